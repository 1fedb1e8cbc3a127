"""The columns of an output: carried input columns, columns of answers, and the columns that every output has."""

import io
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.work import WORK
from exspec.pipeline.errors import JobError, no_column
from exspec.pipeline.job.functions import FunctionError

if TYPE_CHECKING:
    from exspec.pipeline.job.functions import Function
    from exspec.pipeline.job.settings import Job

_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "shard": (pa.string(), "the input file, by its path below the input folder"),
    "row": (pa.int64(), "the row's number in the shard, from 0; with it, unique in the job"),
    "id": (pa.string(), "the row's id: of the id column, or shard and row number"),
    "completion": (pa.string(), "the text that the target wrote; null for an error row"),
    "finish_reason": (pa.string(), "stop (end token or stop string), length, or error"),
    "error": (pa.string(), "why the row could not be generated; null otherwise"),
    "prompt_tokens": (pa.int32(), "tokens of the prompt"),
    "prompt_tokens_cut": (pa.int32(), "tokens that were cut off the beginning of the prompt"),
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
ID = "_exspec_id"  # column of row ids in the blocks that actors receive
PREFIX = "input_"


def carried_columns(job: "Job", schema: pa.Schema) -> dict[str, str]:
    """The input columns to carry, with their names in the output. Raises JobError if one is missing."""
    taken = {*GENERATED.names, *(["seed"] if job.listed else [])}
    if own := [n for n in job.form_columns().names if n in taken]:
        raise JobError(f"label_column: {own[0]!r} is a column of the output or of its samples; use another name")
    names = [n for n in schema.names if n != job.id_column] if job.carry is None else list(dict.fromkeys(job.carry))
    known = set(schema.names)
    if missing := [name for name in names if name not in known]:
        raise JobError(*(f"carry: {no_column(name, schema.names)}" for name in missing))
    carried = {name: carried_as(job, name) for name in names}
    if twice := [name for name, new in carried.items() if name != new and new in carried]:
        name = twice[0]
        raise JobError(f"carry: {name!r} would become {carried[name]!r}, which the input has too; leave out one")
    return carried


def carried_as(job: "Job", name: str) -> str:
    """The output name of an input column; it gets a prefix if the output has its own column of that name."""
    taken = {*GENERATED.names, *job.answer_columns().names, *WORK, ID}
    return f"{PREFIX}{name}" if name in taken else name


def carried_schema(job: "Job", schema: pa.Schema) -> pa.Schema:
    """The carried columns in the output. A column whose type Parquet does not have becomes JSON text."""
    carried = [schema.field(name).with_name(new) for name, new in carried_columns(job, schema).items()]
    if _writable(carried):
        return pa.schema(carried)
    return pa.schema([f if _writable([f]) else pa.field(f.name, pa.string(), metadata=f.metadata) for f in carried])


def _writable(fields: list[pa.Field]) -> bool:
    """Whether Parquet can hold columns of these types, found by writing and reading a row of nulls."""
    buffer = io.BytesIO()
    try:
        pq.write_table(pa.table([pa.nulls(1, field.type) for field in fields], schema=pa.schema(fields)), buffer)
        return bool(pq.read_table(buffer).to_pylist())
    except (pa.ArrowException, OSError, ValueError, RecursionError):  # it raises different types for different types
        return False


def output_schema(job: "Job", schema: pa.Schema) -> pa.Schema:
    """The columns of a part before `map_output`."""
    return pa.schema([*carried_schema(job, schema), *job.answer_columns(), *GENERATED])


def completed(schema: pa.Schema) -> pa.Schema:
    """The columns of a job's files, from the columns of one file, plus those that an older version did not write."""
    fields = list(schema.remove_metadata())
    for before, field in pairwise([None, *GENERATED]):
        if field.name not in schema.names:
            names = [known.name for known in fields]
            fields.insert(names.index(before.name) + 1 if before else len(names), field)
    return pa.schema(fields)


def conform(table: pa.Table, schema: pa.Schema, place: str) -> pa.Table:
    """Rows of a file with the columns of the job; columns that an older version did not write are null.

    place: of the file, for the error. Raises JobError if the file has an additional column, or one of another type.
    """
    kinds = {field.name: field.type for field in schema}
    other = [f.name for f in table.schema if kinds.get(f.name) != f.type]
    if other:
        raise JobError(f"{place}: parts differ in column {other[0]!r}; expected one schema, as one job writes it")
    present = set(table.column_names)
    columns = [table[f.name] if f.name in present else pa.nulls(table.num_rows, f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def added_columns(function: "Function | None", schema: pa.Schema) -> pa.Schema:
    """The columns that `map_output` adds to parts of this schema. Raises JobError."""
    try:
        made = function.makes(schema) if function else pa.schema([])
    except FunctionError as error:
        raise JobError(f"map_output: {error}") from error
    known = set(schema.names)
    return pa.schema([field for field in made if field.name not in known])
