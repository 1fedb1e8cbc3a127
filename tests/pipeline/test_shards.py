"""Shards and chunks: the plan is a pure function of the footers, and no two things share a name."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exspec.pipeline.errors import JobError
from exspec.pipeline.plan import Chunk, Plan, Shard
from exspec.pipeline.shards import find_shards, read_chunk


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 20), st.none() | st.integers(1, 100))
def test_chunks_cover_every_row_once_and_parts_have_names_of_their_own(
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
    assert len({c.part for c in chunks}) == len(chunks)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_chunk_reads_its_rows_across_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(50)}), tmp_path / "s.parquet", row_group_size=7)
    (shard,), _ = find_shards([str(tmp_path)], {})
    for first, rows in ((0, 50), (0, 7), (6, 2), (13, 20), (49, 1)):
        assert read_chunk(Chunk(shard, first, rows), {})["n"].to_pylist() == list(range(first, first + rows))


def test_folders_globs_and_files(tmp_path: Path) -> None:
    for name in ("a/x.parquet", "a/b/x.parquet", "a/_hidden.parquet", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("txt"):
            (tmp_path / name).write_text("no shard")
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
