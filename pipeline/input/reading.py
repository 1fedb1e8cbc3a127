"""Rows of a shard: many ranges in one pass, of the version that was planned or not at all."""

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.errors import JobError, first_line
from exspec.pipeline.input.formats import bare, read, suffix_of
from exspec.pipeline.input.plan import Chunk, Shard, decode_row
from exspec.pipeline.input.schemas import nullable
from exspec.pipeline.input.snapshot import difference, locate
from exspec.pipeline.storage import attempt

AT_ONCE = 8 << 20  # bytes of row groups that are fetched together; a larger one comes page by page
FETCHED = 2 << 20  # bytes of a column that are fetched at once where it comes page by page
DECODED = 16 << 20  # bytes that are decoded at once, about
SALVAGED = 64  # rows that are decoded at once where something is damaged
FORMAT = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises for a file that is not as it should be


@dataclass(frozen=True)
class Unreadable:
    """What a range gives that cannot be read. reason: what has become of its shard."""

    reason: str


class ChangedError(Exception):
    """A shard is no longer what was planned."""


class Bytes:
    """The bytes of a file, fetched with retries.

    fetches: how many there were. refused: what the store said where it refused for good.
    """

    def __init__(self, fs: Any, path: str, size: int = 0, shard: Shard | None = None) -> None:
        self.fs, self.path, self.size, self.shard = fs, path, size, shard
        self.fetches = 0
        self.refused: Exception | None = None

    def fetch(self, begin: int, end: int) -> bytes:
        self.fetches += 1
        try:
            return attempt(lambda: self._fetch(begin, end))
        except Exception as error:  # pyarrow may hand on an error of its own instead
            self.refused = error
            raise

    def changed(self) -> str | None:
        """What has become of the shard since it was planned."""
        return difference(self.shard, self.fs, self.path) if self.shard else None

    def _fetch(self, begin: int, end: int) -> bytes:
        try:
            return bytes(self.fs.cat_file(self.path, start=begin, end=end))
        except Exception as error:
            if why := self.changed():  # then it is not worth another try
                raise ChangedError(why) from error
            raise


class RangeFile(io.RawIOBase):
    """A file of which nothing is fetched but what is read."""

    def __init__(self, source: Bytes) -> None:
        self.source, self.at = source, 0

    def read(self, count: int | None = -1) -> bytes:
        size = self.source.size
        end = size if count is None or count < 0 else min(self.at + count, size)
        content = self.source.fetch(self.at, end) if end > self.at else b""
        self.at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.source.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class Piece(NamedTuple):
    """What a row group holds of a range: rows from `begin` to before `end`, counted from the shard's first."""

    group: int
    begin: int
    end: int


def read_ranges(
    shard: Shard,
    ranges: Sequence[tuple[int, int]],
    columns: Sequence[str] | None,
    options: dict[str, Any],
    schema: pa.Schema | None = None,
) -> Iterator[pa.Table | Unreadable]:
    """The rows of each range, in one pass over the shard: no row group is decoded twice, none is held whole.

    ranges: first row and number of rows, ascending and disjoint. columns: those that are needed; None is all.
    schema: as planned; without it the types are the file's. Raises what the store raises where it refuses for good.
    """
    content = Bytes(*locate(shard.url, options), shard.size, shard)
    given = 0
    try:
        for item in _checked(content, _items(content, shard, ranges, columns, schema)):
            yield item
            given += 1
    except ChangedError as error:
        yield from [Unreadable(str(error))] * (len(ranges) - given)


def read_chunk(
    chunk: Chunk, options: dict[str, Any], columns: Sequence[str] | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    """The chunk's rows. Raises JobError where they cannot be read."""
    for item in read_ranges(chunk.shard, [(chunk.first, chunk.rows)], columns, options, schema):
        if isinstance(item, Unreadable):
            raise JobError(f"{chunk}: {item.reason}")
    return item


def read_footer(content: Bytes) -> pq.ParquetFile:
    """The file behind its bytes. Raises one of FORMAT where it is none."""
    return pq.ParquetFile(RangeFile(content))


def _checked(content: Bytes, items: Iterator[pa.Table | Unreadable]) -> Iterator[pa.Table | Unreadable]:
    """The items, with a look at the shard before and after the bytes of each were fetched."""
    looked = -1
    for item in chain([None], items):
        if looked != content.fetches and (why := content.changed()):
            raise ChangedError(why)
        looked = content.fetches
        if item is not None:
            yield item


def _items(
    content: Bytes,
    shard: Shard,
    ranges: Sequence[tuple[int, int]],
    columns: Sequence[str] | None,
    schema: pa.Schema | None,
) -> Iterator[pa.Table | Unreadable]:
    if suffix_of(shard.name):
        yield from _in_order(content, shard, ranges, columns, schema)
        return
    try:
        source = Source(content, shard, columns, schema)
    except FORMAT as error:
        yield from [damage(content, error)] * len(ranges)
        return
    needed = [source.pieces(first, rows) for first, rows in ranges]
    found = source.decode([piece for pieces in needed for piece in pieces])
    for pieces, (_, rows) in zip(needed, ranges, strict=True):
        yield source.table([next(found) for _ in pieces], rows)


def _in_order(
    content: Bytes,
    shard: Shard,
    ranges: Sequence[tuple[int, int]],
    columns: Sequence[str] | None,
    schema: pa.Schema | None,
) -> Iterator[pa.Table | Unreadable]:
    """The ranges of a file that is read from its first row on."""
    given = start = 0
    try:
        tables = read(shard.name, lambda: RangeFile(content), schema)
        table = next(tables, None)
        for begin, rows in ranges:
            found: list[pa.Table] = []
            while table is not None and start < begin + rows:
                low, high = max(begin - start, 0), min(begin + rows - start, table.num_rows)
                found += [table.slice(low, high - low)] if low < high else []
                if start + table.num_rows >= begin + rows:
                    break
                start, table = start + table.num_rows, next(tables, None)
            if sum(part.num_rows for part in found) < rows:
                yield Unreadable(f"cannot be read: it holds {start} rows, fewer than planned")
            else:
                yield _typed(pa.concat_tables(found, promote_options="permissive"), columns, schema)
            given += 1
    except FORMAT as error:
        yield from [damage(content, error)] * (len(ranges) - given)


def _typed(table: pa.Table, columns: Sequence[str] | None, schema: pa.Schema | None) -> pa.Table:
    """The columns of a table as planned; null where the file has none of that name."""
    wanted = schema or table.schema
    fields = [wanted.field(name) for name in (wanted.names if columns is None else columns)]
    if not fields:
        return bare(table.num_rows)
    arrays = {f.name: table[f.name].cast(f.type) for f in fields if f.name in table.column_names}
    arrays |= {f.name: pa.nulls(table.num_rows, f.type) for f in fields if f.name not in arrays}
    return pa.table([arrays[f.name] for f in fields], schema=pa.schema(fields))


def damage(content: Bytes, error: Exception) -> Unreadable:
    """What a format's error comes to. Raises what the store said instead, if it refused."""
    if content.refused:
        raise content.refused
    return Unreadable(f"cannot be read: {first_line(error)}")


class Source:
    """A shard's file, of which some columns are read."""

    def __init__(self, content: Bytes, shard: Shard, columns: Sequence[str] | None, schema: pa.Schema | None) -> None:
        opened = read_footer(content)
        self.content, self.metadata = content, opened.metadata
        self.values = decode_row(shard.values) if shard.values else pa.table({})
        known = {field.name: field for field in chain(nullable(opened.schema_arrow), self.values.schema, schema or ())}
        every = schema.names if schema else list(known)
        self.schema = pa.schema([known[name] for name in (every if columns is None else columns)])
        self.columns = [name for name in self.schema.names if name not in self.values.column_names]
        self.starts = [0]
        for group in range(self.metadata.num_row_groups):
            self.starts.append(self.starts[-1] + self.metadata.row_group(group).num_rows)
        roots = tuple(f"{name}." for name in self.columns)
        paths = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        self.leaves = [i for i, path in enumerate(paths) if f"{path}.".startswith(roots)]

    def pieces(self, first: int, rows: int) -> list[Piece]:
        """A range's pieces, as far as the file has its rows."""
        group, last, found = bisect_right(self.starts, first) - 1, min(first + rows, self.starts[-1]), []
        while group < len(self.starts) - 1 and self.starts[group] < last:
            piece = Piece(group, max(first, self.starts[group]), min(last, self.starts[group + 1]))
            found += [piece] if piece.begin < piece.end else []
            group += 1
        return found

    def decode(self, pieces: Sequence[Piece]) -> Iterator[list[pa.RecordBatch] | Unreadable]:
        """Each piece's rows; where something is damaged, the others as far as they can be had."""
        spans = self._spans(dict.fromkeys(piece.group for piece in pieces))
        for _, found in groupby(pieces, key=lambda piece: spans[piece.group]):
            span, done = list(found), 0
            try:
                for batches in self._cut(span, self._at_once(span)):
                    yield batches
                    done += 1
            except FORMAT as error:
                damage(self.content, error)
                for _, left in groupby(span[done:], key=lambda piece: piece.group):
                    yield from self._salvage(list(left))

    def table(self, parts: Sequence[list[pa.RecordBatch] | Unreadable], rows: int) -> pa.Table | Unreadable:
        """A range's table out of its pieces."""
        batches: list[pa.RecordBatch] = []
        for part in parts:
            if isinstance(part, Unreadable):
                return part
            batches += part
        if sum(batch.num_rows for batch in batches) < rows:
            return Unreadable(f"cannot be read: it holds {self.starts[-1]} rows, fewer than planned")
        table = pa.Table.from_batches(batches)
        for name in self.values.column_names:
            table = table.append_column(name, pa.repeat(self.values[name][0], rows))
        table = table.select(self.schema.names)
        return table.cast(self.schema) if self.schema.names else table  # a cast would lose the number of rows

    def _spans(self, groups: Iterable[int]) -> dict[int, int]:
        """Row groups by the span in which they are decoded: neighbours, as many as are small enough together."""
        spans: dict[int, int] = {}
        last, size = -2, 0
        for group in groups:
            here = self._size(group)
            begins = group != last + 1 or size + here > AT_ONCE
            size = here if begins else size + here
            spans[group] = len(spans) if begins else spans[last]
            last = group
        return spans

    def _salvage(self, pieces: Sequence[Piece]) -> Iterator[list[pa.RecordBatch] | Unreadable]:
        """The pieces of one row group, in small steps up to the damage."""
        done = 0
        try:
            for batches in self._cut(pieces, SALVAGED):
                yield batches
                done += 1
        except FORMAT as error:
            yield from [damage(self.content, error)] * (len(pieces) - done)

    def _cut(self, pieces: Sequence[Piece], rows: int) -> Iterator[list[pa.RecordBatch]]:
        """The pieces out of batches of so many rows."""
        batches = self._batches(range(pieces[0].group, pieces[-1].group + 1), rows)
        first, batch = next(batches)
        for piece in pieces:
            found, begin = [], piece.begin
            while begin < piece.end:
                while begin >= first + batch.num_rows:
                    first, batch = next(batches)
                found.append(batch.slice(begin - first, piece.end - begin))
                begin += found[-1].num_rows
            yield found

    def _batches(self, groups: Sequence[int], rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of neighbouring row groups, each with the number of its first row."""
        whole = sum(map(self._size, groups)) <= AT_ONCE
        opened = pq.ParquetFile(
            RangeFile(self.content),
            metadata=self.metadata,
            pre_buffer=whole,
            buffer_size=0 if whole else FETCHED,
            page_checksum_verification=True,
        )
        first = self.starts[groups[0]]
        for batch in opened.iter_batches(rows, list(groups), self.columns, use_threads=False):
            yield first, batch
            first += batch.num_rows
        raise pa.ArrowInvalid("it holds fewer rows than its footer tells")

    def _size(self, group: int) -> int:
        row_group = self.metadata.row_group(group)
        return sum(int(row_group.column(leaf).total_compressed_size) for leaf in self.leaves)

    def _at_once(self, pieces: Sequence[Piece]) -> int:
        """Rows of a batch."""
        groups = [self.metadata.row_group(g) for g in range(pieces[0].group, pieces[-1].group + 1)]
        size = sum(group.column(leaf).total_uncompressed_size for group in groups for leaf in self.leaves)
        rows = sum(group.num_rows for group in groups)
        return max(1, min(65536, DECODED * int(rows) // max(int(size), 1)))
