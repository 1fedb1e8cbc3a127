"""The methods: each is a choice of KV store, drafter, grouping and prefill for the engine's loop."""

from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.config import UNPACKED, EngineConfig
from exspec.actors.engine.drafters.draft_length import DraftLength, draft_length
from exspec.actors.engine.drafters.drafter import Drafter, DrafterContext, MakeCached, MakeDrafter, NoDraft
from exspec.actors.engine.drafters.lookup import kind
from exspec.actors.engine.faults import warn_once
from exspec.actors.engine.graphs import CudaGraphs, Eager, Recorder
from exspec.actors.engine.kv.cached_model import (
    GATHERED,
    IN_PLACE,
    CachedModel,
    PagedModel,
    RealignedModel,
    context_length,
)
from exspec.actors.engine.kv.pages import Boundless, Pages, Store
from exspec.actors.engine.kv.split import Split, SplitModel, spread
from exspec.actors.engine.kv.trial import attention_trial
from exspec.actors.engine.kv.window import Rings
from exspec.actors.engine.layers.packed import is_quantized, packs
from exspec.actors.engine.layers.programs import Compiled, compiler_trial
from exspec.actors.engine.scheduling.grouping import Grouping, grouping_of
from exspec.actors.engine.scheduling.prefill import ChunkedPrefill, Prefill, WholePrefill


class Parts(NamedTuple):
    """The parts of an engine. context: what the drafter was built from; calibration builds other drafters from it."""

    target: CachedModel | SplitModel
    drafter: Drafter
    context: DrafterContext
    draft_length: DraftLength
    grouping: Grouping
    prefill: Prefill
    store: Store


def recorder_for(device: torch.device, config: EngineConfig) -> Recorder:
    """CUDA graphs on a GPU with fixed shapes; otherwise a recorder that records nothing."""
    return CudaGraphs(device) if device.type == "cuda" and config.fixed_shapes else Eager()


def compiling(recorder: Recorder, config: EngineConfig) -> Recorder:
    """A recorder of programs, if the config asks for compiled kernels; otherwise the recorder itself."""
    return Compiled(recorder, config.packs) if config.compiles else recorder


def resolve(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig) -> EngineConfig:
    """The config as it runs with these models on this device: with the capacity limited to the model's context, and
    with attention (in place there is one bucket), overlap and kernels decided.

    Raises ValueError if the config asks for attention in place and it does not work.
    """
    config = spread(target.config, config)
    config = _with_attention(
        target, draft, replace(config, capacity=min(config.capacity, context_length(target.config)))
    )
    default = target.device.type == "cuda" and config.attention == "in_place"
    overlap = default if config.overlap is None else config.overlap
    config = replace(config, overlap=overlap and config.fixed_shapes)
    if config.kernels != "eager" and any(m is not None and is_quantized(m.config) for m in (target, draft)):
        warn_once("layers run eagerly, neither packed nor compiled: a model's weights are quantized")
        config = replace(config, kernels="eager")
    if not packs(target.device, target.dtype):
        config = replace(config, kernels=UNPACKED.get(config.kernels, config.kernels))
    if config.compiles:
        reason = "attention is not in place" if config.attention != "in_place" else compiler_trial(target.device)
        if reason is not None:
            warn_once(f"layers run eagerly, not compiled: {reason}")
            return replace(config, kernels="eager")
    return config


def _with_attention(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig) -> EngineConfig:
    if config.method == "eqspec":
        return config
    models = [target.config, *kind(config).models(None if draft is None else draft.config)]
    trials = (attention_trial(model, target.device, target.dtype, config.page_size) for model in models)
    if config.attention == "gathered":
        return config
    reason = next((reason for reason in trials if reason is not None), None)
    if reason is None:
        return replace(config, attention="in_place", pages=config.page_count, bucket=config.capacity)
    if config.attention == "in_place":
        raise ValueError(f"attention: in_place does not work here: {reason}; expected auto or gathered")
    warn_once(f"attention copies the KV that it reads: {reason}")
    return replace(config, attention="gathered")


def drafter_of(context: DrafterContext) -> Drafter:
    """The drafter of the config. Raises ValueError if it cannot draft with these models."""
    config, drafter = context.config, kind(context.config)
    draft = None if context.draft is None else context.draft.config
    reason = drafter.refusal(context.target.config, draft, config) or drafter.trial(context.target, config)
    if reason:
        raise ValueError(f"method {config.method} with the drafter {config.drafter}: {reason}")
    return drafter.build(context)


def build(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: EngineConfig,
    recorder: Recorder,
    drafter: MakeDrafter = drafter_of,
) -> Parts:
    """Build the parts of an engine from a resolved config. Raises ValueError if no drafter can be made."""
    store, cached = _stores(target, config)
    split = Split.of(target)
    # Many shapes would take longer to record than they save. In place, additional KV columns cost nothing.
    few_shapes = recorder.records or config.attention == "in_place"
    prefill: Prefill = ChunkedPrefill(
        config.prefill_rows, config.prefill_columns, config.capacity, config.bucket if few_shapes else 1
    )
    if config.method == "eqspec":
        prefill = WholePrefill()
    verifier: CachedModel | SplitModel
    verifier = cached(target, None, config.widest) if split is None else _split(target, split, store, config, recorder)
    step = config.bucket if few_shapes else config.page_size
    context = DrafterContext(target, verifier, draft, config, cached, recorder, step)
    proposer = drafter(context) if config.drafts else NoDraft()
    return Parts(verifier, proposer, context, draft_length(config), grouping_of(config), prefill, store)


def _split(target: PreTrainedModel, split: Split, store: Store, config: EngineConfig, recorder: Recorder) -> SplitModel:
    assert isinstance(store, Pages), "`spread` refuses eqspec"
    recorders = {split.devices[0]: recorder}

    def of(device: torch.device) -> Recorder:
        return recorders.setdefault(device, recorder_for(device, config))

    return SplitModel(target, split, store, _attention(config), of)


def _attention(config: EngineConfig) -> str:
    return IN_PLACE if config.attention == "in_place" else GATHERED


def _stores(target: PreTrainedModel, config: EngineConfig) -> tuple[Store, MakeCached]:
    """The store of the slots' KV, and a function that wraps a model with KV for the slots. Models without a window
    share one page table."""
    if config.method == "eqspec":
        return Boundless(), lambda model, *_: RealignedModel(model, config.batch_size, config.kernels == "packed")
    slots, size, longest = config.slots, config.page_size, config.capacity + config.widest  # dead columns reach past it
    pages = Pages(slots, config.page_count, size, config.prefill_columns, longest, target.device)

    def cached(model: PreTrainedModel, window: int | None, widest: int) -> PagedModel:
        ring = Rings(slots, window, widest, size, longest, target.device) if window else None
        return PagedModel(model, ring or pages, _attention(config), config.kernels)

    return pages, cached
