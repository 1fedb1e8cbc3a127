"""Training during a job: when to pause, and which drafter the job uses. The planner decides whether a training pays."""

import time
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from exspec.actors.engine import EngineConfig
from exspec.jobs.training.planner import BEST, MARGIN, SHARE, SMALL, Foreseen, Given, Taught, cost, foresee, teach
from exspec.jobs.training.prospect import length_of
from exspec.pipeline.cluster.connect import on_a_device
from exspec.pipeline.cluster.failures import cause
from exspec.pipeline.errors import kept_traceback
from exspec.pipeline.input.plan import Task
from exspec.pipeline.job.settings import Job
from exspec.pipeline.learning import Learning, Phase, Sample, spread, used_of
from exspec.pipeline.output.owner import DRAFTERS, Writer
from exspec.pipeline.output.page import duration
from exspec.pipeline.output.report import Report
from exspec.pipeline.progress import Progress
from exspec.pipeline.shape import Settled

FEWEST = 2_000  # rows left; a job with fewer never trains
FIRST, GROWTH = 0.02, 4  # the share of the rows before the first pause; each later pause has so many times as many
WATCHED, KEPT = 0.02, 0.8  # of each such share of the rows, the accept length must be so much of that in training


class JobLearning(Learning):
    """Pauses a job to train a drafter on its finished rows. A drafter that was trained lies in the job's output.

    choices: drafters that may be trained.
    """

    def __init__(self, choices: tuple[str, ...], progress: Progress) -> None:
        self.asked = self.choices = choices
        self.progress = progress
        self.trained: list[dict[str, Any]] = []  # in the log, as `Taught.figures`, with `used`
        self.before: tuple[Job, EngineConfig] | None = None  # how the job decodes without the drafter that it uses
        self.at: float | None = None  # rows of the job at the next pause
        self.row_seconds: float | None = None  # of the job without learning
        self.alone: EngineConfig | None = None  # how the job would decode if it did not learn
        self.spent = 0.0  # seconds on learning since the last training
        self.over = False
        self.seen: Counter[str] | None = None  # sums at the beginning of what is watched
        self.watched, self.found = 0.0, 0.0  # rows to watch; the accept length of the last ones

    def arranged(self, tasks: Iterator[Task]) -> Iterator[Task]:
        return spread(tasks, FIRST)

    def begin(self, job: Job, settled: Settled, planned: int, sample: Sample) -> EngineConfig:
        config, known = settled.config, settled.row_seconds
        devices = job.actor_range[0]
        whole = None if known is None else planned * known / devices
        if planned < FEWEST or (whole is not None and whole < SMALL):
            self._end(f"off: a job of {planned:,} rows" if whole is None else f"off: the job takes {duration(whole)}")
            return config
        began = time.monotonic()
        self.progress.stage("trying whether a drafter can learn this job")
        try:
            given = job, config, self.choices, planned / devices, whole, sample()
            foreseen: Foreseen = on_a_device(job, foresee, *given)
        except ValueError as error:  # a target that these drafters are not for
            foreseen = Foreseen(None, f"off: {error}")
        except Exception as error:  # of a library, or of memory: the job does not need it
            foreseen = Foreseen(None, f"off: {cause(error)}; details: {kept_traceback(error)}")
        if foreseen.drafter is None or foreseen.config is None:
            self._end(foreseen.reason)
            return config
        self.progress.say(f"learning: {foreseen.reason}")
        self.choices, self.row_seconds, self.alone = (foreseen.drafter,), foreseen.seconds / planned, config
        self.spent = time.monotonic() - began
        return foreseen.config

    def resume(self, job: Job, config: EngineConfig, writer: Writer) -> tuple[Job, EngineConfig]:
        known = writer.state.description
        decided = known.get("learning", {})
        if decided.get("asked") == list(self.asked):
            self.choices, self.over = tuple(decided["choices"]), decided["over"]
            self.row_seconds, self.at = decided["row_seconds"], decided["at"]
            if self.over:
                self.progress.say("learning: it has ended in an earlier run of this job")
        self.over |= config.width == 1  # there is no room for drafts
        self.trained = list(known.get("drafters", []))
        used = used_of(known)
        self.over |= bool(self.trained) and used is None  # the last one was taken back
        if self.at is None:  # in the log from now on, so that no kill moves the pause
            done, planned = writer.state.rows, writer.state.plan.rows
            self.at = self.trained[-1]["rows_before"] * GROWTH if self.trained else done + FIRST * planned
        self._remember(writer)
        return (job, config) if used is None else self._swapped(job, config, used)

    def rows(self, done: int, planned: int) -> int | None:
        self.seen, self.watched = None, WATCHED * planned
        if self.over or self.at is None or planned - done < FEWEST:
            return None
        return max(1, int(self.at - done)) if self._again(planned - self.at) else None

    def _again(self, left: float) -> bool:
        """Whether a drafter that was trained could be so much better that it pays to train it further. left: rows."""
        if not self.trained:
            return True
        last = self.trained[-1]
        gain: float = 1 - last["accept_length"] / length_of(BEST, last["shape"]["draft_tokens"])
        if self.row_seconds is None:
            return gain > MARGIN * SHARE
        seconds: float = left * self.row_seconds / prod(made["speedup"] for made in self.trained)
        costs: float = max(cost(seconds), last["seconds"])
        return gain * seconds > MARGIN * costs

    def ends(self, now: Counter[str]) -> bool:
        if self.before is None:
            return False
        self.seen = self.seen or now.copy()
        since = now - self.seen
        if since["rows"] < self.watched:
            return False
        self.seen, self.found = now.copy(), since["completion_tokens"] / max(since["rounds"], 1)
        return self._fell()

    def _fell(self) -> bool:
        promised: float = self.trained[-1]["accept_length"]
        return 0 < self.found < KEPT * promised

    def pause(self, phase: Phase, writer: Writer, report: Report) -> tuple[Job, EngineConfig]:
        goes_on = self._pause(phase, writer, report)
        self._remember(writer)
        return goes_on

    def _pause(self, phase: Phase, writer: Writer, report: Report) -> tuple[Job, EngineConfig]:
        if self.before is not None and self._fell():
            return self._taken_back(self.before)
        now, as_before = report.now, (phase.job, phase.config)
        left = phase.planned - writer.state.rows
        row_tokens = now["completion_tokens"] / max(now["rows"], 1)
        seconds = left * row_tokens * phase.seconds / max(phase.tokens, 1)
        if self.row_seconds is not None and not self.trained:  # the first phase is short, and actors compile in it
            seconds = min(seconds, left * self.row_seconds)
            self.spent += max(0.0, phase.seconds - now["rows"] * self.row_seconds)
        if left < FEWEST or seconds < SMALL / 2:
            self.over = True
            return as_before
        self.progress.stage(f"learning from the {writer.state.rows:,} finished rows, for about {cost(seconds):.0f} s")
        began, name = time.monotonic(), f"{str(writer.state.job)[:8]}-{len(self.trained) + 1}"
        try:
            taught: Taught = on_a_device(phase.job, teach, Given(*as_before, self.choices, name, seconds, self.alone))
        except Exception as error:  # the learner died: only its training is lost
            self._end(f"ended: {cause(error)}; the job goes on as before; details: {kept_traceback(error)}")
            return as_before
        self.at = writer.state.rows * GROWTH
        if taught.config is None:
            self._end(taught.reason)
            return as_before
        self.progress.say(f"learning: {taught.reason}")
        more = {"used": True, "rows_before": writer.state.rows, "at": time.time()}
        more["seconds"] = round(self.spent + time.monotonic() - began, 1)
        self.alone, self.spent = None, 0.0
        self.trained = [*self.trained, taught.figures | more]
        return self._swapped(*(self.before or as_before), self.trained[-1])

    def _taken_back(self, before: tuple[Job, EngineConfig]) -> tuple[Job, EngineConfig]:
        promised, self.before = self.trained[-1]["accept_length"], None
        self._end(f"the accept length fell from {promised:.2f} to {self.found:.2f}; back to the old drafter")
        last = self.trained[-1] | {"until": time.time()}
        self.trained = [made | {"used": False} for made in (*self.trained[:-1], last)]
        return before

    def _remember(self, writer: Writer) -> None:
        """Write to the log what a resumed job need not find out again."""
        decided = {"asked": list(self.asked), "choices": list(self.choices), "over": self.over}
        decided |= {"row_seconds": self.row_seconds, "at": self.at}
        trained = {"drafters": self.trained} if self.trained else {}
        writer.describe({"learning": decided} | trained)
        writer.publish()

    def _end(self, reason: str) -> None:
        self.over = True
        self.progress.say(f"learning: {reason}")

    def _swapped(self, job: Job, config: EngineConfig, made: dict[str, Any]) -> tuple[Job, EngineConfig]:
        """Job and config with a drafter of the job's own output."""
        self.before, self.found = (job, config), 0.0
        draft = f"{job.output}/{DRAFTERS}/{made['name']}"
        shape = made["shape"] | {"pages": _fewer(made["shape"]["pages"], config.pages)}  # memory may be less now
        return job.model_copy(update={"draft": draft, "draft_revision": None}), config.drafting(shape)


def _fewer(one: int | None, other: int | None) -> int | None:
    """The smaller number of pages; None: all."""
    return min((pages for pages in (one, other) if pages is not None), default=None)
