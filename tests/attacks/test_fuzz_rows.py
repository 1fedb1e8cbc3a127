"""Random values, encodings, types and names: what planning accepts is written, and neighbours of an odd row stay equal.

Real files, reader, sink and converter; only the decoding is scripted.
"""

import csv
import gzip
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exspec.actors.engine import Room
from exspec.actors.generator import Origin
from exspec.actors.samples import RowResult
from exspec.jobs.commands.convert import WRITERS
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.batch import is_batch, of_batch
from exspec.pipeline.input.plan import Chunk, Task
from exspec.pipeline.input.reader import Reader
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import carried_schema
from exspec.pipeline.output.parts import PartSink
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs

GOOD = "w1 w2"
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(
    lambda name: name not in ("prompt", "messages", "message", "text", "id", "body", "custom_id")
)
odd_text = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"\xff\xfe", b"w1\x00", "\U000f0000".encode(), b"\xed\xa0\x80", b"", b"w" * 9000, b"[" * 700]),
    st.text(max_size=8).map(lambda text: text.encode(errors="surrogatepass")),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
) | st.integers(1, 900).map(lambda depth: json.loads("[" * depth + "]" * depth))


def texts(values: list[bytes], large: bool = False) -> pa.Array:
    kind, raw = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    return pa.Array.from_buffers(kind, len(values), pa.array(values, raw).buffers())


def times(unit: str, zone: str | None = None) -> Any:
    """Times that Python may not have."""
    return lambda v: pa.array([0, v, 1], pa.timestamp(unit, zone))


LEAVES = (
    st.sampled_from([times("us"), times("ns"), times("s", "UTC"), times("ms", "Mars/Olympus"), times("us", "+05:30")]),
    st.sampled_from(
        [lambda v: pa.array([0, v % 2**31, 1], pa.date32()), lambda v: pa.array([0, v, 1], pa.duration("s"))]
    ),
)
leaves = st.one_of(
    st.tuples(st.one_of(*LEAVES), st.integers(-(2**63), 2**63 - 1)).map(lambda made: made[0](made[1])),
    st.tuples(odd_text, st.booleans()).map(lambda made: texts([b"a", made[0], b"c"], made[1])),
    st.sampled_from(
        [
            pa.array([{}, None, {}], pa.struct([])),
            pa.array([(1, 2, 3), None, (0, 0, 0)], pa.month_day_nano_interval()),
            pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]),
            pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [pa.array([1, 2, 3])]),
            pa.array([b"", None, b""], pa.binary(0)),
            pa.nulls(3),
            pa.array([1.5, float("nan"), float("inf")]),
        ]
    ),
)


def in_list(inner: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), inner)


def in_record(inner: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([inner], ["a"])


def coded(inner: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), inner)


arrays = st.one_of(
    leaves,
    leaves.map(in_list),
    leaves.map(in_record),
    leaves.map(in_record).map(in_list),
    leaves.map(coded),
)


def outcome(pair: jobs.Pair, place: Path, **given: Any) -> list[dict[str, Any]] | None:
    """The rows of a job as they are converted; None if planning refuses the input."""
    job: Job = jobs.job(pair, place / "in", place / "out", max_new_tokens_column=None, **{"id_column": None} | given)
    try:
        (shard,), schema = find_shards(job.input, {})
        job = of_batch(job, schema, None) if is_batch(job, schema) else job
        carried = carried_schema(job, schema)
        tasks = [Task(Chunk(shard, 0, 0, shard.rows))]
        (block,) = Reader(job, schema, Room(64, 64))(pa.table({"tasks": [pickle.dumps(tasks)]}))
    except JobError as error:
        print(str(error).encode())  # the reason can be written
        return None
    assert block["unreadable"][0].as_py() is None
    rows = pa.ipc.open_stream(block["rows"][0].as_buffer()).read_all()
    errors = rows["_error"].to_pylist()
    results: list[RowResult | None] = [RowResult(None, None, error or "decoded", 1) for error in errors]
    sink = PartSink(Folder(str(place / "out")), "job", "chunk", carried, job.answer_columns())
    staged = sink.stage(tasks[0], rows, results, Origin("actor", "host", {}, 0.0, 1.0, 1))
    table = pq.read_table(place / "out" / staged["staged"])
    for column in table.columns:
        column.validate(full=True)
    for name in (".jsonl", ".csv"):
        WRITERS[name](place / f"out{name}", table.column_names, iter([table]), None)
    csv.field_size_limit(1 << 30)
    with (place / "out.csv").open(encoding="utf-8", newline="") as file:
        assert sum(1 for _ in csv.reader(file)) == shard.rows + 1
    found = [json.loads(line) for line in (place / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(found) == shard.rows
    return found


def compare(pair: jobs.Pair, write: Any, odd: Any, plain: Any, **given: Any) -> None:
    """The neighbours of row 1 are the same beside an odd row and a plain one, unless planning refuses the odd one."""
    both = []
    for value in (odd, plain):
        with tempfile.TemporaryDirectory() as here:
            (Path(here) / "in").mkdir()
            write(Path(here) / "in", value)
            both.append(outcome(pair, Path(here), **given))
    with_odd, without = both
    assert without is not None
    if with_odd is not None:
        assert len(with_odd) == len(without) == 3
        for i in (0, 2):
            assert with_odd[i]["error"] == without[i]["error"] == "decoded"
            assert {k: v for k, v in with_odd[i].items() if k in without[i]} == without[i]


def save(kind: str, table: pa.Table, folder: Path) -> None:
    if kind == "parquet":
        pq.write_table(table, folder / "s.parquet")
        return
    with pa.ipc.new_stream(folder / "s.arrow", table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@FUZZ
@given(bad=odd_text, large=st.booleans(), role=st.sampled_from(["prompt", "id"]))
def test_odd_text_in_a_prompt_or_an_id(pair: jobs.Pair, kind: str, bad: bytes, large: bool, role: str) -> None:
    def write(folder: Path, value: bytes) -> None:
        given = {"prompt": texts([GOOD.encode()] * 3), "id": texts([b"a", b"b", b"c"])}
        other = GOOD.encode() if role == "prompt" else b"a"
        given[role] = texts([other, value, other], large)
        save(kind, pa.table(given), folder)

    compare(pair, write, bad, b"w2", id_column="id")


@FUZZ
@given(column=arrays, name=names)
def test_a_carried_column_of_any_type(pair: jobs.Pair, column: pa.Array, name: str) -> None:
    with tempfile.TemporaryDirectory() as here:
        (Path(here) / "in").mkdir()
        save("arrow", pa.table({"prompt": [GOOD] * 3, name: column}), Path(here) / "in")
        rows = outcome(pair, Path(here))
    assert rows is not None, "any type is accepted"
    assert [row["error"] for row in rows] == ["decoded"] * 3


@FUZZ
@given(value=json_values, name=names, packed=st.booleans())
def test_any_value_in_json_lines(pair: jobs.Pair, value: Any, name: str, packed: bool) -> None:
    def write(folder: Path, value: Any) -> None:
        lines = [{"prompt": GOOD}, {"prompt": GOOD, name: value}, {"prompt": GOOD}]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = folder / ("s.jsonl.gz" if packed else "s.jsonl")
        file.write_bytes(gzip.compress(content) if packed else content)

    compare(pair, write, value, None)


@FUZZ
@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), name=names)
def test_any_value_in_csv(pair: jobs.Pair, value: str, name: str) -> None:
    def write(folder: Path, value: str) -> None:
        with (folder / "s.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["prompt", name], [GOOD, "x"], [value, value], [GOOD, "y"]])

    compare(pair, write, value, "w2")


@FUZZ
@given(
    body=json_values
    | st.dictionaries(st.sampled_from(["messages", "prompt", "max_tokens", "stop", "seed"]), json_values)
)
def test_any_body_of_a_batch_request(pair: jobs.Pair, body: Any) -> None:
    def write(folder: Path, body: Any) -> None:
        good = {"prompt": GOOD, "max_tokens": 4}
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b}
            for i, b in enumerate([good, body, good])
        ]
        (folder / "s.jsonl").write_text("\n".join(map(json.dumps, lines)))

    compare(pair, write, body, {"prompt": "w2"}, chat=False)
