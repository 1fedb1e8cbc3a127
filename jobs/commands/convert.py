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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import write_dataset
from pyarrow.fs import FSSpecHandler, PyFileSystem

from exspec.actors.engine.faults import first_line
from exspec.actors.samples import SAMPLES
from exspec.pipeline.errors import JobError, counted, did_you_mean
from exspec.pipeline.input.batch import MODEL, URL, answer, is_batch
from exspec.pipeline.input.plan import decode_schema
from exspec.pipeline.input.rows import as_json, nearest
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import GENERATED
from exspec.pipeline.output.contents import columns_of, tables
from exspec.pipeline.output.owner import SUCCESS, Output, read_output
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder

J = TypeVar("J", bound=Job)
FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.,]*\Z)")  # the beginning of a formula; -1.5 is a number
JOB_SUFFIX = ".job"  # of the folder that a job works in if its output is a file
NUMBERED = ("sample", "sample_seed")  # columns that a row of a sample has, beside those of a row
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
    output: str,
    folder: str,
    options: dict[str, Any],
    by: list[str],
    columns: list[str] | None = None,
    explode: bool = False,
) -> int:
    """Write the rows of an output as Parquet into folders named after the values of columns. Returns their number.

    Arguments: as of `convert`. Raises JobError if a row or a column is missing, or the folder exists.
    """
    source, target = Source(_complete(output, options), explode), Folder(folder, options)
    if target.exists(""):
        cut = "" if target.local or target.exists(SUCCESS) else " without _SUCCESS: a convert was interrupted"
        raise JobError(f"{folder}: already exists{cut}; expected a new folder")
    names = source.columns([*(columns or []), *by])
    remaining = source.tables(list(dict.fromkeys([*columns, *by])) if columns else names)
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
    return source.rows


def _folder(name: str) -> str:
    """The name of a column in the name of a folder, quoted like the values. Readers skip folders with _ or . first."""
    quoted = quote(name, safe="")
    return f"%{ord(name[0]):02X}{quoted[1:]}" if name[:1] in ("_", ".") else quoted


def convert(
    output: str,
    file: str,
    options: dict[str, Any],
    columns: list[str] | None = None,
    quote_formulas: bool = False,
    explode: bool = False,
) -> int:
    """Write the rows of an output in order to one file, atomically. Returns their number.

    If the input was requests of the batch API, JSON Lines holds its answers. file: a path or fsspec URL, whose suffix
    names the format. columns: the columns to write. Default: all. quote_formulas: put ' before text in CSV that a
    spreadsheet would run. explode: write a row for each sample. Raises JobError if a row or a column is missing.
    """
    suffix = format_of(file)
    if suffix is None:
        raise JobError(f"{file}: expected a name that ends with {' or '.join(WRITERS)}")
    source = Source(_complete(output, options), explode)
    names = source.columns(columns or [])
    names, whole = columns or names, columns is None and not explode
    formulas = Formulas(quote_formulas)
    each = formulas if suffix.startswith(".csv") else _answers(source.output) if whole else None
    found = (table.select(names) for table in source.tables(names))
    folder, _, name = file.rpartition("/")
    with Folder(folder or ".", options).writing(name) as path:
        WRITERS[suffix](path, list(map(formulas.text, names)) if each is formulas else names, found, each)
    if formulas.found and not quote_formulas:
        print(
            f"{formulas.found} of the CSV's values may run as a formula in a spreadsheet (=, +, -, @, tab or CR); "
            "exspec convert --quote-formulas puts ' before them"
        )
    return source.rows


def _complete(output: str, options: dict[str, Any]) -> Output:
    done = read_output(Folder(output, options))
    done.refuse_waiting()
    if not done.state.complete:
        missing = done.state.plan.rows - done.state.rows
        raise JobError(f"{output}: {missing} of {done.state.plan.rows} rows are missing; run the job again first")
    return done


class Source:
    """The rows that are written: those of an output, or with `explode` a row for each sample. rows: so far."""

    def __init__(self, output: Output, explode: bool) -> None:
        self.output, self.explode, self.rows = output, explode, 0
        self.own: list[str] = columns_of(output).names
        url = output.folder.url
        if explode and not stored_job(output.state.description, output.folder.options).listed:
            raise JobError(f"--explode: {url} has no column {SAMPLES!r}; expected the output of a job with --n")
        if explode and (taken := [name for name in NUMBERED if name in self.own]):
            raise JobError(f"--explode: {url} has a column {taken[0]!r} already; leave it out of carry")

    def columns(self, wanted: list[str]) -> list[str]:
        """All columns. Raises JobError if a wanted one is not among them."""
        names = [name for name in self.own if name != SAMPLES] + list(NUMBERED) if self.explode else self.own
        if missing := [name for name in wanted if name not in names]:
            url = self.output.folder.url
            raise JobError(*(f"{url}: has no column {name!r}{did_you_mean(name, names)}" for name in missing))
        return names

    def tables(self, names: list[str]) -> Iterator[pa.Table]:
        """The rows, with these columns."""
        read = list(dict.fromkeys([SAMPLES, *(n for n in names if n not in NUMBERED)])) if self.explode else names
        for table in tables(self.output, read):
            made = exploded(table).select(names) if self.explode else table
            self.rows += made.num_rows
            yield made


def exploded(table: pa.Table) -> pa.Table:
    """A row for each sample, with the sample's own values in the columns of a row. A row without samples stays."""
    samples = table[SAMPLES].combine_chunks()
    counts = samples.value_lengths().fill_null(0).to_numpy()
    sizes = np.maximum(counts, 1)
    rows = np.repeat(np.arange(len(table)), sizes)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    there = np.repeat(counts > 0, sizes)
    flat = samples.flatten().take(pa.array(np.cumsum(there) - 1, mask=~there))
    table, is_sample = table.drop_columns([SAMPLES]).take(pa.array(rows)), pa.array(there)
    own = {field.name for field in flat.type} - {"seed"}  # an input column may have that name
    for i, field in enumerate(table.schema):
        if field.name in own:
            table = table.set_column(
                i, field, pc.if_else(is_sample, pc.struct_field(flat, field.name), table[field.name])
            )
    columns = pa.array(numbers, pa.int32(), mask=~there), pc.struct_field(flat, "seed")
    for name, column in zip(NUMBERED, columns, strict=True):
        table = table.append_column(name, column)
    return table


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
    job = stored_job(description, output.folder.options)
    if not is_batch(job, decode_schema(output.state.plan.schema)):
        return None
    own = {*job.answer_columns().names, *GENERATED.names, URL, MODEL}  # not what was carried
    made = partial(answer, model=description["job"]["target"], created=int(output.state.began))
    return lambda row: made({name: value for name, value in row.items() if name in own})


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
