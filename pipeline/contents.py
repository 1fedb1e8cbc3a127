"""Where the rows of every chunk lie: in a part of its own, or in a merged file whose footer lists its chunks.

A name that begins with `_` is not data for a reader of Parquet folders. So does the name of a file that is to take the
place of others: it holds its chunks from the moment that one of those others is gone.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.errors import JobError
from exspec.pipeline.parts import SUMMARY, Summary
from exspec.pipeline.plan import Chunk
from exspec.pipeline.storage import Folder, attempt

MERGED = b"exspec.merged"
READERS = 16  # files read at once
_PART = re.compile(r"part-.*-\d{10}-\d+\.parquet", re.DOTALL)
_MERGED_NAME = re.compile(r"part-.*-merged-[0-9a-f]{8}\.parquet", re.DOTALL)


@dataclass(frozen=True)
class Merged:
    """What a merged file's footer tells, or a part's. weight: bytes that it counts for when files are merged.
    summaries: of its chunks, in the order of their rows.
    """

    weight: int
    summaries: list[Summary]

    @cached_property
    def starts(self) -> dict[str, int]:
        """First row of every chunk, by the name of its part."""
        firsts = accumulate((s.rows for s in self.summaries), initial=0)
        return dict(zip((s.part for s in self.summaries), firsts, strict=False))

    def to_json(self) -> bytes:
        return json.dumps({"weight": self.weight, "summaries": [vars(s) for s in self.summaries]}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Merged":
        loaded = json.loads(content)
        return cls(loaded["weight"], [Summary(**s) for s in loaded["summaries"]])


class Contents:
    """The files of an output folder by the chunks that they hold. Chunks go by the names of their parts.

    Raises JobError where a merged file cannot be read, or two of them hold the same chunk.
    """

    def __init__(self, folder: Folder, names: Iterable[str] | None = None) -> None:
        self.folder = folder
        names = folder.names() if names is None else names
        self.parts = {n for n in names if _PART.fullmatch(n)}
        hidden = {n[1:] for n in names if n.startswith("_")}
        waiting = sorted(f"_{n}" for n in hidden if _PART.fullmatch(n) or _MERGED_NAME.fullmatch(n))
        shown = sorted(n for n in names if _MERGED_NAME.fullmatch(n))
        with ThreadPoolExecutor(READERS) as pool:
            read = dict(zip([*shown, *waiting], pool.map(self._read, [*shown, *waiting]), strict=True))
        self.merged = {name: read[name] for name in shown}
        self.waiting = {name: read[name] for name in waiting}
        self._file: dict[str, str] = {}
        for name, file in self.merged.items():
            for part in file.starts:
                if (other := self._file.setdefault(part, name)) != name:
                    raise JobError(
                        f"{folder.url}: {other} and {name} both hold {part}; remove one of them and run the job again"
                    )
        for name, file in self.waiting.items():
            for part in file.starts.keys() - self.parts:
                self._file.setdefault(part, name)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.part in self.parts or chunk.part in self._file

    def file(self, part: str) -> str:
        """Name of the file that holds a chunk."""
        return self._file.get(part, part)

    def visible(self, part: str) -> bool:
        """Whether a reader of the folder finds the chunk."""
        return not self.file(part).startswith("_")

    def summaries(self, chunks: list[Chunk]) -> list[Summary]:
        """The chunks' summaries, in order."""
        known = {s.part: s for file in (*self.waiting.values(), *self.merged.values()) for s in file.summaries}
        own = [c.part for c in chunks if self.file(c.part) == c.part]
        with ThreadPoolExecutor(READERS) as pool:
            known |= zip(own, (file.summaries[0] for file in pool.map(self._read, own)), strict=True)
        return [known[c.part] for c in chunks]

    def columns(self, chunks: list[Chunk]) -> Callable[[list[str] | None], Iterator[pa.Table]]:
        """Reads columns, or all, of the files that hold these chunks, each once, always in the same order."""
        files: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            files.setdefault(self.file(chunk.part), []).append(chunk)
        parts = [name for name in files if name in self.parts]
        merged = {name: self.merged.get(name) or self.waiting[name] for name in files if name not in self.parts}

        def read(columns: list[str] | None) -> Iterator[pa.Table]:
            for name, file in merged.items():
                rows = sum(s.rows for s in file.summaries)
                if sum(chunk.rows for chunk in files[name]) == rows:
                    yield from read_range(self.folder, name, 0, rows, columns)
                else:  # it waits to take the place of parts, some of which are still there
                    yield from (self.rows(chunk, columns) for chunk in files[name])
            with ThreadPoolExecutor(READERS) as pool:
                for first in range(0, len(parts), 4 * READERS):
                    batch = [files[name][0] for name in parts[first : first + 4 * READERS]]
                    yield from pool.map(lambda chunk: self.rows(chunk, columns), batch)

        return read

    def rows(self, chunk: Chunk, columns: list[str] | None) -> pa.Table:
        """Columns of a chunk's rows, or all."""
        name = self.file(chunk.part)
        first = 0 if name == chunk.part else (self.merged.get(name) or self.waiting[name]).starts[chunk.part]
        return pa.concat_tables(read_range(self.folder, name, first, chunk.rows, columns))

    def _read(self, name: str) -> Merged:
        """What the footer of a part or a merged file tells."""
        metadata = _parquet(self.folder, name, lambda file: file.metadata)
        stored = metadata.metadata or {}
        if MERGED in stored:
            return Merged.from_json(stored[MERGED])
        if SUMMARY in stored:
            return Merged(_weight(metadata), [Summary(**json.loads(stored[SUMMARY]))])
        raise JobError(f"{self.folder.url}/{name}: not a part of exspec")


def read_range(
    folder: Folder, name: str, first: int, rows: int, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """Rows of a file, a row group at a time."""
    metadata = _parquet(folder, name, lambda file: file.metadata)
    start = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        low, high = max(first, start) - start, min(first + rows, start + count) - start
        if low < high:
            table = _parquet(folder, name, lambda file, g=group: file.read_row_group(g, columns), metadata)
            yield table.slice(low, high - low)
        start += count
    if start < first + rows:
        raise JobError(f"{folder.url}/{name}: holds {start} rows, expected {first + rows} or more")


def _weight(metadata: Any) -> int:
    """Bytes of a part's columns as they are stored, and of its summary."""
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    columns = sum(group.column(c).total_compressed_size for group in groups for c in range(group.num_columns))
    return int(columns) + len(metadata.metadata[SUMMARY])


def read_part(folder: Folder, name: str) -> tuple[pa.Table, Merged]:
    """A part's rows and what its footer tells, read in one go."""
    content = folder.read(name)
    try:
        file = pq.ParquetFile(io.BytesIO(content))
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(folder, name, error) from error
    return table, Merged(_weight(file.metadata), [Summary(**json.loads(file.metadata.metadata[SUMMARY]))])


def _parquet(folder: Folder, name: str, action: Any, metadata: Any = None) -> Any:
    """What the action makes of a Parquet file. Raises JobError where it is none."""

    def read() -> Any:
        with folder.fs.open(f"{folder.path}/{name}", "rb") as file:
            try:
                return action(pq.ParquetFile(file, metadata=metadata))
            except OSError as error:
                if type(error) is OSError and error.errno is None:  # of the format, not of the store: it will not pass
                    raise pa.ArrowInvalid(str(error)) from error
                raise

    try:
        return attempt(read)
    except FileNotFoundError as error:
        raise JobError(f"{folder.url}/{name}: has vanished; is something else at work on this output?") from error
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(folder, name, error) from error


def _unreadable(folder: Folder, name: str, error: Exception) -> JobError:
    reason = str(error).splitlines()[0]
    return JobError(f"{folder.url}/{name}: cannot be read ({reason}); remove it and run the job again")
