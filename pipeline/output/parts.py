"""Writes parts: one Parquet file per chunk, all with one schema, and a summary in the footer."""

import io
import json
from collections import Counter
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from exspec.actors.generator import Origin
from exspec.actors.samples import SAMPLES, RowResult
from exspec.pipeline.input.plan import Chunk, Task
from exspec.pipeline.input.rows import RowError, stored, values
from exspec.pipeline.job.functions import Function, FunctionError
from exspec.pipeline.output.columns import GENERATED, ID, added_columns, conform
from exspec.pipeline.output.contents import md5, opened, read_range
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.state import File, Summary
from exspec.pipeline.storage import Folder

FOOTER = b"exspec"
COUNTED = [name for name in GENERATED.names[GENERATED.names.index("prompt_tokens") :] if name != "prompt_tokens_cut"]
SUMMED = ("prompt_tokens", "completion_tokens", "rounds", "forced")
PIECES = 16  # equal pieces of a chunk's time, for the plot of tokens by time


class PartSink:
    """Writes the rows of a chunk to a staged file, which the driver commits later.

    job: its id, which the footer holds. prefix: of staged names. last: the job's `map_output`.
    """

    def __init__(
        self,
        folder: Folder,
        job: str,
        prefix: str,
        carried: pa.Schema,
        answers: pa.Schema,
        last: Function | None = None,
    ) -> None:
        self.folder, self.job, self.prefix, self.last = folder, job, prefix, last
        self.generated = pa.schema([*answers, *GENERATED])
        self.schema = pa.schema([*carried, *self.generated])
        self.added = added_columns(last, self.schema)

    def stage(self, task: Task, block: pa.Table, results: list[RowResult | None], origin: Origin) -> dict[str, Any]:
        """Stage the chunk's rows, with carried and generated columns, in order. Returns the file as JSON."""
        chunk = task.chunk
        kept = self._kept(task) if None in results else []
        rows, reasons = [], Reasons()
        for i, (name, result) in enumerate(zip(self._ids(chunk, block), results, strict=True)):
            place = {"shard": chunk.shard.name, "row": chunk.first + i, "id": name}
            rows.append(kept[i] if result is None else place | _generated(result))
            if result and result.error:
                reasons.add(result.error, 1, [name], result.lasting)
        generated = pa.Table.from_pylist(rows, schema=self.generated)
        columns = [
            generated[field.name] if field.name in self.generated.names else stored(block[field.name], field.type)
            for field in self.schema
        ]
        table = pa.Table.from_arrays(columns, schema=self.schema)
        if self.last:
            made = self.last(table)
            if any(name in made.column_names and made[name] != table[name] for name in ("shard", "row", "id")):
                raise FunctionError(f"{self.last.name}: changed the order of the rows")
            for field in self.added:
                table = table.append_column(field, made[field.name])
        counted = summarize(chunk, generated, origin, reasons)
        content = encode(table, self.job, [counted])
        staged = self.folder.stage(content, self.prefix)
        return vars(described(content, staged, [counted])) | {"chunks": [vars(counted)]}

    def _ids(self, chunk: Chunk, block: pa.Table) -> list[str]:
        own = [f"{chunk.shard.name}:{chunk.first + i}" for i in range(block.num_rows)]
        if ID not in block.column_names:
            return own
        given = values(block, ID)
        return [
            name if value is None or isinstance(value, RowError) else _id(value)
            for name, value in zip(own, given, strict=True)
        ]

    def _kept(self, task: Task) -> list[dict[str, Any]]:
        assert task.file is not None
        tables = read_range(self.folder, task.file, task.start, task.chunk.rows, self.generated.names)
        return [row for table in tables for row in conform(table, self.generated, self.folder.url).to_pylist()]


def _id(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value).encode(errors="backslashreplace").decode()


def encode(table: pa.Table, job: str, chunks: list[Summary]) -> bytes:
    """A Parquet file with rows of chunks. The footer names the job and the chunks."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(footer(job, chunks)), buffer, write_page_checksum=True)
    return buffer.getvalue()


def footer(job: str, chunks: list[Summary]) -> dict[bytes, bytes]:
    return {FOOTER: json.dumps({"job": job, "chunks": [vars(s) for s in chunks]}).encode()}


def described(content: bytes, staged: str, chunks: list[Summary]) -> File:
    """The log's record of a part. The weight counts stored columns and the footer."""
    metadata = pq.read_metadata(io.BytesIO(content))
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    columns = sum(group.column(c).total_compressed_size for group in groups for c in range(group.num_columns))
    weight = int(columns) + len(metadata.metadata[FOOTER])
    return File("", staged, len(content), md5(io.BytesIO(content)), weight, chunks)


def read_staged(folder: Folder, name: str) -> tuple[str, File] | None:
    """The job of a staged file and the log's record of it; None if it is invalid or incomplete."""
    try:
        content = folder.read(name)
        parquet = opened(io.BytesIO(content))
        stored = json.loads(parquet.metadata.metadata[FOOTER])
        chunks = [Summary.from_json(s) for s in stored["chunks"]]
        whole = parquet.read(use_threads=False).num_rows == sum(s.rows for s in chunks)
    except (FileNotFoundError, pa.ArrowException, OSError, KeyError, ValueError, TypeError, RecursionError):
        return None
    return (stored["job"], described(content, name, chunks)) if whole else None


def _generated(result: RowResult) -> dict[str, Any]:
    if result.completion is None:
        return {"finish_reason": "error", "error": result.error, "prompt_tokens": result.prompt_tokens}
    counted = {name: getattr(result.completion.statistics, name) for name in COUNTED}
    ended = {"completion": result.text, "finish_reason": result.completion.finish_reason}
    return result.values | ended | counted | {"prompt_tokens_cut": result.cut}


def summarize(chunk: Chunk, table: pa.Table, origin: Origin, reasons: Reasons) -> Summary:
    """The summary of a chunk's rows. table: their generated columns."""
    sums: dict[str, Any] = {name: int(pc.sum(table[name]).as_py() or 0) for name in SUMMED}

    def by_position(name: str) -> list[int]:
        rows = [row for row in table[name].to_pylist() if row]
        return [sum(counts) for counts in zip_longest(*rows, fillvalue=0)]

    return Summary(
        shard=chunk.number,
        first=chunk.first,
        rows=table.num_rows,
        errors=table.num_rows - table["error"].null_count,
        **sums,
        drafted_by_position=by_position("drafted_by_position"),
        accepted_by_position=by_position("accepted_by_position"),
        lengths=Counter(map(str, _lengths(table))),
        reasons=reasons.to_json(),
        produced=_produced(table, origin.ended - origin.started),
        **vars(origin),
    )


def _lengths(table: pa.Table) -> list[int]:
    """Tokens of each completion, or of each sample."""
    if SAMPLES in table.schema.names:
        return list(pc.struct_field(pc.list_flatten(table[SAMPLES]), "completion_tokens").drop_null().to_pylist())
    lengths = table["completion_tokens"]
    if "token_ids" in table.schema.names:  # with best_of alone, completion_tokens is of all samples
        lengths = pc.coalesce(pc.list_value_length(table["token_ids"]), lengths)
    return list(lengths.drop_null().to_pylist())


def _produced(table: pa.Table, seconds: float) -> list[float]:
    """Tokens in equal pieces of the chunk's time, as if each row's tokens came evenly during decoding."""
    names = ("seconds_queued", "seconds_prefill", "seconds_decode", "completion_tokens")
    queued, prefill, decode, tokens = (table[name].fill_null(0).to_numpy().astype(float)[:, None] for name in names)
    edges = np.linspace(0, seconds, PIECES + 1)  # [P + 1]
    done = np.clip((edges - queued - prefill) / np.maximum(decode, 1e-9), 0, 1)  # [rows, P + 1]
    done[:, -1] = 1
    return [round(float(piece), 1) for piece in np.diff((done * tokens).sum(axis=0))]
