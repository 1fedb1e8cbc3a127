"""`exspec label`: a job whose completions are labels."""

import json
from pathlib import Path
from typing import Any

from exspec.jobs import run as jobs
from exspec.pipeline.contents import Contents
from exspec.pipeline.labels import LabelJob
from exspec.pipeline.output import JOB, read_job
from exspec.pipeline.report import rewrite
from exspec.pipeline.review import REVIEW, write_review
from exspec.pipeline.run import execute, prepare
from exspec.pipeline.storage import Folder


def label(file: Path | None, flags: dict[str, Any], restart: bool, retry_errors: bool, quiet: bool) -> int:
    """Run a labeling job, or what is missing of it. Returns the exit code."""
    job = jobs.load(LabelJob, file, flags)
    prepared = prepare(job, restart)
    code = execute(prepared, retry_errors, quiet=quiet)
    _compare(job, prepared.folder)
    if job.review_share:
        contents = Contents(prepared.folder)
        present = [chunk for chunk in prepared.plan.chunks() if chunk in contents]
        count = write_review(job, prepared.folder, contents.columns(present))
        print(f"{count} rows to look at: {prepared.folder.url}/{REVIEW}" if count else "no labeled rows to look at")
    return code


def _compare(job: LabelJob, folder: Folder) -> None:
    """Report on known labels that a finished job did not name when it ran."""
    description, _ = read_job(folder)
    if description["job"]["gold_column"] == job.gold_column:
        return
    description["job"]["gold_column"] = job.gold_column
    folder.write(JOB, json.dumps(description, indent=1).encode())
    report, figures = rewrite(folder)
    for line in report.closing_lines(figures, folder.url):
        print(line)
