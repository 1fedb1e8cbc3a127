"""All kinds of jobs: their settings together, and the job that an output was written by."""

from typing import Any

from exspec.pipeline.job.embeddings import EmbedJob
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.scores import ScoreJob
from exspec.pipeline.job.settings import Job

KINDS: dict[str, type[Job]] = {kind.kind: kind for kind in (Job, LabelJob, ScoreJob, EmbedJob)}
SETTINGS = {name: field for kind in KINDS.values() for name, field in kind.model_fields.items()}
DEFAULTS = {n: getattr(f.default, "value", f.default) for n, f in SETTINGS.items() if not f.is_required()}


def stored_job(description: dict[str, Any], options: dict[str, Any]) -> Job:
    """The job that a stored description is of. options: of the file systems."""
    kind = KINDS.get(description["kind"], Job)
    known = {name: value for name, value in description["job"].items() if name in kind.model_fields}
    return kind(**known, storage_options=options)
