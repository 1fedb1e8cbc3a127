"""What lies in a job's output folder beside the parts, and how it is read again."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.labels import LabelJob
from exspec.pipeline.parts import Summary, read_rows, read_summary
from exspec.pipeline.shards import Chunk, Plan
from exspec.pipeline.storage import Folder

JOB, PLAN, SUCCESS = "_job.json", "_plan.json", "_SUCCESS"
REPORT, AUDIT = "_report.json", "_audit.json"


def read_job(folder: Folder) -> tuple[dict[str, Any], Plan]:
    """What is written about a job, and its plan. Raises JobError where the folder is not a job's output."""
    try:
        return json.loads(folder.read(JOB)), Plan.from_json(folder.read(PLAN))
    except FileNotFoundError as error:
        raise JobError(f"{folder.url}: holds no {JOB} and {PLAN}; expected the output of exspec run") from error


def settings(description: dict[str, Any], options: dict[str, Any]) -> Job:
    """The settings of the job that a description tells of, with the options of its file systems."""
    kind = LabelJob if description["kind"] == LabelJob.kind else Job
    return kind(**description["job"], storage_options=options)


def read_columns(folder: Folder, chunks: list[Chunk]) -> Callable[[list[str] | None], Iterator[pa.Table]]:
    """Reads columns, or all, of the chunks' parts, one table after the other, in order."""
    return lambda columns: (read_rows(folder, chunk.part, columns) for chunk in chunks)


def read_summaries(folder: Folder, chunks: list[Chunk]) -> list[Summary]:
    """The summaries of the chunks' parts, in order."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda chunk: read_summary(folder, chunk.part), chunks))
