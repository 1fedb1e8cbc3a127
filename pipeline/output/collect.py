"""What comes back from the actors: counted, committed a few parts at a time, and the end of a job that goes wrong."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.compact import mend
from exspec.pipeline.output.owner import Writer
from exspec.pipeline.output.parts import Task
from exspec.pipeline.output.report import Report
from exspec.pipeline.output.state import File

PREFILL = {"prefill_tokens": "prefill_tokens", "found_tokens": "cached_tokens"}  # engine counters, by summary field
TOGETHER, EVERY = 256, 2.0  # parts that are committed together at most, and the seconds until they are


class StopError(Exception):
    """So much goes wrong that a job is not worth going on with; what is done is kept."""


class Collector:
    """Commits the files of tasks that are done. again: how many tasks are to mend each file of the job."""

    def __init__(self, writer: Writer, again: Counter[str]) -> None:
        self.writer, self.again = writer, again
        self.parts: list[File] = []
        self.mended: dict[str, list[File]] = defaultdict(list)
        self.prefilled: dict[str, Counter[str]] = defaultdict(Counter)  # by actor, what its chunks have been told
        self.last = 0.0

    def add(self, result: dict[str, Any]) -> None:
        task: Task = result["task"]
        if task.file is None:
            self._new(result)
        else:
            self._mended(task.file, result)

    def _new(self, result: dict[str, Any]) -> None:
        if not result["set_aside"]:
            self.parts.append(self._file(result))
        if len(self.parts) >= TOGETHER or time.monotonic() - self.last > EVERY:
            self.flush()

    def _mended(self, name: str, result: dict[str, Any]) -> None:
        if not result["set_aside"]:
            self.mended[name].append(self._file(result))
        self.again[name] -= 1
        if self.again[name] == 0 and self.mended[name]:
            mend(self.writer, name, self.mended.pop(name))

    def _file(self, result: dict[str, Any]) -> File:
        """The file of a result. Its chunk is told what the engine has prefilled and no other chunk was told."""
        told = self.prefilled[result["actor"]]
        more = {name: max(0, getattr(result["engine"], counter) - told[name]) for name, counter in PREFILL.items()}
        told.update(more)
        (summary,) = result["file"]["chunks"]
        return File.from_json(result["file"] | {"chunks": [summary | more]})

    def flush(self) -> None:
        """Commit the parts that have come."""
        parts, self.parts = self.parts, []  # a commit that fails is not tried again: the next run adopts them
        if parts:
            self.writer.commit(parts)
            self.last = time.monotonic()


def collect(job: Job, results: Iterable[dict[str, Any]], report: Report, collector: Collector) -> None:
    """Commit what the actors staged. Raises StopError where too much goes wrong."""
    failed = 0
    try:
        for result in results:
            report.fold(result)
            collector.add(result)
            failed += result.get("fault") == "output"
            if failed >= job.max_write_failures:
                raise StopError(f"stopped: {failed} chunks could not be written; the last: {result['set_aside']}")
            if job.max_error_share is not None and report.now["errors"] > job.max_error_share * report.planned:
                raise StopError(f"stopped: {report.now['errors']} rows have an error, more than max_error_share")
    finally:
        collector.flush()
