"""`exspec label` as a person runs it: labels with their confidence, known labels, JSON of a schema, audit."""

import csv
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
from typer.testing import CliRunner

from exspec.jobs import cli
from exspec.jobs.cluster import submit
from exspec.jobs.demo.messages import CATEGORIES
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.functions import Function
from exspec.pipeline.job.labels import NONE, LabelJob, _evaluation
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.output.page import _confusion

FIELDS = ["--fields", f"category={','.join(CATEGORIES)}", "--fields", "urgency=high,low,normal", "--no-json-spaces"]
GOLD = ["--gold-column", "category=category", "--gold-column", "urgency=urgency"]
SMALL = ["--rows-per-chunk", "8", "--batch-size", "4", "--window", "8", "--method", "exspec", "--quiet"]


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"}, catch_exceptions=False)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    assert call("messages", str(folder), "--rows", "24", "--shards", "2").exit_code == 0
    return folder


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("part-*")) for row in pq.read_table(path).to_pylist()]


def test_labels_with_gold_review_report_and_audit(messages: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = ["label", "--input", str(messages), "--output", str(out)]
    result = call(*source, *FIELDS, *SMALL)
    assert result.exit_code == 0, result.output
    assert "accuracy" not in result.output
    result = call(*source, *FIELDS, *GOLD, *SMALL, "--review-share", "0.25")  # known labels that turn up later
    assert result.exit_code == 0, result.output
    assert "nothing to do" in result.output
    rows = rows_of(out)
    assert len(rows) == 24
    for row in rows:
        answer = {"category": row["label_category"], "urgency": row["label_urgency"]}
        assert row["completion"] == json.dumps(answer, separators=(",", ":"))
        assert 0 <= row["label_urgency_runner_up_confidence"] <= row["label_urgency_confidence"] <= 1
    right = sum(row["label_category"] == row["category"] for row in rows)
    assert right > 20, "the demo pair was trained for these"
    report = json.loads((out / "_report.json").read_text())
    assert report["answers"]["category"]["accuracy"] == round(right / 24, 4)
    assert report["forced_share"] == round(
        sum(r["forced"] for r in rows) / sum(r["completion_tokens"] for r in rows), 4
    )
    assert report["forced_share"] > 0.5
    page = (out / "_report.html").read_text()
    assert "category, as known" in page
    assert f"category: accuracy {round(right / 24, 4)}" in result.output

    with (out / "_review.csv").open(newline="") as file:
        review = list(csv.DictReader(file))
    certainty = {r["id"]: min(r["label_category_confidence"], r["label_urgency_confidence"]) for r in rows}
    assert [r["id"] for r in review] == sorted(certainty, key=lambda name: certainty[name])[:6]
    assert all(r["message"] for r in review)

    result = call("audit", str(out), "--share", "1")
    assert result.exit_code == 0, result.output
    assert [(c["rows"], c["equal"]) for c in json.loads((out / "_audit.json").read_text())["comparisons"]] == [
        (24, 24)
    ] * 2
    part = sorted(out.glob("part-*"))[1]
    content, table = part.read_bytes(), pq.read_table(part)
    labels = table["label_urgency"].to_pylist()
    labels[3] = "low" if labels[3] != "low" else "high"
    place = table.schema.get_field_index("label_urgency")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(labels)), part)
    result = call("audit", str(out), "--share", "1", "--no-generate")
    assert result.exit_code == 1
    (difference,) = json.loads((out / "_audit.json").read_text())["comparisons"][0]["differences"]
    assert difference["id"] == table["id"][3].as_py()
    assert json.loads(difference["stored"]) == {"label_urgency": labels[3]}

    part.write_bytes(content)
    assert call("report", str(out)).exit_code == 0
    before = json.loads((out / "_report.json").read_text())["answers"]
    assert call("compact", str(out)).exit_code == 0
    assert len(list(out.glob("part-*"))) == 1
    assert call("report", str(out)).exit_code == 0
    assert json.loads((out / "_report.json").read_text())["answers"] == before


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "form", [["--json-schema", '{"enum": ["red", "green", "blue"]}'], FIELDS], ids=["schema", "fields"]
)
def test_the_shape_of_a_labeling_job_is_measured(form: list[str], messages: Path, tmp_path: Path) -> None:
    """On requests with their constraints, in another process."""
    tuned = ["--tune-from", "1", "--tune-seconds", "2", "--quiet"]
    result = call("label", "--input", str(messages), "--output", str(tmp_path / "out"), *form, *tuned)
    assert result.exit_code == 0, result.output
    assert "(measured in" in result.output
    assert len(rows_of(tmp_path / "out")) == 24


def test_a_matrix_of_odd_labels_is_drawn() -> None:
    labels = ["$5_$", "a$ ^$b", "<b>"]
    counts = Counter({("$5_$", "a$ ^$b"): 2, ("<b>", "<b>"): 1, ("$5_$", "another"): 1, ("$5_$", NONE): 4})
    found = _evaluation(counts, labels)
    assert found["matrix"] == [[0, 0, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert [c["label"] for c in found["classes"]] == [*labels, "(other)"]
    assert (found["accuracy"], found["rows_with_gold"]) == (0.25, 4)
    assert _confusion("$x^$", found).startswith("<svg")


@pytest.mark.slow
def test_json_of_a_schema_gets_typed_columns_and_what_is_cut_short_is_an_error(messages: Path, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "category": {"enum": list(CATEGORIES)},
            "amounts": {"type": "array", "items": {"type": "string", "maxLength": 14}, "maxItems": 9},
            "score": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["category", "amounts", "score"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    out = tmp_path / "out"
    options = ["--json-schema", str(tmp_path / "schema.json"), "--no-json-spaces", "--max-new-tokens", "24"]
    result = call("label", "--input", str(messages), "--output", str(out), *options, *SMALL)
    assert result.exit_code == 0, result.output
    rows = rows_of(out)
    assert len(rows) == 24
    good, cut = [r for r in rows if not r["error"]], [r for r in rows if r["error"]]
    assert good
    assert cut
    for row in good:
        jsonschema.validate(json.loads(row["completion"]), schema)
        assert json.loads(row["completion"]) == {name: row[f"label_{name}"] for name in schema["properties"]}  # type: ignore[attr-defined]
    for row in cut:
        assert "not complete after 24 tokens" in row["error"]
        assert row["completion"] is row["label_category"] is None
    types = pq.read_schema(next(out.glob("part-*"))).field("label_amounts").type
    assert types == pa.list_(pa.string())
    known = ["--gold-column", "category=category", "--review-share", "0.2"]
    result = call("label", "--input", str(messages), "--output", str(out), *options, *SMALL, *known)
    assert result.exit_code == 0, result.output
    assert "category: accuracy" in result.output
    figures = json.loads((out / "_report.json").read_text())["answers"]["category"]
    right = sum(row["label_category"] == row["category"] for row in rows)
    assert (figures["accuracy"], figures["rows_with_gold"]) == (round(right / 24, 4), 24)
    assert sum(figures["rows_by_label"].values()) == 24
    with (out / "_review.csv").open(newline="", encoding="utf-8") as file:
        least = [float(row["label_category_confidence"]) for row in csv.DictReader(file)]
    certain = sorted(row["label_category_confidence"] for row in good)
    assert least == pytest.approx(certain[: len(least)])
    assert len(least) == math.ceil(0.2 * len(good))
    result = call("audit", str(out), "--share", "1")
    assert result.exit_code == 0, result.output
    assert [c["equal"] for c in json.loads((out / "_audit.json").read_text())["comparisons"]] == [24, 24]


def test_plan_of_a_labeling_job_runs_nothing(messages: Path, tmp_path: Path) -> None:
    result = call("label", "--plan", "--input", str(messages), "--output", str(tmp_path / "out"), *FIELDS)
    assert result.exit_code == 0, result.output
    assert "0 of the first 24 rows would be refused" in result.output
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected one of labels, fields and json_schema, not none"),
        ({"labels": ["a", "b"], "fields": {"x": ["a", "b"]}}, "not labels and fields"),
        ({"labels": ["a"]}, r"labels: expected two or more distinct, non-empty labels, not \['a'\]"),
        ({"fields": ["x=a,a"]}, "fields.x: expected two or more"),
        ({"labels": ["on", True]}, "put such a label in quotes"),
        (
            {"fields": {"x": ["a", "b"], "x_confidence": ["a", "b"]}},
            "two answers would have the column 'label_x_confidence'",
        ),
        ({"fields": ["x"]}, "fields: expected NAME=LABEL,LABEL, not 'x'"),
        ({"labels": ["a", "b"], "gold_column": "x=gold"}, "gold_column: expected a column, not 'x=gold'"),
        ({"labels": ["a", "b"], "stop": ["."]}, "an answer ends when it is complete"),
        ({"json_schema": "no-such-file.json"}, "json_schema: cannot be read: .*no-such-file.json"),
        ({"json_schema": "{]"}, "json_schema: not JSON"),
        (
            {"json_schema": "{}", "review_share": 0.1},
            "review_share need labels, fields, or a schema prop",
        ),
        ({"fields": ["x=a,b", "x=c,d"]}, "fields: x is given twice"),
        ({"labels": ["a", "b"], "since": "yesterday"}, "since: expected last, or a date"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(LabelJob, None, {"target": "x", "input": "in", "output": "out", **settings})


def test_a_label_column_is_no_column_of_every_output(messages: Path, tmp_path: Path) -> None:
    options = ["--labels", "a", "--labels", "b", "--label-column", "accepted"]
    with pytest.raises(JobError, match="label_column: 'accepted' is a column that every output has"):
        call("label", "--plan", "--input", str(messages), "--output", str(tmp_path / "out"), *options)


def test_numbers_are_labels_as_they_are_written() -> None:
    settings = {"target": "x", "input": "in", "output": "out", "fields": {"stars": [1, 2, 3.5]}}
    assert load_job(LabelJob, None, settings).choices == {"stars": ["1", "2", "3.5"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--gold-column", "category=kind"],
            "gold_column: 'kind' is not in the input, which has id, message, category",
        ),
        (["--gold-column", "category=category", "--carry", "record"], "gold_column: 'category' is not in the output"),
    ],
)
def test_a_gold_column_must_be_there_to_compare_with(
    options: list[str], message: str, messages: Path, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        call("label", "--plan", "--input", str(messages), "--output", str(tmp_path / "out"), *FIELDS, *options)


def test_a_schema_is_sent_along_with_a_submitted_job(tmp_path: Path) -> None:
    """The cluster does not have the file that a setting was read from."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    command = typer.main.get_command(cli.app).commands["label"]  # type: ignore[attr-defined]
    words = ["--input", "s3://bucket/in", "--output", "s3://bucket/out", "--json-schema", str(tmp_path / "schema.json")]
    call = submit.check(command, command.make_context("label", list(words)).params, words)
    assert call.arguments[-2:] == ["--json-schema", '{"type": "object"}']


def test_a_function_is_sent_along_with_a_submitted_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def same(table):\n    return table\n")
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
    words = ["--input", "s3://bucket/in", "--output", "s3://bucket/out", "--map", "mine:same"]
    call = submit.check(command, command.make_context("run", list(words)).params, words)
    assert call.arguments[-2] == "--map"
    (tmp_path / "mine.py").unlink()
    sent = Function.model_validate(call.arguments[-1])
    assert sent(pa.table({"a": [1]})) == pa.table({"a": [1]}), "what the cluster is sent is all that it needs"


def test_a_setting_of_every_job_is_one_of_a_labeling_job_too() -> None:
    """A validator of the same name in the subclass would take the place of the other."""
    job = LabelJob(target="t", input=["i"], output="o", labels=["a", "b"], template_arguments=["enable_thinking=false"])  # type: ignore[arg-type]
    assert job.template_arguments == {"enable_thinking": False}
    ours, theirs = (kind.__pydantic_decorators__.field_validators for kind in (Job, LabelJob))
    assert [theirs[name].info.fields for name in ours] == [validator.info.fields for validator in ours.values()]
