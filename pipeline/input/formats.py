"""Shards in JSON Lines, CSV and Arrow format. They have no footer, so planning scans each for row count and schema."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from exspec.pipeline.input.batch import BODY, ID

ROWS = 4096  # per table
BUFFER = 1 << 20  # bytes per fetch
BLOCK = 16 << 20  # bytes of CSV decoded at once; the limit for a row
CSV = pc.ParseOptions(newlines_in_values=True)
Open = Callable[[], io.RawIOBase]


class FormatError(ValueError):
    """A file that does not match its suffix. The message has the line."""


def suffix_of(name: str) -> str | None:
    """The suffix by which a file has one of these formats; None if it has none."""
    return next((suffix for suffix in READERS if name.lower().removesuffix(".gz").endswith(suffix)), None)


def scan(name: str, opened: Open) -> tuple[int, pa.Schema]:
    """Number of rows and schema of a file. Raises FormatError, or the store's error."""
    rows, schema = 0, pa.schema([])
    for table in read(name, opened):
        try:
            schema = pa.unify_schemas([schema, table.schema.remove_metadata()], promote_options="permissive")
        except pa.ArrowException as error:
            raise FormatError(f"rows {rows} to {rows + table.num_rows - 1}: {error}, expected one type") from error
        rows += table.num_rows
    return rows, schema


def read(name: str, opened: Open, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
    """The rows of a file in order. schema: from `scan`; without it, types are inferred."""
    stream: Any = io.BufferedReader(opened(), BUFFER)
    if name.lower().endswith(".gz"):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), BUFFER)
    try:
        yield from READERS[str(suffix_of(name))](stream, schema)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"truncated, or not a gzip file: {error}") from error


def _json_lines(stream: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:
    number = 0
    while lines := list(islice(stream, ROWS)):
        rows = {}
        for line in lines:
            number += 1
            if line.strip():
                rows[number] = _object(line, number)
        yield _table(rows, schema)


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"line {number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise FormatError(f"line {number}: expected an object, not {type(row).__name__}")
    if {BODY, ID} <= row.keys() and isinstance(row[BODY], dict):
        row[BODY] = json.dumps(row[BODY])  # calls may have different fields
    return row


def _table(rows: dict[int, dict[str, Any]], schema: pa.Schema | None) -> pa.Table:
    """Rows, by line number, as a table."""
    names = schema.names if schema else list(dict.fromkeys(name for row in rows.values() for name in row))
    columns = {}
    for name in names:
        kind = schema.field(name).type if schema else None
        values = {line: row.get(name) for line, row in rows.items()}
        try:
            columns[name] = pa.array(list(values.values()), kind)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise FormatError(f"{_place(values, kind)}column {name!r}: {error}; expected values of one type") from error
    return pa.table(columns) if columns else bare(len(rows))


def _place(values: dict[int, Any], kind: pa.DataType | None) -> str:
    """The line of the first value whose type differs from the values before it."""
    for line, value in values.items():
        try:
            kind = pa.array([value], kind).type if value is not None else kind
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            return f"line {line}: "
    return f"lines {min(values)} to {max(values)}: "


def bare(rows: int) -> pa.Table:
    """A table with rows but no columns."""
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))])


def _csv(stream: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:  # noqa: ARG001
    """All values are text, or null if empty: what looks like a number may be an id with a leading 0."""
    header = stream.peek(BUFFER).decode("utf-8-sig", errors="replace")
    names = next(csv.reader(io.StringIO(header, newline="")), [])
    try:
        texts = pc.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with pc.open_csv(stream, pc.ReadOptions(block_size=BLOCK), CSV, texts) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
    except pa.ArrowInvalid as error:
        raise FormatError(str(error)) from error


def _arrow(stream: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:  # noqa: ARG001
    """Arrow streams, as the `datasets` library saves them, and Arrow files."""
    begin = stream.peek(6)[:6]
    try:
        if begin == b"ARROW1":
            if isinstance(stream.raw, gzip.GzipFile):
                raise FormatError("an Arrow file cannot be read from .gz; unpack it")
            opened = pa.ipc.open_file(stream.raw)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(stream))
        for batch in batches:
            yield pa.Table.from_batches([batch])
    except pa.ArrowException as error:
        raise FormatError(f"not an Arrow stream: {error}") from error


READERS: dict[str, Callable[[Any, pa.Schema | None], Iterator[pa.Table]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".arrow": _arrow,
}
