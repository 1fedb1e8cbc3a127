"""A word to a URL when a job has come to its end, however it ended."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from exspec.pipeline.errors import BrokenOffError, JobError, StoppedError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import REPORT
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder

TOLD = ("planned_rows", "rows", "errors", "errors_by_reason", "completion_tokens", "seconds", "tokens_per_second")
TIMEOUT, TRIES = 20, 2  # seconds of a try; who does not answer then holds nobody up


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
    except KeyboardInterrupt:
        code, message = StoppedError.code, "interrupted"
        raise
    finally:
        _post(job, job.notify, code, message)
    return code


def _post(job: Job, url: str, code: int, message: str) -> None:
    told: dict[str, Any] = {"output": anonymous(job.output), "code": code, "message": message}
    if code in (0, BrokenOffError.code, StoppedError.code):  # one that was refused left an earlier report as it is
        with suppress(Exception):  # it may have come to none
            figures = json.loads(Folder(job.output, job.storage_options).read(REPORT))
            told |= {name: figures[name] for name in TOLD}
    request = Request(url, json.dumps(told).encode(), {"Content-Type": "application/json"})
    for tries_left in reversed(range(TRIES)):
        try:
            urlopen(request, timeout=TIMEOUT).close()
            return
        except Exception as error:  # whoever listens, or not, the job is what it is
            if not tries_left:
                print(f"notify: nobody at {urlsplit(url).hostname} was told: {type(error).__name__}: {error}")
