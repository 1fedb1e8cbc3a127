"""What the user sees while a job runs: the stage, then rows and speed, and what the job waits for."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from exspec.actors.ledger import Signs

if TYPE_CHECKING:
    from exspec.pipeline.output.report import Report

EVERY = 10.0  # seconds between lines without a terminal
PATIENCE = 60.0  # seconds of waiting after which the reason is printed


class Progress:
    """One live line on a terminal, or a line per stage and every few seconds elsewhere. A context manager.

    quiet: show only messages and results.
    """

    def __init__(self, quiet: bool = True) -> None:
        self.quiet, self.began = quiet, time.monotonic()
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self.status = self.console.status("")
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Bar(*columns, TimeRemainingColumn(), console=self.console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stage(self, what: str) -> None:
        """The job enters this stage."""
        if self.live:
            self.status.update(what)
            self.status.start()
        elif not self.quiet:
            print(f"{time.monotonic() - self.began:.0f} s: {what}", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a message that stays on the screen."""
        if self.live:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def tell(self, line: str) -> None:
        """Print a line of the result to standard output."""
        print(line, flush=True)

    def stop(self) -> None:
        """Remove the live line."""
        if self.live:
            self.status.stop()
            self.bar.stop()

    @contextmanager
    def decoding(
        self, report: "Report", finished: int, actors: int, signs: Callable[[], Signs], lacking: Callable[[bool], str]
    ) -> Iterator[None]:
        """Show the progress of the report until the block ends.

        finished: rows that were done before. actors: expected number of actors. signs: the present state of the actors.
        lacking: says what missing actors wait for; nothing while the wait is short (False) and no process was killed.
        """
        if self.quiet:
            yield
            return
        from exspec.pipeline.output.page import duration

        self.stop()
        over = threading.Event()

        def show() -> None:
            began, said = time.monotonic(), False
            while not over.wait(1.0 if self.live else EVERY):
                now = signs()
                waiting = now.actors < actors
                line = report.line(now) if now.tokens else "loading models"
                line += f", {now.actors} of {actors} actors ready" if waiting else ""
                done = finished + report.rows_now
                said &= waiting
                if self.live:
                    self.bar.update(self.bar.task_ids[-1], completed=done, description=line)
                else:
                    if (rows := report.phase["rows"]) and now.seconds:
                        line += f", {duration((report.planned - done) * now.seconds / rows)} left"
                    print(f"{done}/{report.planned} rows, {line}", file=sys.stderr, flush=True)
                if waiting and not said and (why := lacking(time.monotonic() - began > PATIENCE)):
                    said = True
                    self.say(f"waiting for {actors - now.actors} of {actors} actors: {why}")

        watch = threading.Thread(target=show, daemon=True)
        if self.live:
            self.bar.start()
            self.bar.add_task("", total=report.planned, completed=finished)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join(timeout=PATIENCE)  # it may be waiting for a Ray that has died
            self.stop()


class Silent(Progress):
    """Prints nothing: the caller reports the result."""

    def say(self, line: str) -> None: ...

    def tell(self, line: str) -> None: ...
