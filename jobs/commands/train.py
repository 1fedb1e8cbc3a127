"""`exspec train`: trains a drafter for a job's target on the rows of the job."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from exspec.jobs.commands import run as jobs
from exspec.jobs.demo import TARGET
from exspec.jobs.training.page import render
from exspec.jobs.training.prospect import tidy
from exspec.jobs.training.run import MADE, Training, measure, use_cores
from exspec.jobs.training.settings import TrainSettings
from exspec.jobs.training.unfinished import WORK, asked_of, check_folder, held, note
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.job.settings import Job
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous

CONFIG, FIGURES = "config.json", "training.json"
SPEEDS = ("workers", "cache_gib")  # settings that may change when a training goes on


def train(output: str, options: dict[str, Any], folder: Path, settings: TrainSettings) -> None:
    """Train a drafter and write it. Prints one JSON object at last."""
    if not settings.regenerate and (settings.target or settings.max_new_tokens):
        raise JobError("--target and --max-new-tokens: expected --regenerate with them; a job has its own")
    work, asked = folder / WORK, asked_of(output, settings)
    check_folder(folder, {name: value for name, value in asked.items() if name not in SPEEDS})
    disable_progress_bar()
    use_cores(1)
    with Progress(quiet=False) as progress:
        if not (folder / CONFIG).exists():
            _make(output, options, folder, settings, asked, progress)
        shutil.rmtree(work)
        figures = json.loads((folder / FIGURES).read_text())
        progress.stop()
        progress.tell(json.dumps({name: value for name, value in figures.items() if name != "asked"}))


def _make(
    output: str, options: dict[str, Any], folder: Path, settings: TrainSettings, asked: dict[str, Any],
    progress: Progress,
) -> None:  # fmt: skip
    """Train a drafter and write all files of its folder."""
    work, rows_of = folder / WORK, output
    if settings.regenerate:
        rows_of = _answered(output, options, work / "answers", settings, progress)
    training = Training(rows_of, options, settings, work)
    progress.stage("loading the target")
    job, pair = training.load()
    progress.stage("reading rows")
    rows = training.rows(job, pair)
    if left_out := rows.left_out:
        progress.say(left_out)
    tokens = sum(len(completion) for _, completion in rows.learned)
    others = "of other shards" if rows.by_shard else "of the same shard"
    progress.say(
        f"{counted(len(rows.learned), 'row')} with {tokens:,} tokens of completions; {len(rows.held)} {others} held out"
    )
    learner = training.learner(pair, rows.learned)  # before anything is written: it may be impossible
    note(folder, asked, rows.digest)
    with held(folder):
        progress.stage("writing texts")
        training.write_texts(pair, rows.learned, progress.say)
        progress.stage("training")
        if settings.workers > 1:
            del learner
            target: Any = pair.target
            place = target.device
            target.to("cpu")  # the processes need the device
            tidy()
            training.run_together(job)
            target.to(place)
        else:
            training.run(learner, pair, rows, progress.say)
        progress.stage("decoding the rows that were held out")
        pair, drafts, records = training.made(pair, job)
        found = measure(pair, [request for request, _ in rows.held], settings.drafter, drafts)
        figures = {
            "drafter": settings.drafter,
            "draft_tokens": drafts,
            "accept_length": round(found.mean_accepted_length, 3),
            "acceptance_rate": round(found.acceptance_rate, 4),
            "rows": len(rows.learned),
            "seconds": round(records[-1].seconds, 1),
        }
        made = work / MADE
        (made / "training.html").write_text(render(records, figures, asked, anonymous(output)), encoding="utf-8")
        (made / FIGURES).write_text(json.dumps(figures | {"asked": asked}, indent=2) + "\n")
        for file in sorted(made.iterdir(), key=lambda file: file.name == CONFIG):  # last what makes it a drafter
            file.replace(folder / file.name)


def _answered(files: str, options: dict[str, Any], answers: Path, settings: TrainSettings, progress: Progress) -> str:
    """The output of a job in which the target answers the messages of files."""
    asked: dict[str, Any] = {} if settings.max_new_tokens is None else {"max_new_tokens": settings.max_new_tokens}
    job = Job(
        target=settings.target or str(TARGET),
        input=[files],
        output=str(answers),
        limit=settings.rows,
        storage_options=options,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
        **asked,
    )
    if code := jobs.run(job, False, False, None, progress):
        raise JobError(f"{files}: the target has not answered all messages (exit code {code})")
    return str(answers)
