"""What the user sees while a job runs: the stage, then rows and speed, the hosts, and what the job waits for."""

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
from exspec.pipeline.errors import counted

if TYPE_CHECKING:
    from exspec.pipeline.output.report import Report

EVERY = 10.0  # seconds between lines without a terminal
MINUTE = 60.0  # seconds between lines about the hosts
SHOWN = 8  # hosts in such a line


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
        """Show the progress of the report until the block ends, and every minute the hosts.

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
            before, due, said = Signs({}, 0.0), time.monotonic() + MINUTE, False
            needed, left = actors, 0
            while not over.wait(1.0 if self.live else EVERY):
                now = signs()
                if now.left > left:  # Ray ends idle actors when no more chunks are queued
                    needed, left = min(needed, now.actors), now.left
                missing = max(0, needed - now.actors)
                line = report.line(now) if now.tokens else "loading models"
                line += f", {now.actors} of {needed} actors ready" if missing else ""
                done = finished + report.rows_now
                said &= missing > 0
                if self.live:
                    self.bar.update(self.bar.task_ids[-1], completed=done, description=line)
                else:
                    if (rows := report.phase["rows"]) and now.seconds:
                        line += f", {duration((report.planned - done) * now.seconds / rows)} left"
                    print(f"{done}/{report.planned} rows, {line}", file=sys.stderr, flush=True)
                late = time.monotonic() > due
                why = lacking(late) if missing and (late or not said) and not now.unable else ""
                if late or why or now.unable.keys() - before.unable.keys():
                    waiting = "" if now.seconds else "waiting for the first chunk to be read"
                    if why:
                        waiting = f"waiting for {missing} of {needed} actors: {why}"
                    text = hosts_line(now, before, waiting)
                    if text and self.live:
                        self.say(text)  # above the live line
                    elif text:
                        print(text, file=sys.stderr, flush=True)
                    before, due, said = now, time.monotonic() + MINUTE, bool(why)

        watch = threading.Thread(target=show, daemon=True)
        if self.live:
            self.bar.start()
            self.bar.add_task("", total=report.planned, completed=finished)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join(timeout=MINUTE)  # it may be waiting for a Ray that has died
            self.stop()


def hosts_line(now: Signs, before: Signs, waiting: str) -> str:
    """Which hosts decode, are gone or cannot decode, and what the job waits for. Empty for one host without trouble.

    before: the signs at the line before, from which on the speed is counted.
    """
    from exspec.pipeline.output.page import duration

    if len(now.hosts) < 2 and not waiting and not now.unable:
        return ""
    seconds = now.seconds - before.seconds
    alive = sorted(name for name, host in now.hosts.items() if host.actors)
    gone = sorted((host.silent, name) for name, host in now.hosts.items() if host.silent and not host.actors)
    lost = [f"{name} for {duration(silent)}" for silent, name in gone[: SHOWN // 2]]

    def decoding(what: str, names: list[str]) -> str:
        parts = [counted(sum(now.hosts[name].actors for name in names), "actor")]
        if now.tokens and seconds:
            tokens = sum(now.hosts[n].tokens - (before.hosts[n].tokens if n in before.hosts else 0) for n in names)
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        return f"{what} ({', '.join(parts)})"

    room = SHOWN - len(lost)
    shown = [decoding(name, [name]) for name in alive[:room]]
    shown += [decoding(f"{len(alive) - room} more", alive[room:])] if alive[room:] else []
    lost += [f"{len(gone) - len(lost)} more"] if gone[len(lost) :] else []
    unable = [f"{name} ({why})" for name, why in sorted(now.unable.items())[:SHOWN]]
    unable += [f"{len(now.unable) - SHOWN} more"] if len(now.unable) > SHOWN else []
    titled = ("hosts", shown), ("gone", lost), ("cannot decode", unable)
    parts = [f"{title}: {', '.join(items)}" for title, items in titled if items]
    return "; ".join(filter(None, [*parts, waiting]))


class Silent(Progress):
    """Prints nothing: the caller reports the result."""

    def say(self, line: str) -> None: ...

    def tell(self, line: str) -> None: ...
