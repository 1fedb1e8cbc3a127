"""The rows of a chunk after `map`, and the engine request of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from exspec.actors.engine import Request
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.batch import BODY, MODEL, add_model, with_model
from exspec.pipeline.input.formats import spread
from exspec.pipeline.input.plan import Chunk, Shard
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.rows import BAD, Row, RowError, attempted, rows
from exspec.pipeline.job.functions import Function, FunctionError
from exspec.pipeline.job.settings import Job


@dataclass(frozen=True)
class Asked:
    """A row, its number in the shard, and its request or the error that prevents one."""

    number: int
    row: Row
    request: Request | RowError


def mapped(job: Job, schema: pa.Schema) -> pa.Schema:
    """The schema of the input after `map`, with the models that batch requests name. Raises JobError."""
    try:
        return with_model(job, job.map.makes(schema) if job.map else schema)
    except FunctionError as error:
        raise JobError(f"map: {error}") from error


def read_mapped(
    job: Job, shard: Shard, ranges: Sequence[tuple[int, int]], columns: Sequence[str], schema: pa.Schema
) -> Iterator[pa.Table | Unreadable]:
    """The rows of each range after `map`, in one pass over the shard. columns: after `map`. schema: before it.

    Raises as `read_ranges` does.
    """
    lacks_model = MODEL in columns and MODEL not in schema.names
    named = list(dict.fromkeys(BODY if name == MODEL and lacks_model else name for name in columns))
    for table in read_ranges(shard, ranges, None if job.map else named, job.storage_options, schema):
        if isinstance(table, Unreadable):
            yield table
            continue
        try:
            made = _map(job.map, table) if job.map else table
            made = made if set(columns) <= set(made.column_names) else add_model(made)
            yield made.select([*columns, *({BAD} & set(made.column_names))])
        except FunctionError as error:
            yield Unreadable(f"map: {error}")


def _map(function: Function, table: pa.Table) -> pa.Table:
    """A table after `map`, which does not get lines that cannot be read. Raises FunctionError."""
    if BAD not in table.column_names:
        return function(table)
    good = table[BAD].is_null()
    made = spread(function(table.filter(good).drop_columns([BAD])), good.to_pylist())
    return made.append_column(BAD, table[BAD])


def requests(
    chunk: Chunk,
    job: Job,
    prompts: Prompts,
    schema: pa.Schema,
    numbers: Sequence[int] | None = None,
    also: Sequence[str] = (),
) -> Iterator[Asked]:
    """The rows of a chunk with their requests. numbers: only these rows of the chunk. also: more columns to read.

    schema: of the files, before `map`. Raises JobError if they cannot be read.
    """
    numbers = range(chunk.rows) if numbers is None else numbers
    needed = list(dict.fromkeys([*prompts.columns(mapped(job, schema)), *also]))
    for table in read_mapped(job, chunk.shard, [(chunk.first, chunk.rows)], needed, schema):
        if isinstance(table, Unreadable):
            raise JobError(f"{chunk}: {table.reason}")
        for i, row in zip(numbers, rows(table.take(pa.array(numbers, pa.int64())), needed), strict=True):
            number = chunk.first + i
            yield Asked(number, row, attempted(partial(prompts.request, row, chunk.shard, number)))
