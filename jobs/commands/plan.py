"""`exspec plan`: shows what a job would do, and which of its first rows cannot be decoded."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from exspec.actors.engine.shape.plan import by_device
from exspec.actors.engine.shape.roofline import ACCEPTANCE, CARDS, LENGTHS, Roofline, Sizes, draftings
from exspec.jobs.commands.convert import behind
from exspec.jobs.commands.estimate import estimate
from exspec.jobs.commands.shared_prompts import Shared
from exspec.jobs.commands.tables import budgets
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import GENERATED, carried_columns
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.prepare import Prepared, prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.run import stop_on_signals
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import Settled, device_here
from exspec.pipeline.storage import Folder

CHUNKS = 8  # whose rows are rendered
SHOWN = 3  # prompts that are printed


@dataclass
class Preview:
    """The rows of the first chunks. shared: None if the method does not share prefixes."""

    rows: int = 0
    prompts: list[str] = field(default_factory=list)
    refused: Reasons = field(default_factory=Reasons)
    ids: list[Any] = field(default_factory=list)
    shared: Shared | None = None

    @property
    def refused_rows(self) -> int:
        return sum(reason.rows for reason in self.refused.most_first)

    def lines(self) -> Iterator[str]:
        """The lines to print."""
        yield from self.prompts
        if self.shared and (line := self.shared.line()):
            yield line
        yield f"{self.refused_rows} of the first {self.rows} rows would get an error"
        for line in self.refused.lines():
            yield f"  {line}"
        nulls = sum(v is None for v in self.ids)
        repeated = len(self.ids) - nulls - len({str(v) for v in self.ids if v is not None})
        if nulls or repeated:
            yield f"ids: {nulls} null and {repeated} repeated; shard and row still identify each row"
        if self.refused_rows == self.rows:
            yield "none of these rows can be decoded"


def plan(job: Job, cards: bool, estimated: bool, price: float | None) -> int:
    """Print what a job would do. Returns 2 if none of the first rows can be decoded, else 0.

    cards: compute what drafting is worth on known GPUs. estimated: decode some rows, and estimate the whole job. price:
    of one GPU for an hour, to estimate the cost.
    """
    stop_on_signals()  # so that nothing is left in the output
    progress = Progress(quiet=False)
    prepared = examined(job, progress)
    progress.stage("rendering the first prompts")
    preview = _preview(prepared)
    progress.stop()
    console = Console(soft_wrap=False)
    table = Table(show_header=False, title="plan", box=None, title_justify="left")
    for name, value in _facts(prepared):
        table.add_row(name, value)
    console.print(table, markup=False)
    for line in (*(f"note: {note}" for note in _notes(prepared)), *preview.lines()):
        console.print(line, markup=False, highlight=False)
    if cards:
        console.print(_on_cards(prepared), markup=False)
    if preview.refused_rows == preview.rows:
        return 2
    if estimated:
        progress.stage("decoding some rows")
        found = estimate(prepared, 1 - preview.refused_rows / preview.rows)
        progress.stop()
        for line in found.lines(price):
            console.print(line, markup=False, highlight=False)
        if memory := budgets(found.shape.candidates):
            for shown in memory:
                console.print(shown, markup=False, highlight=False)
    return 0


def examined(job: Job, progress: Progress) -> Prepared:
    """Prepare a job without leaving anything in its output. Raises JobError like `prepare`."""
    progress.stage("checking the job")
    job, _ = behind(job)
    with Folder(job.output, job.storage_options).untouched():
        return prepare(job)


def _facts(prepared: Prepared) -> list[tuple[str, str]]:
    job, schema, planned = prepared.job, prepared.mapped, prepared.plan
    chunks = sum(1 for _ in planned.chunks())
    done = planned.rows - sum(chunk.rows for chunk in prepared.missing)
    config, free = prepared.shape.config, prepared.shape.free
    prompt = "the template" if job.prompt_template else f"column {prepared.prompts.column}"
    columns = [*carried_columns(job, schema).values(), *job.answer_columns().names, *GENERATED.names]
    facts = [
        ("target", anonymous(job.target)),
        ("draft", anonymous(job.draft) if job.draft else "none"),
        *([("adapter", anonymous(job.adapter))] if job.adapter else []),
        *((f"adapter {name}", anonymous(place)) for name, place in job.adapters.items()),
        ("device", f"{job.device}, on the cluster {job.ray_address}" if job.ray_address else device_here(job)),
        (
            "input",
            f"{counted(len(planned.shards), 'shard')} with {counted(planned.rows, 'row')}; {done} of them are done",
        ),
        ("prompt", f"{prompt}, {'in the chat template' if prepared.prompts.chat else 'without a chat template'}"),
        ("ids", f"column {job.id_column}" if job.id_column else "shard and row number"),
        ("output", f"{anonymous(job.output)}: {', '.join(columns)}"),
        ("chunks", f"{chunks} or more, each of at most {counted(planned.rows_per_chunk, 'row')}"),
        ("actors", f"{job.actors}, each with at least {counted(job.chunks_in_flight, 'chunk')} at once"),
        ("shape", f"{Settled(config, [])}, at most {config.capacity} tokens per row"),
        ("memory", f"per actor: {by_device(prepared.memory(config))}"),
    ]
    if free:
        facts.append(("to be measured", f"{', '.join(free)}; the values above are where measuring starts"))
    return facts


def _on_cards(prepared: Prepared) -> Table:
    """Tokens/s relative to plain decoding on known GPUs, by drafter and tokens whose KV a row reads."""
    target, *drafts = prepared.models.configs
    drafts = [draft for draft in drafts if not getattr(draft, "head_for", None)]
    sizes = [Sizes.of(model, torch.bfloat16) for model in (target, *drafts)]
    title = (
        f"computed tokens/s relative to plain decoding on one GPU, by text length (bfloat16, acceptance {ACCEPTANCE})"
    )
    table = Table("GPU", "drafter", *map(str, LENGTHS), "pays from", title=title, box=None, title_justify="left")
    for cells in card_rows(*sizes):
        table.add_row(*cells)
    return table


def card_rows(target: Sizes, draft: Sizes | None = None) -> Iterator[list[str]]:
    """A row of the table for each GPU and way to draft."""
    for name, card in CARDS.items():
        bounds = Roofline(card, target)
        for drafting in draftings(target, draft):
            ratios = [bounds.times_plain(length, drafting) for length in LENGTHS]
            cells = [f"{ratio:.2f}" if ratio else "too large" for ratio in ratios]
            yield [name, drafting.name, *cells, str(bounds.pays_from(drafting) or "never")]


def _notes(prepared: Prepared) -> list[str]:
    """What the job ignores of the target's generation config, and what it needs that this machine lacks."""
    job, notes = prepared.job, [prepared.note] if prepared.note else []
    low, high = job.actor_range
    if job.ray_address:
        return notes
    cards = torch.cuda.device_count() if job.device != "cpu" else 0
    least = 1 if job.actors == "auto" else high
    gpus = least * (job.num_gpus or 1)
    if cards and gpus > cards:
        notes.append(f"{counted(least, 'actor')} need {gpus:g} GPUs, and this machine has {cards}")
    if not cards and job.device != "cuda":
        if low * job.threads > (cores := os.cpu_count() or 1):
            notes.append(f"{low} actors of {job.threads} threads share the {cores} cores of this machine")
        each = sum(plan.total for plan in prepared.memory(prepared.shape.config))
        needed, available = high * each, psutil.virtual_memory().available
        if needed > available:
            notes.append(f"{high} actors need {needed >> 20} MiB, and this machine has {available >> 20} MiB free")
    return notes


def _preview(prepared: Prepared) -> Preview:
    config = prepared.shape.config
    prompts = prepared.prompts.within(prepared.room(config))
    preview = Preview(shared=Shared(config.prefill_columns) if config.method != "eqspec" else None)
    for chunk in islice(prepared.plan.chunks(), CHUNKS):
        _add(preview, chunk, prepared, prompts)
    return preview


def _add(preview: Preview, chunk: Chunk, prepared: Prepared, prompts: Prompts) -> None:
    job = prepared.job
    preview.rows += chunk.rows
    try:
        asked = list(requests(chunk, job, prompts, prepared.schema, also=[job.id_column] if job.id_column else []))
    except JobError as error:  # the run would set the chunk aside and go on
        preview.refused.add(str(error), chunk.rows, [f"{chunk.shard.name}:{chunk.first}"], True)
        return
    for one in asked:
        row_id = None
        if job.id_column and isinstance(one.row, dict):
            row_id = one.row[job.id_column]
            preview.ids.append(row_id)
        if isinstance(one.request, RowError):
            name = f"{chunk.shard.name}:{one.number}" if row_id is None else str(row_id)
            preview.refused.add(str(one.request), 1, [name], True)
            continue
        if preview.shared:
            preview.shared.add(one.request.prompt)
        if len(preview.prompts) < SHOWN:
            preview.prompts.append(f"prompt of {len(one.request.prompt)} tokens: {prompts.text(one.row)[:300]!r}")
