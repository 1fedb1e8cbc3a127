"""The methods: which KV store, drafter, grouping and prefill the one loop works with."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.cached_model import CachedModel, RealignedModel, SlotModel, context_length
from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.draft_length import Confidence, DraftLength, Fixed, History, Product, Unasked
from exspec.actors.engine.drafting import Drafter, DraftModel, NoDraft
from exspec.actors.engine.graphs import CudaGraphs, Eager, Recorder
from exspec.actors.engine.grouping import FixedBatch, Grouping, LengthBuckets
from exspec.actors.engine.prefill import STEP, ChunkedPrefill, Prefill, WholePrefill


class Parts(NamedTuple):
    target: CachedModel
    drafter: Drafter
    draft_length: DraftLength
    grouping: Grouping
    prefill: Prefill
    caches: list[CachedModel]


def recorder_for(device: torch.device, config: EngineConfig) -> Recorder:
    """Graphs need a device that has them and shapes that come again."""
    return CudaGraphs(device) if device.type == "cuda" and config.fixed_shapes else Eager()


def build(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig, recorder: Recorder) -> Parts:
    """The parts of an engine. Raises ValueError where the models cannot serve the method or the capacity."""
    cached = _cached(target, config)
    grouping: Grouping = LengthBuckets(config.batch_size, config.bucket, fallback=not config.exact)
    # A recording each for many shapes would take longer than they save.
    fine = (STEP, 1) if not recorder.records else (config.prefill_columns, config.bucket)
    prefill: Prefill = ChunkedPrefill(config.prefill_rows, config.prefill_columns, config.capacity, *fine)
    if config.method == "eqspec":
        grouping, prefill = FixedBatch(), WholePrefill()
    if not config.drafts:
        return Parts(cached, NoDraft(), Fixed(), grouping, prefill, [cached])
    if draft is None:
        raise ValueError(f"method {config.method} needs a draft model; without one use method plain")
    if context_length(draft.config) < config.capacity:
        raise ValueError(
            f"the draft model's context of {context_length(draft.config)} tokens is shorter than the capacity of "
            f"{config.capacity}; lower capacity or take a draft with a longer context"
        )
    draft_cached = _cached(draft, config)
    vocabularies = (draft.config.get_text_config().vocab_size, target.config.get_text_config().vocab_size)
    by_confidence = config.draft_length in ("explicit", "both")
    confidence: Confidence = Product(config.threshold) if by_confidence else Unasked()
    drafter = DraftModel(draft_cached, vocabularies, config.capacity, fine[1], confidence, recorder)
    by_history = config.draft_length in ("implicit", "both")
    draft_length: DraftLength = History(config.threshold) if by_history else Fixed()
    return Parts(cached, drafter, draft_length, grouping, prefill, [cached, draft_cached])


def _cached(model: PreTrainedModel, config: EngineConfig) -> CachedModel:
    if config.method == "eqspec":
        return RealignedModel(model, config.batch_size)
    return SlotModel(model, config.slots, config.capacity)
