"""Reads rows of a shard: many ranges in one pass, only from the version that was planned."""

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.engine.faults import first_line
from exspec.pipeline.input.formats import bare, read, suffix_of
from exspec.pipeline.input.plan import Shard, decode_row
from exspec.pipeline.input.rows import BAD
from exspec.pipeline.input.schemas import nullable
from exspec.pipeline.input.snapshot import difference, locate, same_start
from exspec.pipeline.storage import attempt

AT_ONCE = 8 << 20  # bytes of row groups fetched together; a larger row group is read page by page
FETCHED = 2 << 20  # bytes of a column per fetch when reading page by page
DECODED = 16 << 20  # approximate bytes decoded at once
SALVAGED = 64  # rows decoded at once in a damaged row group
GROWING = (".jsonl", ".ndjson", ".csv")  # suffixes of files to which lines can be appended
FORMAT = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises for invalid files


@dataclass(frozen=True)
class Unreadable:
    """Stands for a range that cannot be read."""

    reason: str


class ChangedError(Exception):
    """A shard has changed since it was planned."""


class Bytes:
    """The bytes of a file, with retries. fetches: number of fetches. refused: the store's final error, if any."""

    def __init__(self, fs: Any, path: str, size: int = 0, shard: Shard | None = None) -> None:
        self.fs, self.path, self.size, self.shard = fs, path, size, shard
        self.fetches = 0
        self.refused: Exception | None = None

    def fetch(self, begin: int, end: int) -> bytes:
        self.fetches += 1
        try:
            return attempt(lambda: self._fetch(begin, end))
        except Exception as error:  # pyarrow may raise its own error instead
            self.refused = error
            raise

    def changed(self) -> str | None:
        """How the shard has changed since it was planned; None if it has not."""
        return difference(self.shard, self.fs, self.path) if self.shard else None

    def _fetch(self, begin: int, end: int) -> bytes:
        try:
            return bytes(self.fs.cat_file(self.path, start=begin, end=end))
        except Exception as error:
            if why := self.changed():  # no retry will help
                raise ChangedError(why) from error
            raise


class RangeFile(io.RawIOBase):
    """A file object that fetches only what is read."""

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
    """The part of a range in one row group: shard rows from `begin` to before `end`."""

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
    """The rows of each range, in one pass over the shard: no row group is decoded twice or held whole.

    ranges: (first row, number of rows), ascending and disjoint. columns: None means all. schema: as planned; default:
    the file's. Repaired rows replace those of the file. Raises the store's error if retries do not help.
    """
    content = Bytes(*locate(shard.url, options), shard.size, shard)
    given = 0
    try:
        for item in _checked(content, _items(content, shard, ranges, columns, schema)):
            yield _repaired(shard, ranges[given][0], item)
            given += 1
    except ChangedError as error:
        yield from [Unreadable(str(error))] * (len(ranges) - given)


def _repaired(shard: Shard, first: int, item: pa.Table | Unreadable) -> pa.Table | Unreadable:
    """The rows of a range from row `first` on, with the shard's repairs."""
    if isinstance(item, Unreadable) or not item.num_columns:
        return item
    for at in range(item.num_rows if shard.repairs else 0):
        if text := shard.repairs.get(str(first + at)):
            new = _typed(decode_row(text), replace(shard, values=""), item.column_names, item.schema)
            item = pa.concat_tables([item.slice(0, at), new, item.slice(at + 1)])
    return item


def grew(planned: Shard, now: Shard, options: dict[str, Any], schema: pa.Schema) -> bool:
    """Whether a changed file of lines has the planned bytes, whole lines and rows, and then more.

    False if the store's etag is not a digest of the content, so that the planned bytes cannot be told.
    """
    fs, path = locate(now.url, options)
    if not now.name.lower().endswith(GROWING) or now.size <= planned.size or not same_start(fs, path, planned):
        return False
    # The last planned row may go on in the new bytes, for example in a quoted value.
    last = [(planned.rows - 1, 1)]
    found = [next(_items(Bytes(fs, path, size), planned, last, None, schema)) for size in (planned.size, now.size)]
    return isinstance(found[0], pa.Table) and isinstance(found[1], pa.Table) and found[0].equals(found[1])


def read_footer(content: Bytes) -> pq.ParquetFile:
    """A Parquet file. Raises one of FORMAT if it is invalid."""
    return pq.ParquetFile(RangeFile(content))


def _checked(content: Bytes, items: Iterator[pa.Table | Unreadable]) -> Iterator[pa.Table | Unreadable]:
    """The items; checks that the shard has not changed before the first fetch and after the fetches of each item."""
    checked_at = -1
    for item in chain([None], items):
        if checked_at != content.fetches and (why := content.changed()):
            raise ChangedError(why)
        checked_at = content.fetches
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
        source = ParquetShard(content, shard, columns, schema)
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
    """The ranges of a file without row groups, which is read from the start."""
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
                yield Unreadable(f"cannot be read: it has {start} rows, fewer than planned")
            else:
                yield _typed(pa.concat_tables(found, promote_options="permissive"), shard, columns, schema)
            given += 1
    except FORMAT as error:
        yield from [damage(content, error)] * (len(ranges) - given)


def _typed(table: pa.Table, shard: Shard, columns: Sequence[str] | None, schema: pa.Schema | None) -> pa.Table:
    """The columns of a table with the planned types, and BAD; a column that the file lacks has the shard's value, or
    is null."""
    values = decode_row(shard.values) if shard.values else pa.table({})
    wanted = schema or pa.schema([*table.schema, *values.schema])
    fields = [wanted.field(name) for name in (wanted.names if columns is None else columns)]
    present, given = set(table.column_names), set(values.column_names)
    fields += [pa.field(BAD, pa.string())] if BAD in present and BAD not in wanted.names else []
    if not fields:
        return bare(table.num_rows)

    def column(field: pa.Field) -> Any:
        if field.name in given:
            return pa.repeat(values[field.name][0], table.num_rows).cast(field.type)
        if field.name in present:
            return table[field.name].cast(field.type)
        return pa.nulls(table.num_rows, field.type)

    return pa.table([column(field) for field in fields], schema=pa.schema(fields))


def damage(content: Bytes, error: Exception) -> Unreadable:
    """The result for an invalid file. If the store refused to read it, raises the store's error instead."""
    if content.refused:
        raise content.refused
    return Unreadable(f"cannot be read: {first_line(error)}")


class ParquetShard:
    """The Parquet file of a shard, and the columns to read."""

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
        roots = set(self.columns)
        paths = [self.metadata.schema.column(i).path.split(".") for i in range(self.metadata.num_columns)]
        # A name may contain dots itself.
        self.leaves = [i for i, path in enumerate(paths) if not roots.isdisjoint(accumulate(path, "{}.{}".format))]

    def pieces(self, first: int, rows: int) -> list[Piece]:
        """The pieces of a range, as far as the file has the rows."""
        group, last, found = bisect_right(self.starts, first) - 1, min(first + rows, self.starts[-1]), []
        while group < len(self.starts) - 1 and self.starts[group] < last:
            piece = Piece(group, max(first, self.starts[group]), min(last, self.starts[group + 1]))
            found += [piece] if piece.begin < piece.end else []
            group += 1
        return found

    def decode(self, pieces: Sequence[Piece]) -> Iterator[list[pa.RecordBatch] | Unreadable]:
        """The rows of each piece. Damage in one piece does not affect others, as far as possible."""
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
        """The table of a range from its pieces."""
        batches: list[pa.RecordBatch] = []
        for part in parts:
            if isinstance(part, Unreadable):
                return part
            batches += part
        if sum(batch.num_rows for batch in batches) < rows:
            return Unreadable(f"cannot be read: it has {self.starts[-1]} rows, fewer than planned")
        table = pa.Table.from_batches(batches)
        for name in self.values.column_names:
            table = table.append_column(name, pa.repeat(self.values[name][0], rows))
        table = table.select(self.schema.names)
        return table.cast(self.schema) if self.schema.names else table  # a cast without columns loses the rows

    def _spans(self, groups: Iterable[int]) -> dict[int, int]:
        """The span of each row group. Row groups of a span are neighbours that are small enough to fetch together."""
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
        """The pieces of one damaged row group, in small steps up to the damage."""
        done = 0
        try:
            for batches in self._cut(pieces, SALVAGED):
                yield batches
                done += 1
        except FORMAT as error:
            yield from [damage(self.content, error)] * (len(pieces) - done)

    def _cut(self, pieces: Sequence[Piece], rows: int) -> Iterator[list[pa.RecordBatch]]:
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
        """Batches of neighbouring row groups, each with the index of its first row."""
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
        raise pa.ArrowInvalid("it has fewer rows than its footer says")

    def _size(self, group: int) -> int:
        row_group = self.metadata.row_group(group)
        return sum(int(row_group.column(leaf).total_compressed_size) for leaf in self.leaves)

    def _at_once(self, pieces: Sequence[Piece]) -> int:
        """Rows per batch that decode to about DECODED bytes."""
        groups = [self.metadata.row_group(g) for g in range(pieces[0].group, pieces[-1].group + 1)]
        size = sum(group.column(leaf).total_uncompressed_size for group in groups for leaf in self.leaves)
        rows = sum(group.num_rows for group in groups)
        return max(1, min(65536, DECODED * int(rows) // max(int(size), 1)))
