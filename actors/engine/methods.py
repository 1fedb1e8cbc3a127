"""The methods: which KV store, drafter, grouping and prefill the one loop works with."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters import kind
from exspec.actors.engine.drafters.draft_length import DraftLength, draft_length
from exspec.actors.engine.drafters.drafter import Drafter, Given, MakeDrafter
from exspec.actors.engine.drafters.none import NoDraft
from exspec.actors.engine.graphs import CudaGraphs, Eager, Recorder
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.kv.cached_model import (
    GATHERED,
    IN_PLACE,
    CachedModel,
    PagedModel,
    RealignedModel,
    context_length,
    kv_shape,
)
from exspec.actors.engine.kv.pages import Boundless, Pages, Store
from exspec.actors.engine.layers.fused import compiler_trial, tell
from exspec.actors.engine.layers.twin import packs
from exspec.actors.engine.scheduling.grouping import Grouping, grouping_of
from exspec.actors.engine.scheduling.prefill import ChunkedPrefill, Prefill, WholePrefill


class Parts(NamedTuple):
    """given: what the drafter was made of, and others may be."""

    target: CachedModel
    drafter: Drafter
    given: Given
    draft_length: DraftLength
    grouping: Grouping
    prefill: Prefill
    store: Store


def recorder_for(device: torch.device, config: EngineConfig) -> Recorder:
    """Graphs need a device that has them and shapes that come again."""
    return CudaGraphs(device) if device.type == "cuda" and config.fixed_shapes else Eager()


def settle(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig) -> EngineConfig:
    """The config as it can be run with these models here: no slot longer than the model's context, which it would
    never fill; how attention is going to read the KV, and where that is in place, no buckets; whether rounds overlap;
    what runs the layers.

    Raises ValueError where attention in place is asked for and does not work.
    """
    config = _attending(target, draft, replace(config, capacity=min(config.capacity, context_length(target.config))))
    by_itself = target.device.type == "cuda" and config.attention == "in_place"
    overlap = by_itself if config.overlap is None else config.overlap
    config = replace(config, overlap=overlap and config.fixed_shapes)
    if config.kernels == "packed" and not packs(target.device):
        return replace(config, kernels="eager")
    if config.kernels == "compiled":
        told = "attention is not in place" if config.attention != "in_place" else compiler_trial(target.device)
        if told is not None:
            tell(f"layers run as they are, not compiled: {told}")
            return replace(config, kernels="eager")
    return config


def _attending(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig) -> EngineConfig:
    if config.method == "eqspec":
        return config
    models = [target.config, *kind(config).models(None if draft is None else draft.config)]
    trials = (_trial(model, target.device, target.dtype, config.page_size) for model in models)
    found = trials if config.attention != "gathered" else ["not asked"]
    reason = next((why for why in found if why is not None), None)
    if reason is not None and config.attention == "in_place":
        raise ValueError(f"attention: in_place does not work here: {reason}; expected auto or gathered")
    if reason is not None:
        if config.attention == "auto":
            tell(f"attention copies the KV that it reads: {reason}")
        return replace(config, attention="gathered")
    return replace(config, attention="in_place", pages=config.page_count, bucket=config.capacity)


def _trial(model: PretrainedConfig, device: torch.device, dtype: torch.dtype, page: int) -> str | None:
    _, kv_heads, size = kv_shape(model)
    if device.type == "cuda" and getattr(model.get_text_config(), "attn_logit_softcapping", None):
        return "attention with a soft-cap is not in place on CUDA"
    return trial(device, dtype, model.get_text_config().num_attention_heads, kv_heads, size, page)


def drafter_of(given: Given) -> Drafter:
    """The drafter of the config. Raises ValueError where it cannot draft with these models."""
    made, other = kind(given.config), None if given.draft is None else given.draft.config
    why = made.refusal(given.target.config, other, given.config) or made.trial(given.target, given.config)
    if why:
        raise ValueError(f"method {given.config.method} with the drafter {given.config.drafter}: {why}")
    return made.build(given)


def build(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: EngineConfig,
    recorder: Recorder,
    drafter: MakeDrafter = drafter_of,
) -> Parts:
    """The parts of an engine of a settled config. Raises ValueError where no drafter can be made."""
    store, cached = _stores(target, config)
    # A recording each for many shapes would take longer than they save; and in place, what is attended costs nothing.
    few = recorder.records or config.attention == "in_place"
    prefill: Prefill = ChunkedPrefill(
        config.prefill_rows, config.prefill_columns, config.capacity, config.bucket if few else 1
    )
    if config.method == "eqspec":
        prefill = WholePrefill()
    verifier = cached(target)
    given = Given(target, verifier, draft, config, cached, recorder, config.bucket if few else config.page_size)
    its = drafter(given) if config.drafts else NoDraft()
    return Parts(verifier, its, given, draft_length(config), grouping_of(config), prefill, store)


def _stores(target: PreTrainedModel, config: EngineConfig) -> tuple[Store, Callable[[PreTrainedModel], CachedModel]]:
    """What gives slots their KV, and gives it to a model. One table of pages is for all models."""
    if config.method == "eqspec":
        return Boundless(), lambda model: RealignedModel(model, config.batch_size, config.kernels == "packed")
    widest = max(config.width, config.prefill_columns)  # a row may be fed past its capacity, with dead columns
    pages = Pages(
        config.slots,
        config.page_count,
        config.page_size,
        config.prefill_columns,
        config.capacity + widest,
        target.device,
    )
    attention = IN_PLACE if config.attention == "in_place" else GATHERED
    return pages, lambda model: PagedModel(model, pages, attention, config.kernels)
