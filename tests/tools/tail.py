"""`python -m tests.tools.tail`: how long actors are idle at the end of a job, by a simulation without Ray.

Prints a JSON line for each job: lengths, rows, and figures with chunks of one size and with smaller ones at the end.

A row in a slot makes a token per step. Chunks are planned, read and sent as in a real job: in order, to the actor that
has the fewest. Sending takes no time.
"""

import heapq
import json
import pickle
import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from exspec.actors.engine import EngineConfig
from exspec.pipeline.input import passes
from exspec.pipeline.input.plan import Plan, Shard, Task
from exspec.pipeline.job.settings import Job

PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"
TOKENS_PER_WORD = 1.3
ROWS = 480, 5_000, 50_000
ORDERS = 4  # shuffled orders of the rows, over which figures are averaged


class Idle(NamedTuple):
    """actors: share of their time in which they have no row. slots: share of empty ones. steps: that the job takes, as
    a multiple of the steps if no slot were ever empty. chunks: their number."""

    actors: float
    slots: float
    steps: float
    chunks: int


class Actor:
    """Works on `calls` chunks at a time. Their rows take free slots in order. All times are in steps."""

    def __init__(self, slots: int, calls: int) -> None:
        self.slots, self.calls = slots, calls
        self.waiting: deque[list[int]] = deque()  # chunks, each the lengths of its rows
        self.unfinished: dict[int, int] = {}  # rows of the begun chunks, by number of the chunk
        self.rows: deque[tuple[int, int]] = deque()  # without a slot: number of the chunk, and length
        self.ends: list[tuple[int, int]] = []  # of the rows in slots: time, and number of the chunk
        self.count = self.used = 0

    @property
    def held(self) -> int:
        return len(self.waiting) + len(self.unfinished)

    def fill(self, now: int) -> None:
        """Begin chunks and rows."""
        while self.waiting and len(self.unfinished) < self.calls:
            lengths = self.waiting.popleft()
            self.count += 1
            self.unfinished[self.count] = len(lengths)
            self.rows.extend((self.count, length) for length in lengths)
        while self.rows and len(self.ends) < self.slots:
            chunk, length = self.rows.popleft()
            heapq.heappush(self.ends, (now + length, chunk))
            self.used += length

    def end_row(self) -> None:
        """The first row ends."""
        _, chunk = heapq.heappop(self.ends)
        self.unfinished[chunk] -= 1
        if not self.unfinished[chunk]:
            del self.unfinished[chunk]


def simulate(chunks: Sequence[list[int]], actors: int, slots: int, calls: int) -> Idle:
    """Decode chunks, each the lengths of its rows. An actor has at most `calls` + 1 of them."""
    todo, pool = deque(chunks), [Actor(slots, calls) for _ in range(actors)]
    now = working = 0
    while True:
        while todo and (free := min(pool, key=lambda actor: actor.held)).held <= calls:
            free.waiting.append(todo.popleft())
        for actor in pool:
            actor.fill(now)
        busy = [actor for actor in pool if actor.ends]
        if not busy:
            break
        first = min(busy, key=lambda actor: actor.ends[0])
        working += len(busy) * (first.ends[0][0] - now)
        now = first.ends[0][0]
        first.end_row()
    tokens, total = sum(map(sum, chunks)), now * actors
    return Idle(1 - working / total, 1 - tokens / (total * slots), total * slots / tokens, len(chunks))


def in_time(todo: Sequence[bytes], readers: int) -> Iterator[Task]:
    """The tasks in the order in which equally fast readers read them."""
    groups = enumerate(deque(pickle.loads(tasks)) for tasks in todo)
    reading = [(0, number, group) for _, (number, group) in zip(range(readers), groups, strict=False)]
    while reading:
        rows, number, group = heapq.heappop(reading)
        task = group.popleft()
        yield task
        if not group:
            number, group = next(groups, (number, group))
        if group:
            heapq.heappush(reading, (rows + task.chunk.rows, number, group))


def decode(lengths: Sequence[int], smaller: bool, actors: int = 8, shards: int = 1, **config: Any) -> Idle:
    """A job over rows of these lengths. smaller: whether the last chunks are. config: of the engine."""
    job, shape = Job(target="t", input=["i"], output="o", actors=str(actors)), EngineConfig(**config)
    edges = [len(lengths) * i // shards for i in range(shards + 1)]
    most = job.chunk_rows(len(lengths))
    plan = Plan([Shard(str(i), "", edges[i + 1] - edges[i], 0, "") for i in range(shards)], most)
    tasks, both = map(Task, plan.chunks()), (actors, actors)
    with patch.object(passes, "SMALLEST", passes.SMALLEST if smaller else 1):
        work = passes.dispatch(tasks, most, both, shape.batch_size, shape.slots, 1, job.chunks_in_flight)
    read = in_time(work.passes, actors + 1)
    first = [(edges[task.chunk.number] + task.chunk.first, task.chunk.rows) for task in read]
    chunks = [list(lengths[a : a + n]) for a, n in first]
    return simulate(chunks, actors, shape.batch_size, work.calls)


def spec_bench(rows: int) -> list[int]:
    """Lengths of SpecBench's prompts, in the place of completions, which it lacks."""
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    lengths = [max(1, round(TOKENS_PER_WORD * len(text.split()))) for text in texts]
    return (lengths * -(-rows // len(lengths)))[:rows]


def lognormal(rows: int) -> list[int]:
    rng = random.Random(0)
    return [max(1, min(1500, round(rng.lognormvariate(3.5, 1.1)))) for _ in range(rows)]


def figures(lengths: list[int], smaller: bool, **settings: Any) -> Idle:
    """Means over shuffled orders of the rows."""
    found = []
    for seed in range(ORDERS):
        random.Random(seed).shuffle(order := list(lengths))
        found.append(decode(order, smaller, **settings))
    return Idle(*(round(sum(each) / ORDERS, 4) for each in zip(*found, strict=True)))  # type: ignore[arg-type]


def main() -> None:
    for make in (spec_bench, lognormal) if PROMPTS.exists() else (lognormal,):
        for rows in ROWS:
            lengths = make(rows)
            found = {name: figures(lengths, smaller)._asdict() for name, smaller in (("before", False), ("now", True))}
            print(json.dumps({"lengths": make.__name__, "rows": rows, **found}), flush=True)


if __name__ == "__main__":
    main()
