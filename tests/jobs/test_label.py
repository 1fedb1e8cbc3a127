"""`exspec label` on the command line: labels with their confidence, known labels, JSON of a schema, audit."""

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

from exspec.jobs import cli
from exspec.jobs.cluster import submit
from exspec.jobs.demo.messages import CATEGORIES
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.functions import Function
from exspec.pipeline.job.labels import NONE, LabelJob, _evaluation
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.output.page import _confusion
from tests.jobs.calls import call, overwrite, rows_of, succeed

FIELDS = ["--fields", f"category={','.join(CATEGORIES)}", "--fields", "urgency=high,low,normal", "--no-json-spaces"]
GOLD = ["--gold-column", "category=category", "--gold-column", "urgency=urgency"]
SMALL = ["--rows-per-chunk", "8", "--batch-size", "4", "--window", "8", "--method", "exspec", "--quiet"]


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def review_of(out: Path) -> list[dict[str, str]]:
    with (out / "_review.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def equal_rows(out: Path) -> list[tuple[int, int]]:
    """Rows and equal rows of each comparison of an audit."""
    succeed("audit", out, "--share", 1)
    return [(c["rows"], c["equal"]) for c in read(out, "_audit.json")["comparisons"]]


def test_labels_with_gold_review_report_and_audit(messages: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    label = ["label", "--input", messages, "--output", out, *FIELDS, *SMALL]
    assert "accuracy" not in succeed(*label)
    printed = succeed(*label, *GOLD, "--review-share", 0.25)  # the known labels are added later
    assert "nothing to do" in printed
    rows = rows_of(out)
    assert len(rows) == 24
    for row in rows:
        answer = {"category": row["label_category"], "urgency": row["label_urgency"]}
        assert row["completion"] == json.dumps(answer, separators=(",", ":"))
        assert 0 <= row["label_urgency_runner_up_confidence"] <= row["label_urgency_confidence"] <= 1
    right = sum(row["label_category"] == row["category"] for row in rows)
    assert right > 20, "the demo pair was trained on these"
    report = read(out, "_report.json")
    assert report["answers"]["category"]["accuracy"] == round(right / 24, 4)
    assert report["forced_share"] == round(
        sum(r["forced"] for r in rows) / sum(r["completion_tokens"] for r in rows), 4
    )
    assert report["forced_share"] > 0.5
    page = (out / "_report.html").read_text()
    assert "category, known" in page
    assert f"category: accuracy {round(right / 24, 4)}" in printed

    review = review_of(out)
    certainty = {r["id"]: min(r["label_category_confidence"], r["label_urgency_confidence"]) for r in rows}
    assert [r["id"] for r in review] == sorted(certainty, key=lambda name: certainty[name])[:6]
    assert all(r["message"] for r in review)

    assert equal_rows(out) == [(24, 24)] * 2
    part = sorted(out.glob("part-*"))[1]
    urgency = pq.read_table(part)["label_urgency"][3].as_py()
    changed = "low" if urgency != "low" else "high"
    row = overwrite(part, "label_urgency", 3, changed)
    assert call("audit", out, "--share", 1, "--no-generate").exit_code == 1
    (difference,) = read(out, "_audit.json")["comparisons"][0]["differences"]
    assert difference["id"] == row["id"]
    assert json.loads(difference["stored"]) == {"label_urgency": changed}

    overwrite(part, "label_urgency", 3, urgency)
    answers = []
    for command in ("report", "compact", "report"):
        succeed(command, out)
        answers.append(read(out, "_report.json")["answers"])
    assert len(list(out.glob("part-*"))) == 1
    assert answers[0] == answers[2]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(["--json-schema", '{"enum": ["red", "green", "blue"]}'], id="schema", marks=pytest.mark.rare),
        pytest.param(FIELDS, id="fields"),
    ],
)
def test_the_shape_of_a_labeling_job_is_measured(form: list[str], messages: Path, tmp_path: Path) -> None:
    """In another process, on requests with their constraints."""
    tuned = ["--tune-from", "1", "--tune-seconds", "2", "--quiet"]
    assert "(measured in" in succeed("label", "--input", messages, "--output", tmp_path / "out", *form, *tuned)
    assert len(rows_of(tmp_path / "out")) == 24


def test_the_matrix_shows_labels_with_special_characters() -> None:
    labels = ["$5_$", "a$ ^$b", "<b>"]
    counts = Counter({("$5_$", "a$ ^$b"): 2, ("<b>", "<b>"): 1, ("$5_$", "another"): 1, ("$5_$", NONE): 4})
    found = _evaluation(counts, labels)
    assert found["matrix"] == [[0, 0, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert [c["label"] for c in found["classes"]] == [*labels, "(other)"]
    assert (found["accuracy"], found["rows_with_gold"]) == (0.25, 4)
    assert _confusion("$x^$", found).startswith("<svg")


@pytest.mark.slow
def test_json_of_a_schema_gives_typed_columns_or_an_error(messages: Path, tmp_path: Path) -> None:
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
    options = ["--json-schema", tmp_path / "schema.json", "--no-json-spaces", "--max-new-tokens", 24]
    label = ["label", "--input", messages, "--output", out, *options, *SMALL]
    succeed(*label)
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
    assert "category: accuracy" in succeed(*label, "--gold-column", "category=category", "--review-share", 0.2)
    figures = read(out, "_report.json")["answers"]["category"]
    right = sum(row["label_category"] == row["category"] for row in rows)
    assert (figures["accuracy"], figures["rows_with_gold"]) == (round(right / 24, 4), 24)
    assert sum(figures["rows_by_label"].values()) == 24
    least = [float(row["label_category_confidence"]) for row in review_of(out)]
    certain = sorted(row["label_category_confidence"] for row in good)
    assert least == pytest.approx(certain[: len(least)])
    assert len(least) == math.ceil(0.2 * len(good))
    assert equal_rows(out) == [(24, 24)] * 2


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
        ({"json_schema": "{}", "review_share": 0.1}, "review_share need labels, fields, or a schema prop"),
        ({"fields": ["x=a,b", "x=c,d"]}, "fields: x is given twice"),
        ({"labels": ["a", "b"], "since": "yesterday"}, "since: expected last, or a date"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(LabelJob, None, {"target": "x", "input": "in", "output": "out", **settings})


def test_numbers_are_labels() -> None:
    settings = {"target": "x", "input": "in", "output": "out", "fields": {"stars": [1, 2, 3.5]}}
    assert load_job(LabelJob, None, settings).choices == {"stars": ["1", "2", "3.5"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gold-column kind", "gold_column: 'kind' is not in the input, which has id, message, category"),
        ("--gold-column category --carry record", "gold_column: 'category' is not in the output"),
        ("--label-column accepted", "label_column: 'accepted' is a column of the output or of its samples"),
    ],
)
def test_columns_that_do_not_fit_are_refused(options: str, message: str, messages: Path, tmp_path: Path) -> None:
    label = ["label", "--plan", "--input", messages, "--output", tmp_path / "out", "--labels", "a", "--labels", "b"]
    with pytest.raises(JobError, match=message):
        call(*label, *options.split())


def sent(name: str, *options: str) -> list[str]:
    """The arguments that a submitted job gets on the cluster."""
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    words = ["--input", "s3://bucket/in", "--output", "s3://bucket/out", *options]
    return submit.check(command, command.make_context(name, list(words)).params, words).arguments


def test_a_submitted_job_contains_its_schema(tmp_path: Path) -> None:
    """The cluster does not have the file."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    arguments = sent("label", "--json-schema", str(tmp_path / "schema.json"))
    assert arguments[-2:] == ["--json-schema", '{"type": "object"}']


def test_a_submitted_job_contains_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def same(table):\n    return table\n")
    monkeypatch.chdir(tmp_path)
    arguments = sent("run", "--map", "mine:same")
    assert arguments[-2] == "--map"
    (tmp_path / "mine.py").unlink()
    assert Function.model_validate(arguments[-1])(pa.table({"a": [1]})) == pa.table({"a": [1]})


def test_a_labeling_job_has_the_settings_and_validators_of_every_job() -> None:
    """A validator of the same name in the subclass would replace the other."""
    job = LabelJob(target="t", input=["i"], output="o", labels=["a", "b"], template_arguments=["enable_thinking=false"])  # type: ignore[arg-type]
    assert job.template_arguments == {"enable_thinking": False}
    ours, theirs = (kind.__pydantic_decorators__.field_validators for kind in (Job, LabelJob))
    assert [theirs[name].info.fields for name in ours] == [validator.info.fields for validator in ours.values()]
