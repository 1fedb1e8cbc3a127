"""Delta and Iceberg tables: the files that hold the rows of one version."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from exspec.pipeline.errors import JobError, job_errors
from exspec.pipeline.input.plan import encode_row
from exspec.pipeline.storage import attempt

LOG, METADATA = "/_delta_log/", "/metadata/"
FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True)
class TableFile:
    """A file of a table. values: of columns that are not in the file, as in `Shard.values`."""

    path: str
    values: str = ""


@dataclass(frozen=True)
class TableVersion:
    """One version of a table. columns: of its files, each with its Parquet field id if it has one."""

    version: str
    files: list[TableFile]
    columns: dict[str, int | None]

    def check(self, url: str, schema: pa.Schema) -> None:
        """Raises JobError if the columns of the file `url` differ from the table's in name or field id."""
        found = {field.name: int((field.metadata or {}).get(FIELD_ID, -1)) for field in schema}
        advice = "rewrite the table's files with its present columns"
        if odd := sorted(self.columns.keys() ^ found.keys()):
            where = "the table, but not the file" if odd[0] in self.columns else "the file, but not the table"
            raise JobError(f"{url}: column {odd[0]!r} is in {where}; {advice}")
        for name, number in self.columns.items():
            if number is not None and found[name] not in (-1, number):
                raise JobError(f"{url}: column {name!r} is a different column in the table, after a rename; {advice}")


def find_tables(files: Iterable[str]) -> dict[str, str]:
    """Folders of the files that are tables, with the kind of each."""
    kinds = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        if LOG in file:
            kinds[file.partition(LOG)[0]] = "delta"
        elif name.endswith(".metadata.json") and f"{folder}/".endswith(METADATA):
            kinds[folder.removesuffix(METADATA[:-1])] = "iceberg"
    return kinds


def read_table(fs: Any, root: str, kind: str, files: Sequence[str]) -> TableVersion:
    """The newest version of the table in the folder `root`. files: all files in it.

    Raises JobError if it cannot be read, or if it has deleted rows that would be read.
    """
    url = fs.unstrip_protocol(root)
    if kind == "delta":
        return _delta(fs, root, url, files)
    return _iceberg(fs, url, _current([f for f in files if f.startswith(f"{root}{METADATA}")], url))


def read_iceberg(fs: Any, metadata: str) -> TableVersion:
    """The Iceberg table of a metadata file."""
    return _iceberg(fs, fs.unstrip_protocol(metadata.rpartition(METADATA)[0]), metadata)


def _library(name: str, kind: str, extra: str, url: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise JobError(
            f"input {url}: is {kind} table, whose folder may contain files with deleted rows, and "
            f"{name.partition('.')[0]} is not installed to tell which; install exspec[{extra}]"
        ) from error


def _delta(fs: Any, root: str, url: str, files: Sequence[str]) -> TableVersion:
    library = _library("deltalake", "a Delta", "delta", url)
    with tempfile.TemporaryDirectory(prefix="exspec-") as here:
        # Copy the log, so that the input's file system and options are used.
        for path, content in _log(fs, root, files):
            (place := Path(here + path[len(root) :])).parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        try:
            table = library.DeltaTable(here)
            _refuse_deletions(library, table, url)
            return _version(fs, root, url, table)
        except library.exceptions.DeltaError as error:
            raise JobError(f"input {url}: cannot be read as a Delta table: {error}") from error


def _log(fs: Any, root: str, files: Sequence[str]) -> Iterable[tuple[str, bytes]]:
    """The files of a table's log, from the last checkpoint on."""
    log = [file for file in files if file.startswith(f"{root}{LOG}")]
    hint = f"{root}{LOG}_last_checkpoint"
    first = int(json.loads(attempt(lambda: fs.cat_file(hint)))["version"]) if hint in log else 0
    for path in log:
        number = re.match(r"\d{20}", path.rpartition("/")[2])
        if number is None or int(number[0]) >= first:
            yield path, attempt(lambda path=path: fs.cat_file(path))  # type: ignore[misc]


def _refuse_deletions(library: Any, table: Any, url: str) -> None:
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise JobError(f"input {url}: tables with delta.columnMapping.mode are not supported")
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return
    try:
        deleted = any(batch.num_rows for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()))
    except library.exceptions.DeltaError:  # a vector in a separate file, which the copy of the log lacks
        deleted = True
    if deleted:
        raise JobError(
            f"input {url}: has deletion vectors, which are not supported; purge them with REORG TABLE ... APPLY (PURGE)"
        )


def _version(fs: Any, root: str, url: str, table: Any) -> TableVersion:
    split = table.metadata().partition_columns
    names = [field.name for field in table.schema().fields if field.name not in split]
    adds = pa.table(table.get_add_actions(flatten=True))
    files = []
    for row in range(adds.num_rows):
        path = unquote(adds["path"][row].as_py())
        values = pa.record_batch({name: adds[f"partition.{name}"][row : row + 1].combine_chunks() for name in split})
        place = fs._strip_protocol(path) if "://" in path else f"{root}/{path}"
        files.append(TableFile(place, encode_row(values) if split else ""))
    return TableVersion(f"{url}@{table.version()}", files, dict.fromkeys(names))


def _current(files: Sequence[str], url: str) -> str:
    """The newest metadata file of an Iceberg table. Only the catalog knows for sure which one is current."""
    numbers = {f: re.match(r"v?(\d+)", f.rpartition("/")[2]) for f in files if f.endswith(".metadata.json")}
    newest = max(int(number[1]) if number else -1 for number in numbers.values())
    found = sorted(file for file, number in numbers.items() if (int(number[1]) if number else -1) == newest)
    if len(found) > 1:
        raise JobError(
            f"input {url}: the Iceberg table has {found[0]} and {found[1].rpartition('/')[2]}, and only its catalog "
            "knows which is current; give that file as input"
        )
    return found[0]


def _iceberg(fs: Any, url: str, metadata: str) -> TableVersion:
    library = _library("pyiceberg.table", "an Iceberg", "iceberg", url)
    with job_errors(f"input {url}: cannot be read as an Iceberg table"):
        table = _static_table(library.StaticTable, fs, metadata)
        tasks = list(table.scan().plan_files())
    if any(task.delete_files for task in tasks):
        raise JobError(
            f"input {url}: has delete files, which are not supported; compact the table's data "
            "files first (rewrite_data_files)"
        )
    if odd := [task.file.file_path for task in tasks if task.file.file_format.name != "PARQUET"]:
        raise JobError(f"input {url}: {odd[0]} is not a Parquet file; expected only Parquet files")
    files = [TableFile(fs._strip_protocol(task.file.file_path)) for task in tasks]
    columns = {field.name: field.field_id for field in table.schema().fields}
    return TableVersion(f"{url}@{table.metadata.current_snapshot_id}", files, columns)


def _static_table(make: Callable[..., Any], fs: Any, metadata: str) -> Any:
    """The table of a metadata file, read with the input's file system."""
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.fsspec import FsspecFileIO
    from pyiceberg.serializers import FromInputFile

    class Files(FsspecFileIO):  # type: ignore[misc, unused-ignore]
        def get_fs(self, *_: Any) -> Any:
            return fs

    files, location = Files({}), fs.unstrip_protocol(metadata)
    content = FromInputFile.table_metadata(files.new_input(location))
    return make((location,), content, location, files, NoopCatalog("exspec"))
