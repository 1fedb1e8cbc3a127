"""Collects the results of actors: counts them, commits them in batches, and stops a job that fails too often."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from exspec.pipeline.errors import counted
from exspec.pipeline.input.plan import Task
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.compact import mend
from exspec.pipeline.output.owner import Writer
from exspec.pipeline.output.report import Report
from exspec.pipeline.output.state import File

PREFILL = {"prefill_tokens": "prefill_tokens", "found_tokens": "cached_tokens"}  # engine counters, by summary field
MOST_UNWRITTEN = 3  # chunks that could not be written, before the job stops
TOGETHER, EVERY = 256, 2.0  # maximum number of parts per commit, and seconds between commits


class StopError(Exception):
    """Too many failures to go on. What is committed is kept."""


class Collector:
    """Commits the files of finished tasks. again: number of tasks that decode rows of each file again."""

    def __init__(self, writer: Writer, again: Counter[str]) -> None:
        self.writer, self.again = writer, again
        self.parts: list[File] = []
        self.mended: dict[str, list[File]] = defaultdict(list)
        self.prefilled: dict[str, Counter[str]] = defaultdict(Counter)  # by actor: counts that its chunks already have
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
        """The file of a result. Its chunk gets the engine's prefill counts since the last chunk of the actor."""
        counted = self.prefilled[result["actor"]]
        more = {name: max(0, getattr(result["engine"], counter) - counted[name]) for name, counter in PREFILL.items()}
        counted.update(more)
        (summary,) = result["file"]["chunks"]
        return File.from_json(result["file"] | {"chunks": [summary | more]})

    def flush(self) -> None:
        """Commit the parts received so far."""
        parts, self.parts = self.parts, []  # a failed commit is not retried: the next run adopts the parts
        if parts:
            self.writer.commit(parts)
            self.last = time.monotonic()


def collect(job: Job, results: Iterable[dict[str, Any]], report: Report, collector: Collector) -> None:
    """Commit what the actors staged. Raises StopError after too many failures."""
    failed = 0
    try:
        for result in results:
            report.add(result)
            collector.add(result)
            failed += result.get("fault") == "output"
            if failed >= MOST_UNWRITTEN:
                raise StopError(
                    f"stopped: {counted(failed, 'chunk')} could not be written; the last: {result['set_aside']}"
                )
            if job.max_error_share is not None and report.now["errors"] > job.max_error_share * report.planned:
                raise StopError(
                    f"stopped: {counted(report.now['errors'], 'row')} with an error, more than max_error_share allows"
                )
    finally:
        collector.flush()
