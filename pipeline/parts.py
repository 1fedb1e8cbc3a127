"""The output: one Parquet part a chunk, all with one schema, and what its footer tells of it."""

import io
import json
import time
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from exspec.actors.generator import WORK, RowResult
from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.plan import Chunk
from exspec.pipeline.storage import Folder

_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "shard": (pa.string(), "the input file, by its path below the input folder"),
    "row": (pa.int64(), "the row's number in the shard; with it, unique in the job"),
    "id": (pa.string(), "the row's id: of the id column, or shard and row number"),
    "completion": (pa.string(), "the text that the target wrote; null for an error row"),
    "finish_reason": (pa.string(), "stop (end token or stop string), length, or error"),
    "error": (pa.string(), "why the row could not be generated; null otherwise"),
    "prompt_tokens": (pa.int32(), "tokens of the prompt"),
    "completion_tokens": (pa.int32(), "tokens of the completion, the end token included"),
    "rounds": (pa.int32(), "rounds of drafting and verifying that the row took part in"),
    "drafted": (pa.int32(), "tokens proposed by the drafter"),
    "accepted": (pa.int32(), "drafted tokens that the target agreed with"),
    "forced": (pa.int32(), "tokens that the form of the answer left no alternative to"),
    "acceptance_rate": (pa.float32(), "accepted / drafted"),
    "mean_accepted_length": (pa.float32(), "completion tokens per round, bonus token included"),
    "accepted_by_position": (pa.list_(pa.int32()), "accepted tokens by their place in the draft"),
    "drafted_by_position": (pa.list_(pa.int32()), "drafted tokens by their place in the draft"),
    "seconds_queued": (pa.float32(), "seconds from the engine's receiving the row to its getting a slot"),
    "seconds_prefill": (pa.float32(), "seconds of prefill"),
    "seconds_decode": (pa.float32(), "seconds from the first round to the end"),
}
GENERATED = pa.schema([pa.field(n, t, metadata={"description": d}) for n, (t, d) in _COLUMNS.items()])
SUMMARY = b"exspec.summary"


def carried_columns(job: Job, schema: pa.Schema) -> list[str]:
    """Names of the input columns to carry. Raises JobError where one is missing or its name is taken."""
    if own := [n for n in job.answer_columns().names if n in GENERATED.names or n in WORK]:
        raise JobError(f"label_column: {own[0]!r} is the name of a column that every output has; take another")
    names = [n for n in schema.names if n != job.id_column] if job.carry is None else job.carry
    for name in names:
        if name not in schema.names:
            raise JobError(f"carry: {name!r} is not in the input, which has {', '.join(schema.names)}")
    taken = [n for n in names if n in GENERATED.names or n in WORK or n in job.answer_columns().names]
    if taken:
        raise JobError(
            f"carry: the input's column {taken[0]!r} has the name of an output column; leave it out with carry"
        )
    return names


@dataclass(frozen=True)
class Summary:
    """What a part's footer tells of its chunk, and the driver folds into progress and report.

    lengths: rows by completion length in tokens; JSON makes its keys strings.
    """

    part: str
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    rounds: int
    forced: int
    lengths: dict[str, int]
    actor: str
    started: float
    ended: float
    attempt: int


class PartSink:
    """Where an actor commits chunks: one atomic write each; a part that is there is never written again.

    So two runs of one job cannot double or spoil a part: the first writer wins, and the other's work is dropped.
    With `retry` the part is replaced: rows without a result stay as they are in it.
    """

    def __init__(
        self, folder: Folder, carried: pa.Schema, answers: pa.Schema, id_column: str | None, retry: bool = False
    ) -> None:
        self.folder, self.id_column, self.retry = folder, id_column, retry
        self.generated = pa.schema([*answers, *GENERATED])
        self.schema = pa.schema([*carried, *self.generated])

    def commit(
        self, chunk: Chunk, block: pa.Table, results: list[RowResult | None], actor: str, started: float, number: int
    ) -> dict[str, Any]:
        """Write the chunk's part: carried columns and generated ones, in the chunk's order. Returns its summary."""
        kept = self._kept(chunk) if None in results else []
        rows = []
        for i, (name, result) in enumerate(zip(self._ids(chunk, block), results, strict=True)):
            place = {"shard": chunk.shard.name, "row": chunk.first + i, "id": name}
            rows.append(kept[i] if result is None else place | _generated(result))
        generated = pa.Table.from_pylist(rows, schema=self.generated)
        table = block.select([n for n in self.schema.names if n not in self.generated.names])
        for field in self.generated:
            table = table.append_column(field, generated[field.name])
        summary = summarize(chunk.part, table, actor, started, number)
        table = table.cast(self.schema).replace_schema_metadata({SUMMARY: json.dumps(vars(summary)).encode()})
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        self.folder.write(chunk.part, buffer.getvalue(), replace=self.retry)
        return vars(summary)

    def _ids(self, chunk: Chunk, block: pa.Table) -> list[str]:
        own = [f"{chunk.shard.name}:{chunk.first + i}" for i in range(block.num_rows)]
        if self.id_column is None:
            return own
        given = block[self.id_column].to_pylist()
        return [name if value is None else str(value) for name, value in zip(own, given, strict=True)]

    def _kept(self, chunk: Chunk) -> list[dict[str, Any]]:
        table = pq.read_table(io.BytesIO(self.folder.read(chunk.part)), columns=self.generated.names)
        return list(table.to_pylist())


def _generated(result: RowResult) -> dict[str, Any]:
    if result.completion is None:
        return {"finish_reason": "error", "error": result.error}
    counted = result.completion.statistics
    return result.values | {
        "completion": result.text,
        "finish_reason": result.completion.finish_reason,
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "rounds": counted.rounds,
        "drafted": counted.drafted,
        "accepted": counted.accepted,
        "acceptance_rate": counted.acceptance_rate,
        "forced": counted.forced,
        "mean_accepted_length": counted.mean_accepted_length,
        "accepted_by_position": counted.accepted_by_position,
        "drafted_by_position": counted.drafted_by_position,
        "seconds_queued": counted.seconds_queued,
        "seconds_prefill": counted.seconds_prefill,
        "seconds_decode": counted.seconds_decode,
    }


def summarize(part: str, table: pa.Table, actor: str, started: float, attempt: int) -> Summary:
    """The summary of a part's rows."""

    def total(name: str) -> int:
        return int(pc.sum(table[name]).as_py() or 0)

    def by_position(name: str) -> list[int]:
        rows = [row for row in table[name].to_pylist() if row]
        return [sum(counts) for counts in zip_longest(*rows, fillvalue=0)]

    return Summary(
        part=part,
        rows=table.num_rows,
        errors=table.num_rows - table["error"].null_count,
        prompt_tokens=total("prompt_tokens"),
        completion_tokens=total("completion_tokens"),
        rounds=total("rounds"),
        forced=total("forced"),
        drafted_by_position=by_position("drafted_by_position"),
        accepted_by_position=by_position("accepted_by_position"),
        lengths=Counter(str(n) for n in table["completion_tokens"].to_pylist() if n is not None),
        actor=actor,
        started=started,
        ended=time.time(),
        attempt=attempt,
    )
