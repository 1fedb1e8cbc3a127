"""The shape of a job's decoding: as the job says, as the job's first run chose it, or measured on a device now."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from transformers import PretrainedConfig

from exspec.actors.engine import EngineConfig, Request
from exspec.actors.engine.config import DRAFTING, Method
from exspec.actors.engine.drafters import DRAFTERS, NONE, available, drafter_class, kind, label
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.plan import fit, free_memory, plan_memory
from exspec.actors.models import Pair, load_pair
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Plan, decode_schema
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.fingerprint import may_change
from exspec.pipeline.job.settings import AUTO, Job
from exspec.pipeline.weights import local_model

LONGEST = 4096  # tokens of a request unless the job says otherwise
SAMPLED = (8, 256)  # chunks that a sample is taken from, and prompts of it
ALWAYS = ("kernels", "prefill")  # measured with whatever else is
BY_DRAFTER = ("method", "drafter", *DRAFTING)  # settings that say who drafts, and how
SHARE = 0.9  # of the free memory that a plan may use: libraries take some too


@dataclass(frozen=True)
class Shape:
    """config: with a default where the job says auto. free: the settings that are to be measured, if any.
    stored: it is what the job's first run settled on.
    """

    config: EngineConfig
    free: tuple[str, ...]
    stored: bool = False


def shape_of(job: Job, models: Sequence[PretrainedConfig], rows: int, stored: dict[str, Any] | None) -> Shape:
    """The job's shape before anything is measured; `stored` is what its first run settled on. models: of the target
    and, where it may be used, of the draft.

    Raises JobError for settings that exclude each other.
    """
    free = tuple(name for name in AUTO if getattr(job, name) == "auto")
    given: dict[str, Any] = {name: getattr(job, name) for name in AUTO if name not in free}
    capacity = min(job.capacity or LONGEST, context_length(models[0]))
    target, draft = models[0], models[1] if len(models) > 1 else None
    method: Method = "eqspec" if job.method == "eqspec" else "exspec"
    hand = available(target, draft, EngineConfig(method=method, capacity=capacity, **_asked(job)))
    given |= _drafting(job, hand)
    if given.get("method") == "plain":
        free = tuple(name for name in free if name not in ("method", "drafter", "draft_tokens"))
    if "draft_tokens" in free and given["drafter"] in DRAFTERS:
        longest = max(drafter_class(given["drafter"]).lengths_with(draft))
        given["draft_tokens"] = min(EngineConfig.draft_tokens, longest)
    if "window" in free and "batch_size" not in free:
        given["window"] = max(given["batch_size"], EngineConfig.window)
    if "batch_size" in free and "window" not in free:
        given["batch_size"] = min(given["window"], EngineConfig.batch_size)
    try:
        config = EngineConfig(
            **given,
            capacity=capacity,
            exact=job.exact,
            draft_length=job.draft_length,
            threshold=job.threshold or EngineConfig.threshold,
            **_asked(job),
        )
        config = _taken_up(config, stored, job, hand) if stored else config
    except ValueError as error:
        raise JobError(str(error)) from error
    if why := kind(config).refusal(target, draft, config):
        raise JobError(f"drafter {config.drafter}: {why}")
    if stored or rows < job.tune_from or config.method == "eqspec":
        if not stored and {"method", "drafter"} <= set(free) and job.draft is None:
            config = replace(config, method="plain", drafter=NONE)  # nobody has seen yet what looking up is worth
        free = ()
    elif free:
        free += ALWAYS
    return Shape(config, free, stored is not None)


def _drafting(job: Job, hand: list[str]) -> dict[str, Any]:
    """Method and drafter as the job says, with the first drafter at hand where it says nothing.

    Raises JobError where they exclude each other.
    """
    method = None if job.method == "auto" else job.method
    if method == "plain" or (job.drafter == NONE and method is None):
        if job.drafter not in ("auto", NONE):
            raise JobError(f"method plain drafts nothing, and drafter is {job.drafter}; expected one of them")
        return {"method": "plain", "drafter": NONE}
    drafter = job.drafter
    if drafter == "auto":
        if not hand and method is None:
            return {"method": "plain", "drafter": NONE}
        if not hand:
            raise JobError(f"method {method} has no drafter at hand; give a draft, or take method plain")
        drafter = hand[0]
    elif drafter in DRAFTERS and drafter_class(drafter).needs_draft and job.draft is None:
        raise JobError(f"drafter {drafter} needs a draft; without one use another, or auto")
    return {"drafter": drafter} | ({"method": method} if method else {})


def _asked(job: Job) -> dict[str, Any]:
    """Settings of drafters that the job names."""
    return {name: value for name in DRAFTING if (value := getattr(job, name)) is not None}


def _says(job: Job, name: str) -> bool:
    """Whether the job has such a setting, and not left to what is measured or to a default."""
    return getattr(job, name, None) not in (None, "auto")


def wants_draft(job: Job) -> bool:
    """Whether what the job names as its draft may be used."""
    if job.draft is None or job.method == "plain" or job.drafter == NONE:
        return False
    return job.drafter not in DRAFTERS or drafter_class(job.drafter).needs_draft


def _taken_up(config: EngineConfig, began: dict[str, Any], job: Job, hand: list[str]) -> EngineConfig:
    """The shape that a job began in, with what may change as the job says now, by the drafter that there is now: which
    one changes no token, and neither does plain decoding in this shape. config: as a new job would have it."""
    stored = replace(config, **known_shape(began))
    said = {name: getattr(config, name) for name in asdict(config) if name not in BY_DRAFTER and _says(job, name)}
    stored = replace(stored, **{name: value for name, value in said.items() if may_change(name, job.exact)})
    asked = _asked(job)
    if any(getattr(stored, name) != value for name, value in asked.items()):
        stored = stored.drafting(asked)
    if job.drafter == "auto" and stored.drafts and stored.drafter not in hand:
        others = [name for name in hand if drafter_class(name).needs_draft]  # the job has another kind of draft now
        stored = replace(stored, drafter=(others or [stored.drafter])[0])
    drafted = stored.width - 1  # K, or the columns that plain decoding left dead
    drafter = stored.drafter if job.drafter == "auto" else job.drafter
    if stored.method == "plain" and (job.drafter == "auto" or not drafted):
        return stored
    if job.method == "plain" or drafter == NONE or (job.draft is None and drafter_class(drafter).needs_draft):
        return stored.plain()
    if stored.method == "plain":
        return replace(stored, method="exspec", drafter=drafter, draft_tokens=drafted)
    return replace(stored, drafter=drafter)


def known_shape(stored: dict[str, Any]) -> dict[str, Any]:
    """The shape that a job began in. Raises JobError where a newer version decided more of it."""
    names = {field.name for field in fields(EngineConfig)}
    if strange := [name for name in stored if name not in names]:
        raise JobError(
            f"the job began with the setting {strange[0]!r}, which this version does not know; use the newer version"
        )
    return stored


def stored_shape(config: EngineConfig) -> dict[str, Any]:
    """What a later run of the job needs to decode in the same shape. How many pages it has, and how they are read, is
    its machine's own."""
    return {name: value for name, value in asdict(config).items() if name not in ("draft_length", "pages", "attention")}


def memory_of(config: EngineConfig, models: Sequence[PretrainedConfig], job: Job) -> MemoryPlan:
    return plan_memory(models[0], models[1] if len(models) > 1 else None, config, getattr(torch, job.dtype))


def sample(job: Job, plan: Plan, prompts: Prompts) -> list[Request]:
    """Prompts out of chunks that are spread over the plan."""
    found: list[Request] = []
    count = sum(1 for _ in plan.chunks())
    schema = decode_schema(plan.schema)
    each = -(-SAMPLED[1] // min(SAMPLED[0], count))
    for chunk in islice(plan.chunks(), 0, None, -(-count // SAMPLED[0])):
        first = range(min(each, chunk.rows))
        with suppress(JobError):  # it will be set aside
            asked = requests(chunk, job, prompts, schema, first)
            found += [a.request for a in asked if not isinstance(a.request, RowError)]  # the others are sample enough
    return found


@dataclass(frozen=True)
class Settled:
    """config: what the job decodes with. candidates: shape, predicted and measured tokens/s; empty: not measured.
    compiled: what was compiled to measure them, and where it is kept."""

    config: EngineConfig
    candidates: list[dict[str, Any]]
    seconds: float = 0.0
    compiled: str | None = None

    def __str__(self) -> str:
        c = self.config
        method = f"{c.method} ({label(c)})" if c.drafts else c.method
        shape = f"{method}, B={c.batch_size}, slots={c.slots}, K={c.drafted}, bucket={c.bucket}, {c.kernels}"
        if c.method != "eqspec":
            shape += f", KV of {c.page_count * c.page_size} tokens"
        told = [f"measured in {self.seconds:.0f} s", *filter(None, [self.compiled])]
        return f"{shape} ({'; '.join(told)})" if self.candidates else shape


def settle(job: Job, shape: Shape, requests: list[Request], device: str) -> Settled:
    """Fit the shape into the device's memory, and measure what is free. Runs where the device is.

    Raises ValueError where the memory is too small or no request of the sample can be decoded.
    """
    torch.set_num_threads(job.threads)
    budget = memory_budget(job, torch.device(device))  # before the weights take their part of it
    wanted = "drafter" in shape.free or kind(shape.config).needs_draft
    pair = pair_of(job, device, wanted and wants_draft(job))
    if shape.free:
        found = calibrate(pair.target, pair.draft, requests, shape.config, shape.free, job.tune_seconds, budget)
        config = found.config if job.threshold is None else replace(found.config, threshold=job.threshold)
        return Settled(config, found.table(), found.seconds, found.compiled)
    draft = pair.draft.config if pair.draft is not None else None
    fitted = fit(pair.target.config, draft, shape.config, pair.target.dtype, budget)
    if fitted.batch_size < shape.config.batch_size and shape.stored:
        raise ValueError(
            f"memory: {budget / MEBIBYTE:.0f} MiB are too few for the batch of {shape.config.batch_size} that this job "
            "decodes in; give as much as its first run had, or start over with --restart"
        )
    return Settled(fitted, [])


def pair_of(job: Job, device: str, draft: bool) -> Pair:
    """The job's target, and its draft where that is wanted, on this node. Raises ModelError as `load_pair` does."""
    return load_pair(
        local_model(job.target, job.storage_options),
        local_model(job.draft, job.storage_options) if job.draft and draft else None,
        getattr(torch, job.dtype),
        device,
        job.target_revision,
        job.draft_revision,
        trust_remote_code=job.trust_remote_code,
        allow_pickle=job.allow_pickle,
    )


def device_here(job: Job) -> str:
    """The kind of device that the job decodes on where it runs on this machine."""
    if job.device != "auto":
        return job.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_budget(job: Job, device: torch.device) -> int:
    """Bytes that one actor's plan may use: the job's, or its share of what the device has free."""
    if job.memory_gib is not None:
        return int(job.memory_gib * 2**30)
    neighbours = -(-job.actor_range[1] // _nodes()) if device.type == "cpu" else 1 / (job.num_gpus or 1)
    return int(free_memory(device) * SHARE / max(neighbours, 1))


def _nodes() -> int:
    """Machines that share the job's actors."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
