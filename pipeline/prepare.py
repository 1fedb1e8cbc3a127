"""Checks everything about a job that can be checked before it starts, and reports all problems at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow as pa
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from exspec.actors.adapter import CONFIG, UNMERGED, read
from exspec.actors.answers.answers import AnswerError
from exspec.actors.engine import EngineConfig, Room
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import ADAPTERS, LOADED, MemoryPlan
from exspec.actors.engine.kv.split import LAYERS
from exspec.actors.engine.layers.headless import headless
from exspec.actors.engine.layers.packed import is_quantized, quantization
from exspec.actors.engine.shape.plan import balanced, fit
from exspec.actors.exactness import check_config, limit_context
from exspec.actors.models import check_folder, check_names, check_vocabularies, config_of, head_config
from exspec.actors.source import ModelError, Source, load_part
from exspec.pipeline.cluster.connect import starts_here
from exspec.pipeline.errors import JobError, job_errors, no_column
from exspec.pipeline.input.batch import COLUMNS, is_batch, of_batch
from exspec.pipeline.input.plan import Chunk, Plan, Shard, encode_schema
from exspec.pipeline.input.prompts import Prompts, prompt_column
from exspec.pipeline.input.reading import grew
from exspec.pipeline.input.requests import mapped
from exspec.pipeline.input.shards import Since, find_shards
from exspec.pipeline.job.fingerprint import cures, differences, fingerprint
from exspec.pipeline.job.generation import OwnSettings, load_generation_config, note, own_settings, with_own
from exspec.pipeline.job.settings import Job
from exspec.pipeline.learning import with_trained
from exspec.pipeline.output.columns import added_columns, carried_columns, output_schema
from exspec.pipeline.output.owner import Output
from exspec.pipeline.output.state import State
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import (
    LONGEST,
    Shape,
    device_count,
    device_here,
    known_shape,
    longest,
    memory_of,
    sample,
    shape_of,
    wants_draft,
    wide,
)
from exspec.pipeline.storage import PROBE, Folder
from exspec.pipeline.weights import local_model, model_digest, resolved, weight_bytes

UNPACKS = "compressed-tensors"
PACKAGES = {UNPACKS: "compressed_tensors", "torchao": "torchao"}  # of quantized weights, by method
ROOM = 1 << 20  # bytes of a probe file
T = TypeVar("T")


@dataclass
class CheckedModels:
    """What is known of a job's models without their weights. own: from the target's generation config."""

    tokenizer: Any
    context: int
    digests: dict[str, str]
    configs: list[PretrainedConfig]
    own: OwnSettings


@dataclass
class Prepared:
    """A job that has passed all checks.

    mending: error rows are decoded again, so settings that change only those may differ. schema: of the input files.
    mapped: the schema after `map`. found: the present shards. settled: names of finished shards, whose files may be
    gone.
    """

    job: Job
    output: Output
    restart: bool
    mending: bool
    schema: pa.Schema
    mapped: pa.Schema
    found: list[Shard]
    settled: set[str]
    plan: Plan
    shape: Shape
    prompts: Prompts
    models: CheckedModels

    @property
    def folder(self) -> Folder:
        return self.output.folder

    @property
    def missing(self) -> Iterator[Chunk]:
        """The chunks to run, as far as is known before the run owns the output."""
        state = self.output.state
        return self.plan.chunks() if self.restart or state.job is None else self.plan.chunks(state.held())

    @property
    def note(self) -> str | None:
        """One line on what the target's generation config asks for and the job does not do, if anything."""
        return None if self.job.embeds else note(self.job, self.models.own)

    def room(self, config: EngineConfig) -> Room:
        """The limits on tokens of a row in this shape."""
        return Room(self.models.context, config.capacity)

    def shape_of(self, job: Job, plan: Plan, stored: dict[str, Any] | None) -> Shape:
        """How a job with these rows decodes, before calibration. stored: the shape of the output's job."""
        shape = shape_of(job, self.models.configs, plan.rows, stored)
        if stored is not None or not job.reads:
            return shape
        return wide(job, shape, sample(job, plan, self.prompts.within(self.room(shape.config))))

    def memory(self, config: EngineConfig) -> list[MemoryPlan]:
        """The memory of an actor in this shape, by device."""
        return memory_of(config, self.models.configs, self.job)

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Everything that decides the output on this kind of device."""
        return fingerprint(self.job, self.models.digests, device)

    def refuse_other(self, state: State, device: str | None = None) -> None:
        """Raises JobError if the output has a job with another fingerprint. device: if it is known."""
        device = device or (state.description["device"] if self.job.device == "auto" else self.job.device)
        before, now = state.description["fingerprint"], self.fingerprint(device)
        cured = before | self._cures(state)
        if changes := differences(cured if self.mending else before, now):
            mend = "" if differences(cured, now) else "--retry-errors, "
            raise JobError(
                f"output {self.folder.url}: has a job with other settings: {', '.join(changes)}; use {mend}another "
                "output or --restart"
            )

    def _cures(self, state: State) -> dict[str, Any]:
        stored = EngineConfig(**known_shape(state.description["shape"]))
        return cures(state.description["fingerprint"], self.fingerprint(""), stored, self._capacity)

    @property
    def _capacity(self) -> int:
        return min(self.job.capacity or LONGEST, self.models.context)

    def changed(self, state: State) -> dict[str, Any]:
        """What changes in the description of the output's job if its error rows are decoded with these settings; or
        nothing."""
        if not (cured := self._cures(state) if self.mending else {}):
            return {}
        shape = state.description["shape"] | ({"capacity": self._capacity} if "capacity" in cured else {})
        return {"fingerprint": state.description["fingerprint"] | cured, "shape": shape}

    def resumed(self, state: State) -> "Prepared":
        """The same for the job in the output: with its shape, and with its plan plus new shards.

        Raises JobError if it is another job, or if a planned shard has changed.
        """
        self.refuse_other(state)
        plan = replace(state.plan, limit=self.job.limit, schema=self.plan.schema).extended(
            self.found, self.settled, self._grew
        )
        if plan.rows < state.rows:
            raise JobError(
                f"limit: is {self.job.limit}, but {state.rows} rows are done in {self.folder.url}; raise it, or use "
                "another output"
            )
        stored = (state.description | self.changed(state))["shape"]
        return replace(self, plan=plan, shape=self.shape_of(self.job, plan, stored))

    def _grew(self, planned: Shard, now: Shard) -> bool:
        # A limit counts rows in the plan's order, in which the new rows come before those of later shards.
        return self.job.limit is None and grew(planned, now, self.job.storage_options, self.schema)


def prepare(job: Job, restart: bool = False, mending: bool = False) -> Prepared:
    """Check everything about a job without starting it. Raises JobError with all problems.

    mending: as in `Prepared`.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    problems: list[str] = []

    def check(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except JobError as error:
            problems.extend(error.problems)
        except (ModelError, AnswerError) as error:
            problems.append(str(error))
        return None

    folder = Folder(job.output, job.storage_options)
    check(lambda: _refuse_overlap(job, folder))
    output = check(lambda: _open(folder))
    job = check(lambda: with_trained(job)) or job
    known = check(lambda: resolved(job))
    models = check(lambda: _check_models(known)) if known else None
    if known and models:
        job = check(lambda: with_own(known, models.own)) or known
        job = check(lambda: _with_dimensions(job, models)) or job
        check(lambda: _check_tokens(job, models))
    earlier = output.state if output and output.state.job and not restart else None
    settled = earlier.done_shards() if earlier and job.since else set()
    since = Since(earlier.plan if earlier else None, settled, job.newer_than) if job.since else None
    before, bad_lines = earlier.plan if earlier else None, job.bad_lines == "error"
    found = check(lambda: find_shards(job.input, job.storage_options, before, since, bad_lines))
    columns = check(lambda: mapped(job, found[1])) if found else None
    prompts = None
    if columns is not None:
        carried = earlier.description["job"].get("carry") if earlier else None
        job = check(lambda: _with_ids(job, columns, carried)) or job
        check(lambda: _check_columns(job, columns))
        check(lambda: added_columns(job.map_output, output_schema(job, columns)))
        if models:
            prompts = check(lambda: Prompts(job, models.tokenizer, columns))
            if prompts and prompts.answers.constraint:
                check(prompts.answers.constraint)
    if models:
        rows = sum(shard.rows for shard in found[0]) if found and earlier is None else None
        check(lambda: _check_memory(job, models, rows))
    if earlier is None or earlier.description["device"] == "cuda":  # else the device is another setting
        check(lambda: _check_device(job))
    if problems or not (found and columns is not None and models and prompts and output):
        raise JobError(*dict.fromkeys(problems))
    plan = Plan(found[0], 1, job.limit, encode_schema(found[1]))
    plan = replace(plan, rows_per_chunk=job.chunk_rows(plan.rows))
    shape = shape_of(job, models.configs, plan.rows, None)
    prepared = Prepared(
        job, output, restart, mending, found[1], columns, found[0], settled, plan, shape, prompts, models
    )
    return prepared.resumed(earlier) if earlier else replace(prepared, shape=prepared.shape_of(job, plan, None))


def _with_ids(job: Job, schema: pa.Schema, before: list[str] | None) -> Job:
    """The job with its id column; an empty name means none. before: the columns that an earlier run carries."""
    if is_batch(job, schema):
        return of_batch(job, schema, before)
    found = "id" if job.id_column is None and "id" in schema.names else job.id_column
    return job.model_copy(update={"id_column": found or None})


def _open(folder: Folder) -> Output:
    """The output, after checks that it can be written and that the store can keep two runs apart."""
    with job_errors(f"output {folder.url}: cannot be written"):
        output = Output(folder).read()
        output.check_foreign()
        _probe(folder)
    return output


def _probe(folder: Folder) -> None:
    probe = f"{PROBE}-{time.time_ns()}"
    folder.write(probe, bytes(ROOM))  # about as large as a part
    folder.remove(probe)
    folder.check_create()


def _check_models(job: Job) -> CheckedModels:
    tokenizers, contexts, digests = [], [], {}
    configs: list[PretrainedConfig] = []
    problems: list[str] = []
    own = OwnSettings({}, {})
    pairs = [("target", job.target, job.target_revision)]
    if job.draft is not None and wants_draft(job):
        pairs.append(("draft", job.draft, job.draft_revision))
    for role, name, revision in pairs:
        try:
            place = local_model(name, job.storage_options, weights=False)
            source = Source(place, revision, job.trust_remote_code, job.allow_pickle)
            values = config_of(source)
            if role == "draft" and problems:  # no target to compare it with
                continue
            if role == "draft" and (head := head_config(values, name, configs[0])):
                digests[role] = model_digest(name, revision, job.storage_options)
                configs.append(head)
                continue
            config = load_part(AutoConfig, source)
            check_names(source, config)
            if Path(name).is_dir():
                check_folder(source, config)
            tokenizers.append(load_part(AutoTokenizer, source))
            if role == "target":
                own = own_settings(load_generation_config(place, revision, config, job.trust_remote_code))
            digests[role] = model_digest(name, revision, job.storage_options)
            check_config(config, name)
            if is_quantized(config) and starts_here(job):
                _check_packages(config, name)
            # An estimate, until the model is loaded. On a CPU, compressed-tensors unpacks the weights.
            if is_quantized(config) and not (quantization(config) == UNPACKS and device_here(job) == "cpu"):
                setattr(config, LOADED, weight_bytes(name, job.storage_options))
        except (JobError, ModelError) as error:
            problems.append(f"{role} {error}")
            continue
        limit_context(config)
        contexts.append(context_length(config))
        configs.append(config)
    if configs and (devices := device_count(job)) > 1:
        problems += _split(job, configs, devices)
    if configs and (job.adapter or job.adapters):
        problems += _check_adapters(job, configs[0], digests)
    if problems:
        raise JobError(*problems)
    if len(tokenizers) == 2:
        check_vocabularies(tokenizers[0], tokenizers[1], job.target, str(job.draft))
    if len(contexts) == 2 and contexts[1] < (capacity := min(job.capacity or LONGEST, contexts[0])):
        raise JobError(
            f"draft {job.draft}: its context of {contexts[1]} tokens is shorter than the capacity of {capacity}; "
            "set capacity, or take a draft with a longer context"
        )
    constrained = job.kind != Job.kind or job.max_thinking_tokens is not None
    return CheckedModels(tokenizers[0], contexts[0], digests, configs, own.without_limits() if constrained else own)


def _split(job: Job, configs: list[PretrainedConfig], devices: int) -> list[str]:
    """Adds to the target's config how its layers are split over an actor's devices. Returns the problems."""
    target, draft = configs[0], configs[1] if len(configs) > 1 else None
    if draft is not None and getattr(draft, "head_for", None):
        return [f"draft {job.draft}: a head reads the target's layers, which lie on several devices; use a draft model"]
    try:
        setattr(target, LAYERS, balanced(target, draft, devices, getattr(torch, job.dtype), longest(job)))
    except ValueError as error:
        return [f"target {job.target}: {error}"]
    return []


def _check_packages(config: PretrainedConfig, name: str) -> None:
    """Raises JobError if a package is missing that quantized weights need."""
    package = PACKAGES.get(quantization(config))
    if package is not None and find_spec(package) is None:
        raise JobError(f"{name}: its weights need {package}; pip install 'exspec[quantized]'")


def _check_adapters(job: Job, config: PretrainedConfig, digests: dict[str, str]) -> list[str]:
    """The problems of the job's adapters. Adds their digests, and to the target's config the memory of those by row."""
    given = {"adapter": job.adapter} if job.adapter else {}
    given |= {f"adapters.{name}": place for name, place in job.adapters.items()}
    problems = [UNMERGED] if job.adapter and is_quantized(config) else []
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, trust_remote_code=job.trust_remote_code)
    target = headless(target) if job.embeds else target
    numbers = 0
    for role, name in given.items():
        try:
            place = local_model(name, job.storage_options, config=CONFIG)
            digests[role] = model_digest(name, None, job.storage_options, CONFIG)
            parts = read(target, place)
        except (JobError, ModelError) as error:
            problems.append(f"{role} {error}")
            continue
        numbers += sum(factor.numel() for pair in parts.values() for factor in pair)
    if job.adapters:
        setattr(config, ADAPTERS, numbers * getattr(torch, job.dtype).itemsize)
    return problems


def _with_dimensions(job: Job, models: CheckedModels) -> Job:
    """An embedding job with the number of its dimensions. Raises JobError if it is above the target's."""
    if not job.embeds:
        return job
    size, asked = models.configs[0].get_text_config().hidden_size, getattr(job, "dimensions", None)
    if asked and asked > size:
        raise JobError(f"dimensions: is {asked}, but the hidden states of {anonymous(job.target)} have {size}")
    return job.model_copy(update={"dimensions": asked or size})


def _check_tokens(job: Job, models: CheckedModels) -> None:
    size = models.configs[0].get_text_config().vocab_size
    if unknown := sorted({token for word in job.bad_words_ids for token in word if token >= size}):
        raise JobError(f"bad_words_ids: token {unknown[0]} is not in the target's vocabulary of {size}")


def _check_memory(job: Job, models: CheckedModels, rows: int | None) -> None:
    """Check the settings of the shape, and that one sequence fits into memory_gib if that is set.

    rows: of a new job. A shape that is free will be fitted to the memory, and that of an older job is stored.
    """
    shape = shape_of(job, models.configs, rows or 0, None)
    config, settled = shape.config, rows is not None and not shape.free and job.memory_gib is None
    needed, there = sum(p.total for p in memory_of(config, models.configs, job)), psutil.virtual_memory().total
    if settled and needed > there and device_here(job) == "cpu" and starts_here(job):
        raise JobError(
            f"memory: an actor needs {needed / 2**30:,.1f} GiB, and this machine has {there / 2**30:,.1f} GiB; lower "
            f"batch_size ({config.batch_size}), window ({config.slots}) or capacity ({config.capacity})"
        )
    if job.memory_gib is not None:
        draft = models.configs[1] if len(models.configs) > 1 else None
        try:
            fit(models.configs[0], draft, config, getattr(torch, job.dtype), int(job.memory_gib * 2**30))
        except ValueError as error:
            raise JobError(str(error)) from error


def _check_device(job: Job) -> None:
    if job.device == "cuda" and starts_here(job) and not torch.cuda.is_available():
        raise JobError("device: is cuda, but this machine has no GPU that torch can use; use cpu, or set ray_address")


def _check_columns(job: Job, schema: pa.Schema) -> None:
    """Raises JobError for all settings that name missing columns, or columns that must be carried and are not."""
    keys = ("id_column", "completion_column", "choices_column", *COLUMNS)
    named = {key: [column] for key in keys if (column := getattr(job, key, None)) is not None} | job.kept_columns
    missing = [(key, column) for key, columns in named.items() for column in columns if column not in schema.names]
    problems = [f"{key}: {no_column(column, schema.names)}" for key, column in missing]
    try:
        if job.prompt_template is None and not is_batch(job, schema):
            prompt_column(job, schema)
        carried = carried_columns(job, schema)
    except JobError as error:
        raise JobError(*problems, *error.problems) from error
    problems += [
        f"{key}: {column!r} is not in the output; add it to carry"
        for key, columns in job.kept_columns.items()
        for column in columns
        if column in schema.names and column not in carried
    ]
    if problems:
        raise JobError(*problems)


def _refuse_overlap(job: Job, folder: Folder) -> None:
    """Raises JobError if output and input overlap: parts would become shards, and --restart would copy the input."""
    own = f"{folder.path}/"
    for url in job.input:
        path = f"{Folder(url, job.storage_options).path}/"
        if own.startswith(path) or path.startswith(own) or fnmatch(f"{own}part-0.parquet", path.rstrip("/")):
            raise JobError(f"output {folder.url}: overlaps the input {url}; use a separate folder")
