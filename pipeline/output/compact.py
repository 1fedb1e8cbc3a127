"""Merges small files into larger ones, and puts rows that were decoded again into the file that holds them.

Each new file is staged first. Then one entry of the job's log puts it in the place of the old files.
"""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.errors import JobError
from exspec.pipeline.output.columns import conform
from exspec.pipeline.output.contents import (
    batches,
    check,
    columns_of,
    damaged,
    md5,
    open_part,
    read_groups,
    read_range,
)
from exspec.pipeline.output.owner import Writer, read_output, take
from exspec.pipeline.output.parts import FOOTER, footer
from exspec.pipeline.output.state import File, Summary
from exspec.pipeline.storage import Folder, at_once

ROW_GROUP = 64 << 20  # bytes in memory of a row group
MOST_CHUNKS = 10_000  # of a merged file: every reader reads its footer, which lists them


@dataclass(frozen=True)
class Compacted:
    """Number of files before and after, and how many of them were written."""

    before: int
    after: int
    written: int


def compact(folder: Folder, target: int, wait: bool = False) -> Compacted:
    """Merge neighbouring files of a finished output into files of up to about `target` bytes.

    The rows and their order stay the same. Raises JobError if the job is not finished.
    """
    with take(read_output(folder), "compact", wait) as writer:
        writer.refuse_waiting()
        if not writer.state.complete:
            missing = writer.state.plan.rows - writer.state.rows
            raise JobError(
                f"{folder.url}: {missing} of {writer.state.plan.rows} rows are missing; expected a finished output; "
                "run the job again first"
            )
        writer.sweep()
        names = writer.state.names()
        ahead = _Ahead(_sources(writer, names, target))
        after = written = 0
        while first := ahead.take():
            after += 1
            if (following := ahead.peek()) and _fits(first.file.weight, len(first.file.chunks), following, target):
                _merge(writer, first, ahead, target)
                written += 1
        if writer.state.done is None:
            writer.finish()
        return Compacted(len(names), after, written)


def mend(writer: Writer, name: str, parts: list[File]) -> None:
    """Replace chunks of a file by chunks that were decoded again. parts: staged parts of one chunk each."""
    check(writer, name, name)  # damaged rows would get a new digest
    file = writer.state.file(name)
    if len(file.chunks) == 1:
        writer.commit(parts, [name])
        return
    new, start, chunks = {(p.chunks[0].shard, p.chunks[0].first): p for p in parts}, 0, []
    rows = file.rows
    with writer.folder.staging(writer.prefix) as (path, staged), _FileWriter(path, writer, ROW_GROUP) as out:
        for old in file.chunks:
            part = new.get((old.shard, old.first))
            chunks.append(part.chunks[0] if part else old)
            where = (part.staged, 0) if part else (name, start)
            for table in read_range(writer.folder, *where, old.rows):
                out.write(table, file.weight * table.num_rows // rows)
            start += old.rows
        mended = out.end(staged, chunks)
    writer.commit([mended], [name])
    writer.folder.each(writer.folder.remove, [p.staged for p in parts])


@dataclass(frozen=True)
class _Source:
    """A file to merge. table: the rows of a part; the rows of a merged file are read when they are needed."""

    file: File
    table: pa.Table | None = None


def _sources(writer: Writer, names: list[str], target: int) -> Iterator[_Source]:
    folder, sizes = writer.folder, dict(writer.state.sizes())

    def load(file: File) -> _Source:
        if len(file.chunks) > 1 or file.size >= target:
            return _Source(file)
        content = folder.read(file.name)
        if md5(io.BytesIO(content)) != file.digest:
            raise damaged(folder, file.name)
        return _Source(file, open_part(folder, file.name, content))

    for batch in batches(names, {n: min(sizes[n], target) for n in names}):
        yield from at_once(load, [writer.state.file(name) for name in batch])


class _Ahead:
    """An iterator with a look-ahead of one."""

    def __init__(self, items: Iterator[_Source]) -> None:
        self._items = items
        self._next = next(items, None)

    def peek(self) -> _Source | None:
        return self._next

    def take(self) -> _Source | None:
        taken, self._next = self._next, next(self._items, None)
        return taken


def _fits(weight: int, chunks: int, source: _Source, target: int) -> bool:
    """Whether a source may join a file of this weight and number of chunks."""
    return weight + source.file.weight <= target and chunks + len(source.file.chunks) <= MOST_CHUNKS


def _merge(writer: Writer, first: _Source, ahead: _Ahead, target: int) -> None:
    """Merge a file with as many of the next as fit, and replace them by the result."""
    taken, chunks = [first.file.name], list(first.file.chunks)
    with writer.folder.staging(writer.prefix) as (path, staged), _FileWriter(path, writer, target // 8) as out:
        out.add(first)
        while (source := ahead.peek()) and (len(taken) == 1 or _fits(out.weight, len(chunks), source, target)):
            out.add(source)
            taken.append(source.file.name)
            chunks += source.file.chunks
            ahead.take()
        merged = out.end(staged, chunks)
    writer.commit([merged], taken)


class _FileWriter:
    """Writes a file of chunks, a row group at a time. group: stored bytes of a row group.

    weight: bytes so far; buffered tables count as in their sources, and the footer's list of chunks counts too. It is
    at least the weight of every source. So files that do not fit together never will, and a second compaction has
    nothing to do.
    """

    def __init__(self, path: Path, owner: Writer, group: int) -> None:
        self.path, self.owner, self.group = path, owner, group
        self.file = path.open("wb")
        self.writer: Any = None
        self.tables: list[pa.Table] = []
        self.buffered = self.held = self.least = self.footer = self.rows = 0  # held: bytes of tables in memory

    def __enter__(self) -> "_FileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()  # else the garbage collector closes it, after the file
        self.file.close()

    @property
    def weight(self) -> int:
        return max(self.file.tell() + self.buffered + self.footer, self.least)

    def add(self, source: _Source) -> None:
        """Write the rows of a source."""
        folder, name, rows = self.owner.folder, source.file.name, source.file.rows
        if source.table is None:
            check(self.owner, name, name)
        before, listed = self.rows, len(footer("", source.file.chunks)[FOOTER])
        self.footer += listed
        for table in read_groups(folder, name) if source.table is None else [source.table]:
            self.write(table, max(0, source.file.weight - listed) * table.num_rows // rows)
        self.least = max(self.least, source.file.weight)
        if self.rows - before != rows:
            raise JobError(f"{folder.url}/{name}: has {self.rows - before} rows, but the log says {rows}")

    def write(self, table: pa.Table, weight: int) -> None:
        if self.writer is None:
            self.schema = columns_of(self.owner)
            self.writer = pq.ParquetWriter(self.file, self.schema, write_page_checksum=True)
        self.tables.append(conform(table, self.schema, self.owner.folder.url))
        self.buffered += weight
        self.held += self.tables[-1].nbytes
        self.rows += table.num_rows
        if self.buffered >= self.group or self.held >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        together = pa.concat_tables(self.tables)
        self.writer.write_table(together, row_group_size=together.num_rows)
        self.tables, self.buffered, self.held = [], 0, 0

    def end(self, staged: str, chunks: list[Summary]) -> File:
        """Write the footer, with the list of chunks, and return the file."""
        weight = self.weight
        if self.tables:
            self._flush()
        self.writer.add_key_value_metadata(footer(str(self.owner.state.job), chunks))
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        found, expected = pq.read_metadata(self.path).num_rows, sum(s.rows for s in chunks)
        if found != expected:
            raise JobError(f"{self.owner.folder.url}: {found} rows were written, expected {expected}")
        with self.path.open("rb") as written:
            return File("", staged, self.path.stat().st_size, md5(written), weight, chunks)
