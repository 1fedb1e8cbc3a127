"""`exspec convert`: the rows of an output in one file of another format, or in folders by the values of a column."""

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from exspec.jobs.commands.convert import behind
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.rows import as_json
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import Output, take
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.jobs.calls import call, rows_of, succeed
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process


@pytest.fixture(scope="module")
def output(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("convert")
    jobs.write_shards(place / "in", rows=30)
    for path in (place / "in").iterdir():
        table = pq.read_table(path)
        kinds = [f"k{key % 3}" for key in table["key"].to_pylist()]
        pq.write_table(table.append_column("kind", pa.array(kinds)), path)
    with in_process():
        assert execute(prepare(jobs.job(pair, place / "in", place / "out")), load=jobs.ArithmeticLoader()) == 0
    return place / "out"


def test_json_lines_have_every_row_in_order(output: Path, tmp_path: Path) -> None:
    assert "30 rows in" in succeed("convert", output, tmp_path / "out.jsonl")
    succeed("convert", output, tmp_path / "out.jsonl.gz")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows_of(output)
    with gzip.open(tmp_path / "out.jsonl.gz", "rt", encoding="utf-8") as packed:
        assert packed.read().splitlines() == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.gz"], "no other file is left"


def test_csv_has_the_named_columns(output: Path, tmp_path: Path) -> None:
    succeed("convert", output, tmp_path / "out.csv", "--columns", "id", "--columns", "completion")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.reader(file))
    assert written == [["id", "completion"], *([str(row["id"]), str(row["completion"])] for row in rows_of(output))]


def test_files_are_read_without_threads(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's threads release a file late. A process that exited at that moment was aborted with code 134."""
    read, calls = pq.ParquetFile.read_row_group, []

    def watched(file: Any, *given: Any, **options: Any) -> Any:
        calls.append(options)
        return read(file, *given, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", watched)
    succeed("convert", output, tmp_path / "out.csv")
    assert len(calls) >= 4
    assert all(options == {"use_threads": False} for options in calls)


def test_folders_by_the_values_of_a_column(output: Path, tmp_path: Path) -> None:
    def partitioned(name: str, *words: str) -> pa.Table:
        succeed("convert", output, tmp_path / name, "--partition-by", "kind", *words)
        return ds.dataset(tmp_path / name, partitioning="hive", exclude_invalid_files=True).to_table()

    key = lambda row: (row["shard"], row["row"])  # noqa: E731
    assert sorted(partitioned("by").to_pylist(), key=key) == sorted(rows_of(output), key=key)
    assert {path.name for path in (tmp_path / "by").iterdir()} == {"kind=k0", "kind=k1", "kind=k2", "_SUCCESS"}
    few = partitioned("few", "--columns", "id")
    assert sorted(few.column_names) == ["id", "kind"]
    assert sorted(few["id"].to_pylist()) == sorted(row["id"] for row in rows_of(output))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out.txt"], "out.txt: expected a name that ends with .jsonl or .jsonl.gz or .csv or .csv.gz"),
        (["out.jsonl", "--columns", "complition"], "has no column 'complition'; did you mean completion?"),
        (["by", "--partition-by", "kin"], "has no column 'kin'; did you mean kind?"),
        ([".", "--partition-by", "kind"], ": already exists; expected a new folder"),
    ],
)
def test_a_conversion_is_refused_and_nothing_is_written(
    output: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(JobError) as refused:
        call("convert", output, tmp_path / words[0], *words[1:])
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_output_with_missing_rows_is_refused(output: Path, tmp_path: Path) -> None:
    other = Folder(str(tmp_path / "other"))
    with take(Output(other), "run") as writer:
        writer.begin(jobs.DESCRIBED, Output(Folder(str(output))).read().state.plan)
    with pytest.raises(JobError, match="30 of 30 rows are missing; run the job again first"):
        call("convert", other.url, tmp_path / "out.jsonl")


def test_json_of_bytes_nan_and_infinity() -> None:
    given = {"a": math.nan, "b": [1.5, -math.inf], "c": {"d": b"\x01\xff"}, "e": None, "map": [("k", math.nan)]}
    assert json.loads(as_json(given)) == {
        "a": None,
        "b": [1.5, None],
        "c": {"d": "01ff"},
        "e": None,
        "map": [["k", None]],
    }


@pytest.mark.parametrize(
    ("source", "file"), [("a.jsonl", "a.jsonl"), ("*.jsonl", "out.jsonl"), (".", "out.csv"), ("..", "new/out.jsonl.gz")]
)
def test_an_output_file_in_the_input_is_refused(source: str, file: str, tmp_path: Path) -> None:
    job = Job(target="t", input=[str(tmp_path / source)], output=str(tmp_path / file))
    with pytest.raises(JobError, match=r"is in the input .*; choose another place"):
        behind(job)
    other = job.model_copy(update={"input": [str(tmp_path / "b.jsonl")]})
    assert behind(other) == (other.model_copy(update={"output": f"{job.output}.job"}), job.output)
