"""`exspec run`, `exspec plan` and `exspec tune`."""

from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from exspec.jobs.demo import DRAFT, TARGET
from exspec.jobs.tables import candidates_table
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.rows import RowError, rows, values
from exspec.pipeline.input.shards import read_chunk
from exspec.pipeline.job import AUTO, Job, load_job
from exspec.pipeline.run import Prepared, execute, prepare
from exspec.pipeline.shape import Settled, memory_of, sample, settle, shape_of

J = TypeVar("J", bound=Job)
DEMO_PAIR = {"target": str(TARGET), "draft": str(DRAFT)}
SHOWN = 3  # rendered prompts that a plan prints


def run(file: Path | None, flags: dict[str, Any], restart: bool, retry_errors: bool, quiet: bool) -> int:
    """Run a job, or what is missing of it. Returns the exit code."""
    job = load(Job, file, flags)
    return execute(prepare(job, restart), retry_errors, quiet=quiet)


def plan(kind: type[Job], file: Path | None, flags: dict[str, Any]) -> None:
    """Print what a job of this kind would do."""
    job = load(kind, file, flags)
    prepared = prepare(job)
    chunks = sum(1 for _ in prepared.plan.chunks())
    missing = sum(chunk.rows for chunk in prepared.missing)
    console = Console()
    table = Table(show_header=False, title="plan")
    table.add_row("shards", f"{len(prepared.plan.shards)}")
    table.add_row("rows", f"{prepared.plan.rows}")
    table.add_row("chunks", f"{chunks} of at most {job.rows_per_chunk} rows; {prepared.plan.rows - missing} rows done")
    table.add_row("actors", f"{job.actors}, each {job.chunks_in_flight} chunks at once or more")
    config, free = prepared.shape.config, prepared.shape.free
    table.add_row("shape", f"{Settled(config, [])}, {config.capacity} tokens a slot")
    if free:
        table.add_row("", f"{', '.join(free)}: measured when the job starts; what stands here is where it begins")
    packed = job.device != "cuda" and torch.backends.mkldnn.is_available()
    table.add_row("memory of an actor", str(memory_of(config, prepared.models.configs, job, packed)))
    console.print(table)
    _show_prompts(prepared, job, console)


def tune(file: Path | None, flags: dict[str, Any]) -> None:
    """Measure what is auto in a job, on this machine, and print what it found and how to fix it in a job file."""
    job = load(Job, file, flags)
    prepared = prepare(job)
    shape = shape_of(job, prepared.models.context, job.tune_from, None)
    if not shape.free:
        raise JobError(f"nothing to measure: of {', '.join(AUTO)} none is auto, or the method is eqspec")
    where = job.device if job.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    settled = settle(job, shape, sample(job, prepared.plan, prepared.prompts), where)
    console = Console()
    console.print(candidates_table(settled.candidates, settled.seconds))
    for name in AUTO:
        console.print(f"{name}: {getattr(settled.config, name)}", highlight=False)
    if settled.config.draft_length != "fixed":
        console.print(f"threshold: {settled.config.threshold:.3f}", highlight=False)


def _show_prompts(prepared: Prepared, job: Job, console: Console) -> None:
    """The first prompts as they are rendered, and what is wrong with rows of the first chunks."""
    prompts = prepared.prompts.within(prepared.room(prepared.shape.config))
    refused, looked, ids = [], 0, []
    for chunk in islice(prepared.plan.chunks(), 8):
        looked += chunk.rows
        needed = [*prompts.columns(prepared.schema), *([job.id_column] if job.id_column else [])]
        try:
            table = read_chunk(chunk, job.storage_options, list(dict.fromkeys(needed)), prepared.schema)
        except JobError as error:  # the run will set its rows aside, and no others
            refused += [str(error)] * chunk.rows
            continue
        ids += values(table, job.id_column) if job.id_column else []
        for number, row in enumerate(rows(table, prompts.columns(prepared.schema)), chunk.first):
            try:
                request = prompts.request(row, chunk.shard, number)
            except RowError as error:
                refused.append(f"{chunk.shard.name}, row {number}: {error}")
                continue
            if looked - chunk.rows + number - chunk.first < SHOWN:
                shown = f"prompt of {len(request.prompt)} tokens: {prompts.text(row)[:300]!r}"
                console.print(shown, markup=False, highlight=False)
    console.print(f"{len(refused)} of the first {looked} rows would be refused", markup=False, highlight=False)
    for line in list(dict.fromkeys(refused))[:10]:
        console.print(f"  {line}", markup=False, highlight=False)
    if job.id_column:
        _show_ids(ids, console)


def _show_ids(ids: list[Any], console: Console) -> None:
    nulls = sum(v is None for v in ids)
    repeated = len(ids) - nulls - len({str(v) for v in ids if v is not None})
    if nulls or repeated:
        console.print(f"ids: {nulls} null and {repeated} repeated; shard and row tell them apart", highlight=False)


def load(kind: type[J], file: Path | None, flags: dict[str, Any]) -> J:
    """The job that a command was given, with the demo pair where it names none; what loads models keeps quiet."""
    disable_progress_bar()
    set_verbosity_error()
    return load_job(kind, file, flags, DEMO_PAIR)
