"""Reads the rows of a job from its files, staged or shown, parts or merged files."""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError
from exspec.pipeline.output.columns import completed, conform
from exspec.pipeline.output.owner import Output
from exspec.pipeline.storage import STREAMS, Folder, at_once, attempt

READ_AHEAD = 64 << 20  # bytes of files that are read ahead
UNREADABLE = (pa.ArrowException, OSError, ValueError)  # ValueError: a name in the footer is not UTF-8


def tables(output: Output, columns: list[str] | None, intact: bool = True) -> Iterator[pa.Table]:
    """The rows of a job in order. columns: None means all. Columns that an older version did not write are null.

    intact: compare every file with its digest first, which reads all of it. Raises JobError if one is damaged.
    """
    folder, shown, sizes = output.folder, output.folder.names(), dict(output.state.sizes())
    schema = columns_of(output)
    if columns is not None:
        known = {field.name: field for field in schema}
        schema = pa.schema([known.get(name, pa.field(name, pa.null())) for name in dict.fromkeys(columns)])

    def read(name: str) -> Iterator[pa.Table]:
        place = name if name in shown else output.place(name)
        if intact:
            check(output, name, place)
        return (conform(table, schema, f"{folder.url}/{place}") for table in read_groups(folder, place, columns))

    for batch in batches(output.state.names(), sizes):
        if len(batch) == 1:
            yield from read(batch[0])
        else:
            for found in at_once(lambda name: list(read(name)), batch):
                yield from found


def check(output: Output, name: str, place: str) -> None:
    """Compare a file with its digest in the log. place: its present path. Raises JobError if it is damaged."""
    if _reading(output.folder, place, md5) != output.state.digest(name):
        raise damaged(output.folder, place)


def md5(file: Any) -> str:
    """The MD5 of an open file in hex."""
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def columns_of(output: Output) -> pa.Schema:
    """The columns of a job's files, whichever version wrote them."""
    first = next(iter(output.state.names()), None)
    if first is None:
        return pa.schema([])
    return completed(parquet(output.folder, output.place(first), lambda file: file.schema_arrow))


def samples(output: Output, count: int) -> list[dict[str, Any]]:
    """The first rows with a completion: id and completion."""
    found = (row for table in tables(output, ["id", "completion"], intact=False) for row in table.to_pylist())
    return list(islice((row for row in found if row["completion"]), count))


def batches(names: Iterable[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    """The names in order, in batches that may be read ahead."""
    batch: list[str] = []
    held = 0
    for name in names:
        if batch and (held + sizes[name] > READ_AHEAD or len(batch) == 4 * STREAMS):
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += sizes[name]
    if batch:
        yield batch


def read_groups(folder: Folder, name: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The rows of a file, a row group at a time."""
    metadata = parquet(folder, name, lambda file: file.metadata)
    for group in range(metadata.num_row_groups):
        yield _read_group(folder, name, metadata, group, columns)


def read_range(
    folder: Folder, name: str, first: int, rows: int, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """A range of the rows of a file."""
    metadata = parquet(folder, name, lambda file: file.metadata)
    start = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        low, high = max(first, start) - start, min(first + rows, start + count) - start
        if low < high:
            yield _read_group(folder, name, metadata, group, columns).slice(low, high - low)
        start += count
    if start < first + rows:
        raise JobError(f"{folder.url}/{name}: has {start} rows, expected {first + rows} or more")


def _read_group(folder: Folder, name: str, metadata: Any, group: int, columns: list[str] | None) -> Any:
    return parquet(folder, name, lambda file: file.read_row_group(group, columns, use_threads=False), metadata)


def parquet(folder: Folder, name: str, action: Any, metadata: Any = None) -> Any:
    """The result of an action on a Parquet file. Raises JobError if it cannot be read."""

    def read(file: Any) -> Any:
        try:
            return action(opened(file, metadata))
        except OSError as error:
            if type(error) is OSError and error.errno is None:  # of the format, not of the store: do not retry
                raise pa.ArrowInvalid(str(error)) from error
            raise

    return _reading(folder, name, read)


def _reading(folder: Folder, name: str, action: Callable[[Any], Any]) -> Any:
    """The result of an action on an open file. Raises JobError if it cannot be read."""

    def read() -> Any:
        with folder.fs.open(f"{folder.path}/{name}", "rb") as file:
            return action(file)

    try:
        return attempt(read)
    except FileNotFoundError as error:
        raise JobError(f"{folder.url}/{name}: has vanished; is another process changing this output?") from error
    except OSError as error:  # of the store: the file may be whole
        raise JobError(f"{folder.url}/{name}: cannot be read ({first_line(error)})") from error
    except UNREADABLE as error:
        raise unreadable(folder, name, error) from error


def opened(file: Any, metadata: Any = None) -> pq.ParquetFile:
    """A Parquet file from a Python file. Arrow's threads are not used: they release the file some time after the read,
    and a process that exits at that moment is aborted (apache/arrow#34314)."""
    return pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True, pre_buffer=False)


def open_part(folder: Folder, name: str, content: bytes) -> pa.Table:
    """The rows of a Parquet file from its bytes. Raises JobError if it cannot be read."""
    try:
        return opened(io.BytesIO(content)).read(use_threads=False)
    except UNREADABLE as error:
        raise unreadable(folder, name, error) from error


def unreadable(folder: Folder, name: str, error: Exception) -> JobError:
    return JobError(f"{folder.url}/{name}: cannot be read ({first_line(error)}); remove it and run the job again")


def damaged(folder: Folder, name: str) -> JobError:
    return JobError(f"{folder.url}/{name}: is damaged; remove it and run the job again")
