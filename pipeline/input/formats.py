"""Shards in JSON Lines, CSV and Arrow format. They have no footer, so planning scans each for row count and schema."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from textwrap import shorten
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as pc

from exspec.pipeline.input.batch import BODY, ID
from exspec.pipeline.input.rows import BAD, shown

ROWS = 4096  # per table
BUFFER = 1 << 20  # bytes per fetch
BLOCK = 4 << 20  # bytes of CSV decoded at once, unless a row is larger
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
            place = f"rows {rows} to {rows + table.num_rows - 1}, from 0"
            schema = _joined(schema, found, place, bad_lines) if rows else found
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
        row = json.loads(line.rstrip())
    except RecursionError as error:
        raise FormatError("nested too deep") from error
    except ValueError as error:
        place = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
        raise FormatError(f"not JSON: {place}") from error
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
        except UNFIT:
            reason = f"expected {shorten(str(kind), 80)} as in other rows, not {shown(value)}"
            bad.setdefault(line, f"column {name!r}: {reason}")
            fitting.append(pa.nulls(1, kind))
    return pa.concat_arrays(fitting)


def bare(rows: int) -> pa.Table:
    """A table with rows but no columns."""
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))])


# A value in quotes: up to a quote before a comma or line end, or else within one line. Without either, its quote is
# stray, and only its line is lost. Before the end of the file (BEGUN), a value may go on in the bytes that come next.
_INSIDE = rb'[^"]*+(?:""[^"]*+)*+'
_VALUE = rb'%b"(?=[,\r\n]|\Z)|[^"\r\n]*+(?:""[^"\r\n]*+)*+"|(?P<stray>[^\r\n]*)' % _INSIDE
_OPENS = rb'"(?<![^,\r\n]")'
WHOLE = re.compile(rb"%b(?:%b)" % (_OPENS, _VALUE))
BEGUN = re.compile(rb"%b(?:%b\Z|%b)" % (_OPENS, _INSIDE, _VALUE))
STRAY = re.compile(_OPENS)
LINES = pc.ParseOptions(newlines_in_values=True)


class CsvRow(NamedTuple):
    """A row that is not blank. line: its first. end: its offset. shape: as `_shape` makes it."""

    line: int
    end: int
    content: bytes
    shape: bytes

    def fault(self, columns: int) -> str | None:
        """Why the row cannot be read, if so."""
        if STRAY.search(self.shape):
            return "a quote opens a value here, and no quote before a comma or line end closes it"
        if (found := self.shape.count(b",") + 1) != columns:
            return f"{found} columns, expected {columns} as in the header"
        try:
            self.content.decode()
        except UnicodeDecodeError as error:
            return f"byte 0x{self.content[error.start]:02x} is not UTF-8 text"
        return None


class CsvColumns:
    """Makes tables of text: what looks like a number may be an id with a leading 0. An empty value is null."""

    def __init__(self, header: CsvRow) -> None:
        if fault := header.fault(header.shape.count(b",") + 1):
            raise FormatError(f"line {header.line}: {fault}")
        size = pc.ReadOptions(block_size=len(header.content) + 1)
        self.names = pc.read_csv(pa.BufferReader(header.content), size, LINES).column_names
        self.schema = pa.schema([(name, pa.string()) for name in self.names])
        self.values = pc.ConvertOptions(
            column_types=self.schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        )

    def table(self, content: bytes) -> pa.Table:
        """The rows in these bytes. Raises ArrowInvalid."""
        content = b"\n" + content  # Arrow skips a blank line; after it, a byte order mark is text
        whole = pc.ReadOptions(column_names=self.names, block_size=len(content) + 1, use_threads=False)
        return pc.read_csv(pa.BufferReader(content), whole, LINES, self.values)

    def part(self, line: int, content: bytes, shape: bytes) -> Part:
        """The rows in these bytes, one by one if they are not all good. line: the first."""
        with suppress(pa.ArrowInvalid):
            if not STRAY.search(shape):
                return self.table(content), {}
        rows = list(_csv_rows(line, content, shape))
        faults = [row.fault(len(self.names)) for row in rows]
        good = [row.content for row, fault in zip(rows, faults, strict=True) if not fault]
        table = self.table(b"".join(good)) if good else self.schema.empty_table()
        bad = {i: f"line {rows[i].line}: {fault}" for i, fault in enumerate(faults) if fault}
        return spread(table, [not fault for fault in faults]), bad


def _csv(stream: Any, schema: pa.Schema | None) -> Iterator[Part]:  # noqa: ARG001
    columns = None
    for line, content, shape in _csv_blocks(stream):
        if columns:
            yield columns.part(line, content, shape)
        elif header := next(_csv_rows(line, content, shape), None):
            columns, end = CsvColumns(header), header.end
            yield columns.part(header.line + len(header.content.splitlines()), content[end:], shape[end:])
    if not columns:
        raise FormatError("Empty CSV file, expected a line with the names of the columns")


def _csv_blocks(stream: Any) -> Iterator[tuple[int, bytes, bytes]]:
    """Whole rows: the number of their first line, their bytes and their shape."""
    rest, line, more = b"", 1, True
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(3)
    while more:
        read = stream.read(max(BLOCK, len(rest)))
        content, more = rest + read, bool(read)
        shape = _shape(content, more)
        end = len(content)
        if more:  # a line feed may follow on the last byte
            end = shape.rfind(b"\n") + 1 or shape.rfind(b"\r", 0, -1) + 1
        if end:
            yield line, content[:end], shape[:end]
        line += len(content[:end].splitlines())
        if len(rest := content[end:]) > LARGEST_ROW:
            raise FormatError(
                f"line {line}: the row that begins here is longer than {LARGEST_ROW >> 20} MiB; shorten it"
            )


def _csv_rows(line: int, content: bytes, shape: bytes) -> Iterator[CsvRow]:
    end = 0
    for row in shape.splitlines(keepends=True):
        begin, end = end, end + len(row)
        if row.strip(b"\r\n"):
            yield CsvRow(line, end, content[begin:end], row)
        line += len(content[begin:end].splitlines())


def _shape(content: bytes, more: bool) -> bytes:
    """The content with an x for each byte of a value in quotes, so that each line end is the end of a row."""
    if b'"' not in content:
        return content
    pattern = BEGUN if more else WHOLE
    return pattern.sub(lambda value: value[0] if value["stray"] is not None else b"x" * len(value[0]), content)


def spread(table: pa.Table, given: Iterable[bool]) -> pa.Table:
    """The rows of a table in the places that are True; the other places are null."""
    number = count()
    return table.take(pa.array([next(number) if here else None for here in given], pa.int64()))


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
SUFFIXES = f".parquet, {', '.join(READERS)}; the last {len(READERS)} also with .gz"
