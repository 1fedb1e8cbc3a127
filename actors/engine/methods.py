"""The methods: which KV store, drafter, grouping and prefill the one loop works with."""

from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.attention import trial
from exspec.actors.engine.cached_model import (
    GATHERED,
    IN_PLACE,
    CachedModel,
    PagedModel,
    RealignedModel,
    context_length,
    kv_shape,
)
from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.draft_length import Confidence, DraftLength, Fixed, History, Product, Unasked
from exspec.actors.engine.drafting import Drafter, DraftModel, NoDraft
from exspec.actors.engine.fused import compiler_trial, tell
from exspec.actors.engine.graphs import CudaGraphs, Eager, Recorder
from exspec.actors.engine.grouping import FixedBatch, Grouping, LengthBuckets
from exspec.actors.engine.pages import Boundless, Pages, Store
from exspec.actors.engine.prefill import ChunkedPrefill, Prefill, WholePrefill
from exspec.actors.engine.twin import packs


class Parts(NamedTuple):
    target: CachedModel
    drafter: Drafter
    draft_length: DraftLength
    grouping: Grouping
    prefill: Prefill
    caches: list[CachedModel]
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
    models = [target, draft] if draft is not None and config.drafts else [target]
    found = (_trial(model, config.page_size) for model in models) if config.attention != "gathered" else ["not asked"]
    reason = next((why for why in found if why is not None), None)
    if reason is not None and config.attention == "in_place":
        raise ValueError(f"attention: in_place does not work here: {reason}; expected auto or gathered")
    if reason is not None:
        if config.attention == "auto":
            tell(f"attention copies the KV that it reads: {reason}")
        return replace(config, attention="gathered")
    return replace(config, attention="in_place", pages=config.page_count, bucket=config.capacity)


def _trial(model: PreTrainedModel, page: int) -> str | None:
    _, kv_heads, size = kv_shape(model.config)
    if model.device.type == "cuda" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return "attention with a soft-cap is not in place on CUDA"
    return trial(model.device, model.dtype, model.config.get_text_config().num_attention_heads, kv_heads, size, page)


def build(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig, recorder: Recorder) -> Parts:
    """The parts of an engine of a settled config. Raises ValueError where the models cannot serve the method or the
    capacity."""
    store, models = _stores(target, draft if config.drafts else None, config)
    grouping: Grouping = LengthBuckets(config.batch_size, config.bucket, fallback=not config.exact)
    # A recording each for many shapes would take longer than they save; and in place, what is attended costs nothing.
    few = recorder.records or config.attention == "in_place"
    prefill: Prefill = ChunkedPrefill(
        config.prefill_rows, config.prefill_columns, config.capacity, config.bucket if few else 1
    )
    if config.method == "eqspec":
        grouping, prefill = FixedBatch(), WholePrefill()
    if not config.drafts:
        return Parts(models[0], NoDraft(), Fixed(), grouping, prefill, models, store)
    if draft is None:
        raise ValueError(f"method {config.method} needs a draft model; without one use method plain")
    if context_length(draft.config) < config.capacity:
        raise ValueError(
            f"the draft model's context of {context_length(draft.config)} tokens is shorter than the capacity of "
            f"{config.capacity}; lower capacity or take a draft with a longer context"
        )
    vocabularies = (draft.config.get_text_config().vocab_size, target.config.get_text_config().vocab_size)
    by_confidence = config.draft_length in ("explicit", "both")
    confidence: Confidence = Product(config.threshold) if by_confidence else Unasked()
    step = config.bucket if few else config.page_size
    drafter = DraftModel(models[1], vocabularies, config.capacity, step, confidence, recorder)
    by_history = config.draft_length in ("implicit", "both")
    draft_length: DraftLength = History(config.threshold) if by_history else Fixed()
    return Parts(models[0], drafter, draft_length, grouping, prefill, models, store)


def _stores(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig
) -> tuple[Store, list[CachedModel]]:
    """What gives slots their KV, and the models with it, the target first. One table of pages is for both."""
    models = [target] if draft is None else [target, draft]
    if config.method == "eqspec":
        return Boundless(), [RealignedModel(model, config.batch_size, config.kernels == "packed") for model in models]
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
    return pages, [PagedModel(model, pages, attention, config.kernels) for model in models]
