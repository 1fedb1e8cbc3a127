"""A job that learns decodes in phases. Between two of them a drafter may be trained on the finished rows, and swapped.

No token depends on the drafter, so a swap changes no row.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from exspec.actors.engine import EngineConfig, Request
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Task
from exspec.pipeline.job.settings import FROM, Job
from exspec.pipeline.output.owner import DRAFTERS, Writer, read_output
from exspec.pipeline.output.report import Report
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import Settled
from exspec.pipeline.storage import Folder

Sample = Callable[[], list[Request]]  # of the job's requests


def used_of(description: dict[str, Any]) -> dict[str, Any] | None:
    """The last drafter that a job has trained and uses, from its description."""
    return next((made for made in reversed(description.get("drafters", [])) if made["used"]), None)


def with_trained(job: Job) -> Job:
    """The job with the drafter that another one has trained, if its draft is from:OUTPUT. Raises JobError if there is
    none."""
    if job.draft is None or not job.draft.startswith(FROM):
        return job
    output = job.draft.removeprefix(FROM)
    used = used_of(read_output(Folder(output, job.storage_options)).state.description)
    if used is None:
        raise JobError(f"draft {anonymous(job.draft)}: the job in that output uses no drafter that it has trained")
    return job.model_copy(update={"draft": f"{output}/{DRAFTERS}/{used['name']}"})


@dataclass(frozen=True)
class Phase:
    """What a job has just done. job, config: how it decodes. planned: rows of the job. tokens, seconds: decoded in this
    phase, by all actors together."""

    job: Job
    config: EngineConfig
    planned: int
    tokens: int
    seconds: float


class Learning:
    """Decides what a job does between phases. This one never learns: the job has one phase."""

    def arranged(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """The tasks in the order in which they run."""
        return tasks

    def begin(self, job: Job, settled: Settled, planned: int, sample: Sample) -> EngineConfig:  # noqa: ARG002
        """The shape of a new job. Its forwards have columns for the drafts to come."""
        return settled.config

    def resume(self, job: Job, config: EngineConfig, writer: Writer) -> tuple[Job, EngineConfig]:  # noqa: ARG002
        """How a job goes on that has been stopped."""
        return job, config

    def rows(self, done: int, planned: int) -> int | None:  # noqa: ARG002
        """Rows of the next phase; None: all that are left. done, planned: rows of the job."""
        return None

    def ends(self, now: Counter[str]) -> bool:  # noqa: ARG002
        """Whether the phase ends early. now: its sums so far."""
        return False

    def pause(self, phase: Phase, writer: Writer, report: Report) -> tuple[Job, EngineConfig]:  # noqa: ARG002
        """How the job goes on after a phase. It may train a drafter first."""
        return phase.job, phase.config


def up_to(tasks: Iterator[Task], rows: int | None) -> Iterator[Task]:
    """The next tasks, until they have so many rows; None: all. Rows that are decoded again are all in one phase: a file
    is replaced when the last of its rows is there."""
    for task in tasks:
        yield task
        if rows is not None:
            rows -= task.chunk.rows
            if rows <= 0 and task.file is None:
                return


def spread(tasks: Iterable[Task], share: float) -> Iterator[Task]:
    """The tasks, but first this share of the new ones, from everywhere, and last those that decode rows again."""
    step, every = round(1 / share), list(tasks)  # a list: what is missing changes while the first ones run
    new = [task for task in every if task.file is None]
    others = (task for i, task in enumerate(new) if i % step)
    return chain(new[::step], others, (task for task in every if task.file is not None))
