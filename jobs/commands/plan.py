"""`exspec plan`: what a job would do, and what of its rows would not do."""

import os
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from exspec.jobs.commands.convert import behind
from exspec.jobs.commands.estimate import estimate
from exspec.jobs.commands.shared import Shared
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import GENERATED, carried_columns
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.prepare import Prepared, prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import Settled, device_here
from exspec.pipeline.storage import Folder

LOOKED = 8  # chunks whose rows are rendered
SHOWN = 3  # prompts that are printed


@dataclass
class Look:
    """What the first chunks' rows are. shared: None where the method computes every prompt by itself."""

    rows: int = 0
    prompts: list[str] = field(default_factory=list)
    refused: Reasons = field(default_factory=Reasons)
    ids: list[Any] = field(default_factory=list)
    shared: Shared | None = None


def plan(job: Job, estimated: bool = False, price: float | None = None) -> int:
    """Print what a job would do. Returns 2 where no row of those looked at could be decoded, else 0.

    estimated: decode some of its rows here, and tell what all will take. price: of a GPU hour, to tell the cost.
    """
    progress = Progress(quiet=False)
    prepared = examined(job, progress)
    job = prepared.job
    progress.stage("rendering the first prompts")
    look = _look(prepared)
    progress.stop()
    console = Console(soft_wrap=False)
    table = Table(show_header=False, title="plan", box=None, title_justify="left")
    for name, value in _facts(prepared):
        table.add_row(name, value)
    console.print(table, markup=False)
    for note in _notes(prepared):
        console.print(f"note: {note}", markup=False, highlight=False)
    for shown in look.prompts:
        console.print(shown, markup=False, highlight=False)
    if look.shared and (line := look.shared.line()):
        console.print(line, markup=False, highlight=False)
    refused = sum(reason.rows for reason in look.refused.most_first)
    console.print(f"{refused} of the first {look.rows} rows would be refused", markup=False, highlight=False)
    for line in look.refused.lines():
        console.print(f"  {line}", markup=False, highlight=False)
    if job.id_column:
        _show_ids(look.ids, console)
    if refused == look.rows:
        console.print("none of them could be decoded: the job would be useless", markup=False, highlight=False)
        return 2
    if estimated:
        progress.stage("decoding some rows")
        found = estimate(prepared, 1 - refused / look.rows)
        progress.stop()
        for line in found.lines(price):
            console.print(line, markup=False, highlight=False)
    return 0


def examined(job: Job, progress: Progress) -> Prepared:
    """A job as it would be run, which is not going to be: nothing of it stays. Raises JobError as `prepare`."""
    progress.stage("checking the job")
    job, _ = behind(job)
    with Folder(job.output, job.storage_options).untouched():
        return prepare(job)


def _facts(prepared: Prepared) -> list[tuple[str, str]]:
    job, schema, found = prepared.job, prepared.mapped, prepared.plan
    chunks = sum(1 for _ in found.chunks())
    missing = sum(chunk.rows for chunk in prepared.missing)
    config, free = prepared.shape.config, prepared.shape.free
    prompt = "the template" if job.prompt_template else f"column {prepared.prompts.column}"
    columns = [*carried_columns(job, schema).values(), *job.answer_columns().names, *GENERATED.names]
    facts = [
        ("target", anonymous(job.target)),
        ("draft", anonymous(job.draft) if job.draft else "none"),
        ("device", _device(job)),
        ("input", f"{len(found.shards)} shards with {found.rows} rows; {found.rows - missing} of them are done"),
        ("prompt", f"{prompt}, {'in the chat template' if prepared.prompts.chat else 'as it is'}"),
        ("ids", f"column {job.id_column}" if job.id_column else "shard and row number"),
        ("output", f"{anonymous(job.output)}: {', '.join(columns)}"),
        ("chunks", f"{chunks} of at most {found.rows_per_chunk} rows"),
        ("actors", f"{job.actors}, each {job.chunks_in_flight} chunks at once or more"),
        ("shape", f"{Settled(config, [])}, {config.capacity} tokens a row at most"),
        ("memory", f"of an actor: {prepared.memory(config)}"),
    ]
    if free:
        facts.append(("to be measured", f"{', '.join(free)}; what stands above is where it begins"))
    return facts


def _notes(prepared: Prepared) -> list[str]:
    """What the target's generation config asks for and the job does not do; what the job asks for and this machine does
    not have, where no cluster may have it."""
    job, notes = prepared.job, [prepared.note] if prepared.note else []
    low, high = job.actor_range
    if job.ray_address:
        return notes
    if job.device == "cuda" and not torch.cuda.is_available():
        notes.append("device is cuda, and this machine has no GPU that torch can use: run refuses it here")
    cards = torch.cuda.device_count() if job.device != "cpu" else 0
    if cards and job.actors != "auto" and high * (job.num_gpus or 1) > cards:
        notes.append(f"{high} actors need {high * (job.num_gpus or 1):g} GPUs, and this machine has {cards}")
    if not cards and job.device != "cuda" and low * job.threads > (cores := os.cpu_count() or 1):
        notes.append(f"{low} actors of {job.threads} threads share the {cores} cores of this machine")
    if (
        not cards
        and job.device != "cuda"
        and (needed := high * prepared.memory(prepared.shape.config).total)
        > (free := psutil.virtual_memory().available)
    ):
        notes.append(f"{high} actors need {needed >> 20} MiB, and this machine has {free >> 20} MiB free")
    return notes


def _device(job: Job) -> str:
    if job.ray_address:
        return f"{job.device}, on the cluster {job.ray_address}"
    return device_here(job)


def _look(prepared: Prepared) -> Look:
    config = prepared.shape.config
    prompts = prepared.prompts.within(prepared.room(config))
    look = Look(shared=Shared(config.prefill_columns) if config.method != "eqspec" else None)
    for chunk in islice(prepared.plan.chunks(), LOOKED):
        _look_at(chunk, prepared, prompts, look)
    return look


def _look_at(chunk: Chunk, prepared: Prepared, prompts: Prompts, look: Look) -> None:
    job = prepared.job
    look.rows += chunk.rows
    try:
        asked = list(requests(chunk, job, prompts, prepared.schema, also=[job.id_column] if job.id_column else []))
    except JobError as error:  # the run will set its rows aside, and no others
        look.refused.add(str(error), chunk.rows, [f"{chunk.shard.name}:{chunk.first}"], True)
        return
    for one in asked:
        known = None
        if job.id_column and isinstance(one.row, dict):
            known = one.row[job.id_column]
            look.ids.append(known)
        if isinstance(one.request, RowError):
            name = f"{chunk.shard.name}:{one.number}" if known is None else str(known)
            look.refused.add(str(one.request), 1, [name], True)
            continue
        if look.shared:
            look.shared.add(one.request.prompt)
        if len(look.prompts) < SHOWN:
            look.prompts.append(f"prompt of {len(one.request.prompt)} tokens: {prompts.text(one.row)[:300]!r}")


def _show_ids(ids: list[Any], console: Console) -> None:
    nulls = sum(v is None for v in ids)
    repeated = len(ids) - nulls - len({str(v) for v in ids if v is not None})
    if nulls or repeated:
        console.print(f"ids: {nulls} null and {repeated} repeated; shard and row tell them apart", highlight=False)
