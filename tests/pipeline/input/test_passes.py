"""Chunks become smaller towards the end, and no row is lost or twice."""

import pickle
from itertools import pairwise
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.pipeline.input import passes as module
from exspec.pipeline.input.passes import Sizes, passes, smallest_chunk
from exspec.pipeline.input.plan import Plan, Shard, Task

SHARDS = st.lists(st.integers(1, 300), min_size=1, max_size=8)


def planned(rows: list[int], most: int, limit: int | None = None) -> Plan:
    return Plan([Shard(str(i), "", n, n, "") for i, n in enumerate(rows)], most, limit)


def cut(plan: Plan, held: list[tuple[int, int, int]], readers: int, sizes: Sizes) -> list[list[Task]]:
    found, count = passes(map(Task, plan.chunks(held)), readers, sizes)
    groups = [pickle.loads(tasks) for tasks in found]
    assert count == sum(map(len, groups))
    return groups


@settings(deadline=None, derandomize=True)
@given(st.data(), SHARDS, st.integers(1, 64), st.none() | st.integers(1, 900), st.integers(1, 9))
def test_every_missing_row_is_in_one_chunk(
    data: st.DataObject, rows: list[int], most: int, limit: int | None, actors: int
) -> None:
    """Whatever is held: chunks of other sizes, or of a run that was killed."""
    plan = planned(rows, most, limit)
    every = {(c.number, c.first + i) for c in plan.chunks() for i in range(c.rows)}
    held: list[tuple[int, int, int]] = []
    for number, end in enumerate(rows):
        edges = sorted(data.draw(st.sets(st.integers(0, end), max_size=8)))
        held += [(number, a, b - a) for a, b in list(pairwise(edges))[::2] if (number, b - 1) in every]
    enough = data.draw(st.integers(1, 400))
    sizes = Sizes(
        most, smallest_chunk(most, actors, data.draw(st.integers(1, 64))), actors * data.draw(st.integers(2, 6))
    )
    with patch.object(module, "ENOUGH_ROWS", enough):
        groups = cut(plan, held, actors + 1, sizes)
    chunks = [task.chunk for group in groups for task in group]
    found = [(c.number, c.first + i) for c in chunks for i in range(c.rows)]
    assert found == sorted(every - {(n, first + i) for n, first, count in held for i in range(count)}), "in order"
    assert all(1 <= c.rows <= most for c in chunks)
    assert len({Task(c).key for c in chunks}) == len(chunks)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 9), st.integers(2, 6))
def test_sizes_never_grow(rows: int, most: int, actors: int, calls: int) -> None:
    """Equal pieces of a chunk may differ by a row, and the last chunk of the shard is what is left."""
    sizes = Sizes(most, smallest_chunk(most, actors, 8), actors * calls)
    chunks = [task.chunk for group in cut(planned([rows], most), [], actors + 1, sizes) for task in group]
    assert sum(chunk.rows for chunk in chunks) == rows
    assert all(other.rows <= one.rows + 1 for one, other in pairwise(chunks))
    assert all(chunk.rows <= sizes.of(rows - chunk.first // most * most) for chunk in chunks)
    if actors == 1:
        assert all(chunk.rows == most for chunk in chunks[:-1])
    elif rows > most > sizes.least:
        assert chunks[-1].rows < most


def test_small_chunks_come_last_whoever_reads_them() -> None:
    """Of two readers, one takes the large shard and the other all others, which it has read earlier."""
    large, *others = cut(planned([60_000, 17_000, 17_000], 64), [], 2, Sizes(64, 8, 40))
    assert [task.chunk.rows for task in large][-40:] == [8] * 40
    assert {task.chunk.rows for group in others for task in group} == {64, 17_000 % 64}


def test_tasks_that_decode_rows_again_stay_whole() -> None:
    """Their number decides when their file is replaced."""
    again = [Task(chunk, "part", chunk.first) for chunk in planned([200], 64).chunks()]
    (tasks,) = (pickle.loads(group) for group in passes(iter(again), 9, Sizes(64, 8, 40))[0])
    assert tasks == again
