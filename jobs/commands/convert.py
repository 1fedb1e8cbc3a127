"""`exspec convert`: the rows of an output as one file of another kind."""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pyarrow as pa
from pyarrow.dataset import write_dataset
from pyarrow.fs import FSSpecHandler, PyFileSystem

from exspec.pipeline.errors import JobError, did_you_mean, first_line
from exspec.pipeline.input.batch import answer, is_batch
from exspec.pipeline.input.plan import decode_schema
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.contents import columns_of, tables
from exspec.pipeline.output.owner import SUCCESS, Output, read_output
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder

J = TypeVar("J", bound=Job)
BESIDE = ".job"  # what the name of the folder ends with that stands behind an output that is a file
Write = Callable[[TextIO, list[str], Iterator[dict[str, Any]]], int]


def kind_of(name: str) -> str | None:
    """The suffix by which a file is of a kind that can be written; None where it is none."""
    return next((suffix for suffix in WRITERS if name.removesuffix(".gz").endswith(suffix)), None)


def behind(job: J) -> tuple[J, str | None]:
    """A job whose output is a folder, and the file that is to be made of it, where its output was one.

    Raises JobError where that file would be an input, now or when the job is run again.
    """
    if kind_of(job.output) is None:
        return job, None
    own = Folder(job.output, job.storage_options).path
    for url in job.input:
        path = Folder(url, job.storage_options).path
        if own == path or own.startswith(f"{path}/") or fnmatch(own, path):
            raise JobError(f"output {anonymous(job.output)}: lies in the input {anonymous(url)}; give it another place")
    return job.model_copy(update={"output": f"{job.output}{BESIDE}"}), job.output


def finish(job: Job, file: str | None, code: int) -> int:
    """Make the file of a job that has one, where all its rows are done. Returns the exit code, as it was."""
    if file and code == 0:
        print(f"{convert(job.output, file, job.storage_options)} rows in {anonymous(file)}")
    return code


def partition(
    output: str, folder: str, options: dict[str, Any], by: list[str], columns: list[str] | None = None
) -> int:
    """Write the rows of an output as Parquet into folders named after the values of columns; returns how many.

    columns: of the rows; all unless given. Raises JobError where rows are missing, a column is, or the folder holds
    something.
    """
    found, target = _complete(output, options), Folder(folder, options)
    if target.exists(""):
        raise JobError(f"{folder}: is there already; expected a folder that is to be made")
    names = _columns(found, [*(columns or []), *by])
    every = tables(found, list(dict.fromkeys([*columns, *by])) if columns else names)
    first = next(every)
    count = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for table in chain([first], every):
            count += table.num_rows
            yield from table.to_batches()

    try:
        write_dataset(
            counted(),
            target.path,
            schema=first.schema,
            format="parquet",
            filesystem=PyFileSystem(FSSpecHandler(target.fs)),
            partitioning=by,
            partitioning_flavor="hive",
        )
    except pa.ArrowException as error:  # too many values, or such as no folder can be named after
        target.fs.rm(target.path, recursive=True)
        raise JobError(f"--partition-by {', '.join(by)}: {first_line(error)}") from error
    target.write(SUCCESS, b"")
    return count


def convert(output: str, file: str, options: dict[str, Any], columns: list[str] | None = None) -> int:
    """Write the rows of an output, in their order, into one file, whole or not at all; returns how many there are.

    Where the input was requests of the batch API, JSON Lines are its answers. file: a path or fsspec URL, whose suffix
    tells the kind. columns: all unless given. Raises JobError where rows are missing, or a column is.
    """
    if kind_of(file) is None:
        raise JobError(f"{file}: expected a name that ends with {' or '.join(WRITERS)}, or with .gz after it")
    found = _complete(output, options)
    folder, _, name = file.rpartition("/")
    with Folder(folder or ".", options).writing(name) as place:
        return _write(place, file, found, columns)


def _complete(output: str, options: dict[str, Any]) -> Output:
    found = read_output(Folder(output, options))
    if not found.state.complete:
        missing = sum(chunk.rows for chunk in found.state.missing())
        raise JobError(f"{output}: {missing} of {found.state.plan.rows} rows are missing; run the job again first")
    return found


def _columns(output: Output, wanted: list[str]) -> list[str]:
    """The columns of an output. Raises JobError naming those of the wanted that it has not."""
    names: list[str] = columns_of(output).names
    if missing := [name for name in wanted if name not in names]:
        raise JobError(*(f"{output.folder.url}: has no column {name!r}{did_you_mean(name, names)}" for name in missing))
    return names


def _write(place: Path, file: str, output: Output, columns: list[str] | None) -> int:
    every = _columns(output, columns or [])
    names = columns or every
    rows = (row for table in tables(output, names) for row in table.select(names).to_pylist())
    job = stored_job(output.state.description, output.folder.options)
    if kind_of(file) == ".jsonl" and columns is None and is_batch(job, decode_schema(output.state.plan.schema)):
        model, began = output.state.description["job"]["target"], int(output.state.began)
        rows = (answer(row, model, began) for row in rows)
    opened: Any = gzip.open if file.endswith(".gz") else open
    with opened(place, "wt", encoding="utf-8", newline="") as text:
        return WRITERS[str(kind_of(file))](text, names, rows)


def _json_lines(text: TextIO, _: list[str], rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        text.write(f"{_json(row)}\n")
    return count


def _csv(text: TextIO, names: list[str], rows: Iterator[dict[str, Any]]) -> int:
    """With lists and records as JSON, which a field can hold."""
    writer = csv.writer(text)
    writer.writerow(names)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        writer.writerow(_json(value) if isinstance(value, list | dict) else value for value in row.values())
    return count


def _json(value: Any) -> str:
    """JSON, which has neither bytes nor what is no number: hexadecimal digits as ids have them, and null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value


WRITERS: dict[str, Write] = {".jsonl": _json_lines, ".csv": _csv}
