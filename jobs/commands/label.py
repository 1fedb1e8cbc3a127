"""`exspec label`: a job whose completions are labels."""

from functools import partial

from exspec.jobs.commands.convert import behind, finish
from exspec.jobs.commands.notify import notified
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import REVIEW, Output, read_output, take
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.output.review import write_review
from exspec.pipeline.prepare import prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.run import execute
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder


def label(job: LabelJob, restart: bool, retry_errors: bool, progress: Progress) -> int:
    """Run a labeling job, or what is missing of it. Returns the exit code."""
    job, file = behind(job)
    return notified(job, lambda: finish(job, file, _label(job, restart, retry_errors, progress)))


def _label(job: LabelJob, restart: bool, retry_errors: bool, progress: Progress) -> int:
    code = execute(prepare(job, restart), retry_errors, progress=progress)
    output = read_output(Folder(job.output, job.storage_options))
    _compare(job, output)
    if job.review_share:
        count = write_review(job, output.folder, partial(tables, output))
        print(
            f"{count} rows to look at: {anonymous(output.folder.url)}/{REVIEW}"
            if count
            else "no labeled rows to look at"
        )
    return code


def _compare(job: LabelJob, output: Output) -> None:
    """Report on known labels that a finished job did not name when it ran."""
    before = output.state.description["job"]
    if before["gold_column"] == job.gold_column:
        return
    with take(output, "label", job.wait) as writer:
        writer.describe({"job": before | {"gold_column": job.gold_column}})
        writer.publish()
        report, figures = rewrite(writer)
    for line in report.closing_lines(figures, anonymous(output.folder.url)):
        print(line)
