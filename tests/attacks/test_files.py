"""Odd files and folders: each costs at most its own lines, or is refused by name. The next one is one more line."""

import csv
import gzip
import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.jobs.finished import choose, read_rows
from exspec.pipeline.errors import JobError
from exspec.pipeline.input import formats, shards
from exspec.pipeline.input.formats import read, scan
from exspec.pipeline.input.plan import Shard, decode_row
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.rows import RowError, rows
from exspec.pipeline.input.schemas import refuse_duplicates, unified
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import carried_columns
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.storage import Folder
from tests import tiny
from tests.jobs.calls import rows_of, succeed
from tests.pipeline import jobs

Rows = list[Any]


def found(place: Path, bad_lines: bool = False) -> tuple[list[Shard], pa.Schema, Rows]:
    """The shards of an input, their schema, and what a reader makes of their rows: values, or the text of the error."""
    planned, schema = find_shards([str(place)], {}, bad_lines=bad_lines)
    given: Rows = []
    for shard in planned:
        for table in read_ranges(shard, [(n, 1) for n in range(shard.rows)], None, {}, schema):
            assert not isinstance(table, Unreadable), table.reason
            given += [str(row) if isinstance(row, RowError) else row for row in rows(table, schema.names)]
    return planned, schema, given


def one(**values: Any) -> Any:
    return values


LONG = "x" * (17 << 20)  # a value that is larger than several blocks

# What a file holds, and the rows that come out.
READABLE = {
    "a CSV with a blank first line keeps 007 and 1e5": (
        "a.csv",
        b"\nid,prompt\n007,1e5\n",
        [one(id="007", prompt="1e5")],
    ),
    "a CSV with blank lines and CRLF": (
        "a.csv",
        b'\r\n\r\na,b\r\n1,\r\n\r\n2,""\r\n',
        [one(a="1", b=None), one(a="2", b="")],
    ),
    "a CSV whose lines end with CR": ("a.csv", b"a,b\r1,2\r3,4", [one(a="1", b="2"), one(a="3", b="4")]),
    "a CSV with a byte order mark": ("a.csv", b'\xef\xbb\xbf"a",b\n\xef\xbb\xbf1,2\n', [one(a="\ufeff1", b="2")]),
    "a CSV with line ends, commas and quotes in a value": (
        "a.csv",
        b'a,b\n"1\n\n,""2""\r\n",x\n',
        [one(a='1\n\n,"2"\r\n', b="x")],
    ),
    "a CSV with a byte order mark and a line end in the header": (
        "a.csv",
        b'\xef\xbb\xbf"a\n",b\n1,2\n',
        [{"a\n": "1", "b": "2"}],
    ),
    "a CSV with a very long name": ("a.csv", b"x" * 200_000 + b"\n1\n", [{"x" * 200_000: "1"}]),
    "a CSV with line ends in the header": ("a.csv", b'"a\nb",c\n1,2\n', [{"a\nb": "1", "c": "2"}]),
    "a CSV with a quote inside a value": ("a.csv", b'a,b\n5" lamp,"6" lamp"\n', [one(a='5" lamp', b='6 lamp"')]),
    "a CSV with a value larger than a block": ("a.csv", f'a,b\n"{LONG}\n,",2\n'.encode(), [one(a=f"{LONG}\n,", b="2")]),
    "a CSV with one column and empty values": ("a.csv", b'a\n""\n\nx\n', [one(a=""), one(a="x")]),
    "a JSONL with blank lines": ("a.jsonl", b'\n{"a": 1}\n \n{"b": 2}', [one(a=1, b=None), one(a=None, b=2)]),
}


@pytest.mark.parametrize(("name", "content", "expected"), READABLE.values(), ids=READABLE)
def test_an_odd_file_is_read(name: str, content: bytes, expected: Rows, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert found(tmp_path)[2] == expected
    assert found(tmp_path, bad_lines=True)[2] == expected
    (tmp_path / name).unlink()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert found(tmp_path)[2] == expected


STRAY = "a quote opens a value here, and no quote before a comma or line end closes it"
# What a file holds, and the rows that come out with bad_lines=error: values, or the error. Without, the first error.
BAD_LINES = {
    "a quote that nothing closes": (
        "a.csv",
        b'a,b\n1,"x\n2,y\n3,z\n',
        [f"line 2: {STRAY}", one(a="2", b="y"), one(a="3", b="z")],
    ),
    "a quote that another value's quote closes": (
        "a.csv",
        b'a,b\n1,"x\n2,"y, z"\n3,z\n',
        [f"line 2: {STRAY}", one(a="2", b="y, z"), one(a="3", b="z")],
    ),
    "two quotes that nothing closes": (
        "a.csv",
        b'a,b\n"1,x\n"2,y\n3,z',
        [f"line 2: {STRAY}", f"line 3: {STRAY}", one(a="3", b="z")],
    ),
    "too many and too few columns": (
        "a.csv",
        b'a,b\n1,2,3\n"4\n5",6\n7\n8,9\n',
        [
            "line 2: 3 columns, expected 2 as in the header",
            one(a="4\n5", b="6"),
            "line 5: 1 columns, expected 2 as in the header",
            one(a="8", b="9"),
        ],
    ),
    "a byte in a CSV that is not UTF-8": (
        "a.csv",
        b"a,b\n1,2\nx,\xff\n3,4\n",
        [one(a="1", b="2"), "line 3: byte 0xff is not UTF-8 text", one(a="3", b="4")],
    ),
    "only bad lines of JSON": ("a.jsonl", b"{\n", ["line 1: not JSON: "]),
    "only bad lines of a CSV": ("a.csv", b"a,b\n1\n", ["line 2: 1 columns, expected 2 as in the header"]),
    "broken JSON": (
        "a.jsonl",
        b'{"a": 1}\n{"a":\n{"a": 3}\n',
        [one(a=1), "line 2: not JSON: Expecting value (column 6)", one(a=3)],
    ),
    "a byte in JSON that is not UTF-8": (
        "a.ndjson",
        b'{"a": "1"}\n\n{"a": "\xff"}\n{"a": "3"}\n',
        [
            one(a="1"),
            "line 3: not JSON: 'utf-8' codec can't decode byte 0xff in position 7: invalid start byte",
            one(a="3"),
        ],
    ),
    "a list, a number and text": (
        "a.jsonl",
        b'{"a": 1}\n[2]\n3\n{"a": 4}\n',
        [
            one(a=1),
            "line 2: expected an object, not list",
            "line 3: expected an object, not int",
            one(a=4),
        ],
    ),
    "JSON nested 100,000 deep": (
        "a.jsonl",
        b'{"a": 1}\n{"b": ' + b"[" * 100_000 + b"]" * 100_000 + b'}\n{"a": 3}\n',
        [one(a=1), "line 2: nested too deep", one(a=3)],
    ),
    "a long text among numbers": (
        "a.jsonl",
        b'{"a": 1}\n{"a": "' + b"x" * 1_000_000 + b'"}\n{"a": 3}\n',
        [one(a=1), f"line 2: column 'a': expected int64 as in other rows, not '{'x' * 37}...{'x' * 38}'", one(a=3)],
    ),
    "half a surrogate pair": (
        "a.jsonl",
        b'{"a": "1"}\n{"a": "\\ud800"}\n{"a": "3"}\n',
        [
            one(a="1"),
            "line 2: column 'a': expected string as in other rows, not '\\ud800'",
            one(a="3"),
        ],
    ),
    "a number that no column can hold": (
        "a.jsonl",
        b'{"a": 1}\n{"a": 1' + b"0" * 99 + b'}\n{"a": 2.5}\n',
        [one(a=1.0), "line 2: column 'a': ", one(a=2.5)],
    ),
    "text among numbers": (
        "a.jsonl",
        b'{"a": null}\n{"a": 1}\n{"a": "x"}\n{"a": 2.5}\n',
        [one(a=None), one(a=1.0), "line 3: column 'a': ", one(a=2.5)],
    ),
    "text after thousands of numbers": (
        "a.jsonl",
        b'{"a": 1}\n' * 5000 + b'{"a": "x"}\n',
        [one(a=1)] * 5000 + ["line 5001: column 'a': "],
    ),
    "a batch request that is cut": (
        "a.jsonl",
        b'{"custom_id": "1", "body": {"prompt": "w1"}}\n{"custom_id": "2", "bo',
        [
            one(custom_id="1", body='{"prompt": "w1"}'),
            "line 2: not JSON: Unterminated string starting at (column 20)",
        ],
    ),
}  # fmt: skip


def begun(given: Rows, expected: Rows) -> Rows:
    """The rows, with as much of each error as is expected."""
    assert len(given) == len(expected)
    return [
        g[: len(e)] if isinstance(g, str) and isinstance(e, str) else g for g, e in zip(given, expected, strict=True)
    ]


@pytest.mark.parametrize(("name", "content", "expected"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_costs_one_row(name: str, content: bytes, expected: Rows, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    given = found(tmp_path, bad_lines=True)[2]
    assert begun(given, expected) == expected
    first = next(row for row in given if isinstance(row, str))
    with pytest.raises(JobError) as error:
        found(tmp_path)
    if len(given) < formats.ROWS:  # else types are compared by table
        assert str(error.value) == f"file://{tmp_path / name}: {first}; correct it, or set bad_lines to error"


REFUSED = {
    "an empty CSV": ("a.csv", b"", "Empty CSV file, expected a line with the names of the columns"),
    "a CSV of blank lines": ("a.csv", b"\n\n", "Empty CSV file"),
    "a header that is not UTF-8": ("a.csv", b"\na,\xff\n1,2\n", "line 2: byte 0xff is not UTF-8 text"),
    "a header with a stray quote": ("a.csv", b'a,"b\n1,2\n', f"line 1: {STRAY}"),
    "a CSV in UTF-16": ("a.csv", "a,b\n1,2\n".encode("utf-16"), "line 1: byte 0xff is not UTF-8 text"),
    "a CSV of one endless row": (
        "a.csv",
        b"a,b\n1," + b"x" * (2 << 20),
        "line 2: the row that begins here is longer than 1 MiB",
    ),
    "a quote that nothing closes for a long time": (
        "a.csv",
        b'a\n"' + b"x\n" * (1 << 20),
        "line 2: the row that begins here is",
    ),
    "a reserved name in JSON": (
        "a.jsonl",
        b'{"_exspec_bad_line": "x"}\n',
        "the column name '_exspec_bad_line' is reserved",
    ),
    "a reserved name in a CSV": ("a.csv", b"_exspec_bad_line\nx\n", "the column name '_exspec_bad_line' is reserved"),
    "two columns of one name": ("a.csv", b"a,a\n1,2\n", "2 columns are called 'a'; expected unique names"),
    "a .tsv": (
        "p.tsv",
        b"a\tb\n",
        "not a Parquet file, and its suffix names no other format; exspec reads .parquet, .jsonl, .ndj",
    ),
    "a .json": (
        "b.json",
        b'[{"a": 1}]',
        "not a Parquet file, and its suffix names no other format; exspec reads .parquet, .jsonl",
    ),
    "a file without a suffix": ("rows", b"a,b\n1,2\n", "not a Parquet file, and its suffix names no other format"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("bad_lines", [False, True], ids=["refuse", "error"])
def test_a_file_that_cannot_be_read_is_refused(
    name: str, content: bytes, message: str, bad_lines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LARGEST_ROW", 1 << 20)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError) as error:
        found(tmp_path / name, bad_lines)
    assert str(error.value).startswith(f"file://{tmp_path / name}: {message}")


def test_a_folder_of_other_files_names_the_suffixes(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").touch()
    with pytest.raises(
        JobError, match=r"exspec reads \.parquet, \.jsonl, \.ndjson, \.csv, \.arrow; the last 4 also with \.gz"
    ):
        found(tmp_path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("_pipe"))
    path.symlink_to("_pipe")


IRREGULAR = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": _link_to_pipe,
}


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
@pytest.mark.parametrize("name", ["b.jsonl", "b.csv", "b.parquet", "b.arrow"])
def test_only_regular_files_are_read(make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    make(tmp_path / name)
    for place in (tmp_path, tmp_path / name, tmp_path / "*[b].*"):
        with pytest.raises(JobError, match=rf"{name}: is a pipe, socket, device or folder; expected a regular file"):
            found(place)


def test_a_file_that_becomes_a_pipe_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl"
    place.write_text('{"a": 1}\n')
    (shard,), schema = find_shards([str(place)], {})
    place.unlink()
    os.mkfifo(place)
    (table,) = read_ranges(shard, [(0, 1)], None, {}, schema)
    assert isinstance(table, Unreadable)
    assert table.reason.startswith("has changed since it was planned: it is no longer a regular file")


WRITE = {
    "parquet": pq.write_table,
    "jsonl": lambda table, path: path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist())),
    "csv": lambda table, path: table.to_pandas().to_csv(path, index=False),
}


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITE[path.suffix[1:]](pa.table(columns), path)


# Folders of one file each, and the columns of their rows.
FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "two keys": {
        "lang=en/day=2026-01-01/x": one(lang="en", day="2026-01-01"),
        "lang=de/day=2026-01-02/x": one(lang="de", day="2026-01-02"),
    },
    "keys and values that are quoted": {"a%2Fb%3D=x%2Fy%20z=1/x": {"a/b=": "x/y z=1"}},
    "a value that is null": {
        "lang=__HIVE_DEFAULT_PARTITION__/x": one(lang=None),
        "lang=007/x": one(lang="007"),
    },
    "an empty value": {"lang=/x": one(lang="")},
    "other folders between": {"data/lang=en/more/x": one(lang="en"), "data/lang=de/x": one(lang="de")},
    "folders that are no keys": {"=en/x": {}, "en/=/y": {}},
    "a key in the name of the file": {"x/lang=en": {}},
}


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("folders", FOLDERS.values(), ids=FOLDERS)
def test_folders_are_columns(suffix: str, folders: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for number, name in enumerate(folders):
        write(tmp_path / f"{name}.{suffix}", prompt=[f"{number} 1", f"{number} 2"])
    planned, schema, given = found(tmp_path)
    order = sorted(folders)
    expected = [{"prompt": f"{list(folders).index(n)} {i}"} | folders[n] for n in order for i in (1, 2)]
    assert [shard.name for shard in planned] == [f"{name}.{suffix}" for name in order]
    assert given == expected
    assert all(schema.field(name).type == pa.string() for name in schema.names)
    (some,) = read_ranges(planned[0], [(0, 2)], schema.names[1:], {}, schema)
    assert not isinstance(some, Unreadable)
    assert some.to_pylist() == [folders[order[0]]] * 2
    assert found(Path(f"{tmp_path}/**/*.{suffix}"))[2] == expected


def test_a_column_of_the_file_goes_before_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "lang=1/x.parquet", prompt=["a"], lang=[7])
    assert found(tmp_path)[2] == [one(prompt="a", lang=7)]


ODD_FOLDERS = {
    "a file outside": (["lang=en/x", "y"], [{"lang": "en"}, {"lang": None}]),
    "another key": (["day=1/x", "lang=en/x"], [{"day": "1", "lang": None}, {"day": None, "lang": "en"}]),
    "a key twice": (["lang=en/lang=de/x"], r"the folders of 'lang=en/lang=de/x\.jsonl' name a column twice"),
    "a reserved name": (["_exspec_bad_line=1/x", "lang=1/x"], [{"lang": "1"}]),  # hidden
}


@pytest.mark.parametrize(("names", "outcome"), ODD_FOLDERS.values(), ids=ODD_FOLDERS)
def test_odd_folders(names: list[str], outcome: str | list[dict[str, Any]], tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / f"{name}.jsonl", prompt=["a"])
    if isinstance(outcome, list):
        assert found(tmp_path)[2] == [{"prompt": "a"} | columns for columns in outcome]
        return
    with pytest.raises(JobError, match=outcome):
        found(tmp_path)


# Jobs, with the arithmetic model and in this process.


def job(pair: jobs.Pair, place: Path, **settings: Any) -> Job:
    given = {"id_column": None, "max_new_tokens_column": None, "max_new_tokens": 3, "limit": None}
    return jobs.job(pair, place / "in", place / "out", **given | settings)


def run(pair: jobs.Pair, place: Path, **settings: Any) -> int:
    from exspec.pipeline.run import execute

    return execute(prepare(job(pair, place, **settings)), load=jobs.ArithmeticLoader())


def outcome(place: Path) -> dict[tuple[str, int], Any]:
    """What the output has by shard and row: the error, or the completion."""
    return {(row["shard"], row["row"]): row["error"] or [row["completion"]] for row in rows_of(place / "out")}


REQUEST = {"method": "POST", "url": "/v1/completions"}
GOOD = [f"w{n % 30}" for n in range(40)]
JOBS = {
    "JSONL": ("a.jsonl", [json.dumps({"prompt": text, "n": n}) for n, text in enumerate(GOOD)], '{"prompt": "w1", '),
    "CSV": ("a.csv", [f"{text},{n}" for n, text in enumerate(GOOD)], "w1,2,3"),
    "batch requests": (
        "a.jsonl",
        [
            json.dumps(REQUEST | {"custom_id": str(n), "body": {"prompt": text, "max_tokens": 3}})
            for n, text in enumerate(GOOD)
        ],
        '{"custom_id": "1", "body": ',
    ),
}


@pytest.mark.parametrize(("name", "lines", "bad"), JOBS.values(), ids=JOBS)
def test_neighbours_of_bad_lines_are_the_same(
    pair: jobs.Pair, name: str, lines: list[str], bad: str, tmp_path: Path
) -> None:
    header = ["prompt,n"] if name.endswith(".csv") else []

    def write_lines(place: Path, lines: list[str]) -> None:
        (place / "in").mkdir(parents=True)
        (place / "in" / name).write_text("\n".join([*header, *lines]) + "\n")

    plain, odd = tmp_path / "plain", tmp_path / "odd"
    write_lines(plain, lines)
    assert run(pair, plain) == 0
    places = [0, 9, 10, 40]
    mixed = list(lines)
    for at in places:
        mixed.insert(at, bad)
    places = [n for n, line in enumerate(mixed) if line == bad]
    write_lines(odd, mixed)
    with pytest.raises(JobError, match=rf"{name}: line {1 + len(header)}: .*; correct it, or set bad_lines to error"):
        prepare(job(pair, odd))
    assert run(pair, odd, bad_lines="error", limit=20) == 0
    assert run(pair, odd, bad_lines="error") == 0
    given = outcome(odd)
    assert {row for (_, row), value in given.items() if isinstance(value, str)} == set(places)
    for at in places:
        assert given[name, at].startswith(f"line {at + 1 + len(header)}: ")
    assert [given[name, n] for n in range(len(mixed)) if n not in places] == list(outcome(plain).values())
    assert run(pair, odd) == 0, "an unchanged file is not refused later"
    done = read_output(Folder(str(odd / "out")))
    loaded: Any = SimpleNamespace(tokenizer=jobs.tokenizer(), target=tiny.model(seed=0, max_position_embeddings=64))
    audited = list(read_rows(prepare(job(pair, odd)).job, done, loaded, choose(done, 1000, None, 0)))
    assert len(audited) == len(mixed)
    assert all((row.request is None) == (row.number in places) for row in audited)


def test_a_job_with_folders_maps_and_bad_lines(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`map` does not see the bad lines, and sees the folders' columns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mapping.py").write_text(
        "import pyarrow as pa\n\ndef marked(table):\n"
        "    assert None not in table['prompt'].to_pylist()\n"
        "    return table.append_column('mark', pa.array([v + '!' for v in table['lang'].to_pylist()], pa.string()))\n"
    )
    for lang in ("de", "en"):
        place = tmp_path / "in" / f"lang={lang}" / "a.jsonl"
        place.parent.mkdir(parents=True)
        place.write_text('{"prompt": "w1"}\n{\n{"prompt": "w2"}\n')
    assert run(pair, tmp_path, bad_lines="error", map="mapping:marked") == 0
    made = sorted(rows_of(tmp_path / "out"), key=lambda row: (row["shard"], row["row"]))
    assert [(row["lang"], row["mark"]) for row in made if row["error"] is None] == [("de", "de!")] * 2 + [
        ("en", "en!")
    ] * 2
    assert [row["error"][:6] for row in made if row["error"]] == ["line 2"] * 2
    state = read_output(Folder(str(tmp_path / "out"))).state
    assert [decode_row(shard.values).to_pylist() for shard in state.plan.shards] == [[one(lang="de")], [one(lang="en")]]


def test_a_job_that_was_planned_without_folders_goes_on_without(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in/lang=en/a.jsonl", prompt=GOOD)
    with monkeypatch.context() as older:
        older.setattr(shards, "_values", lambda *_: "")
        assert run(pair, tmp_path, limit=16) == 0
    write(tmp_path / "in/lang=de/b.jsonl", prompt=GOOD)
    assert run(pair, tmp_path) == 0
    made = rows_of(tmp_path / "out")
    assert len(made) == 2 * len(GOOD)
    assert not any("lang" in row for row in made)


def test_new_folders_of_a_job_need_its_keys(pair: jobs.Pair, tmp_path: Path) -> None:
    write(tmp_path / "in/a.jsonl", prompt=GOOD)
    assert run(pair, tmp_path) == 0
    write(tmp_path / "in/lang=de/b.jsonl", prompt=GOOD)
    with pytest.raises(JobError, match="column 'lang' is not in the first run's input"):
        prepare(job(pair, tmp_path))


PARTITIONS = {
    "a column that leads outside": "../../x",
    "an absolute path": "/etc/x",
    "a column with a sign of equality": "a=b",
    "a column that is quoted": "a%2Fb",
    "a column whose folder would be hidden": "_x",
}


@pytest.mark.parametrize("name", PARTITIONS.values(), ids=PARTITIONS)
def test_folders_by_odd_columns_stay_inside(pair: jobs.Pair, name: str, tmp_path: Path) -> None:
    place = tmp_path / "deep" / "er"
    write(place / "in/a.jsonl", prompt=GOOD[:4], **{name: ["../..", "x/y", "", "z"]})
    assert run(pair, place) == 0
    before = set(tmp_path.rglob("*"))
    succeed("convert", place / "out", place / "by", "--partition-by", name)
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(place / "by") for path in new)
    assert {row[name] for row in found(place / "by")[2]} == {"../..", "x/y", "", "z"}
    assert set(pq.read_table(place / "by")[name].to_pylist()) == {"../..", "x/y", "", "z"}


FORMULAS = {
    "=cmd|' /C calc'!A0": True,
    "+1+cmd|' /C calc'!A0": True,
    "-2+3": True,
    "@SUM(1)": True,
    "\t=1": True,
    "\r=1": True,
    "-1.5": False,
    "+49": False,
    "a=b": False,
    " =1": False,
    "": False,
}


def test_formulas_in_csv_are_counted_and_quoted(pair: jobs.Pair, tmp_path: Path) -> None:
    write(tmp_path / "in/a.jsonl", prompt=["w1"] * len(FORMULAS), note=list(FORMULAS), n=list(range(len(FORMULAS))))
    assert run(pair, tmp_path) == 0

    def notes(file: Path) -> list[str]:
        with file.open(newline="") as text:
            return [row["note"] for row in csv.DictReader(text)]

    said = succeed("convert", tmp_path / "out", tmp_path / "a.csv")
    assert f"{sum(FORMULAS.values())} of the CSV's values may run as a formula" in said
    assert "exspec convert --quote-formulas puts ' before them" in said
    assert notes(tmp_path / "a.csv") == list(FORMULAS)
    assert "a formula" not in succeed("convert", tmp_path / "out", tmp_path / "b.csv", "--quote-formulas")
    assert notes(tmp_path / "b.csv") == [f"'{text}" if formula else text for text, formula in FORMULAS.items()]
    assert "a formula" not in succeed("convert", tmp_path / "out", tmp_path / "c.jsonl")
    assert "a formula" not in succeed("convert", tmp_path / "out", tmp_path / "d.csv", "--columns", "n")


class Names(list[str]):
    """Names of columns that count how often they are searched."""

    searched = 0

    def __contains__(self, name: object) -> bool:
        self.searched += 1
        return super().__contains__(name)

    def count(self, name: Any) -> int:
        self.searched += 1
        return super().count(name)


class Watched:
    """A schema that counts how often its names are made or searched."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.made: list[Names] = []

    @property
    def names(self) -> Names:
        self.made.append(Names(self.schema.names))
        return self.made[-1]

    def field(self, name: str) -> pa.Field:
        return self.schema.field(name)

    def __iter__(self) -> Iterator[pa.Field]:
        return iter(self.schema)

    @property
    def searches(self) -> int:
        return len(self.made) + sum(names.searched for names in self.made)


LINEAR: dict[str, Any] = {
    "one schema for all shards": lambda schema, other, _: unified(schema, "a", "b", other, False),
    "columns of one name": lambda schema, *_: refuse_duplicates("a", schema),
    "columns that are carried": lambda schema, _, job: carried_columns(job, schema),
    "columns that are named to be carried": lambda schema, _, job: carried_columns(
        job.model_copy(update={"carry": schema.schema.names}), schema
    ),
}


@pytest.mark.parametrize("step", LINEAR.values(), ids=LINEAR)
def test_a_step_of_the_plan_is_linear_in_columns(step: Any, pair: jobs.Pair, tmp_path: Path) -> None:
    schema, other = (Watched(pa.schema({f"c{n}": pa.string() for n in range(500)})) for _ in range(2))
    step(schema, other, job(pair, tmp_path))
    assert schema.searches + other.searches < 20


# Any bytes, read in blocks of any size.

NAMES = ["a", "b", "c"]
CSV: Any = [(csv.QUOTE_ALL, "\n"), (csv.QUOTE_ALL, "\r\n"), (csv.QUOTE_MINIMAL, "\r\n")]
VALUES = st.text(st.characters(codec="utf-8") | st.sampled_from('",\n\r\x00'), max_size=9)
LINES = st.lists(st.tuples(VALUES, VALUES, VALUES) | st.sampled_from([b"1,2", b"1,2,3,4", b"\xff,2,3"]), max_size=20)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LINES, st.sampled_from(CSV), st.integers(8, 64))
def test_any_values_come_back_from_a_csv_and_any_bad_lines_are_in_their_place(
    given_rows: list[Any], kind: tuple[Any, str], block: int
) -> None:
    quoting, end = kind
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=quoting, lineterminator=end)
    content = b"a,b,c" + end.encode()
    expected: Rows = []
    for row in given_rows:
        if isinstance(row, bytes):
            content += row + end.encode()
            expected.append("line ")
            continue
        text.seek(text.truncate(0))
        writer.writerow(row)
        content += text.getvalue().encode()
        expected.append(
            {name: value or ("" if quoting == csv.QUOTE_ALL else None) for name, value in zip(NAMES, row, strict=True)}
        )
    assert begun(everything("a.csv", content, block), expected) == expected


SNIPPETS = st.sampled_from(
    [b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"x", b" ", b"\xff", b"\xc3\xa9", b"{", b"}", b'{"a": 1}\n', b"\x00"]
)
ANY = st.lists(SNIPPETS | st.binary(max_size=3), max_size=40).map(b"".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(["a.csv", "a.jsonl"]), ANY, st.integers(1, 64))
def test_any_bytes_give_the_same_rows_in_blocks_of_any_size(name: str, content: bytes, block: int) -> None:
    content = (b"a,b\n" if name == "a.csv" else b"") + content
    whole = everything(name, content, 1 << 20)
    assert everything(name, content, block) == whole
    if name == "a.jsonl":
        assert len(whole) == sum(bool(line.strip()) for line in content.split(b"\n"))


def everything(name: str, content: bytes, block: int) -> Rows:
    """The rows of a file, read in blocks: values, or the text of the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", block)
        count, schema = scan(name, lambda: io.BytesIO(content), bad_lines=True)  # type: ignore[arg-type, return-value]
        tables = read(name, lambda: io.BytesIO(content), schema)  # type: ignore[arg-type, return-value]
        made = [str(r) if isinstance(r, RowError) else r for t in tables for r in rows(t, schema.names)]
    assert len(made) == count
    return made
