"""Shards in JSON Lines, CSV and Arrow format. They have no footer, so planning scans each for row count and schema."""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as pc

from exspec.pipeline.input.batch import BODY, ID
from exspec.pipeline.input.rows import BAD

ROWS = 4096  # per table
BUFFER = 1 << 20  # bytes per fetch
BLOCK = 4 << 20  # bytes of CSV decoded at once, unless a row is larger
CSV = pc.ParseOptions(newlines_in_values=True)
LARGEST_ROW = 64 << 20  # bytes of a CSV row: a quote that is not closed must not read a large file into memory
UNFIT = (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError)  # a value that no column can hold
Open = Callable[[], io.RawIOBase]
Part = tuple[pa.Table, Mapping[int, str]]  # consecutive rows; and for bad lines, by row of the table, the reason


class FormatError(ValueError):
    """A file that does not match its suffix. The message has the line."""


def suffix_of(name: str) -> str | None:
    """The suffix by which a file has one of these formats; None if it has none."""
    return next((suffix for suffix in READERS if name.lower().removesuffix(".gz").endswith(suffix)), None)


def scan(name: str, opened: Open, bad_lines: bool = False) -> tuple[int, pa.Schema]:
    """Number of rows and schema of a file. bad_lines: a line that cannot be read is a row; else it is an error.

    Raises FormatError, or the store's error.
    """
    rows, schema = 0, pa.schema([])
    for table in read(name, opened):
        found = table.schema.remove_metadata()
        if BAD in found.names:
            if not bad_lines:
                reason = next(reason for reason in table[BAD].to_pylist() if reason)
                raise FormatError(f"{reason}; correct it, or set bad_lines to error")
            found = found.remove(found.get_field_index(BAD))
        if not found.equals(schema):
            schema = _joined(schema, found, f"rows {rows} to {rows + table.num_rows - 1}, from 0", bad_lines)
        rows += table.num_rows
    return rows, schema


def _joined(schema: pa.Schema, found: pa.Schema, place: str, bad_lines: bool) -> pa.Schema:
    """The schema that fits both. bad_lines: of types that exclude each other the first counts, and the lines with
    another one are bad."""
    try:
        return pa.unify_schemas([schema, found], promote_options="permissive")
    except pa.ArrowException as error:
        if not bad_lines:
            raise FormatError(f"{place}: {error}, expected one type") from error
    for field in found:
        with suppress(pa.ArrowException):
            schema = pa.unify_schemas([schema, pa.schema([field])], promote_options="permissive")
    return schema


def read(name: str, opened: Open, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
    """The rows of a file in order. schema: from `scan`; without it, types are inferred.

    A line that cannot be read is a row with its reason in the column BAD, which only tables with such a line have.
    """
    stream: Any = io.BufferedReader(opened(), BUFFER)
    if name.lower().endswith(".gz"):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), BUFFER)
    try:
        for table, bad in READERS[str(suffix_of(name))](stream, schema):
            if BAD in table.column_names:
                raise FormatError(f"the column name {BAD!r} is reserved; rename the column")
            reasons = [bad.get(row) for row in range(table.num_rows)] if bad else []
            yield table.append_column(BAD, pa.array(reasons, pa.string())) if bad else table
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"truncated, or not a gzip file: {error}") from error


def _json_lines(stream: Any, schema: pa.Schema | None) -> Iterator[Part]:
    number = 0
    while lines := list(islice(stream, ROWS)):
        rows, bad = {}, {}
        for line in lines:
            number += 1
            if line.strip():
                try:
                    rows[number] = _object(line)
                except (ValueError, RecursionError) as error:
                    rows[number], bad[number] = {}, str(error)
        table = _table(rows, schema, bad)
        yield table, {row: f"line {line}: {bad[line]}" for row, line in enumerate(rows) if line in bad}


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise FormatError(f"expected an object, not {type(row).__name__}")
    if {BODY, ID} <= row.keys() and isinstance(row[BODY], dict):
        row[BODY] = json.dumps(row[BODY])  # calls may have different fields
    return row


def _table(rows: dict[int, dict[str, Any]], schema: pa.Schema | None, bad: dict[int, str]) -> pa.Table:
    """Rows, by line number, as a table. Adds the lines to `bad` that have a value of another type than the others."""
    names = schema.names if schema else list(dict.fromkeys(name for row in rows.values() for name in row))
    columns = {}
    for name in names:
        kind = schema.field(name).type if schema else None
        values = {line: row.get(name) for line, row in rows.items()}
        try:
            columns[name] = pa.array(list(values.values()), kind)
        except UNFIT:
            columns[name] = _fitting(name, values, kind or _first_type(values.values()), bad)
    return pa.table(columns) if columns else bare(len(rows))


def _first_type(values: Iterable[Any]) -> pa.DataType:
    """The type of the first values, widened by later values that agree with it."""
    kind = pa.schema({"": pa.null()})
    for value in values:
        with suppress(*UNFIT):
            kind = pa.unify_schemas([kind, pa.schema({"": pa.array([value]).type})], promote_options="permissive")
    return kind.field(0).type


def _fitting(name: str, values: dict[int, Any], kind: pa.DataType, bad: dict[int, str]) -> pa.Array:
    """The values, by line number, as a column of a type. A line whose value does not fit is null, and bad."""
    fitting = []
    for line, value in values.items():
        try:
            fitting.append(pa.array([value], kind))
        except UNFIT as error:
            bad.setdefault(line, f"column {name!r}: {error}; expected values of one type")
            fitting.append(pa.nulls(1, kind))
    return pa.concat_arrays(fitting)


def bare(rows: int) -> pa.Table:
    """A table with rows but no columns."""
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))])


# A value in quotes: up to a quote before a comma or line end, or else within one line. Without either, its quote is
# stray, and only its line is lost. Before the end of the file (BEGUN), a value may go on in the bytes that come next.
_INSIDE = rb'[^"]*+(?:""[^"]*+)*+'
_VALUE = rb'%b"(?=[,\r\n]|\Z)|[^"\r\n]*+(?:""[^"\r\n]*+)*+"|(?P<stray>[^\r\n]*)' % _INSIDE
WHOLE = re.compile(rb'"(?<![^,\r\n]")(?:%b)' % _VALUE)
BEGUN = re.compile(rb'"(?<![^,\r\n]")(?:%b\Z|%b)' % (_INSIDE, _VALUE))


class CsvRow(NamedTuple):
    """A row that is not blank. line: its first. shape: its bytes with an x for each byte of a value in quotes."""

    line: int
    content: bytes
    shape: bytes

    def fault(self, columns: int) -> str | None:
        """Why the row cannot be read, if so."""
        if self.shape.startswith(b'"') or b',"' in self.shape:
            return "a quote opens a value here, and no quote before a comma or line end closes it"
        if (found := self.shape.count(b",") + 1) != columns:
            return f"{found} columns, expected {columns} as in the header"
        try:
            self.content.decode()
        except UnicodeDecodeError as error:
            return f"byte 0x{self.content[error.start]:02x} is not UTF-8 text"
        return None


def spread(table: pa.Table, given: Iterable[bool]) -> pa.Table:
    """The rows of a table in the places that are True; the other places are null."""
    number = count()
    return table.take(pa.array([next(number) if here else None for here in given], pa.int64()))


def _csv(stream: Any, schema: pa.Schema | None) -> Iterator[Part]:  # noqa: ARG001
    """All values are text, or null if empty: what looks like a number may be an id with a leading 0."""
    names: list[str] = []
    for rows in _csv_rows(stream):
        if not names:
            names = _header(rows.pop(0))
            texts = pa.schema([(name, pa.string()) for name in names])
            values = pc.ConvertOptions(
                column_types=texts, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
            )
        faults = [row.fault(len(names)) for row in rows]
        good = [row.content for row, fault in zip(rows, faults, strict=True) if not fault]
        content = b"".join([b"\n", *good])  # Arrow skips a blank line; after it, a byte order mark is text
        whole = pc.ReadOptions(column_names=names, block_size=len(content) + 1, use_threads=False)
        table = pc.read_csv(pa.BufferReader(content), whole, CSV, values) if good else texts.empty_table()
        table = table if len(good) == len(rows) else spread(table, [not fault for fault in faults])
        yield table, {i: f"line {rows[i].line}: {fault}" for i, fault in enumerate(faults) if fault}
    if not names:
        raise FormatError("Empty CSV file, expected a line with the names of the columns")


def _header(row: CsvRow) -> list[str]:
    columns = row.shape.count(b",") + 1
    if fault := row.fault(columns):
        raise FormatError(f"line {row.line}: {fault}")
    return next(csv.reader([row.content.decode("utf-8-sig")]))


def _csv_rows(stream: Any) -> Iterator[list[CsvRow]]:
    rest, line, more = b"", 1, True
    while more:
        content = rest + (read := stream.read(max(BLOCK, len(rest))))
        more, rows, at = bool(read), [], 0
        shapes = _shape(content, more).splitlines(keepends=True)
        for shape in shapes[:-1] if more else shapes:  # the last may go on
            row = content[at : at + len(shape)]
            if shape.strip(b"\r\n"):
                rows.append(CsvRow(line, row, shape))
            line += len(row.splitlines()) if b'"' in row else 1
            at += len(shape)
        if len(rest := content[at:]) > LARGEST_ROW:
            raise FormatError(
                f"line {line}: the row that begins here is longer than {LARGEST_ROW >> 20} MiB; shorten it"
            )
        if rows:
            yield rows


def _shape(content: bytes, more: bool) -> bytes:
    """The content with an x for each byte of a value in quotes, so that each line end is the end of a row."""
    if b'"' not in content:
        return content
    pattern = BEGUN if more else WHOLE
    return pattern.sub(lambda value: value[0] if value["stray"] is not None else b"x" * len(value[0]), content)


def _arrow(stream: Any, schema: pa.Schema | None) -> Iterator[Part]:  # noqa: ARG001
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
            yield pa.Table.from_batches([batch]), {}
    except pa.ArrowException as error:
        raise FormatError(f"not an Arrow stream: {error}") from error


READERS: dict[str, Callable[[Any, pa.Schema | None], Iterator[Part]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".arrow": _arrow,
}
SUFFIXES = f".parquet, or {', '.join(READERS)}, each of which may end with .gz"
