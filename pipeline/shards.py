"""The input: Parquet shards, found and measured by their footers, and read."""

from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.errors import JobError
from exspec.pipeline.plan import Chunk, Plan, Shard, decode_schema
from exspec.pipeline.storage import attempt, etag

READERS = 16  # footers read at once


@dataclass(frozen=True)
class Since:
    """Leaves out shards that are settled, and those that no plan knows yet and that are not newer than a time."""

    before: Plan | None
    settled: Set[str]
    newer_than: datetime | None

    @cached_property
    def planned(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.before.shards} if self.before else {}

    def wants(self, name: str, url: str, fs: Any) -> bool:
        if name in self.settled:
            # Its footer is not read again, but what was written to it since must not be passed over.
            info, shard = attempt(lambda: fs.info(url)), self.planned[name]
            return (int(info["size"]), etag(info)) != (shard.size, shard.etag)
        return name in self.planned or self.newer_than is None or attempt(lambda: fs.modified(url)) > self.newer_than


def find_shards(
    urls: list[str], options: dict[str, Any], before: Plan | None = None, since: Since | None = None
) -> tuple[list[Shard], pa.Schema]:
    """The Parquet files behind folders, globs and paths, with the rows their footers tell; empty ones are left out.

    before: the plan of an earlier run, whose schema new shards must have. since: which files to leave out.
    Returns the shards by name and the schema that they share. Raises JobError naming what cannot be read.
    """
    names: dict[str, tuple[str, str, Any]] = {}
    for place in (place for url in urls for place in _list(url, options)):
        other = names.setdefault(place[0], place)
        if other[1] != place[1]:
            raise JobError(
                f"input: {other[1]} and {place[1]} would both be the shard {place[0]!r}; give a folder above both"
            )
    places = list(names.values())
    by_url = {url: name for name, url, _ in places}
    for name, url, _ in places:
        if by_url[url] != name:
            raise JobError(f"input: {url} is given twice, as {name!r} and {by_url[url]!r}; give one folder above both")
    known = decode_schema(before.schema) if before and before.schema else None
    if not places and not (since and known):
        raise JobError(f"input: no Parquet files in {', '.join(urls)}")
    with ThreadPoolExecutor(READERS) as pool:
        if since:
            wanted = list(pool.map(lambda place: since.wants(*place), places))
            places = [place for place, new in zip(places, wanted, strict=True) if new]
        footers = list(pool.map(lambda place: _footer(*place), places))
    if not footers and not known:
        raise JobError(f"input: no Parquet files in {', '.join(urls)} are newer than since tells")
    first = "the first run's input" if known else footers[0][0].url
    schema = known or footers[0][1]
    for shard, other in footers:
        if not other.equals(schema):
            _refuse_difference(first, schema, shard, other)
    shards = sorted((shard for shard, _ in footers if shard.rows), key=lambda s: s.name)
    if not shards and not known:
        raise JobError(f"input: the Parquet files in {', '.join(urls)} hold no rows")
    return shards, schema


def _list(url: str, options: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(name, url, file system) of the files that one input stands for."""
    try:
        fs, path = fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise JobError(f"input {url}: {error}") from error
    try:
        if "*" in path or "?" in path or "[" in path:
            found = attempt(lambda: fs.glob(path))
            base = path[: min(path.index(c) for c in "*?[" if c in path)].rpartition("/")[0]
        elif attempt(lambda: fs.isdir(path)):
            found = attempt(lambda: fs.find(path))
            base = path.rstrip("/")
        elif attempt(lambda: fs.exists(path)):
            return [(path.rsplit("/", 1)[-1], fs.unstrip_protocol(path), fs)]
        else:
            raise JobError(f"input {url}: no such file or folder")
    except PermissionError as error:
        raise JobError(f"input {url}: permission denied ({error})") from error
    except JobError:
        raise
    except Exception as error:  # an unreachable or refusing store has many names
        raise JobError(f"input {url}: cannot be listed: {type(error).__name__}: {error}") from error
    below = {f: f[len(base) :].lstrip("/") for f in found if f.endswith(".parquet")}
    # What begins so is not data, by the convention of Spark and others: markers, staging folders, checkpoints.
    shown = {f: n for f, n in below.items() if not any(part.startswith(("_", ".")) for part in n.split("/"))}
    return [(name, fs.unstrip_protocol(f), fs) for f, name in sorted(shown.items())]


def _footer(name: str, url: str, fs: Any) -> tuple[Shard, pa.Schema]:
    def read() -> Any:
        with fs.open(url, "rb") as file:
            return pq.read_metadata(file)

    try:
        info, metadata = attempt(lambda: fs.info(url)), attempt(read)
    except pa.ArrowInvalid as error:
        raise JobError(f"{url}: not a Parquet file ({str(error).splitlines()[0]})") from error
    except OSError as error:
        raise JobError(f"{url}: cannot be read: {error}") from error
    shard = Shard(name, url, metadata.num_rows, int(info["size"]), etag(info))
    return shard, metadata.schema.to_arrow_schema().remove_metadata()


def _refuse_difference(first: str, schema: pa.Schema, shard: Shard, other: pa.Schema) -> None:
    for field in schema:
        if field.name not in other.names:
            raise JobError(f"{shard.url}: no column {field.name!r}, which {first} has")
        if other.field(field.name).type != field.type:
            raise JobError(
                f"{shard.url}: column {field.name!r} is {other.field(field.name).type}, but {field.type} in {first}"
            )
    extra = [name for name in other.names if name not in schema.names]
    if extra:
        raise JobError(f"{shard.url}: column {extra[0]!r} is not in {first}; expected one schema for all shards")


def vanished(shards: list[Shard], options: dict[str, Any]) -> set[str]:
    """Names of the shards whose files are no longer there."""

    def gone(shard: Shard) -> bool:
        fs, path = fsspec.url_to_fs(shard.url, **options)
        return not attempt(lambda: fs.exists(path))

    with ThreadPoolExecutor(READERS) as pool:
        return {shard.name for shard, is_gone in zip(shards, pool.map(gone, shards), strict=True) if is_gone}


def read_chunk(chunk: Chunk, options: dict[str, Any]) -> pa.Table:
    """The chunk's rows, from the row groups that hold them."""

    def read() -> pa.Table:
        fs, path = fsspec.url_to_fs(chunk.shard.url, **options)
        with fs.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            starts = [0]
            for group in range(parquet.num_row_groups):
                starts.append(starts[-1] + parquet.metadata.row_group(group).num_rows)
            last = chunk.first + chunk.rows
            wanted = [g for g in range(parquet.num_row_groups) if starts[g] < last and starts[g + 1] > chunk.first]
            return parquet.read_row_groups(wanted).slice(chunk.first - starts[wanted[0]], chunk.rows)

    table = attempt(read)
    if table.num_rows != chunk.rows:
        raise JobError(f"{chunk}: the shard holds fewer rows than planned")
    return table.replace_schema_metadata()
