"""`exspec label`: a job whose completions are labels."""

from functools import partial
from pathlib import Path
from typing import Any

from exspec.jobs import run as jobs
from exspec.pipeline.labels import LabelJob
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import REVIEW, Output, read_output, take
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.output.review import write_review
from exspec.pipeline.run import execute, prepare


def label(file: Path | None, flags: dict[str, Any], restart: bool, retry_errors: bool, quiet: bool) -> int:
    """Run a labeling job, or what is missing of it. Returns the exit code."""
    job = jobs.load(LabelJob, file, flags)
    prepared = prepare(job, restart)
    code = execute(prepared, retry_errors, quiet=quiet)
    output = read_output(prepared.folder)
    _compare(job, output)
    if job.review_share:
        count = write_review(job, prepared.folder, partial(tables, output))
        print(f"{count} rows to look at: {prepared.folder.url}/{REVIEW}" if count else "no labeled rows to look at")
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
    for line in report.closing_lines(figures, output.folder.url):
        print(line)
