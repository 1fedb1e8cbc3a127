"""The target as its own drafter: its forward over a few pages of its KV drafts, and over all of them verifies."""

from typing import Any, ClassVar, Self

from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, DrafterContext, DraftRows, NoDraft
from exspec.actors.engine.drafters.model import PAYS, DraftModel, Step
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import CachedModel, PagedModel
from exspec.actors.engine.kv.split import SplitModel
from exspec.actors.engine.kv.trial import attention_trial
from exspec.actors.engine.kv.window import Reads, window_pages
from exspec.actors.engine.scheduling.group import Group

LEAST, SHARE = 256, 20  # the default window: at least so many tokens, and one in so many of the capacity


class Sparse(DraftModel):
    """Drafts over the first page and the last tokens (StreamingLLM as in MagicDec, arXiv:2408.11049), and over those
    pages that the last verify attended to most (as Vegas chooses tokens, arXiv:2602.07223). It has no weights and no KV
    of its own: it writes the target's at the positions that the verify writes again.

    So a draft costs less than a verify only by the KV that it does not read: long texts and large batches gain.
    """

    needs_draft: ClassVar[bool] = False
    inside: ClassVar[bool] = True
    learner = None
    lengths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    probed_with: ClassVar[int] = 4

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if config.method == "eqspec":
            return "method eqspec moves the KV that it would share with the target"
        if (window := window_of(config)) < config.capacity:
            return None
        return f"it reads {window} tokens, but the capacity is {config.capacity}; set draft_window or a larger capacity"

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:
        about = target.config, target.device, target.dtype, config.page_size
        if not config.draft_chosen or config.attention == "gathered" or attention_trial(*about):
            return None  # pages are gathered
        return attention_trial(*about, weighs=True)

    @classmethod
    def models(cls, draft: PretrainedConfig | None) -> list[PretrainedConfig]:
        return []

    @classmethod
    def variants(cls, target: PretrainedConfig, config: EngineConfig, longest: int) -> list[dict[str, Any]]:
        window = window_of(config)
        if not (config.draft_window or config.draft_chosen or longest >= PAYS * window):
            return []
        chosen = [config.draft_chosen] if config.draft_chosen else [None, window]
        return [{"draft_window": window, "draft_chosen": c} for c in chosen]

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        return f"{super().label(config)}+{config.draft_chosen}" if config.draft_chosen else super().label(config)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        assert not isinstance(context.verifier, SplitModel)
        return cls(context, context.target, context.verifier)

    def __init__(self, context: DrafterContext, model: PreTrainedModel, cached: CachedModel) -> None:
        super().__init__(context, model, cached)
        self.caches = []  # the target's, which the engine checks
        self.budget = window_of(context.config)
        self.chosen = -(-(context.config.draft_chosen or 0) // context.config.page_size)  # pages
        if self.chosen:
            self._target.weigh()

    @property
    def _target(self) -> PagedModel:
        assert isinstance(self.cached, PagedModel), "`refusal` excludes others"
        return self.cached

    def admit(self, slot: int, tokens: list[int]) -> None:
        if self._target.weights is not None:
            self._target.weights[:, slot] = 0.0  # they are those of another sequence

    def prefill(self, batch: Batch) -> None:
        """Nothing: the target's KV is there."""

    def propose(self, group: Group, limits: list[int]) -> Draft:
        return super().propose(group, limits) if max(limits) else NoDraft().propose(group, limits)

    def _first(self, rows: DraftRows) -> Step:
        recent = window_pages(self.budget, rows.most, self._target.pages.size)
        reads = self._target.few_pages(rows.slots, rows.starts + rows.most - 1, recent, self.chosen)
        return self._next(rows.batch(rows.pending[:, None]), reads)

    def _next(self, batch: Batch, state: Reads) -> Step:
        return self._target.forward(batch, keep=1, reads=state), state


def window_of(config: EngineConfig) -> int:
    """The tokens that sparse reads in addition to the first page and to chosen ones."""
    return config.draft_window or max(LEAST, config.capacity // SHARE)
