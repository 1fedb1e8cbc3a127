"""Outputs of other versions: older ones without some columns and figures, and newer ones."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.output import parts
from exspec.pipeline.output.columns import GENERATED, completed, conform
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.log import Log
from exspec.pipeline.output.owner import Writer, read_output, take
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.output.state import FORMAT, Summary
from exspec.pipeline.storage import Folder
from tests.jobs import calls
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS, REFUSED = 60, 5
NEW = ["prompt_tokens_cut", "forced", "seconds_decode"]  # columns that the older version did not write
FIGURES = ("produced", "prefill_tokens", "found_tokens", "forced", "reasons", "host")  # of a summary, likewise


def run(pair: jobs.Pair, place: Path, **options: Any) -> int:
    return jobs.run(pair, place, load=jobs.RefusingLoader(jobs.prompt(REFUSED)), **options)


@pytest.fixture(scope="module")
def begun(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a job, written by a version with fewer columns and figures, and with a figure and a setting that were
    removed since."""
    place = tmp_path_factory.mktemp("begun")
    encode, stage, begin = parts.encode, parts.PartSink.stage, Writer.begin

    def older(summary: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in summary.items() if name not in FIGURES} | {"gone": 7}

    def staged(*given: Any) -> dict[str, Any]:
        made = stage(*given)
        return made | {"chunks": [older(summary) for summary in made["chunks"]]}

    def began(writer: Writer, description: dict[str, Any], plan: Plan) -> None:
        begin(writer, description | {"job": description["job"] | {"gone": 7}}, plan)

    with pytest.MonkeyPatch.context() as patch, in_process():
        patch.setattr(parts, "encode", lambda table, *rest: encode(table.drop_columns(NEW), *rest))
        patch.setattr(parts.PartSink, "stage", staged)
        patch.setattr(Writer, "begin", began)
        assert run(pair, place, rows=ROWS, limit=30) == 0
    for path in (place / "out").glob("part-*"):
        assert not set(NEW) & set(pq.read_schema(path).names)
    return place


@pytest.fixture
def place(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "job"))


def test_an_older_output_is_resumed_compacted_and_read(pair: jobs.Pair, place: Path) -> None:
    out = place / "out"
    before = jobs.read_output(out)
    assert read_output(Folder(str(out))).state.description["job"]["gone"] == 7
    calls.succeed("report", out)
    assert run(pair, place) == 0
    assert set(jobs.read_output(out)) == {str(n) for n in range(ROWS)}
    _, figures = rewrite(read_output(Folder(str(out))))
    assert figures["rows"] == ROWS
    assert {name: host["rows"] for name, host in figures["hosts"].items()} == {"unknown": 30, os.uname().nodename: 30}
    assert figures["errors"] == 1
    assert figures["completion_tokens"] == sum(row["completion_tokens"] or 0 for row in jobs.read_output(out).values())

    calls.succeed("convert", out, place / "some.csv", "--columns", "id", "--columns", "forced")
    with (place / "some.csv").open(newline="") as file:
        found = {row["id"]: row["forced"] for row in csv.DictReader(file)}
    assert len(found) == ROWS
    assert all((found[name] == "") == (name in before or name == str(REFUSED)) for name in found)

    calls.succeed("convert", out, place / "all.jsonl")
    rows = [json.loads(line) for line in (place / "all.jsonl").read_text().splitlines()]
    assert all(list(row) == list(rows[-1]) and set(NEW) <= set(row) for row in rows)
    calls.succeed("convert", out, place / "by", "--partition-by", "finish_reason", "--columns", "forced")

    compact(Folder(str(out)), 1 << 20)
    (file,) = out.glob("part-*")
    table = pq.read_table(file)
    assert set(NEW) <= set(table.column_names)
    assert {name: row["completion"] for name, row in jobs.read_output(out).items() if name in before} == {
        name: row["completion"] for name, row in before.items()
    }


@pytest.mark.parametrize("merged", [False, True])
def test_a_retry_changes_only_the_error_row(pair: jobs.Pair, place: Path, merged: bool) -> None:
    """In a part, and in a file merged from older and newer parts."""
    out = place / "out"
    assert run(pair, place) == 0
    before = jobs.read_output(out)
    if merged:
        compact(Folder(str(out)), 1 << 20)
    assert jobs.run(pair, place, retry_errors=True) == 0
    jobs.assert_complete(out, ROWS)
    after = jobs.read_output(out)
    assert {n: row["rounds"] for n, row in after.items() if n != str(REFUSED)} == {
        n: row["rounds"] for n, row in before.items() if n != str(REFUSED)
    }
    assert after[str(REFUSED)]["forced"] == 0, "it was written by this version"


def test_unknown_figures_of_a_summary_are_ignored() -> None:
    told = {"shard": 0, "first": 0, "rows": 3, "errors": 1, "beams": 4}
    assert Summary.from_json(told) == Summary(0, 0, 3, 1)
    with pytest.raises(ValueError, match="first"):
        Summary.from_json({"shard": 0})


def test_missing_columns_are_inserted_in_order() -> None:
    names = ["key", *GENERATED.names, "mine"]
    schema = pa.schema([GENERATED.field(n) if n in GENERATED.names else pa.field(n, pa.int64()) for n in names])
    for missing in ([], ["forced"], ["prompt_tokens_cut", "rounds", "drafted"], [GENERATED.names[-1]]):
        older = pa.schema([field for field in schema if field.name not in missing])
        assert completed(older).names == names
        table = conform(older.empty_table(), schema, "place")
        assert table.schema.equals(schema)
    with pytest.raises(JobError, match=r"^place: parts differ in column 'mine'; expected one schema"):
        conform(schema.empty_table(), pa.schema(list(schema)[:-1]), "place")


NEWER = "out: is an output of exspec 7.1, in format 3; exspec .* reads up to format 2; use the newer version"


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"format": FORMAT + 1, "versions": {"exspec": "7.1"}}, NEWER),
        (
            {"shape": {"beams": 4}},
            "the job began with the setting 'beams', which this version does not know; use the newer",
        ),
    ],
    ids=["format", "shape"],
)
def test_a_newer_output_is_refused_by_name(
    pair: jobs.Pair, place: Path, description: dict[str, Any], message: str
) -> None:
    with take(read_output(Folder(str(place / "out"))), "run") as writer:
        writer.describe(description)
    with pytest.raises(JobError, match=message):
        run(pair, place)
    if "format" in description:
        assert Log(Folder(str(place / "other"))).append({"kind": "unknown", "description": description})
        with pytest.raises(JobError, match=message.removeprefix("out")):  # also if the entry cannot be applied
            read_output(Folder(str(place / "other")))
        for command, *more in (["report"], ["convert", "x.csv"], ["compact"], ["audit"]):
            with pytest.raises(JobError, match=message):
                calls.call(command, place / "out", *more)
