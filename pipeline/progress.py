"""The progress of a job: a live line on a terminal, a plain one now and then elsewhere."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from exspec.pipeline.output.report import Report

EVERY = 10  # seconds between lines where there is no terminal


class Progress:
    """Shows the report as it grows. Use as a context manager."""

    def __init__(self, rows: int, finished: int, quiet: bool) -> None:
        self.console = Console(stderr=True)
        self.quiet, self.rows, self.finished = quiet, rows, finished
        self.live = self.console.is_terminal and not quiet
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Bar(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task("starting", total=rows, completed=finished)
        self.last = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, report: Report) -> None:
        done = self.finished + report.rows_now
        self.bar.update(self.task, completed=done, description=report.line())
        if not self.live and not self.quiet and time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            print(f"{done}/{self.rows} rows, {report.line()}", file=sys.stderr)
