"""User functions over input rows and over output rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.job.fingerprint import differences, fingerprint
from exspec.pipeline.job.functions import Function, FunctionError
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs

SOURCE = """
from dataclasses import dataclass
import pyarrow as pa
import pyarrow.compute as pc

@dataclass
class Longest:
    words: "int" = 2

def shorter(table):
    words = [" ".join(text.split()[:Longest().words]) for text in table["prompt"].to_pylist()]
    table = table.set_column(table.column_names.index("prompt"), "prompt", pa.array(words, pa.string()))
    return table.append_column("words", pa.array([len(text.split()) for text in words], pa.int64()))

def count(table):
    return table.select(["id"]).append_column("characters", pc.utf8_length(table["completion"]))

def fewer(table):
    return table.slice(0, table.num_rows - 1)

def twins(table):
    return pa.table([table["id"], table["id"]], names=["a", "a"])

def backwards(table):
    return table.sort_by([("row", "descending")]).append_column("new", pa.nulls(table.num_rows))

def nothing(table):
    return None

def other(table):
    return table.append_column("late", pa.nulls(table.num_rows)) if table.num_rows == 0 else table

def broken(table):
    raise ValueError("no such thing") if table.num_rows else ZeroDivisionError

def for_many(table):
    if table.num_rows and table["key"][0].as_py() == 0:
        raise ValueError("the first row")
    return table
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of functions."""
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("ray_session")
def test_rows_are_made_before_and_columns_added_after(pair: jobs.Pair, own: Path) -> None:
    assert jobs.run(pair, own, rows=30, map="mine:shorter", map_output="mine:count") == 0
    given = {row["key"]: row for path in (own / "in").iterdir() for row in pq.read_table(path).to_pylist()}
    rows = [row for path in (own / "out").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 30
    for row in rows:
        words = given[int(row["id"])]["prompt"].split()[:2]
        assert row["words"] == len(words)
        assert row["characters"] == len(row["completion"])
        assert row["prompt_tokens"] == len(words), "the prompt is what the function made"


def test_other_code_is_another_job(pair: jobs.Pair, own: Path) -> None:
    assert jobs.run(pair, own, rows=6, map="mine:shorter") == 0
    stored = stored_job(read_output(Folder(str(own / "out"))).state.description, {})
    assert stored.map == jobs.job(pair, own / "in", own / "out", map="mine:shorter").map, "the output has the code"
    assert jobs.run(pair, own, map="mine:shorter") == 0
    (own / "mine.py").write_text(SOURCE.replace("= 2", "= 3"))
    with pytest.raises(JobError, match=r"map was 'mine:shorter \(\w{12}\)' and is 'mine:shorter \(\w{12}\)'"):
        prepare(jobs.job(pair, own / "in", own / "out", map="mine:shorter"))


def test_a_function_that_fails_affects_only_its_chunks(pair: jobs.Pair, own: Path, capsys: Any) -> None:
    assert jobs.run(pair, own, rows=30, map="mine:for_many") == 1
    assert "map: mine:for_many: ValueError: the first row" in capsys.readouterr().out
    rows = jobs.read_output(own / "out")
    assert "0" not in rows
    assert len(rows) > 20


def test_rows_in_another_order_are_refused(pair: jobs.Pair, own: Path, capsys: Any) -> None:
    assert jobs.run(pair, own, rows=12, map_output="mine:backwards") == 1
    assert "mine:backwards: changed the order of the rows" in capsys.readouterr().out
    assert not list((own / "out").glob("part-*"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine:nothing", "map: mine:nothing: returned NoneType, expected a pyarrow Table"),
        ("mine:none_of_that_name", "map: mine has no function 'none_of_that_name'"),
        ("textwrap:dedent", "map: textwrap:dedent: TypeError: expected string or bytes-like object"),
    ],
)
def test_an_unusable_function_is_refused_before_the_job_starts(
    pair: jobs.Pair, own: Path, function: str, message: str
) -> None:
    jobs.write_shards(own / "in", rows=3)
    with pytest.raises(JobError) as refused:
        prepare(jobs.job(pair, own / "in", own / "out", map=function))
    assert refused.value.problems[0].startswith(message)


@pytest.mark.parametrize("name", ["mine", "mine:", "mi-ne:count", "no_such_module:count", "mine:1"])
def test_a_function_that_is_nowhere_is_named(pair: jobs.Pair, own: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected module:function|no file no_such_module\.py below .*, and no module"
    ):
        jobs.job(pair, own / "in", own / "out", map=name)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fewer", "mine:fewer: returned 2 rows for 3, expected as many"),
        ("twins", "mine:twins: returned two columns 'a'"),
        ("other", "mine:other: returned columns"),
        ("broken", "mine:broken: ValueError: no such thing"),
    ],
)
def test_an_invalid_result_is_refused(own: Path, function: str, message: str) -> None:
    assert own
    with pytest.raises(FunctionError) as refused:
        Function.model_validate(f"mine:{function}")(pa.table({"id": [0, 1, 2]}))
    assert message in str(refused.value)


def test_the_fingerprint_has_a_digest_and_the_job_the_source(pair: jobs.Pair, own: Path) -> None:
    job = jobs.job(pair, own / "in", own / "out", map="mine:shorter")
    assert SOURCE in job.published()["map"]["source"]
    found = fingerprint(job, {})
    assert found["map"] == job.map.identity  # type: ignore[union-attr]
    assert differences(found, found) == []
    without = fingerprint(jobs.job(pair, own / "in", own / "out"), {})
    assert differences(without, found) == [f"map was None and is {found['map']!r}"]
