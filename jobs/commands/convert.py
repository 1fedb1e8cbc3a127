"""`exspec convert`: writes the rows of an output to one file of another format, or to folders of Parquet."""

import csv
import gzip
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import quote

import pyarrow as pa
from pyarrow.dataset import write_dataset
from pyarrow.fs import FSSpecHandler, PyFileSystem

from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError, counted, did_you_mean
from exspec.pipeline.input.batch import answer, is_batch
from exspec.pipeline.input.plan import decode_schema
from exspec.pipeline.input.rows import as_json, nearest
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.contents import columns_of, tables
from exspec.pipeline.output.owner import SUCCESS, Output, read_output
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder

J = TypeVar("J", bound=Job)
FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.,]*\Z)")  # the beginning of a formula; -1.5 is a number
JOB_SUFFIX = ".job"  # of the folder that a job works in if its output is a file
Row = dict[str, Any]
Each = Callable[[Row], Row]  # makes what is written from a row
Lines = Callable[[TextIO, list[str], Iterator[Row]], None]
Write = Callable[[Path, list[str], Iterator[pa.Table], Each | None], None]


def format_of(name: str) -> str | None:
    """The suffix that names a file's format, or None if it cannot be written."""
    return next((suffix for suffix in WRITERS if name.endswith(suffix)), None)


def behind(job: J) -> tuple[J, str | None]:
    """The job with a folder as its output, and the file to make from it, or None if the output already is a folder.

    Raises JobError if the file would be part of the job's input.
    """
    if format_of(job.output) is None:
        return job, None
    output = Folder(job.output, job.storage_options).path
    for url in job.input:
        path = Folder(url, job.storage_options).path
        if output == path or output.startswith(f"{path}/") or fnmatch(output, path):
            raise JobError(f"output {anonymous(job.output)}: is in the input {anonymous(url)}; choose another place")
    return job.model_copy(update={"output": f"{job.output}{JOB_SUFFIX}"}), job.output


def finish(job: Job, file: str | None, code: int) -> int:
    """Write the file, if the job has one and all rows are done. Returns the exit code unchanged."""
    if file and code == 0:
        print(f"{counted(convert(job.output, file, job.storage_options), 'row')} in {anonymous(file)}")
    return code


def partition(
    output: str, folder: str, options: dict[str, Any], by: list[str], columns: list[str] | None = None
) -> int:
    """Write the rows of an output as Parquet into folders named after the values of columns. Returns their number.

    columns: the columns to write. Default: all. Raises JobError if a row or a column is missing, or the folder exists.
    """
    done, target = _complete(output, options), Folder(folder, options)
    if target.exists(""):
        cut = "" if target.local or target.exists(SUCCESS) else " without _SUCCESS: a convert was interrupted"
        raise JobError(f"{folder}: already exists{cut}; expected a new folder")
    names = _columns(done, [*(columns or []), *by])
    remaining = tables(done, list(dict.fromkeys([*columns, *by])) if columns else names)
    quoted = {name: _folder(name) for name in by}
    remaining = (t.rename_columns([quoted.get(name, name) for name in t.column_names]) for t in remaining)
    first = next(remaining)
    with target.whole() as place:
        try:
            write_dataset(
                (batch for table in chain([first], remaining) for batch in table.to_batches()),
                place.path,
                schema=first.schema,
                format="parquet",
                filesystem=PyFileSystem(FSSpecHandler(place.fs)),
                partitioning=list(quoted.values()),
                partitioning_flavor="hive",
            )
        except pa.ArrowException as error:  # too many values, or values that cannot name a folder
            raise JobError(f"--partition-by {', '.join(by)}: {first_line(error)}") from error
        place.write(SUCCESS, b"")
    return done.state.rows


def _folder(name: str) -> str:
    """The name of a column in the name of a folder, quoted like the values. Readers skip folders with _ or . first."""
    quoted = quote(name, safe="")
    return f"%{ord(name[0]):02X}{quoted[1:]}" if name[:1] in ("_", ".") else quoted


def convert(
    output: str, file: str, options: dict[str, Any], columns: list[str] | None = None, quote_formulas: bool = False
) -> int:
    """Write the rows of an output in order to one file, atomically. Returns their number.

    If the input was requests of the batch API, JSON Lines holds its answers. file: a path or fsspec URL, whose suffix
    names the format. columns: the columns to write. Default: all. quote_formulas: put ' before text in CSV that a
    spreadsheet would run. Raises JobError if a row or a column is missing.
    """
    suffix = format_of(file)
    if suffix is None:
        raise JobError(f"{file}: expected a name that ends with {' or '.join(WRITERS)}")
    done = _complete(output, options)
    every = _columns(done, columns or [])
    names = columns or every
    formulas = Formulas(quote_formulas)
    each = formulas if suffix.startswith(".csv") else _answers(done) if columns is None else None
    found = (table.select(names) for table in tables(done, names))
    folder, _, name = file.rpartition("/")
    with Folder(folder or ".", options).writing(name) as path:
        WRITERS[suffix](path, list(map(formulas.text, names)) if each is formulas else names, found, each)
    if formulas.found and not quote_formulas:
        print(
            f"{formulas.found} of the CSV's values may run as a formula in a spreadsheet (=, +, -, @, tab or CR); "
            "exspec convert --quote-formulas puts ' before them"
        )
    return done.state.rows


def _complete(output: str, options: dict[str, Any]) -> Output:
    done = read_output(Folder(output, options))
    done.refuse_waiting()
    if not done.state.complete:
        missing = done.state.plan.rows - done.state.rows
        raise JobError(f"{output}: {missing} of {done.state.plan.rows} rows are missing; run the job again first")
    return done


def _columns(output: Output, wanted: list[str]) -> list[str]:
    """The columns of an output. Raises JobError if a wanted column is not one of them."""
    names: list[str] = columns_of(output).names
    if missing := [name for name in wanted if name not in names]:
        raise JobError(*(f"{output.folder.url}: has no column {name!r}{did_you_mean(name, names)}" for name in missing))
    return names


class Formulas:
    """Makes rows of CSV. found: values that a spreadsheet would take for a formula; quoted: put ' before them."""

    def __init__(self, quoted: bool) -> None:
        self.quoted, self.found = quoted, 0

    def __call__(self, row: Row) -> Row:
        return {name: self.text(value) for name, value in row.items()}

    def text(self, value: Any) -> Any:
        if not isinstance(value, str) or not FORMULA.match(value):
            return value
        self.found += 1
        return f"'{value}" if self.quoted else value


def _answers(output: Output) -> Each | None:
    """What makes an answer of the batch API from a row; None if the input was not requests of it."""
    description = output.state.description
    if not is_batch(stored_job(description, output.folder.options), decode_schema(output.state.plan.schema)):
        return None
    return partial(answer, model=description["job"]["target"], created=int(output.state.began))


def _text(
    write: Lines, opened: Any, path: Path, names: list[str], found: Iterator[pa.Table], each: Each | None
) -> None:
    """Write rows as text. opened: `open` of Python or of gzip."""
    rows: Iterator[Row] = (row for table in found for row in _rows(table))
    with opened(path, "wt", encoding="utf-8", newline="") as text:
        write(text, names, map(each, rows) if each else rows)


def _rows(table: pa.Table) -> list[Row]:
    try:
        return list(table.to_pylist())
    except Exception:  # a value that Python does not have, such as a date after the year 9999
        columns = [[nearest(scalar) for scalar in column] for column in table.columns]
        return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _json_lines(text: TextIO, _: list[str], rows: Iterator[Row]) -> None:
    text.writelines(f"{as_json(row)}\n" for row in rows)


def _csv(text: TextIO, names: list[str], rows: Iterator[Row]) -> None:
    """Lists and records are written as JSON."""
    writer = csv.writer(text)
    writer.writerow(names)
    for row in rows:
        writer.writerow(as_json(value) if isinstance(value, list | dict) else value for value in row.values())


# Every format by its suffix.
WRITERS: dict[str, Write] = {
    f"{suffix}{packed}": partial(_text, lines, opened)
    for suffix, lines in ((".jsonl", _json_lines), (".csv", _csv))
    for packed, opened in (("", open), (".gz", gzip.open))
}
