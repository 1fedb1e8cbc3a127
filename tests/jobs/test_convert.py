"""The rows of an output as one file of another kind, or by the values of a column."""

import csv
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from exspec.jobs import cli
from exspec.jobs.commands.convert import _json, behind
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import Output, take
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("convert")
    pair = jobs.save_pair(place / "pair")
    jobs.write_shards(place / "in", rows=30)
    for path in (place / "in").iterdir():
        table = pq.read_table(path)
        kinds = [f"k{key % 3}" for key in table["key"].to_pylist()]
        pq.write_table(table.append_column("kind", pa.array(kinds)), path)
    with in_process():
        assert execute(prepare(jobs.job(pair, place / "in", place / "out")), load=jobs.ArithmeticLoader()) == 0
    return place / "out"


def rows(output: Path) -> list[dict[str, object]]:
    return [row for path in sorted(output.glob("part-*")) for row in pq.read_table(path).to_pylist()]


def convert(*words: object) -> str:
    result = CliRunner().invoke(cli.app, ["convert", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_lines_hold_every_row_in_order(output: Path, tmp_path: Path) -> None:
    assert "30 rows in" in convert(output, tmp_path / "out.jsonl")
    convert(output, tmp_path / "out.jsonl.gz")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows(output)
    with gzip.open(tmp_path / "out.jsonl.gz", "rt", encoding="utf-8") as packed:
        assert packed.read().splitlines() == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.gz"], "nothing else is left"


def test_csv_holds_the_columns_that_are_asked_for(output: Path, tmp_path: Path) -> None:
    convert(output, tmp_path / "out.csv", "--columns", "id", "--columns", "completion")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.reader(file))
    assert found == [["id", "completion"], *([str(row["id"]), str(row["completion"])] for row in rows(output))]


def test_files_are_read_without_threads_that_outlive_the_read(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They let go of the file later, and a process that ends just then is aborted, with code 134."""
    read, calls = pq.ParquetFile.read_row_group, []

    def watched(file: Any, *given: Any, **options: Any) -> Any:
        calls.append(options)
        return read(file, *given, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", watched)
    convert(output, tmp_path / "out.csv")
    assert len(calls) >= 4
    assert all(options == {"use_threads": False} for options in calls)


@pytest.mark.slow
def test_a_refused_conversion_always_ends_with_its_code(output: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from exspec.jobs.cli import main; main()", "convert"]
    for _ in range(12):
        words = [str(output), str(tmp_path / "x.csv"), "--columns", "complition"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, "did you mean completion?" in done.stderr) == (2, True), done.stderr


def test_folders_by_the_values_of_a_column(output: Path, tmp_path: Path) -> None:
    convert(output, tmp_path / "by", "--partition-by", "kind")
    assert {path.name for path in (tmp_path / "by").iterdir()} == {"kind=k0", "kind=k1", "kind=k2", "_SUCCESS"}
    found = ds.dataset(tmp_path / "by", partitioning="hive", exclude_invalid_files=True).to_table().to_pylist()
    key = lambda row: (row["shard"], row["row"])  # noqa: E731
    assert [row | {"kind": row["kind"]} for row in sorted(found, key=key)] == sorted(rows(output), key=key)
    convert(output, tmp_path / "few", "--partition-by", "kind", "--columns", "id")
    few = ds.dataset(tmp_path / "few", partitioning="hive", exclude_invalid_files=True).to_table()
    assert sorted(few.column_names) == ["id", "kind"]
    assert sorted(few["id"].to_pylist()) == sorted(row["id"] for row in rows(output))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out.txt"], "out.txt: expected a name that ends with .jsonl or .csv, or with .gz after it"),
        (["out.jsonl", "--columns", "complition"], "has no column 'complition'; did you mean completion?"),
        (["by", "--partition-by", "kin"], "has no column 'kin'; did you mean kind?"),
        ([".", "--partition-by", "kind"], ": is there already; expected a folder that is to be made"),
    ],
)
def test_what_cannot_be_written_is_refused(output: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(JobError) as refused:
        CliRunner().invoke(
            cli.app, ["convert", str(output), str(tmp_path / words[0]), *words[1:]], catch_exceptions=False
        )
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_output_with_rows_missing_is_refused(output: Path, tmp_path: Path) -> None:
    other = Folder(str(tmp_path / "other"))
    with take(Output(other), "run") as writer:
        writer.begin({}, Output(Folder(str(output))).read().state.plan)
    with pytest.raises(JobError, match="30 of 30 rows are missing; run the job again first"):
        CliRunner().invoke(cli.app, ["convert", other.url, str(tmp_path / "out.jsonl")], catch_exceptions=False)


def test_json_has_no_bytes_and_nothing_that_is_no_number() -> None:
    given = {"a": math.nan, "b": [1.5, -math.inf], "c": {"d": b"\x01\xff"}, "e": None}
    assert json.loads(_json(given)) == {"a": None, "b": [1.5, None], "c": {"d": "01ff"}, "e": None}


@pytest.mark.parametrize(
    ("source", "file"), [("a.jsonl", "a.jsonl"), ("*.jsonl", "out.jsonl"), (".", "out.csv"), ("..", "new/out.jsonl.gz")]
)
def test_an_output_file_that_would_be_an_input_is_refused(source: str, file: str, tmp_path: Path) -> None:
    job = Job(target="t", input=[str(tmp_path / source)], output=str(tmp_path / file))
    with pytest.raises(JobError, match=r"lies in the input .*; give it another place"):
        behind(job)
    other = job.model_copy(update={"input": [str(tmp_path / "b.jsonl")]})
    assert behind(other) == (other.model_copy(update={"output": f"{job.output}.job"}), job.output)
