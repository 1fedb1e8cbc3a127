"""The output: one Parquet part a chunk, all with one schema, and what its footer tells of it."""

import hashlib
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

from exspec.actors.generator import WORK, Origin, RowResult
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.job import Job
from exspec.pipeline.output.contents import read_range
from exspec.pipeline.output.state import File, Summary
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
FOOTER = b"exspec"


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
class Task:
    """A chunk to be worked on. file: where its rows lie already, from row `start` on, of which those with an error are
    to be decoded again.
    """

    chunk: Chunk
    file: str | None = None
    start: int = 0

    @property
    def key(self) -> str:
        return f"{self.chunk.number}:{self.chunk.first}"

    def __str__(self) -> str:
        return str(self.chunk)


class PartSink:
    """Where an actor leaves the rows of a chunk: one file, staged whole under a name of its own, that says whose it is.

    It is shown when the driver has committed it. job: the identity that the file carries. prefix: of its staged name.
    """

    def __init__(
        self, folder: Folder, job: str, prefix: str, carried: pa.Schema, answers: pa.Schema, id_column: str | None
    ) -> None:
        self.folder, self.job, self.prefix, self.id_column = folder, job, prefix, id_column
        self.generated = pa.schema([*answers, *GENERATED])
        self.schema = pa.schema([*carried, *self.generated])

    def stage(self, task: Task, block: pa.Table, results: list[RowResult | None], origin: Origin) -> dict[str, Any]:
        """Stage the chunk's rows: carried columns and generated ones, in the chunk's order. Returns the file, as JSON
        has it."""
        chunk = task.chunk
        kept = self._kept(task) if None in results else []
        rows = []
        for i, (name, result) in enumerate(zip(self._ids(chunk, block), results, strict=True)):
            place = {"shard": chunk.shard.name, "row": chunk.first + i, "id": name}
            rows.append(kept[i] if result is None else place | _generated(result))
        generated = pa.Table.from_pylist(rows, schema=self.generated)
        columns = [(generated if name in self.generated.names else block)[name] for name in self.schema.names]
        table = pa.Table.from_arrays(columns, schema=self.schema)
        counted = summarize(chunk, table, origin)
        content = encode(table, self.job, [counted])
        staged = self.folder.stage(content, self.prefix)
        return vars(described(content, staged, [counted])) | {"chunks": [vars(counted)]}

    def _ids(self, chunk: Chunk, block: pa.Table) -> list[str]:
        own = [f"{chunk.shard.name}:{chunk.first + i}" for i in range(block.num_rows)]
        if self.id_column is None:
            return own
        given = block[self.id_column].to_pylist()
        return [name if value is None else _id(value) for name, value in zip(own, given, strict=True)]

    def _kept(self, task: Task) -> list[dict[str, Any]]:
        assert task.file is not None
        tables = read_range(self.folder, task.file, task.start, task.chunk.rows, self.generated.names)
        return [row for table in tables for row in table.to_pylist()]


def _id(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def encode(table: pa.Table, job: str, chunks: list[Summary]) -> bytes:
    """A Parquet file with the rows of chunks, whose footer says of which job and which chunks they are."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(footer(job, chunks)), buffer, write_page_checksum=True)
    return buffer.getvalue()


def footer(job: str, chunks: list[Summary]) -> dict[bytes, bytes]:
    return {FOOTER: json.dumps({"job": job, "chunks": [vars(s) for s in chunks]}).encode()}


def described(content: bytes, staged: str, chunks: list[Summary]) -> File:
    """A part's bytes as the log tells of them. Its weight: bytes of its columns as stored, and of the footer."""
    metadata = pq.read_metadata(io.BytesIO(content))
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    columns = sum(group.column(c).total_compressed_size for group in groups for c in range(group.num_columns))
    weight = int(columns) + len(metadata.metadata[FOOTER])
    return File("", staged, len(content), md5(content), weight, chunks)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def read_staged(folder: Folder, name: str) -> tuple[str, File] | None:
    """The job of a staged file and what the log would tell of it; None where it is none, or not whole."""
    try:
        content = folder.read(name)
        parquet = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        told = json.loads(parquet.metadata.metadata[FOOTER])
        chunks = [Summary(**s) for s in told["chunks"]]
        whole = parquet.read().num_rows == sum(s.rows for s in chunks)
    except (FileNotFoundError, pa.ArrowException, OSError, KeyError, ValueError, TypeError):
        return None
    return (told["job"], described(content, name, chunks)) if whole else None


def _generated(result: RowResult) -> dict[str, Any]:
    if result.completion is None:
        return {"finish_reason": "error", "error": result.error, "prompt_tokens": result.prompt_tokens}
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


def summarize(chunk: Chunk, table: pa.Table, origin: Origin) -> Summary:
    """The summary of a chunk's rows."""

    def total(name: str) -> int:
        return int(pc.sum(table[name]).as_py() or 0)

    def by_position(name: str) -> list[int]:
        rows = [row for row in table[name].to_pylist() if row]
        return [sum(counts) for counts in zip_longest(*rows, fillvalue=0)]

    return Summary(
        shard=chunk.number,
        first=chunk.first,
        rows=table.num_rows,
        errors=table.num_rows - table["error"].null_count,
        prompt_tokens=total("prompt_tokens"),
        completion_tokens=total("completion_tokens"),
        rounds=total("rounds"),
        forced=total("forced"),
        drafted_by_position=by_position("drafted_by_position"),
        accepted_by_position=by_position("accepted_by_position"),
        lengths=Counter(str(n) for n in table["completion_tokens"].to_pylist() if n is not None),
        ended=time.time(),
        **vars(origin),
    )
