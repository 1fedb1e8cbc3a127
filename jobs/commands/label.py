"""What `exspec label` adds to `exspec run`: accuracy against known labels, and a file of rows to review."""

from functools import partial

from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import REVIEW, Output, read_output, take
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.output.review import write_review
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.storage import Folder


def review(job: LabelJob) -> None:
    """Report accuracy against known labels, and write the least certain rows to a file if the job asks for it."""
    output = read_output(Folder(job.output, job.storage_options))
    _compare(job, output)
    if job.review_share:
        count = write_review(job, output.folder, partial(tables, output))
        file = f"{anonymous(output.folder.url)}/{REVIEW}"
        print(f"{count} rows to review: {file}" if count else "no labeled rows to review")


def _compare(job: LabelJob, output: Output) -> None:
    """Add accuracy to the report if the job names a gold column that it did not name when it ran."""
    before = output.state.description["job"]
    if before["gold_column"] == job.gold_column:
        return
    with take(output, "label", job.wait) as writer:
        writer.describe({"job": before | {"gold_column": job.gold_column}})
        writer.publish()
        report, figures = rewrite(writer)
    for line in report.closing_lines(figures, anonymous(output.folder.url)):
        print(line)
