"""Which chunks a reader task reads, how many an actor has, and how they shrink towards the end of a job.

Actors wait for the one that has the last chunks. So the rows of a chunk decrease with the rows that are left, as in
guided self-scheduling.
"""

import heapq
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from math import ceil
from typing import NamedTuple

from exspec.pipeline.input.plan import Task

MOST_ROWS, ENOUGH_ROWS = 1 << 20, 1 << 14  # maximum for one reader task: rows of one shard, and of several shards
ROWS_PER_SLOT = 3  # rows in flight per slot of an actor, so that no slot is empty at the end of a chunk
SMALLEST = 8  # rows of the largest chunks per row of the smallest ones; with more, the driver would need more time
MOST_CHUNKS = 8  # of the smallest size, that hold the rows in flight of an actor: all run again if it dies


@dataclass(frozen=True)
class Sizes:
    """Rows of chunks. most, least: of the first and the last ones. held: chunks that all actors have at a time.

    All these chunks together have no more rows than are left, unless they are the smallest.
    """

    most: int
    least: int
    held: int

    def of(self, left: int) -> int:
        """The most rows of the next chunk. left: rows to send."""
        return min(self.most, max(self.least, left // self.held))


class Dispatch(NamedTuple):
    """What actors work on. passes: the pickled tasks of each reader task. calls: chunks that an actor works on at a
    time. held: these and those that wait in it."""

    passes: list[bytes]
    calls: int
    held: int


def dispatch(
    tasks: Iterator[Task], most: int, actors: tuple[int, int], batch_size: int, slots: int, samples: int, calls: int
) -> Dispatch:
    """Share tasks among a pool of at least and at most so many actors, and one more reader than actors.

    most: rows of a chunk; the last ones have fewer. batch_size, slots: of an actor. samples: of a row. calls: the
    fewest chunks that an actor works on at a time; even the smallest ones must keep its batch full.
    """
    low, high = actors
    least = smallest_chunk(most, high, batch_size)
    calls = max(calls, ceil(ROWS_PER_SLOT * max(slots / most, batch_size / least) / samples))

    def held(calls: int) -> int:
        """A fixed pool balances best if one chunk waits. An elastic pool grows by as many actors as could take the
        chunks that wait: it about doubles each time."""
        return calls + 1 if low == high else 2 * calls

    made, count = passes(tasks, high + 1, Sizes(most, least, high * held(calls)))
    calls = min(calls, -(-count // high))  # the first actor that is ready must not take all chunks
    return Dispatch(made, calls, held(calls))


def smallest_chunk(most: int, actors: int, batch_size: int) -> int:
    """Rows of the last chunks, if the first have `most`. A single actor waits for no other."""
    least = max(-(-most // SMALLEST), -(-ROWS_PER_SLOT * batch_size // MOST_CHUNKS))
    return most if actors == 1 else min(most, least)


def passes(tasks: Iterator[Task], readers: int, sizes: Sizes) -> tuple[list[bytes], int]:
    """The pickled tasks of each reader task, and the number of tasks. readers: how many read at a time.

    Readers are taken to be equally fast. Only the last pass of each one is cut into smaller chunks.
    """
    made: list[bytes] = []
    last: list[tuple[int, int, list[Task]]] = []  # of each reader: the rows it reads until then, number, tasks
    count = 0
    for number, group in enumerate(read_together(tasks)):
        before = 0
        if len(last) == readers:
            before, done, read = heapq.heappop(last)
            made[done] = pickle.dumps(read)
            count += len(read)
        heapq.heappush(last, (before + rows_of(group), number, group))
        made.append(b"")
    cut = tapered([(end - rows_of(group), group) for end, _, group in last], sizes)
    for (_, number, _), group in zip(last, cut, strict=True):
        made[number] = pickle.dumps(group)
    return made, count + sum(map(len, cut))


def tapered(groups: Sequence[tuple[int, list[Task]]], sizes: Sizes) -> list[list[Task]]:
    """The groups of tasks that are read at the same time, cut to sizes. Each comes with the rows that are read before.

    Tasks that decode rows of a file again stay whole: the file is replaced when all of them are done.
    """
    made: list[list[Task]] = [[] for _ in groups]
    in_time = [
        zip(accumulate((task.chunk.rows for task in group), initial=before), repeat(i), group, strict=False)
        for i, (before, group) in enumerate(groups)
    ]
    left = sum(rows_of(group) for _, group in groups)
    for _, i, task in heapq.merge(*in_time):
        made[i] += [task] if task.file else pieces(task, sizes.of(left))
        left -= task.chunk.rows
    return made


def pieces(task: Task, most: int) -> list[Task]:
    """The task in equal pieces of at most so many rows."""
    chunk, count = task.chunk, -(-task.chunk.rows // most)
    edges = [chunk.rows * i // count for i in range(count + 1)]
    return [replace(task, chunk=replace(chunk, first=chunk.first + a, rows=b - a)) for a, b in pairwise(edges)]


def rows_of(group: Sequence[Task]) -> int:
    return sum(task.chunk.rows for task in group)


def read_together(tasks: Iterator[Task]) -> Iterator[list[Task]]:
    """The tasks of each reader task: a shard, so that its row groups are decoded once, or several small shards.

    A reader task that is lost starts again at its first row.
    """
    group: list[Task] = []
    rows = 0
    for task in tasks:
        other = group and task.chunk.number != group[-1].chunk.number
        if group and (rows >= MOST_ROWS or (other and rows >= ENOUGH_ROWS)):
            yield group
            group, rows = [], 0
        group.append(task)
        rows += task.chunk.rows
    if group:
        yield group
