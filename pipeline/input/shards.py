"""Finds the shards of the input, with their row counts and schema."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import cached_property, reduce
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa

from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError, job_errors
from exspec.pipeline.input.formats import SUFFIXES, FormatError, scan, suffix_of
from exspec.pipeline.input.plan import Plan, Shard, decode_row, decode_schema, encode_row
from exspec.pipeline.input.reading import FORMAT, Bytes, RangeFile, read_footer
from exspec.pipeline.input.schemas import nullable, refuse_deep, refuse_duplicates, unified
from exspec.pipeline.input.snapshot import IrregularError, locate, probe
from exspec.pipeline.input.tables import TableVersion, find_tables, read_iceberg, read_table
from exspec.pipeline.storage import at_once, attempt, refuse_user

KINDS = "Parquet, JSONL, CSV or Arrow"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # in the name of a folder, as Hive and Spark write null


@dataclass(frozen=True)
class Location:
    """A file that may be a shard. version, values: as in Shard. table: the table that it belongs to."""

    name: str
    url: str
    fs: Any
    path: str
    version: str = ""
    values: str = ""
    table: TableVersion | None = None


@dataclass(frozen=True)
class Since:
    """Skips settled shards, and unplanned shards that are not newer than a time."""

    before: Plan | None
    settled: Set[str]
    newer_than: datetime | None

    @cached_property
    def planned(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.before.shards} if self.before else {}

    def wants(self, location: Location) -> bool:
        if location.name in self.settled:
            # Its footer is not read again, but a change since then must be noticed.
            shard = self.planned[location.name]
            return probe(location.fs, location.path, shard)[:2] != (shard.size, shard.etag)
        if location.name in self.planned or self.newer_than is None:
            return True
        return bool(attempt(lambda: location.fs.modified(location.path)) > self.newer_than)


def find_shards(
    urls: list[str],
    options: dict[str, Any],
    before: Plan | None = None,
    since: Since | None = None,
    bad_lines: bool = False,
) -> tuple[list[Shard], pa.Schema]:
    """The shards of folders, globs and paths, sorted by name, and their schema. Empty files are skipped.

    A Delta or Iceberg table stands for the files of its newest version, or of the planned one.

    before: the plan of an earlier run; new shards must have its schema. since: files to skip. bad_lines: a line that
    cannot be read is a row, not an error.
    Raises JobError naming what cannot be read.
    """
    planned = before.shards if before else []
    listing = Listing(options, [] if since else planned)
    locations = _distinct([location for url in urls for location in listing.locations(url)])
    if since:
        _refuse_rewritten(planned, locations)
    known = nullable(decode_schema(before.schema)) if before and before.schema else None
    if not locations and not (since and known):
        raise JobError(f"input: no {KINDS} files in {', '.join(urls)}; exspec reads {SUFFIXES}")
    by_name = {shard.name: shard for shard in planned}
    if since:
        wanted = at_once(since.wants, locations)
        locations = [location for location, new in zip(locations, wanted, strict=True) if new]
    locations = _in_folders(locations, planned, known)
    ignored = _ignored(planned, known)

    def footer(location: Location) -> tuple[Shard, pa.Schema]:
        return _footer(location, by_name.get(location.name), known, ignored, bad_lines)

    footers = at_once(footer, locations)
    if not footers and not known:
        raise JobError(f"input: no {KINDS} files in {', '.join(urls)} are newer than the date in since")
    # A file without footer and rows has no known columns.
    footers = [found for found in footers if found[0].rows or not suffix_of(found[0].name)]
    if not footers and not known:
        raise JobError(f"input: the files in {', '.join(urls)} have no rows")
    schema = _schema(footers, known)
    shards = sorted((shard for shard, _ in footers if shard.rows), key=lambda s: s.name)
    if not shards and not known:
        raise JobError(f"input: the files in {', '.join(urls)} have no rows")
    return shards, schema


def _schema(footers: Sequence[tuple[Shard, pa.Schema]], known: pa.Schema | None) -> pa.Schema:
    first = "the first run's input" if known else footers[0][0].url

    def join(schema: pa.Schema, footer: tuple[Shard, pa.Schema]) -> pa.Schema:
        return unified(schema, first, footer[0].url, footer[1], fixed=known is not None)

    return reduce(join, footers, known or footers[0][1])


def _distinct(locations: Iterable[Location]) -> list[Location]:
    """The locations, each once. Raises JobError if two have the same name, one has two, or one is not UTF-8."""
    names: dict[str, Location] = {}
    for location in locations:
        if (shown := location.url.encode(errors="backslashreplace").decode()) != location.url:
            raise JobError(f"input {shown}: the file's name is not UTF-8; rename the file")
        other = names.setdefault(location.name, location)
        if other.url != location.url:
            raise JobError(
                f"input: {other.url} and {location.url} would both be the shard {location.name!r}; "
                "give a folder above both"
            )
    by_url = {location.url: location.name for location in names.values()}
    for name, location in names.items():
        if by_url[location.url] != name:
            raise JobError(
                f"input: {location.url} is given twice, as {name!r} and {by_url[location.url]!r}; "
                "give one folder above both"
            )
    return list(names.values())


def _refuse_rewritten(planned: Iterable[Shard], locations: Iterable[Location]) -> None:
    """Raises JobError if a table was rewritten: its old rows would be generated again as new ones."""
    names = {location.name for location in locations}
    if gone := [shard for shard in planned if shard.version and shard.name not in names]:
        raise JobError(
            f"{gone[0].url}: is no longer a file of its table, whose new files may contain its rows; "
            "leave out since, or start over with --restart"
        )


class Listing:
    """Finds the files of an input. planned: shards of tables, which are read at the planned version."""

    def __init__(self, options: dict[str, Any], planned: Sequence[Shard]) -> None:
        self.options = options
        self.kept: dict[str, list[Shard]] = {}
        for shard in planned:
            if shard.version:
                self.kept.setdefault(shard.version.rpartition("@")[0], []).append(shard)

    def locations(self, url: str) -> list[Location]:
        """The files of a folder, glob or path. Raises JobError."""
        refuse_user(url)
        try:
            fs, path = _open(url, self.options)
        except (ImportError, ValueError) as error:
            raise JobError(f"input {url}: {error}") from error
        with job_errors(f"input {url}: cannot be listed"):
            try:
                return self._found(url, fs, path)
            except PermissionError as error:
                raise JobError(f"input {url}: permission denied ({error})") from error

    def _found(self, url: str, fs: Any, path: str) -> list[Location]:
        magic = [path.index(c) for c in "*?[" if c in path]
        if magic and not attempt(lambda: fs.exists(path)):  # these characters may be part of a name
            _refuse_inside(fs, path, url)
            base = path[: min(magic)].rpartition("/")[0]
            return _plain(fs, base, attempt(lambda: fs.glob(path)))
        if attempt(lambda: fs.isdir(path)):
            if "=" in path.rpartition("/")[2]:
                _refuse_inside(fs, path, url)
            return self._below(fs, path.rstrip("/"))
        if not attempt(lambda: fs.exists(path)):
            raise JobError(f"input {url}: no such file or folder")
        if path.endswith(".metadata.json"):
            root = path.rpartition("/metadata/")[0]
            return self._planned(fs, root) or _of_table(fs, root, root, read_iceberg(fs, path))
        return [Location(path.rsplit("/", 1)[-1], fs.unstrip_protocol(path), fs, path)]

    def _below(self, fs: Any, base: str) -> list[Location]:
        files = attempt(lambda: fs.find(base))
        tables = find_tables(files)
        found = _plain(fs, base, [f for f in files if not any(f.startswith(f"{root}/") for root in tables)])
        for root, kind in tables.items():
            if not any(part.startswith(("_", ".")) for part in root[len(base) :].split("/")):
                found += self._planned(fs, root) or _of_table(fs, base, root, read_table(fs, root, kind, files))
        return found

    def _planned(self, fs: Any, root: str) -> list[Location]:
        """The planned files of a table, at the planned version."""
        kept = self.kept.get(fs.unstrip_protocol(root), [])
        return [Location(s.name, s.url, *locate(s.url, self.options), s.version, s.values) for s in kept]


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """File system and path of an input. A chain of URLs has a protocol on both sides of `::`."""
    before, _, after = url.partition("::")
    chain = "://" in after and not before.startswith("/")
    fs, path = fsspec.url_to_fs(url, **options) if chain else locate(url, dict(options))
    return fs, path


def _plain(fs: Any, base: str, files: Iterable[str]) -> list[Location]:
    """The data files: Parquet, or without Parquet files those of one other format."""
    below = {f: f[len(base) :].lstrip("/") for f in files}
    # Names that begin with _ or . are not data, by the convention of Spark and others: markers, staging, checkpoints.
    # The `datasets` library keeps cache files next to its data.
    shown = {
        f: n
        for f, n in below.items()
        if not any(part.startswith(("_", ".")) for part in n.split("/")) and not fnmatch(n, "*cache-*.arrow")
    }
    kinds = {f: ".parquet" if f.endswith(".parquet") else suffix_of(f) for f in shown}
    found = sorted({kind for kind in kinds.values() if kind})
    if len(found) > 1 and ".parquet" not in found:
        location = fs.unstrip_protocol(base)
        raise JobError(
            f"input {location}: has {' and '.join(found)} files; give a pattern, such as {location}/*{found[0]}"
        )
    wanted = ".parquet" if ".parquet" in found else next(iter(found), None)
    shown = {f: name for f, name in shown.items() if wanted and kinds[f] == wanted}
    return [Location(name, fs.unstrip_protocol(f), fs, f) for f, name in sorted(shown.items())]


def _keys(name: str) -> list[tuple[str, str]]:
    """Key and value of each folder called `key=value` in the name of a shard, as Hive and Spark write tables."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return [(unquote(key), unquote(value)) for key, equals, value in pairs if key and equals]


def _in_folders(locations: Sequence[Location], planned: Iterable[Shard], known: pa.Schema | None) -> list[Location]:
    """The locations with the columns that folders name, except in tables; null if a file is outside such a folder."""
    names = [location.name for location in locations if not location.table]
    names += [shard.name for shard in planned if not shard.version]
    keys = dict.fromkeys(key for name in names for key, _ in _keys(name) if known is None or key in known.names)
    return [
        location if location.table else replace(location, values=_values(location.name, keys)) for location in locations
    ]


def _values(name: str, keys: Iterable[str]) -> str:
    """The columns that folders name, as in Shard. Raises JobError if two folders of the shard have one name."""
    pairs = _keys(name)
    if len(own := dict(pairs)) < len(pairs):
        raise JobError(f"input: the folders of {name!r} name a column twice; expected each key once")
    values = dict.fromkeys(keys, NO_VALUE) | own
    columns = {key: pa.array([None if value == NO_VALUE else value], pa.string()) for key, value in values.items()}
    return encode_row(pa.record_batch(columns)) if columns else ""


def _ignored(planned: Iterable[Shard], known: pa.Schema | None) -> set[str]:
    """Keys of folders that are no columns of the job, because it was planned by a version that did not read them."""
    return {key for shard in planned for key, _ in _keys(shard.name)} - set(known.names if known else ())


def _outside(values: str, inside: Set[str]) -> pa.Table:
    """The values of a shard, without columns that are in the file: those go before the folder's name."""
    row = decode_row(values) if values else pa.table({})
    return row.select([name for name in row.column_names if name not in inside])


def _of_table(fs: Any, base: str, root: str, table: TableVersion) -> list[Location]:
    """The files of a table in the folder `root`. A file elsewhere has its whole path as name."""
    locations = []
    for file in sorted(table.files, key=lambda file: file.path):
        inside = file.path.startswith(f"{root}/")
        name = file.path[len(base) :] if inside else file.path
        url = fs.unstrip_protocol(file.path)
        locations.append(Location(name.lstrip("/"), url, fs, file.path, table.version, file.values, table))
    return locations


def _refuse_inside(fs: Any, pattern: str, url: str) -> None:
    """Raises JobError for a pattern inside a table's folder: it would find files that the table has removed."""
    folder = pattern
    while (folder := folder.rpartition("/")[0]).strip("/"):
        for mark in ("_delta_log/*.json", "metadata/*.metadata.json"):
            if found := attempt(lambda mark=mark: fs.glob(f"{folder}/{mark}")):  # type: ignore[misc]
                table = fs.unstrip_protocol(next(iter(find_tables(found))))
                raise JobError(f"input {url}: matches files of the table {table}; give the table's folder instead")
        if not any(c in folder for c in "*?[") and "=" not in folder.rpartition("/")[2]:  # nor a partition
            return


def _footer(
    location: Location, known: Shard | None, schema: pa.Schema | None, ignored: Set[str], bad_lines: bool
) -> tuple[Shard, pa.Schema]:
    """A file as a shard, and its schema. known: the shard as planned. schema: as planned. ignored: keys of folders."""
    file = Bytes(location.fs, location.path)
    try:
        file.size, content, stamp = probe(location.fs, location.path, known)
        if suffix_of(location.name) and known and schema and (known.size, known.etag) == (file.size, content):
            return replace(known, url=location.url, stamp=stamp), schema  # without footer, it would be scanned
        rows, found = _read(location, file, bad_lines)
    except FORMAT as error:
        if isinstance(error, IrregularError):
            raise
        if isinstance(error, FormatError):
            raise JobError(f"{location.url}: {error}") from error
        if "too deeply nested" in str(error):
            raise JobError(
                f"{location.url}: a column is nested deeper than Arrow reads: 100 levels, of which a list takes two; "
                "write the column as JSON text"
            ) from error
        opened = file.fetches or isinstance(error, pa.ArrowInvalid)
        whole = file.refused or not opened or suffix_of(location.name)
        what = "cannot be read" if whole else "not a Parquet file"
        if not (whole or location.name.endswith(".parquet")):
            what += f", and its suffix names no other format; exspec reads {SUFFIXES}"
        raise JobError(f"{location.url}: {what} ({first_line(file.refused or error)})") from error
    refuse_duplicates(location.url, found)
    refuse_deep(location.url, found)
    if location.table:
        location.table.check(location.url, found)
    row = _outside(location.values, {*found.names, *ignored})
    values = encode_row(row.to_batches()[0]) if row.num_columns else ""
    shard = Shard(location.name, location.url, rows, file.size, content, stamp, location.version, values)
    return shard, pa.schema([*nullable(found), *row.schema])


def _read(location: Location, file: Bytes, bad_lines: bool) -> tuple[int, pa.Schema]:
    """Number of rows and schema of a file. Raises one of FORMAT."""
    if suffix_of(location.name):
        return scan(location.name, lambda: RangeFile(file), bad_lines)
    opened = read_footer(file)
    return opened.metadata.num_rows, opened.schema_arrow
