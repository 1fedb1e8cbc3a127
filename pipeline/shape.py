"""The shape that a job decodes in: from the job, from its first run, or from calibration."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from exspec.actors.adapter import CONFIG
from exspec.actors.engine import EngineConfig, Request, shared_code
from exspec.actors.engine.config import DRAFTING, SETTINGS, Method
from exspec.actors.engine.drafters.lookup import available, drafter_class, kind, label
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.candidates import UNCOMPILED
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import SHARE, device_plans, fit, free_memory
from exspec.actors.hardware import hardware
from exspec.actors.models import Devices, Pair, load_pair
from exspec.actors.source import Source, load_part
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Plan, decode_schema
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.fingerprint import may_change
from exspec.pipeline.job.settings import AUTO, Job
from exspec.pipeline.weights import local_model

LONGEST = 4096  # capacity in tokens, unless the job sets one
AT_ONCE, WIDEST = 512, 64  # tokens that a round scores: of all rows, and of one completion
SAMPLED = (8, 256)  # a calibration sample: chunks that it is taken from, and prompts
ALWAYS = ("kernels", "prefill")  # calibrated along with anything else
BY_DRAFTER = ("method", "drafter", *DRAFTING)
RECALLED = "as an earlier calibration chose"
CPU_DEVICES = "EXSPEC_CPU_DEVICES"


@dataclass(frozen=True)
class Shape:
    """config: with defaults for what is not measured yet. free: the settings to calibrate. stored: the config is from
    the job's first run. small: the job sets none of the settings, and has too few rows to measure them. reason: why
    this shape, if it is not the usual one.
    """

    config: EngineConfig
    free: tuple[str, ...]
    stored: bool = False
    small: bool = False
    reason: str | None = None


def shape_of(job: Job, models: Sequence[PretrainedConfig], rows: int, stored: dict[str, Any] | None) -> Shape:
    """How the job decodes, before calibration. models: of the target and, if it may be used, of the draft. stored: the
    shape that the job's first run stored; None for a new job.

    The value of a setting is the first that exists of these:

    setting                              new job                        resumed job
    method, drafter                      job, calibration, default      job, stored (with a drafter that is available)
    batch_size, window, draft_tokens     job, calibration, default      stored
    draft_from, bucket                   job, calibration, default      stored
    exit_depth, check_depth, exit_tokens job, calibration, default      job, stored
    draft_window, draft_chosen           job, calibration, default      job, stored
    threshold                            job, calibration, default      job, stored
    capacity, exact                      job                            stored (a retry may raise the capacity)
    draft_length                         job                            job
    kernels, prefill_*, page, overlap    calibration, default           stored
    columns                              default                        stored, or as many as the drafts had
    pages, attention                     this machine                   this machine

    A job of few rows (see `recalled`) and one with eqspec take defaults instead of calibrating. A job that only
    reads decodes plainly, with as many columns as its completions need (`wide`), and calibrates kernels and prefill.

    A job that began plain stays plain unless it names a drafter and its forwards have columns for drafts.
    Raises JobError for settings that exclude each other.
    """
    target, draft = models[0], models[1] if len(models) > 1 else None
    capacity = min(longest(job), context_length(target))
    own = {name: value for name in DRAFTING if (value := getattr(job, name)) is not None}
    tried: Method = "eqspec" if job.method == "eqspec" else "exspec"
    free = tuple(name for name in AUTO if getattr(job, name) == "auto")
    try:
        drafters = available(target, draft, EngineConfig(method=tried, capacity=capacity, **own))
        if stored is None:
            config = _new_config(job, draft, drafters, capacity)
        else:
            config = _resumed_config(job, known_shape(stored), own, drafters)
    except ValueError as error:
        raise JobError(str(error)) from error
    if why := kind(config).refusal(target, draft, config):
        raise JobError(f"drafter {config.drafter}: {why}")
    if stored is not None and config.kernels != "eager" and device_count(job) > 1:
        raise JobError(
            f"num_gpus: the job began with {config.kernels} kernels on one device, and on several devices layers run "
            "eagerly, which may change the last bits; use the num_gpus of the first run, or start over with --restart"
        )
    if stored is not None or config.method == "eqspec":
        return Shape(config, (), stored is not None)
    if job.reads:
        return Shape(config, ALWAYS if rows >= job.tune_from else ())
    if rows < job.tune_from:
        if {"method", "drafter"} <= set(free) and job.draft is None:
            config = replace(config, method="plain", drafter=NONE)  # without a draft, drafting may not pay
        return Shape(config, (), small=set(AUTO) <= set(free) and not own)
    if not config.drafts:
        free = tuple(name for name in free if name not in ("method", "drafter", "draft_tokens", "draft_from"))
    return Shape(config, free + ALWAYS if free else ())


def _new_config(job: Job, draft: PretrainedConfig | None, drafters: list[str], capacity: int) -> EngineConfig:
    values = {name: value for name in SETTINGS if (value := getattr(job, name)) not in (None, "auto")}
    method, drafter = ("plain", NONE) if job.reads else (job.method, job.drafter)
    if method == "auto" and (drafter == NONE or (drafter == "auto" and not drafters)):
        method = "plain"
    if method == "plain":
        if drafter not in ("auto", NONE):
            raise JobError(f"method plain does not draft, but drafter is {drafter}; change one of them")
        drafter = NONE
    elif drafter == "auto":
        if not drafters:
            raise JobError(f"method {method} has no drafter available; give a draft, or use method plain")
        drafter = drafters[0]
    elif drafter in DRAFTERS and drafter_class(drafter).needs_draft and job.draft is None:
        raise JobError(f"drafter {drafter} needs a draft; give one, or use another drafter")
    values |= {"drafter": drafter} | ({} if method == "auto" else {"method": method})
    if "draft_tokens" not in values and method != "plain" and drafter in DRAFTERS:
        values["draft_tokens"] = min(EngineConfig.draft_tokens, max(drafter_class(drafter).lengths_with(draft)))
    devices = device_count(job)
    if "window" in values:
        values.setdefault("batch_size", min(values["window"], EngineConfig.batch_size))
    elif "batch_size" in values or devices > 1:
        rows = values.get("batch_size", EngineConfig.batch_size)
        values["window"] = max((devices + 2) * rows, EngineConfig.window)
    return EngineConfig(**values | {"capacity": capacity, "embeds": job.embeds})


def _resumed_config(job: Job, stored: dict[str, Any], own: dict[str, Any], drafters: list[str]) -> EngineConfig:
    """The config of a resumed job. Neither another drafter nor plain decoding in the same shape changes a token."""
    given = {field.name: getattr(job, field.name, None) for field in fields(EngineConfig)}
    changed = {
        name: value
        for name, value in given.items()
        if value not in (None, "auto") and name not in BY_DRAFTER and may_change(name, job.exact)
    }
    config = EngineConfig(**stored | changed)
    drafter = config.drafter if job.drafter == "auto" else job.drafter
    if job.drafter == "auto" and config.drafts and drafter not in drafters:  # the job has another kind of draft now
        drafter = next((name for name in drafters if drafter_class(name).needs_draft), drafter)
    if not config.drafts and (job.drafter == "auto" or config.width == 1):
        return config
    if job.method == "plain" or drafter == NONE or (job.draft is None and drafter_class(drafter).needs_draft):
        return config.plain()
    if not config.drafts:
        config = replace(config, method="exspec", drafter=drafter, draft_tokens=config.width - 1)
    if drafter == config.drafter:
        return replace(config, **own)
    return config.drafting({"drafter": drafter, **own})


def wide(job: Job, shape: Shape, requests: Sequence[Request]) -> Shape:
    """The shape of a new job that only reads: most completions fit into one round, and a round has about as many tokens
    as a forward of a prefill. requests: a sample. draft_tokens asks for the columns of a job with so many drafts."""
    lengths = sorted(len(r.given) for r in requests if r.given) or [WIDEST]
    common = lengths[len(lengths) * 9 // 10]
    most = min(WIDEST, shape.config.bucket, shape.config.capacity)
    columns = min(1 << (common - 1).bit_length(), most) if job.draft_tokens == "auto" else int(job.draft_tokens) + 1
    rows = max(1, AT_ONCE // columns) if job.batch_size == "auto" else int(job.batch_size)
    window = max(rows, shape.config.window) if job.window == "auto" else int(job.window)
    try:
        return replace(
            shape, config=replace(shape.config, columns=columns, batch_size=min(rows, window), window=window)
        )
    except ValueError as error:
        raise JobError(str(error)) from error


def wants_draft(job: Job) -> bool:
    """Whether the job may use the draft that it names."""
    if job.draft is None or job.method == "plain" or job.drafter == NONE:
        return False
    return job.drafter not in DRAFTERS or drafter_class(job.drafter).needs_draft


def known_shape(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored shape. Raises JobError if a newer version wrote it with settings that this version does not know."""
    names = {field.name for field in fields(EngineConfig)}
    if strange := [name for name in stored if name not in names]:
        raise JobError(
            f"the job began with the setting {strange[0]!r}, which this version does not know; use the newer version"
        )
    return stored


def stored_shape(config: EngineConfig) -> dict[str, Any]:
    """What a later run needs to decode in the same shape. Pages and attention depend on the machine of each run."""
    own = ("draft_length", "pages", "attention", "devices", *([] if config.embeds else ["embeds"]))
    return {name: value for name, value in asdict(config).items() if name not in own}


def memory_of(config: EngineConfig, models: Sequence[PretrainedConfig], job: Job) -> list[MemoryPlan]:
    """By device of an actor."""
    return device_plans(models[0], models[1] if len(models) > 1 else None, config, getattr(torch, job.dtype))


def sample(job: Job, plan: Plan, prompts: Prompts) -> list[Request]:
    """A sample of the prompts, from chunks that are spread over the plan."""
    found: list[Request] = []
    count = sum(1 for _ in plan.chunks())
    schema = decode_schema(plan.schema)
    each = -(-SAMPLED[1] // min(SAMPLED[0], count))
    for chunk in islice(plan.chunks(), 0, None, -(-count // SAMPLED[0])):
        first = range(min(each, chunk.rows))
        with suppress(JobError):  # the chunk will be set aside
            for asked in requests(chunk, job, prompts, schema, first):
                if not isinstance(asked.request, RowError):
                    found += prompts.answers.requests(asked.request, prompts.given(asked.row))
    return found


@dataclass(frozen=True)
class Settled:
    """config: what the job decodes with. candidates: shapes with predicted and measured tokens/s, if calibrated.
    reason: why this shape, if it was measured. compiled: what calibration compiled, and where it is cached.
    row_seconds: of a row on one device, as calibration expects it. code: as `Ledger.share` takes it."""

    config: EngineConfig
    candidates: list[dict[str, Any]]
    seconds: float = 0.0
    reason: str | None = None
    compiled: str | None = None
    row_seconds: float | None = None
    code: tuple[str, dict[str, bytes]] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        c = self.config
        method = f"{c.method} ({label(c)})" if c.drafts else c.method
        drafts = f"K={c.drafted} from {c.draft_from:,} tokens" if c.drafts and c.draft_from else f"K={c.drafted}"
        shape = f"{method}, B={c.batch_size}, slots={c.slots}, {drafts}, bucket={c.bucket}, {c.kernels}"
        if c.method != "eqspec":
            shape += f", KV of {c.page_count * c.page_size} tokens"
        measured = f"measured in {self.seconds:.0f} s" if self.candidates else None
        notes = [*filter(None, (measured, self.reason, self.compiled))]
        return f"{shape} ({'; '.join(notes)})" if notes else shape


def measurements(job: Job, digests: dict[str, str], device: str) -> Kept:
    """What jobs with the same models have measured on this kind of machine. digests: of the models' files, by role."""
    devices = device_count(job)
    machine = hardware(torch.device(device)) | ({"devices": str(devices)} if devices > 1 else {})
    return Kept.of(digests, job.dtype, machine, job.threads)


def recalled(shape: Shape, kept: Kept, models: Sequence[PretrainedConfig]) -> Shape:
    """A small job's shape as the last calibration chose it for other jobs with the same models, if there was one. It is
    without compiled kernels: each actor would trace them for seconds."""
    found = kept.shape() if shape.small else None
    if found is None:
        return shape
    chosen: dict[str, Any] = {n: found[n] for n in (*AUTO, *DRAFTING, "prefill_rows", "prefill_columns")}
    with suppress(ValueError):  # this job's capacity may exclude a setting
        config = replace(shape.config, **chosen, kernels=UNCOMPILED.get(found["kernels"], found["kernels"]))
        if kind(config).refusal(models[0], models[1] if len(models) > 1 else None, config) is None:
            return shape if config == shape.config else replace(shape, config=config, reason=RECALLED)
    return shape


def settle(job: Job, shape: Shape, requests: list[Request], device: str, digests: dict[str, str]) -> Settled:
    """Fit the shape into the device's memory, and calibrate its free settings. Runs on the device's node.

    Raises ValueError if the memory is too small or no request of the sample can be decoded.
    """
    torch.set_num_threads(job.threads)
    budget = memory_budget(job, torch.device(device))  # before the weights are loaded
    kept = measurements(job, digests, device)
    wanted = "drafter" in shape.free or shape.small or kind(shape.config).needs_draft
    pair = pair_of(job, device, wanted and wants_draft(job))
    if shape.free:
        found = calibrate(
            pair.target, pair.draft, requests, shape.config, shape.free, job.tune_seconds, budget, kept=kept
        )
        config = found.config if job.threshold is None else replace(found.config, threshold=job.threshold)
        code = shared_code.own()
        return Settled(config, found.table(), found.seconds, found.reason, found.compiled, found.row_seconds, code)
    draft = pair.draft.config if pair.draft is not None else None
    shape = recalled(shape, kept, [pair.target.config, *filter(None, [draft])])
    fitted = fit(pair.target.config, draft, shape.config, pair.target.dtype, budget)
    if fitted.batch_size < shape.config.batch_size and shape.stored:
        raise ValueError(
            f"memory: {budget / MEBIBYTE:.0f} MiB are too few for this job's batch_size of {shape.config.batch_size}; "
            "give as much memory as its first run had, or start over with --restart"
        )
    return Settled(fitted, [], reason=shape.reason)


def pair_of(job: Job, device: str, draft: bool) -> Pair:
    """The job's target, and its draft if wanted, loaded on this node. Raises ModelError as `load_pair` does."""

    def source(name: str, revision: str | None) -> Source:
        return Source(local_model(name, job.storage_options), revision, job.trust_remote_code, job.allow_pickle)

    def local(adapter: str) -> str:
        return local_model(adapter, job.storage_options, config=CONFIG)

    target = replace(
        source(job.target, job.target_revision),
        head=not job.embeds,
        adapter=job.adapter and local(job.adapter),
        adapters=tuple(map(local, job.adapters.values())),
    )
    drafting = source(job.draft, job.draft_revision) if job.draft and draft else None
    devices = devices_of(job, device)
    if len(devices) == 1:
        return load_pair(target, drafting, getattr(torch, job.dtype), devices[0])
    named = None
    if job.draft and wants_draft(job):  # loaded or not, so that all processes of the job split the target alike
        place = local_model(job.draft, job.storage_options, weights=False)
        named = load_part(AutoConfig, Source(place, job.draft_revision, job.trust_remote_code, job.allow_pickle))
    return load_pair(target, drafting, getattr(torch, job.dtype), Devices(devices, named, longest(job)))


def device_count(job: Job) -> int:
    """How many devices an actor splits the target over. EXSPEC_CPU_DEVICES makes several of a CPU, for tests."""
    if job.device != "cpu" and int(job.num_gpus or 0) > 1:
        return int(job.num_gpus or 0)
    return int(os.environ.get(CPU_DEVICES, 1))


def devices_of(job: Job, device: str) -> tuple[torch.device, ...]:
    """The devices of an actor, in its process. Raises JobError if it has too few."""
    if (count := device_count(job)) == 1:
        return (torch.device(device),)
    if device != "cuda":
        return (torch.device(device),) * count
    if (there := torch.cuda.device_count()) < count:
        raise JobError(f"num_gpus: the job splits its target over {count} GPUs, and this process has {there}")
    return tuple(torch.device("cuda", number) for number in range(count))


def longest(job: Job) -> int:
    """The capacity in tokens, before it is limited to the target's context."""
    return job.capacity or LONGEST


def device_here(job: Job) -> str:
    """The kind of device that the job would use on this machine."""
    if job.device != "auto":
        return job.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_budget(job: Job, device: torch.device) -> int:
    """Bytes that one actor may use on each of its devices: memory_gib, or a share of the free memory of the one with
    the least."""
    if job.memory_gib is not None:
        return int(job.memory_gib * 2**30)
    devices = devices_of(job, device.type)
    on_cpu = -(-job.actor_range[1] // _nodes()) * len(devices)
    neighbours = on_cpu if device.type == "cpu" else 1 / (job.num_gpus or 1)
    return int(min(map(free_memory, devices)) * SHARE / max(neighbours, 1))


def _nodes() -> int:
    """Number of nodes that the job's actors are spread over."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
