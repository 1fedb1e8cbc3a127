"""What lies in a job's output folder beside the parts, and how it is read again."""

import json
from typing import Any

from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.labels import LabelJob
from exspec.pipeline.plan import Plan
from exspec.pipeline.storage import Folder

JOB, PLAN, SUCCESS = "_job.json", "_plan.json", "_SUCCESS"
REPORT, AUDIT = "_report.json", "_audit.json"


def read_job(folder: Folder) -> tuple[dict[str, Any], Plan]:
    """What is written about a job, and its plan. Raises JobError where the folder is not a job's output."""
    try:
        job, plan = folder.read(JOB), folder.read(PLAN)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JobError(f"{folder.url}: holds no {JOB} and {PLAN}; expected the output of exspec run") from error
    except JobError:
        raise
    except Exception as error:  # an unreachable or refusing store has many names
        raise JobError(f"{folder.url}: cannot be read: {type(error).__name__}: {error}") from error
    name = JOB
    try:
        description = json.loads(job)
        name, _ = PLAN, description["fingerprint"]
        return description, Plan.from_json(plan)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{folder.url}/{name}: not as exspec run writes it ({error})") from error


def settings(description: dict[str, Any], options: dict[str, Any]) -> Job:
    """The settings of the job that a description tells of, with the options of its file systems."""
    kind = LabelJob if description["kind"] == LabelJob.kind else Job
    return kind(**description["job"], storage_options=options)
