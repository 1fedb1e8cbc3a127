"""`exspec run`, `exspec label`, `exspec score`, `exspec embed` and `exspec tune`."""

from functools import partial
from pathlib import Path

from rich.console import Console

from exspec.actors.engine.config import DRAFTING
from exspec.jobs.commands.convert import behind, finish
from exspec.jobs.commands.label import review
from exspec.jobs.commands.plan import examined
from exspec.jobs.commands.repair import repaired
from exspec.jobs.commands.tables import candidates_table
from exspec.jobs.training.learning import JobLearning
from exspec.pipeline.errors import JobError, started
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import AUTO, Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.run import execute
from exspec.pipeline.shape import device_here, sample, settle, shape_of
from exspec.pipeline.storage import Folder


def run(job: Job, restart: bool, retry_errors: bool, repair: Path | None, progress: Progress) -> int:
    """Run a job, or the missing part of it, and return the exit code. repair: a file of corrected rows."""
    if restart and repair:
        raise JobError("--restart reads the input anew, without repaired rows; leave out --repair or --restart")
    if repair and not repair.is_file():
        raise JobError(f"--repair {repair}: no such file; expected one that `exspec convert --errors` wrote")
    job, file = behind(job)
    with Folder(job.output, job.storage_options).untouched():  # by a job that is refused
        prepared = prepare(job, restart, mending=retry_errors or repair is not None)
        fixed = partial(repaired, repair, job.storage_options) if repair else None
        code = execute(prepared, retry_errors, progress=progress, repair=fixed, learning=_learning(job, progress))
    with started():
        if isinstance(job, LabelJob):
            review(job)
        return finish(job, file, code)


def _learning(job: Job, progress: Progress) -> JobLearning | None:
    if job.learn == "off":
        return None
    if not job.exact:
        raise JobError("learn: needs exact; without it, tokens depend on the drafter")
    return JobLearning(("model", "dflash") if job.learn == "auto" else (job.learn,), progress)


def tune(job: Job) -> None:
    """Measure a job's auto settings on this machine, and print them as lines for a job file."""
    progress = Progress(quiet=False)
    prepared = examined(job, progress)
    shape = shape_of(job, prepared.models.configs, job.tune_from, None)
    if not shape.free:
        raise JobError(f"nothing to measure: none of {', '.join(AUTO)} is auto, or the method is eqspec")
    progress.stage(f"measuring, at most {job.tune_seconds:.0f} s")
    requests = sample(job, prepared.plan, prepared.prompts)
    settled = settle(job, shape, requests, device_here(job), prepared.models.digests)
    progress.stop()
    console = Console()
    console.print(candidates_table(settled.candidates, settled.seconds))
    console.print(f"chosen: {settled.reason}", highlight=False)
    for name in (*AUTO, *DRAFTING):
        if (value := getattr(settled.config, name)) is not None:
            console.print(f"{name}: {value}", highlight=False)
    if settled.config.draft_length != "fixed":
        console.print(f"threshold: {settled.config.threshold:.3f}", highlight=False)
