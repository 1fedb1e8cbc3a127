"""Finds the shards of the input, with their row counts and schema."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import cached_property, reduce
from typing import Any

import fsspec
import pyarrow as pa

from exspec.pipeline.errors import JobError, first_line, job_errors
from exspec.pipeline.input.formats import FormatError, scan, suffix_of
from exspec.pipeline.input.plan import Plan, Shard, decode_row, decode_schema
from exspec.pipeline.input.reading import FORMAT, Bytes, RangeFile, read_footer
from exspec.pipeline.input.schemas import nullable, refuse_duplicates, unified
from exspec.pipeline.input.snapshot import locate, probe
from exspec.pipeline.input.tables import TableVersion, find_tables, read_iceberg, read_table
from exspec.pipeline.storage import at_once, attempt

KINDS = "Parquet, JSONL, CSV or Arrow"


@dataclass(frozen=True)
class Candidate:
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

    def wants(self, place: Candidate) -> bool:
        if place.name in self.settled:
            # Its footer is not read again, but a change since then must be noticed.
            shard = self.planned[place.name]
            return probe(place.fs, place.path, shard)[:2] != (shard.size, shard.etag)
        if place.name in self.planned or self.newer_than is None:
            return True
        return bool(attempt(lambda: place.fs.modified(place.path)) > self.newer_than)


def find_shards(
    urls: list[str], options: dict[str, Any], before: Plan | None = None, since: Since | None = None
) -> tuple[list[Shard], pa.Schema]:
    """The shards of folders, globs and paths, sorted by name, and their schema. Empty files are skipped.

    A Delta or Iceberg table stands for the files of its newest version, or of the planned one.

    before: the plan of an earlier run; new shards must have its schema. since: files to skip.
    Raises JobError naming what cannot be read.
    """
    planned = before.shards if before else []
    listing = Listing(options, [] if since else planned)
    places = _distinct([place for url in urls for place in listing.places(url)])
    if since:
        _refuse_rewritten(planned, places)
    known = nullable(decode_schema(before.schema)) if before and before.schema else None
    if not places and not (since and known):
        raise JobError(f"input: no {KINDS} files in {', '.join(urls)}")
    by_name = {shard.name: shard for shard in planned}
    if since:
        wanted = at_once(since.wants, places)
        places = [place for place, new in zip(places, wanted, strict=True) if new]
    footers = at_once(lambda place: _footer(place, by_name.get(place.name), known), places)
    if not footers and not known:
        raise JobError(f"input: no {KINDS} files in {', '.join(urls)} are newer than since")
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


def _distinct(places: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, each once. Raises JobError if two have the same name, or one has two names."""
    names: dict[str, Candidate] = {}
    for place in places:
        other = names.setdefault(place.name, place)
        if other.url != place.url:
            raise JobError(
                f"input: {other.url} and {place.url} would both be the shard {place.name!r}; give a folder above both"
            )
    by_url = {place.url: place.name for place in names.values()}
    for name, place in names.items():
        if by_url[place.url] != name:
            raise JobError(
                f"input: {place.url} is given twice, as {name!r} and {by_url[place.url]!r}; give one folder above both"
            )
    return list(names.values())


def _refuse_rewritten(planned: Iterable[Shard], places: Iterable[Candidate]) -> None:
    """Raises JobError if a table was rewritten: its old rows would be generated again as new ones."""
    names = {place.name for place in places}
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

    def places(self, url: str) -> list[Candidate]:
        """The files of a folder, glob or path. Raises JobError."""
        try:
            fs, path = _open(url, self.options)
        except (ImportError, ValueError) as error:
            raise JobError(f"input {url}: {error}") from error
        with job_errors(f"input {url}: cannot be listed"):
            try:
                return self._found(url, fs, path)
            except PermissionError as error:
                raise JobError(f"input {url}: permission denied ({error})") from error

    def _found(self, url: str, fs: Any, path: str) -> list[Candidate]:
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
        return [Candidate(path.rsplit("/", 1)[-1], fs.unstrip_protocol(path), fs, path)]

    def _below(self, fs: Any, base: str) -> list[Candidate]:
        files = attempt(lambda: fs.find(base))
        tables = find_tables(files)
        found = _plain(fs, base, [f for f in files if not any(f.startswith(f"{root}/") for root in tables)])
        for root, kind in tables.items():
            if not any(part.startswith(("_", ".")) for part in root[len(base) :].split("/")):
                found += self._planned(fs, root) or _of_table(fs, base, root, read_table(fs, root, kind, files))
        return found

    def _planned(self, fs: Any, root: str) -> list[Candidate]:
        """The planned files of a table, at the planned version."""
        kept = self.kept.get(fs.unstrip_protocol(root), [])
        return [Candidate(s.name, s.url, *locate(s.url, self.options), s.version, s.values) for s in kept]


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """File system and path of an input. A chain of URLs has a protocol on both sides of `::`."""
    before, _, after = url.partition("::")
    chain = "://" in after and not before.startswith("/")
    fs, path = fsspec.url_to_fs(url, **options) if chain else locate(url, dict(options))
    return fs, path


def _plain(fs: Any, base: str, files: Iterable[str]) -> list[Candidate]:
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
        place = fs.unstrip_protocol(base)
        raise JobError(f"input {place}: has {' and '.join(found)} files; give a pattern, such as {place}/*{found[0]}")
    wanted = ".parquet" if ".parquet" in found else next(iter(found), None)
    shown = {f: name for f, name in shown.items() if wanted and kinds[f] == wanted}
    return [Candidate(name, fs.unstrip_protocol(f), fs, f) for f, name in sorted(shown.items())]


def _of_table(fs: Any, base: str, root: str, table: TableVersion) -> list[Candidate]:
    """The files of a table in the folder `root`. A file elsewhere has its whole path as name."""
    places = []
    for file in sorted(table.files, key=lambda file: file.path):
        inside = file.path.startswith(f"{root}/")
        name = file.path[len(base) :] if inside else file.path
        url = fs.unstrip_protocol(file.path)
        places.append(Candidate(name.lstrip("/"), url, fs, file.path, table.version, file.values, table))
    return places


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


def _footer(place: Candidate, known: Shard | None, schema: pa.Schema | None) -> tuple[Shard, pa.Schema]:
    file = Bytes(place.fs, place.path)
    try:
        file.size, content, stamp = probe(place.fs, place.path, known)
        if suffix_of(place.name):
            return _counted(place, file, content, stamp, known, schema)
        opened = read_footer(file)
    except FORMAT as error:
        if isinstance(error, FormatError):
            raise JobError(f"{place.url}: {error}") from error
        whole = file.refused or not file.fetches or suffix_of(place.name)
        what = "cannot be read" if whole else "not a Parquet file"
        raise JobError(f"{place.url}: {what} ({first_line(file.refused or error)})") from error
    refuse_duplicates(place.url, opened.schema_arrow)
    if place.table:
        place.table.check(place.url, opened.schema_arrow)
    fields = [*nullable(opened.schema_arrow), *(decode_row(place.values).schema if place.values else ())]
    shard = Shard(
        place.name, place.url, opened.metadata.num_rows, file.size, content, stamp, place.version, place.values
    )
    return shard, pa.schema(fields)


def _counted(
    place: Candidate, file: Bytes, content: str, stamp: str, known: Shard | None, planned: pa.Schema | None
) -> tuple[Shard, pa.Schema]:
    """A file without a footer, which is scanned unless it is unchanged since it was planned."""
    if known and planned and (known.size, known.etag) == (file.size, content):
        return replace(known, url=place.url, stamp=stamp), planned
    rows, schema = scan(place.name, lambda: RangeFile(file))
    refuse_duplicates(place.url, schema)
    return Shard(place.name, place.url, rows, file.size, content, stamp), nullable(schema)
