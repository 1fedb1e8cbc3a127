"""What `exspec label` adds to `exspec run`: accuracy against known labels, and a file of rows to review."""

import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.csv

from exspec.pipeline.errors import counted
from exspec.pipeline.input.rows import as_json
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import REVIEW, Output, read_output, take
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder


def review(job: LabelJob) -> None:
    """Report accuracy against known labels, and write the least certain rows to a file if the job asks for it."""
    output = read_output(Folder(job.output, job.storage_options))
    _compare(job, output)
    if job.review_share:
        count = write_review(job, output)
        file = f"{anonymous(output.folder.url)}/{REVIEW}"
        print(f"{counted(count, 'row')} to review: {file}" if count else "no labeled rows to review")


def _compare(job: LabelJob, output: Output) -> None:
    """Add accuracy to the report if the job names a gold column that it did not name when it ran."""
    before = output.state.description["job"]
    if before["gold_column"] == job.gold_column:
        return
    with take(output, "label", job.wait) as writer:
        writer.describe({"job": before | {"gold_column": job.gold_column}})
        writer.publish()
        report, figures = rewrite(writer)
    for line in report.closing_lines(figures, anonymous(output.folder.url)):
        print(line)


def write_review(job: LabelJob, output: Output) -> int:
    """Write the rows of lowest confidence to `_review.csv`, least certain first. Returns their number."""
    confidences = [f"{job.column(name)}_confidence" for name in job.classes]
    certainty = np.concatenate(
        [np.empty(0), *(_certainty(table, confidences) for table in tables(output, confidences))]
    )
    count = math.ceil(float(job.review_share or 0) * int(np.isfinite(certainty).sum()))
    if count == 0:
        return 0
    chosen = np.sort(np.argsort(certainty, kind="stable")[:count])
    taken, first = [], 0
    for table in tables(output, None):
        inside = chosen[(chosen >= first) & (chosen < first + table.num_rows)] - first
        first += table.num_rows
        taken.append(_flat(table.take(pa.array(inside))))
    rows = pa.concat_tables(taken)
    rows = rows.take(pa.array(np.argsort(certainty[chosen], kind="stable")))
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(rows, buffer)
    output.folder.write(REVIEW, buffer.getvalue())
    return count


def _certainty(table: pa.Table, confidences: list[str]) -> np.ndarray:
    """The lowest confidence of each row; infinite for an error row, which has no label."""
    columns = [table[name].fill_null(math.inf).to_numpy() for name in confidences]
    least: np.ndarray = np.minimum.reduce(columns)
    return least


def _flat(table: pa.Table) -> pa.Table:
    """The table with columns that CSV can hold: lists, structs, bytes and the like become JSON."""
    for i, field in enumerate(table.schema):
        if not (pa.types.is_primitive(field.type) or pa.types.is_string(field.type) or pa.types.is_null(field.type)):
            texts = [None if v is None else as_json(v) for v in table[i].to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table.replace_schema_metadata()
