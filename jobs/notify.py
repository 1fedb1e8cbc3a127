"""A word to a URL when a job has come to its end, however it ended."""

import json
from collections.abc import Callable
from urllib.request import Request, urlopen

from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.output.owner import REPORT
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder, attempt

TOLD = ("planned_rows", "rows", "errors", "errors_by_reason", "completion_tokens", "seconds", "tokens_per_second")
TIMEOUT = 20  # seconds of a try


def notified(job: Job, run: Callable[[], int]) -> int:
    """Run the job, and post how it ended to its `notify`: output, code, message, figures. Returns the exit code."""
    if job.notify is None:
        return run()
    code, message = 3, "a fault of exspec"
    try:
        code = run()
        message = "done" if code == 0 else "rows are missing, or too many have an error"
    except JobError as error:
        code, message = error.code, redacted(str(error))
        raise
    finally:
        _post(job, job.notify, code, message)
    return code


def _post(job: Job, url: str, code: int, message: str) -> None:
    output = Folder(job.output, job.storage_options)
    told = {"output": anonymous(job.output), "code": code, "message": message}
    try:
        figures = json.loads(output.read(REPORT))
        told |= {name: figures[name] for name in TOLD}
    except Exception as error:  # a job that was refused has no report
        told["report"] = f"none: {type(error).__name__}"
    headers = {"Content-Type": "application/json"}
    try:
        attempt(lambda: urlopen(Request(url, json.dumps(told).encode(), headers), timeout=TIMEOUT).close())
    except Exception as error:  # whoever listens, or not, the job is what it is
        print(f"notify {anonymous(url)}: nobody was told: {type(error).__name__}: {redacted(str(error))}")
