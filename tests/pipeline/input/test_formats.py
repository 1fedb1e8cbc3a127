"""Shards in other formats than Parquet: the same rows, and clear errors for invalid files."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.input import shards
from exspec.pipeline.input.plan import Plan, encode_schema
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.shards import find_shards
from tests.pipeline import jobs

ROWS = 10_000  # several tables of each
TABLE = pa.table({
    "prompt": [f"row {i}\nof many, \"quoted\" \u00e9" for i in range(ROWS)],
    "budget": [1 + i % 7 for i in range(ROWS)],
    "note": [None if i % 3 else f"n{i}" for i in range(ROWS)],
})  # fmt: skip


def lines(table: pa.Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def comma(table: pa.Table) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in table.to_pylist())
    return text.getvalue().encode()


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=999)
    return sink.getvalue().to_pybytes()


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=1500)
    return sink.getvalue().to_pybytes()


KINDS: dict[str, Callable[[pa.Table], bytes]] = {
    "a.parquet": parquet,
    "a.jsonl": lines,
    "a.ndjson": lines,
    "a.jsonl.gz": lambda table: gzip.compress(lines(table), mtime=0),
    "a.csv": comma,
    "a.csv.gz": lambda table: gzip.compress(comma(table), mtime=0),
    "data-00000-of-00001.arrow": stream,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("columns", [None, ["budget"], ["note", "prompt"]])
def test_every_kind_of_file_gives_the_same_rows(name: str, columns: list[str] | None, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(KINDS[name](TABLE))
    (shard,), schema = find_shards([str(tmp_path)], {})
    assert (shard.name, shard.rows) == (name, ROWS)
    assert schema.names == TABLE.column_names
    texts = pa.schema([(name, pa.string()) for name in TABLE.column_names])
    expected = TABLE.cast(texts) if ".csv" in name else TABLE
    ranges = [(0, 3), (1490, 20), (4000, 200), (8191, 2), (ROWS - 1, 1)]
    found = list(read_ranges(shard, ranges, columns, {}, schema))
    for (first, rows), table in zip(ranges, found, strict=True):
        assert isinstance(table, pa.Table)
        assert table.equals(expected.slice(first, rows).select(columns or TABLE.column_names))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a":', "a.jsonl: line 2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n\xff\n', "a.jsonl: line 2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl: line 1: expected an object, not list"),
        (
            "a.jsonl",
            b'{"a": 1}\n\n{"a": "x"}\n',
            "a.jsonl: line 3: column 'a': expected int64 as in other rows, not 'x'",
        ),
        (
            "a.jsonl",
            b'{"a": "x"}\n{"a": null}\n{"a": 7}\n',
            "a.jsonl: line 3: column 'a': expected string as in other rows, not 7",
        ),
        ("a.jsonl", b'{"a": "x"}\n{"a": "\\ud800"}\n', "a.jsonl: line 2: column 'a': expected string .*ud800"),
        ("a.jsonl.gz", b'{"a": 1}\n', "a.jsonl.gz: truncated, or not a gzip file: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-9],
            "a.jsonl.gz: truncated, or not a gzip file: .*ended before",
        ),
        ("a.csv.gz", gzip.compress(b"a\n1\n" * 99, mtime=0)[:-9], "a.csv.gz: truncated, or not a gzip file"),
        (
            "a.arrow.gz",
            gzip.compress(b"ARROW1" + bytes(99), mtime=0),
            "a.arrow.gz: an Arrow file cannot be read from .gz",
        ),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv: line 2: 3 columns, expected 2 as in the header"),
        ("a.csv", b"", "a.csv: Empty CSV file"),
        ("a.arrow", b"rows of no kind", "a.arrow: not an Arrow stream"),
        ("a.txt", b"rows of no kind", "no Parquet, JSONL, CSV or Arrow files in"),
    ],
)
def test_an_invalid_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError, match=message):
        find_shards([str(tmp_path)], {})


def test_later_rows_may_widen_a_type(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{"n": 1, "m": None}] * 5000 + [{"n": 1.5, "m": [{"role": "user"}]}, {"more": True}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "b").mkdir()
    numbers = "".join(f"{i}\n" for i in range(300_000))
    (tmp_path / "b" / "b.csv").write_text(f"code\n{numbers}12a\n")
    (shard,), schema = find_shards([str(tmp_path / "a.jsonl")], {})
    assert [str(field.type) for field in schema] == ["double", "list<item: struct<role: string>>", "bool"]
    (found,) = read_ranges(shard, [(0, 5002)], None, {}, schema)
    assert not isinstance(found, Unreadable)
    assert found.to_pylist()[0] == {"n": 1.0, "m": None, "more": None}
    assert found.to_pylist()[-1] == {"n": None, "m": None, "more": True}
    (shard,), schema = find_shards([str(tmp_path / "b")], {})
    assert schema == pa.schema({"code": pa.string()})


def test_a_csv_keeps_numbers_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffid,zip,note\n007,01234,""\n7,true,\n', encoding="utf-8")
    (shard,), schema = find_shards([str(tmp_path)], {})
    (table,) = read_ranges(shard, [(0, 2)], None, {}, schema)
    assert not isinstance(table, Unreadable)
    assert table.to_pylist() == [
        {"id": "007", "zip": "01234", "note": ""},
        {"id": "7", "zip": "true", "note": None},
    ]


def test_rows_without_columns_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 5000 + '{"prompt": "x"}\n')
    (tmp_path / "b.jsonl").write_text("\n")
    (shard,), schema = find_shards([str(tmp_path)], {})
    assert (shard.name, shard.rows) == ("a.jsonl", 5001)
    (table,) = read_ranges(shard, [(4999, 2)], None, {}, schema)
    assert not isinstance(table, Unreadable)
    assert table["prompt"].to_pylist() == [None, "x"]
    (none,) = read_ranges(shard, [(4000, 70)], [], {}, schema)
    assert not isinstance(none, Unreadable)
    assert none.num_rows == 70


def test_files_of_several_kinds_in_one_folder(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / name).write_bytes(KINDS[f"a.{name.split('.')[1]}"](TABLE))
    with pytest.raises(JobError, match=r"has .csv and .jsonl files; give a pattern, such as file://.*/\*.csv"):
        find_shards([str(tmp_path)], {})
    assert [shard.name for shard in find_shards([f"{tmp_path}/*.csv"], {})[0]] == ["a.csv"]
    (tmp_path / "c.parquet").write_bytes(parquet(TABLE))
    found, _ = find_shards([str(tmp_path)], {})
    assert [shard.name for shard in found] == ["c.parquet"], "next to Parquet, other files are not data"


def test_an_unchanged_file_is_not_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TABLE))
    found, schema = find_shards([str(tmp_path)], {})
    monkeypatch.setattr(shards, "scan", lambda *_: pytest.fail("it was scanned"))
    again, same = find_shards([str(tmp_path)], {}, Plan(found, 8, None, encode_schema(schema)))
    assert (again, same) == (found, schema)


def test_a_job_over_json_lines(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "parquet", rows=50)
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "parquet").iterdir():
        (tmp_path / "in" / f"{path.stem}.jsonl").write_bytes(lines(pq.read_table(path)))
    assert jobs.run(pair, tmp_path) == 0
    jobs.assert_complete(tmp_path / "out", 50)
