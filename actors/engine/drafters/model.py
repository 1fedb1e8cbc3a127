"""A draft model: a smaller one of the same vocabulary."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.draft_length import Confidence, confidence
from exspec.actors.engine.drafters.drafter import Draft, Drafter, Given
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.kv.cached_model import CachedModel, context_length
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.guide import narrowed
from exspec.actors.engine.tokens.sampling import Sampler

Step = tuple[Tensor, Any]  # logits [R, 1, V] of the next token, and what the step after it goes on from


class DraftModel(Drafter):
    """Keeps KV of its own between rounds.

    The KV of a round's last draft is never computed. So the first step feeds the last two tokens always: after a fully
    accepted draft the first of them fills the gap, otherwise it is written again with the same value. It feeds them
    even where nothing is to be drafted, or the gap would grow.

    vocabulary, target_vocabulary: embedding sizes, which may differ by padding. columns: KV columns of a slot; a
    draft attends as many as its group needs, rounded up to a multiple of `step`: it does not decide what is committed,
    so its shapes are free. confidence: decides after each step which rows go on. recorder: records the whole loop.
    """

    needs_draft = True

    @classmethod
    def refusal(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if draft is None:
            return "it needs a draft model"
        if made_for := getattr(draft, "head_for", None):
            return f"the draft is a head for {made_for}"
        context, capacity = context_length(draft), min(config.capacity, context_length(target))
        if context >= capacity:
            return None
        return (
            f"the draft model's context of {context} tokens is shorter than the capacity of {capacity}; lower capacity "
            "or take a draft with a longer context"
        )

    @classmethod
    def models(cls, draft: PretrainedConfig | None) -> list[PretrainedConfig]:
        return [] if draft is None else [draft]

    @classmethod
    def build(cls, given: Given) -> Self:
        assert given.draft is not None, "refusal was asked"
        return cls.of(given, given.cached(given.draft))

    @classmethod
    def of(cls, given: Given, cached: CachedModel) -> Self:
        """One that drafts with a model of what was given."""
        assert given.draft is not None
        sizes = [model.config.get_text_config().vocab_size for model in (given.draft, given.target)]
        return cls(
            cached,
            (sizes[0], sizes[1]),
            given.config.capacity,
            given.step,
            confidence(given.config),
            given.recorder,
        )

    def __init__(
        self,
        cached: CachedModel,
        vocabularies: tuple[int, int],
        columns: int,
        step: int,
        confidence: Confidence,
        recorder: Recorder,
    ) -> None:
        vocabulary, target_vocabulary = vocabularies
        self.caches = [cached]
        self.cached, self.columns, self.step, self.confidence = cached, columns, step, confidence
        self.shared = min(vocabulary, target_vocabulary)
        self.last_token = vocabulary - 1
        self.ends_early = not recorder.records  # to look whether any row goes on is to wait for the device
        self._feed, self._loop = recorder.wrap(self._fill), recorder.wrap(self._draft)

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self._feed(slots, tokens, starts, attended)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        needed = -(-(group.longest + max(count, 1)) // self.step) * self.step
        attended = min(needed, self.columns)
        most = torch.from_numpy(np.array(limits)).to(group.pending.device, non_blocking=True)
        must, masks = group.guide.ahead(count) if group.guide else (None, None)
        rows = (group.slots, group.previous, group.pending, group.starts, most, group.sampler)
        return Draft(*self._loop(*rows, count, attended, must, masks))

    def _fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self.cached.fill(slots, tokens.clamp(max=self.last_token), starts, attended)

    def _draft(
        self,
        slots: Tensor,
        previous: Tensor,
        pending: Tensor,
        starts: Tensor,
        most: Tensor,
        sampler: Sampler,
        count: int,
        attended: int,
        must: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, N] with N <= count, and lengths [R] <= most [R]. must, masks: of constrained rows."""
        tokens = pending.new_empty(len(pending), 0)
        lengths, chance = torch.zeros_like(pending), torch.ones_like(pending, dtype=torch.float32)
        logits, state = self._first(slots, previous, pending, starts, attended)
        goes_on = live = most > 0
        for i in range(count):
            if i > 0:
                logits, state = self._next(slots, tokens[:, -1:], starts + i, attended, state)
            if must is not None and masks is not None:
                logits = narrowed(logits, torch.full_like(pending[:, None], i), must, masks)
            token = sampler.propose(logits, (starts + 1 + i)[:, None], tokens)
            tokens = torch.cat([tokens, token], dim=1)
            chance, kept = self.confidence.survives(chance, logits, token)
            goes_on = goes_on & kept & (most > i)
            lengths = lengths + goes_on
            if self.ends_early and not self.confidence.pays(chance, goes_on, live):
                break
        return tokens, lengths

    def _first(self, slots: Tensor, previous: Tensor, pending: Tensor, starts: Tensor, attended: int) -> Step:
        """After the pending tokens, at starts."""
        # Before the pending token of a prompt of one token is no place.
        return self._next(slots, torch.stack([previous, pending], dim=1), starts - 1, attended, None)

    def _next(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int, state: Any) -> Step:  # noqa: ARG002
        """After the last of tokens [R, Q], the first of them at starts."""
        logits = self.cached.forward(slots, tokens.clamp(max=self.last_token), starts, attended, keep=1)
        return logits[..., : self.shared], None
