"""What lies in a job's output folder beside the parts, and how it is read again."""

import json
from typing import Any

from exspec.pipeline.errors import JobError
from exspec.pipeline.shards import Plan
from exspec.pipeline.storage import Folder

JOB, PLAN, SUCCESS = "_job.json", "_plan.json", "_SUCCESS"
REPORT, AUDIT = "_report.json", "_audit.json"


def read_job(folder: Folder) -> tuple[dict[str, Any], Plan]:
    """What is written about a job, and its plan. Raises JobError where the folder is not a job's output."""
    try:
        return json.loads(folder.read(JOB)), Plan.from_json(folder.read(PLAN))
    except FileNotFoundError as error:
        raise JobError(f"{folder.url}: holds no {JOB} and {PLAN}; expected the output of exspec run") from error
