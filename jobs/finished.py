"""Rows of a finished job: what the job wrote, and what it had asked of the engine."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from exspec.actors.engine import Request, Room
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.generator import KILLER
from exspec.actors.models import Pair
from exspec.actors.samples import SAMPLES
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, decode_schema
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import mapped, requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.contents import check, read_range
from exspec.pipeline.output.owner import Output


@dataclass(frozen=True)
class FinishedRow:
    """One row of a job's output, with the request that it came from.

    tokens: how many the completion has. values: the columns that an audit compares, by name. request: None for a row
    that could not be turned into a request. given: the tokens of its completions in a scoring job. count: how many
    samples the job drew. samples: the texts of those that it kept, if it listed them.
    """

    shard: str
    number: int
    id: str
    completion: str | None
    tokens: int | None
    values: dict[str, Any]
    request: Request | None
    given: list[list[int]] | None = None
    count: int = 1
    samples: list[str | None] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.shard, self.number


@dataclass(frozen=True)
class ChunkSample:
    """Some rows of one finished chunk.

    file, start: where the chunk's rows begin in the output. numbers: the chosen rows, counted within the chunk.
    """

    chunk: Chunk
    file: str
    start: int
    numbers: list[int]


def check_map(job: Job, output: str) -> None:
    """Raise JobError if the job's rows are made by code of its own and that code may not run here."""
    if job.map and not job.trust_remote_code:
        raise JobError(f"{output}: the job ran its own code, map {job.map.name}; pass --trust-remote-code to run it")


def choose(
    output: Output, count: int, share: float | None, seed: int, gone: Set[str] = frozenset()
) -> Iterator[ChunkSample]:
    """Choose rows of finished chunks at random, at least one from every shard.

    count: rows in all, spread over the shards by their sizes. share: a share of every shard's rows instead. gone:
    shards that can no longer be read.
    """
    rows: Counter[str] = Counter()
    for chunk, _, _ in output.state.chunks():
        rows[chunk.shard.name] += chunk.rows * (chunk.shard.name not in gone)
    if not (total := rows.total()):
        raise JobError(f"{output.folder.url}: no finished row belongs to a shard that is still in the input")
    part = share if share is not None else min(1.0, count / total)
    for name, chunks in groupby(output.state.chunks(), key=lambda held: held[0].shard.name):
        if rows[name]:
            numbers = random.Random(f"{seed} {name}").sample(range(rows[name]), max(1, round(part * rows[name])))
            yield from _samples(chunks, sorted(numbers))


def _samples(chunks: Iterable[tuple[Chunk, str, int]], chosen: list[int]) -> Iterator[ChunkSample]:
    """Distribute row numbers, counted through all chunks, over the chunks."""
    first = 0
    for chunk, file, start in chunks:
        numbers = [n - first for n in chosen if first <= n < first + chunk.rows]
        first += chunk.rows
        if numbers:
            yield ChunkSample(chunk, file, start, numbers)


def read_rows(job: Job, output: Output, pair: Pair, samples: Iterable[ChunkSample]) -> Iterator[FinishedRow]:
    """Read the rows of the samples from the output, and make their requests again from the input."""
    schema = decode_schema(output.state.plan.schema)
    room = Room(context_length(pair.target.config), output.state.description["shape"]["capacity"])
    prompts = Prompts(job, pair.tokenizer, mapped(job, schema)).within(room)
    more = [*([SAMPLES] if job.listed else []), *job.value_columns]
    columns = ["id", "completion", "completion_tokens", "error", *more]
    checked: set[str] = set()
    for sample in samples:
        chunk, place = sample.chunk, output.place(sample.file)
        if sample.file not in checked:
            check(output, sample.file, place)
            checked.add(sample.file)
        tables = read_range(output.folder, place, sample.start, chunk.rows, columns)
        stored = [row for table in tables for row in table.to_pylist()]
        for asked in requests(chunk, job, prompts, schema, sample.numbers):
            out = stored[asked.number - chunk.first]
            if out["error"] == KILLER:
                continue  # the row killed an actor, and would kill this process too
            request = None if isinstance(asked.request, RowError) else asked.request
            own = request and prompts.settings(asked.row, chunk.shard, asked.number)
            kept = out.get(SAMPLES)
            yield FinishedRow(
                chunk.shard.name,
                asked.number,
                out["id"],
                out["completion"],
                out["completion_tokens"],
                {name: out[name] for name in job.value_columns},
                request,
                own.given if own else None,
                own.samples if own else 1,
                None if kept is None else [one["completion"] for one in kept],
            )
