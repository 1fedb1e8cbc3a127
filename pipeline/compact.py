"""Small parts into larger files, and out of them again, so that no reader sees a row twice and a kill loses none.

A file that is to take the place of others is written whole under a name that readers pass over. Then the others are
removed, and it gets its visible name. Whoever finds such a file later knows by what is still visible how far that had
come: `repair` ends it. The ledger of what a merged file holds is its own footer, so the two cannot disagree.
"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.contents import MERGED, READERS, Contents, Merged, read_part, read_range
from exspec.pipeline.errors import JobError
from exspec.pipeline.output import SUCCESS, read_job
from exspec.pipeline.parts import SUMMARY, Summary
from exspec.pipeline.storage import Folder

READ_AHEAD = 64 << 20  # bytes of parts that are held before they are written
ROW_GROUP = 64 << 20  # bytes in memory of a row group
MOST_CHUNKS = 10_000  # of a merged file: its footer, which every reader reads, tells of each


@dataclass(frozen=True)
class Compacted:
    """Files that hold rows, before and after, and how many of those after were written."""

    before: int
    after: int
    written: int


def compact(folder: Folder, target: int) -> Compacted:
    """Merge the files of a finished output, neighbours by name, into files of at most `target` bytes, about.

    A reader of the folder finds the same rows in the same order. Raises JobError where the job is not finished.
    """
    _, plan = read_job(folder)
    _remove(folder, (n for n in folder.names() if n.startswith("._part-")))  # begun, and never finished
    contents = repair(folder, discard=True)
    chunks = list(plan.chunks())
    _refuse_missing(contents, chunks)
    names = sorted({contents.file(c.part) for c in chunks})
    ahead = _Ahead(_sources(contents, names, target))
    after = written = 0
    while first := ahead.take():
        after += 1
        if (following := ahead.peek()) and _fits(first.weight, len(first.summaries), following, target):
            _merge(folder, first, ahead, target)
            written += 1
    # Only now, for a run may have extended the plan meanwhile.
    _, plan = read_job(folder)
    _refuse_missing(Contents(folder), list(plan.chunks()))
    folder.write(SUCCESS, b"")
    return Compacted(len(names), after, written)


def _refuse_missing(contents: Contents, chunks: list[Any]) -> None:
    if missing := sum(c not in contents for c in chunks):
        raise JobError(
            f"{contents.folder.url}: {missing} of {len(chunks)} chunks are missing; expected a finished output, "
            "run the job again first"
        )


def repair(folder: Folder, discard: bool = False) -> Contents:
    """Finish what was killed between writing a file and removing those that it replaces. Returns what is there then.

    discard: a file that has begun to replace nothing is removed; else it stays, for its writer may be at work.
    """
    contents = Contents(folder)
    while step := _step(contents, discard):
        old, new = step
        _remove(folder, old)
        if new:
            folder.rename(f"_{new}", new)
        contents = Contents(folder)
    return contents


def _step(contents: Contents, discard: bool) -> tuple[list[str], str | None] | None:
    """Files to remove, and the one to be shown then; None where nothing is left to do."""
    late = [p for p in contents.parts if contents.file(p) != p and contents.visible(p)]
    if late:  # a run that was at work during a compaction wrote its part again
        return late, None
    for name, file in contents.waiting.items():
        shown, parts = name[1:], set(file.starts)
        if shown in contents.parts or shown in contents.merged:
            return [name], None
        if not all(contents.visible(p) for p in parts):
            merged = [n for n, other in contents.merged.items() if set(other.starts) <= parts]
            return [*(parts & contents.parts), *merged], shown
        if discard:
            return [name], None
    return None


def split(folder: Folder, contents: Contents, wanted: set[str]) -> None:
    """Give the wanted chunks of merged files parts of their own, which can be replaced; the others stay merged."""
    for name, file in contents.merged.items():
        if wanted.isdisjoint(file.starts):
            continue
        total, new = sum(s.rows for s in file.summaries), []
        for _, group in groupby(file.summaries, key=lambda s: s.part if s.part in wanted else None):
            run = list(group)
            first, rows = file.starts[run[0].part], sum(s.rows for s in run)
            new.append(run[0].part if len(run) == 1 else merged_name(run[0].part))
            with folder.staged(f"_{new[-1]}") as path, _Writer(path, folder, ROW_GROUP) as out:
                for table in read_range(folder, name, first, rows):
                    out.write(table, file.weight * table.num_rows // total)
                out.end(run)
        _swap(folder, [name], new)


def merged_name(part: str) -> str:
    """A new name for a merged file, which sorts where its first chunk's part did."""
    return f"{part.removesuffix('.parquet')}-merged-{uuid.uuid4().hex[:8]}.parquet"


@dataclass(frozen=True)
class _Source:
    """A file that may be merged with its neighbours. table: a part's rows; a merged file's are read as they are needed.
    weight: bytes that it will add, at most.
    """

    name: str
    weight: int
    summaries: list[Summary]
    table: pa.Table | None


def _sources(contents: Contents, names: list[str], target: int) -> Iterator[_Source]:
    sizes = contents.folder.sizes()

    def load(name: str) -> _Source:
        if (file := contents.merged.get(name)) is not None:
            return _Source(name, file.weight, file.summaries, None)
        if sizes[name] >= target:
            return _Source(name, max(target, sizes[name]), [], None)  # stays as it is
        table, part = read_part(contents.folder, name)
        return _Source(name, part.weight, part.summaries, table)

    with ThreadPoolExecutor(READERS) as pool:
        for batch in _batches(names, {n: 0 if n in contents.merged else min(sizes[n], target) for n in names}):
            yield from pool.map(load, batch)


def _batches(names: list[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    """The names in order, no more of them together than may be read ahead."""
    batch: list[str] = []
    for name in names:
        if (batch and sum(sizes[n] for n in batch) + sizes[name] > READ_AHEAD) or len(batch) == 4 * READERS:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


class _Ahead:
    """An iterator whose next item can be seen before it is taken."""

    def __init__(self, items: Iterator[_Source]) -> None:
        self._items = items
        self._next = next(items, None)

    def peek(self) -> _Source | None:
        return self._next

    def take(self) -> _Source | None:
        taken, self._next = self._next, next(self._items, None)
        return taken


def _fits(weight: int, chunks: int, source: _Source, target: int) -> bool:
    """Whether a source may join a file of this weight and so many chunks."""
    return weight + source.weight <= target and chunks + len(source.summaries) <= MOST_CHUNKS


def _merge(folder: Folder, first: _Source, ahead: _Ahead, target: int) -> None:
    """Merge a file with as many of the next as fit, and put the result in their place."""
    name, taken, chunks = merged_name(first.summaries[0].part), [first.name], list(first.summaries)
    with folder.staged(f"_{name}") as path, _Writer(path, folder, target // 8) as out:
        out.add(first)
        while (source := ahead.peek()) and (len(taken) == 1 or _fits(out.weight, len(chunks), source, target)):
            out.add(source)
            taken.append(source.name)
            chunks += source.summaries
            ahead.take()
        out.end(chunks)
    # Whoever waits for the marker does not look while rows are on their way from one name to another.
    folder.remove(SUCCESS)
    _swap(folder, taken, [name])


def _swap(folder: Folder, old: list[str], new: list[str]) -> None:
    """Remove files, then show those that hold their rows."""
    _remove(folder, old)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda name: folder.rename(f"_{name}", name), new))


def _remove(folder: Folder, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(folder.remove, names))


class _Writer:
    """Writes a part or a merged file, a row group at a time. group: bytes that make one, when so many are to be stored.

    weight: bytes so far, those of tables that are not yet written as they were in their sources. At least that of every
    source: so files that did not fit together once never will, and a second compaction has nothing to do.
    Of the footer it has the summaries, not the schema.
    """

    def __init__(self, path: Path, folder: Folder, group: int) -> None:
        self.path, self.folder, self.group = path, folder, group
        self.file = path.open("wb")
        self.writer: Any = None
        self.tables: list[pa.Table] = []
        self.buffered = self.least = self.footer = self.rows = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def weight(self) -> int:
        return max(self.file.tell() + self.buffered + self.footer, self.least)

    def add(self, source: _Source) -> None:
        """Write a source's rows."""
        rows = sum(s.rows for s in source.summaries)
        before, footer = self.rows, len(Merged(0, source.summaries).to_json())
        self.footer += footer
        tables = read_range(self.folder, source.name, 0, rows) if source.table is None else [source.table]
        for table in tables:
            self.write(table, max(0, source.weight - footer) * table.num_rows // rows)
        self.least = max(self.least, source.weight)
        if self.rows - before != rows:
            raise JobError(
                f"{self.folder.url}/{source.name}: holds {self.rows - before} rows, and its footer tells of {rows}"
            )

    def write(self, table: pa.Table, weight: int) -> None:
        table = table.replace_schema_metadata()
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.file, table.schema)
        elif not table.schema.equals(self.writer.schema):
            raise JobError(
                f"{self.folder.url}: parts have different columns; expected one schema, as one job writes it"
            )
        self.tables.append(table)
        self.buffered += weight
        self.rows += table.num_rows
        if self.buffered >= self.group or sum(t.nbytes for t in self.tables) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        together = pa.concat_tables(self.tables)
        self.writer.write_table(together, row_group_size=together.num_rows)
        self.tables, self.buffered = [], 0

    def end(self, summaries: list[Summary]) -> None:
        """Write the footer with what it tells of the chunks."""
        weight = self.weight
        if self.tables:
            self._flush()
        if len(summaries) == 1:
            footer = {SUMMARY: json.dumps(vars(summaries[0])).encode()}
        else:
            footer = {MERGED: Merged(weight, summaries).to_json()}
        self.writer.add_key_value_metadata(footer)
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        found, expected = pq.read_metadata(self.path).num_rows, sum(s.rows for s in summaries)
        if found != expected:
            raise JobError(f"{self.folder.url}: {found} rows were written, expected {expected}")
