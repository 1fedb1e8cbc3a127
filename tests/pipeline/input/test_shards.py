"""Shards and chunks: the plan is a pure function of the footers, and names are unique."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, Plan, Shard, encode_schema
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.input.snapshot import changed, vanished
from exspec.pipeline.output.state import Summary, file_name
from tests.pipeline.input.chunks import read_chunk


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 20), st.none() | st.integers(1, 100))
def test_chunks_cover_every_row_once_and_parts_have_unique_names(
    sizes: list[int], rows_per_chunk: int, limit: int | None
) -> None:
    shards = [Shard(f"{i}/s.parquet", f"/in/{i}/s.parquet", n, n, "") for i, n in enumerate(sizes)]
    plan = Plan(shards, rows_per_chunk, limit)
    chunks = list(plan.chunks())
    covered = [(c.shard.name, c.first + i) for c in chunks for i in range(c.rows)]
    every = [(s.name, i) for s in shards for i in range(s.rows)]
    assert covered == every[: plan.rows]
    assert plan.rows == min(sum(sizes), limit or sum(sizes))
    assert all(1 <= c.rows <= rows_per_chunk for c in chunks)
    made = [Summary(c.number, c.first, c.rows, 0, 0, 0, [], [], 0, 0, {}, "", {}, 0, 0, 1) for c in chunks]
    assert len({file_name([summary], 1) for summary in made}) == len(chunks)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_chunk_reads_its_rows_across_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(50)}), tmp_path / "s.parquet", row_group_size=7)
    (shard,), _ = find_shards([str(tmp_path)], {})
    for first, rows in ((0, 50), (0, 7), (6, 2), (13, 20), (49, 1)):
        assert read_chunk(Chunk(shard, 0, first, rows), {})["n"].to_pylist() == list(range(first, first + rows))


def test_folders_globs_and_files(tmp_path: Path) -> None:
    for name in ("a/x.parquet", "a/b/x.parquet", "a/_hidden.parquet", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("txt"):
            (tmp_path / name).write_text("not a shard")
        else:
            pq.write_table(pa.table({"n": [1]}), tmp_path / name)
    folder = str(tmp_path / "a")

    def names(*urls: str) -> list[str]:
        return [shard.name for shard in find_shards(list(urls), {})[0]]

    assert names(folder) == ["b/x.parquet", "x.parquet"]
    assert names(f"{folder}/*.parquet") == ["x.parquet"]
    assert names(f"{folder}/b/x.parquet") == ["x.parquet"]
    assert names(folder, f"{folder}/*.parquet") == ["b/x.parquet", "x.parquet"], "a file given twice is one shard"
    with pytest.raises(JobError, match=r"would both be the shard 'x.parquet'; give a folder above both"):
        names(f"{folder}/x.parquet", f"{folder}/b/x.parquet")


ODD = ["a::b.parquet", "a#b.parquet", "a?b.parquet", "100%.parquet", "a%20b.parquet", "a b: c.parquet", "a[1]*.parquet"]


@pytest.mark.parametrize("name", ODD)
def test_any_name_can_be_read(tmp_path: Path, name: str) -> None:
    """A `::` in a name is not a chain of URLs."""
    pq.write_table(pa.table({"n": [7]}), tmp_path / name)
    for url in (tmp_path, tmp_path / name, f"file://{tmp_path}"):
        (shard,), _ = find_shards([str(url)], {})
        assert shard.name == name
        assert read_chunk(Chunk(shard, 0, 0, 1), {})["n"].to_pylist() == [7]
        assert vanished([shard], {}) == set()
        assert changed([shard], {}) == {}


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"]), tmp_path / "s.parquet")
    with pytest.raises(JobError, match=r"s\.parquet: 2 columns are called 'n'; expected unique names"):
        find_shards([str(tmp_path)], {})


def write(folder: Path, *columns: pa.Array | pa.Table) -> list[pa.Table]:
    """Write a shard per column, and return what a run reads from them."""
    for i, column in enumerate(columns):
        table = column if isinstance(column, pa.Table) else pa.table({"x": column})
        pq.write_table(table, folder / f"{i}.parquet")
    shards, schema = find_shards([str(folder)], {})
    tables = [read_chunk(Chunk(shard, 0, 0, shard.rows), {}, schema=schema) for shard in shards]
    assert all(table.schema.equals(schema) for table in tables)
    return tables


def test_shards_may_differ_in_nullability(tmp_path: Path) -> None:
    """In fields, list elements and struct members."""
    inner = pa.struct([pa.field("a", pa.string(), nullable=False)])
    strict = pa.schema([pa.field("x", pa.list_(pa.field("element", inner, nullable=False)), nullable=False)])
    loose = pa.schema({"x": pa.list_(pa.struct({"a": pa.string()}))})
    rows = [{"x": [{"a": "1"}]}]
    tables = write(tmp_path, pa.Table.from_pylist(rows, strict), pa.Table.from_pylist(rows, loose))
    assert [table.to_pylist() for table in tables] == [rows, rows]
    field = tables[0].schema.field("x")
    assert field.nullable
    assert field.type.value_field.nullable
    assert field.type.value_type.field("a").nullable


TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def test_texts_of_any_layout_are_one_type(tmp_path: Path) -> None:
    tables = write(tmp_path, *(pa.array(["x"], kind) for kind in TEXTS), pa.nulls(1))
    assert [t["x"].to_pylist() for t in tables] == [["x"], ["x"], ["x"], ["x"], [None]]
    assert tables[0].schema.field("x").type == pa.large_string()


def test_lists_and_structs_of_texts_of_any_layout_are_one_type(tmp_path: Path) -> None:
    small = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    large = pa.large_list(pa.struct({"role": pa.dictionary(pa.int8(), pa.string()), "content": pa.large_string()}))
    value = [[{"role": "user", "content": "Hi"}]]
    coded = pa.StructArray.from_arrays(
        [pa.array(["user"]).dictionary_encode().cast(large.value_type[0].type), pa.array(["Hi"], pa.large_string())],
        ["role", "content"],
    )
    tables = write(tmp_path, pa.array(value, small), pa.LargeListArray.from_arrays([0, 1], coded))
    assert [t["x"].to_pylist() for t in tables] == [value, value]


def test_columns_of_different_types_are_refused(tmp_path: Path) -> None:
    for other in (pa.array(["1"]), pa.array([1.0]), pa.array([[1]])):
        with pytest.raises(JobError, match=r"1\.parquet: column 'x' is .*, but int64 in .*0\.parquet"):
            write(tmp_path, pa.array([1]), other)


def test_a_new_shard_is_read_with_the_planned_types(tmp_path: Path) -> None:
    write(tmp_path, pa.array(["a"]))
    shards, schema = find_shards([str(tmp_path)], {})
    plan = Plan(shards, 8, None, encode_schema(schema))
    pq.write_table(pa.table({"x": pa.array(["b"], pa.large_string())}), tmp_path / "1.parquet")
    shards, schema = find_shards([str(tmp_path)], {}, plan)
    assert schema.field("x").type == pa.string()
    assert read_chunk(Chunk(shards[1], 0, 0, 1), {}, schema=schema).schema == schema
    pq.write_table(pa.table({"x": [1]}), tmp_path / "2.parquet")
    with pytest.raises(JobError, match=r"2\.parquet: column 'x' is int64, but string in the first run's input"):
        find_shards([str(tmp_path)], {}, plan)


def test_an_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.parquet").write_bytes(b"no shard at all, " * 9)
    with pytest.raises(JobError, match=r"s\.parquet: not a Parquet file \(Parquet magic bytes not found"):
        find_shards([str(tmp_path)], {})
