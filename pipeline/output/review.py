"""The rows of a labeling job with the least certain labels, for people to review."""

import io
import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.csv

from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.output.owner import REVIEW
from exspec.pipeline.storage import Folder


def write_review(job: LabelJob, folder: Folder, read: Callable[[list[str] | None], Iterator[pa.Table]]) -> int:
    """Write the least certain labeled rows to `_review.csv`, least certain first. Returns their number.

    The certainty of a row is the lowest of its confidences. read: reads the given columns, or all, of every part.
    """
    confidences = [f"{job.column(name)}_confidence" for name in job.classes]
    certainty = np.concatenate([np.empty(0), *(_certainty(table, confidences) for table in read(confidences))])
    count = math.ceil(float(job.review_share or 0) * int(np.isfinite(certainty).sum()))
    if count == 0:
        return 0
    chosen = np.sort(np.argsort(certainty, kind="stable")[:count])
    taken, first = [], 0
    for table in read(None):
        inside = chosen[(chosen >= first) & (chosen < first + table.num_rows)] - first
        first += table.num_rows
        taken.append(_flat(table.take(pa.array(inside))))
    rows = pa.concat_tables(taken)
    rows = rows.take(pa.array(np.argsort(certainty[chosen], kind="stable")))
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(rows, buffer)
    folder.write(REVIEW, buffer.getvalue())
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
            texts = [None if v is None else json.dumps(v, default=str) for v in table[i].to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table.replace_schema_metadata()
