"""A draft model: a smaller model with the same vocabulary."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.draft_length import confidence
from exspec.actors.engine.drafters.drafter import Draft, Drafter, DrafterContext, DraftRows
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import CachedModel, PagedModel, context_length
from exspec.actors.engine.kv.window import Rings
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.sampling import Uses

WINDOW = 512  # tokens of a window that is worth a trial
PAYS = 4  # times the window: the length of text from which it is
Step = tuple[Tensor, Any]  # logits [R, 1, V] of the next token, and the state for the next step


class DraftModel(Drafter):
    """A draft model keeps its own KV between rounds.

    The KV of a round's last drafted token is never computed. So the first step always feeds the last two tokens: after
    a fully accepted draft the first of them fills the gap; otherwise it is written again with the same value. That step
    runs even if nothing is to be drafted, or the gap would grow.

    A draft decides no committed token, so its shapes are free: it attends to as many KV columns as the group needs.
    """

    needs_draft = True
    learner: ClassVar[str | None] = "exspec.actors.engine.learners.model:ModelLearner"

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if draft is None:
            return "it needs a draft model"
        if made_for := getattr(draft, "head_for", None):
            return f"the draft is a head for {made_for}"
        context, capacity = context_length(draft), min(config.capacity, context_length(target))
        if context >= capacity:
            return None
        return (
            f"the draft model's context of {context} tokens is shorter than the capacity of {capacity}; lower capacity "
            "or use a draft with a longer context"
        )

    @classmethod
    def models(cls, draft: PretrainedConfig | None) -> list[PretrainedConfig]:
        return [] if draft is None else [draft]

    @classmethod
    def variants(cls, target: PretrainedConfig, config: EngineConfig, longest: int) -> list[dict[str, Any]]:
        if config.draft_window or config.method == "eqspec":
            return [{"draft_window": config.draft_window}]
        return [{}, {"draft_window": WINDOW}] if longest >= PAYS * WINDOW else [{}]

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        return f"{config.drafter} {config.draft_window}" if config.draft_window else config.drafter

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        assert context.draft is not None, "`refusal` excludes this"
        return cls(context, context.draft, cls.cached_draft(context, context.draft))

    @classmethod
    def cached_draft(cls, context: DrafterContext, draft: PreTrainedModel) -> CachedModel:
        """The draft with its KV."""
        return context.cached(draft, context.config.draft_window, cls.widest(draft.config, context.config))

    def __init__(self, context: DrafterContext, model: PreTrainedModel, cached: CachedModel) -> None:
        vocabulary, targets = (m.config.get_text_config().vocab_size for m in (model, context.target))
        self.context, self.cached, self.caches = context, cached, [cached]
        self.rings = cached.pages if isinstance(cached, PagedModel) and isinstance(cached.pages, Rings) else None
        self.window = self.rings.window if self.rings else None
        self.shared = min(vocabulary, targets)  # embeddings may differ by padding
        self.last_token = vocabulary - 1
        self.confidence = confidence(context.config)
        self.ends_early = not context.recorder.records  # asking whether any row continues waits for the device
        self._feed, self._loop = context.recorder.wrap(self._fill), context.recorder.wrap(self._draft)

    def admit(self, slot: int, tokens: list[int]) -> None:
        if self.rings:
            self.rings.begin(slot, len(tokens) - 1)

    def prefill(self, batch: Batch) -> None:
        self._feed(batch)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        kv_columns = self.context.kv_columns(group.longest + max(*limits, self.ahead, 1))
        return Draft(*self._loop(DraftRows.of(group, limits, kv_columns)))

    def _fill(self, batch: Batch) -> None:
        self.cached.fill(self._known(batch))

    def _known(self, batch: Batch) -> Batch:
        """The batch with all tokens within the draft's vocabulary."""
        return batch._replace(tokens=batch.tokens.clamp(max=self.last_token))

    def _draft(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Tokens [R, N] with N <= most, and lengths [R] <= limits [R]."""
        tokens: list[Tensor] = []  # [R, 1] each
        nothing = rows.pending.new_empty(len(rows.pending), 0)
        drafted = lengths = torch.zeros_like(rows.pending)
        chance = torch.ones_like(rows.pending, dtype=torch.float32)
        logits, state = self._first(rows)
        goes_on = live = rows.limits > 0
        for i in range(rows.most):
            if i > 0:
                logits, state = self._next(rows.batch(tokens[-1], drafted), state)
            logits = rows.allowed(logits, drafted[:, None])
            before = torch.cat([nothing, *tokens], dim=1) if rows.sampler.uses & Uses.PENALISED else nothing
            token = rows.sampler.propose(logits, (rows.starts + 1 + drafted)[:, None], before)
            tokens.append(token)
            chance, kept = self.confidence.survives(chance, logits, token)
            goes_on = goes_on & kept & (rows.limits > drafted)
            lengths, drafted = lengths + goes_on, drafted + 1  # no number: steps that read alike share compiled code
            if self.ends_early and not self.confidence.pays(chance, goes_on, live):
                break
        return torch.cat([nothing, *tokens], dim=1), lengths

    def _first(self, rows: DraftRows) -> Step:
        """The step after the pending tokens."""
        # The position before the pending token of a one-token prompt is negative, and dead.
        return self._next(rows.batch(torch.stack([rows.previous, rows.pending], dim=1), -1), None)

    def _next(self, batch: Batch, state: Any) -> Step:
        """The step after the batch's last tokens."""
        return self.cached.forward(self._known(batch), keep=1)[..., : self.shared], None
