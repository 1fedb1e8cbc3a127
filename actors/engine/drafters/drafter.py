"""The interface between the engine and a drafter.

A drafter is a class in a file of this folder and a line in the registry. It derives from `Drafter` and overrides what
it needs. Its own settings are a dataclass in NAME_settings.py, which EngineConfig derives from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import CachedModel
from exspec.actors.engine.kv.memory import MemoryPlan, model_memory
from exspec.actors.engine.kv.split import SplitModel, layer_counts
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.constraint_walker import narrowed
from exspec.actors.engine.tokens.sampling import Sampler


class Draft(NamedTuple):
    """tokens: [R, N]. lengths: [R], how many of a row's tokens are proposed; the tokens after them mean nothing. Both
    are new tensors every round, because the host reads them later.

    on_host: the tokens by row, from a drafter that drafts on the host. counts: the drafter's own counts, [R] each,
    by field of SequenceStatistics.
    """

    tokens: Tensor
    lengths: Tensor
    on_host: list[list[int]] | None = None
    counts: Mapping[str, Tensor] = {}


class DraftRows(NamedTuple):
    """The rows that a model drafts for, as a recorded function takes them.

    slots, previous, pending, starts, sampler: of the group. limits: [R], tokens that each row may draft. most: the
    largest of them. kv_columns: KV columns that the draft attends to. must, masks: see `ConstraintWalker.ahead`; None
    where no row has a constraint.
    """

    slots: Tensor
    previous: Tensor
    pending: Tensor
    starts: Tensor
    limits: Tensor
    sampler: Sampler
    most: int
    kv_columns: int
    must: Tensor | None
    masks: Tensor | None

    @classmethod
    def of(cls, group: Group, limits: list[int], kv_columns: int) -> "DraftRows":
        most = max(limits)
        on_device = torch.from_numpy(np.array(limits)).to(group.pending.device, non_blocking=True)
        must, masks = group.walker.ahead(most) if group.walker else (None, None)
        rows = (group.slots, group.previous, group.pending, group.starts, on_device, group.sampler)
        return cls(*rows, most, kv_columns, must, masks)

    def batch(self, tokens: Tensor, offset: int | Tensor = 0) -> Batch:
        """A forward of tokens [R, Q], the first of them `offset` (a number, or [R]) positions after the pending one."""
        return Batch(self.slots, tokens, self.starts + offset, self.kv_columns)

    def allowed(self, logits: Tensor, drafted: Tensor) -> Tensor:
        """Logits [R, Q, V] without the tokens that constraints are known to forbid. drafted: [R, Q], how many tokens of
        the draft come before each column."""
        if self.must is None or self.masks is None:
            return logits
        return narrowed(logits, drafted, self.must, self.masks)


MakeCached = Callable[[PreTrainedModel, int | None, int], CachedModel]


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built from.

    target: the model that verifies. verifier: the target with its KV. draft: a draft model or head, if there is one.
    config: resolved. cached: wraps a model with KV for the engine's slots; its other arguments are the window of tokens
    that the KV is limited to, if it is, and the columns of the widest forward. recorder: records functions of fixed
    shapes. step: a draft's KV columns are rounded up to a multiple of it, so that shapes are few.
    """

    target: PreTrainedModel
    verifier: CachedModel | SplitModel
    draft: PreTrainedModel | None
    config: EngineConfig
    cached: MakeCached
    recorder: Recorder
    step: int

    def kv_columns(self, needed: int) -> int:
        """The KV columns of a draft that needs `needed` columns."""
        return min(-(-needed // self.step) * self.step, self.config.capacity)


MakeDrafter = Callable[[DrafterContext], "Drafter"]


class Drafter(ABC):
    """Proposes tokens. They may be wrong, and the engine applies the constraints.

    A drafter keeps its state of a sequence by slot; `admit` puts a new sequence into a slot. Rows without a sequence
    are dead, and their slot is never admitted to.

    needs_draft: whether it needs a draft model or head. follows: whether it is fed the target's choice at every
    column right after verification, rejected columns included. lengths: the values of K that are worth a trial.
    probed_with: the K that calibration measures first and extrapolates from. learns: whether it uses finished
    completions. caches: its KV, which the engine checks. window: tokens that its KV is limited to, in addition to the
    first page: `prefill` gets only these of a sequence that is admitted, once the target has all. ahead: how many
    positions, from the pending token's on, a draft writes KV of; 0 if never more than the verify. learner:
    MODULE:CLASS of what trains it, see `learners`; None if it cannot be trained. inside: whether it runs layers of the
    target or reads hidden states between them, so that all of them must be on one device.
    """

    needs_draft: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    lengths: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 6, 8)
    probed_with: ClassVar[int] = 5
    learns: ClassVar[bool] = False
    learner: ClassVar[str | None] = None
    inside: ClassVar[bool] = False
    caches: Sequence[CachedModel] = ()
    window: int | None = None
    ahead: int = 0

    @classmethod
    def reads(cls, values: dict[str, Any]) -> bool:
        """Whether the values of a config.json describe a head for this drafter."""
        return False

    @classmethod
    def refusal(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        """The reason why it cannot draft for this target with this draft; None if it can."""
        if cls.inside and layer_counts(target):
            return "it reads the target's layers, which lie on several devices; expected a draft model, suffix or none"
        return cls.unfit(target, draft, config)

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        """As `refusal`, for a target on one device."""
        return "it needs a draft model" if cls.needs_draft and draft is None else None

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:
        """As `refusal`, but found by running the target."""
        return None

    @classmethod
    def models(cls, draft: PretrainedConfig | None) -> list[PretrainedConfig]:
        """The models, beside the target, whose KV it keeps in the engine's slots."""
        return []

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        """The memory that it takes in addition to the target's."""
        # Two columns: a step has logits of no more, or of no more than the target's verify, which counts them.
        shape: dict[str, Any] = {"columns": 2, "window": config.draft_window, "widest": cls.widest(draft, config)}
        return sum((model_memory(m, config, dtype, **shape) for m in cls.models(draft)), start=MemoryPlan())

    @classmethod
    def widest(cls, draft: PretrainedConfig | None, config: EngineConfig) -> int:
        """Columns of its widest forward."""
        del draft
        return config.widest

    @classmethod
    def lengths_with(cls, draft: PretrainedConfig | None) -> tuple[int, ...]:
        """The values of K that are worth a trial with this draft."""
        return cls.lengths

    @classmethod
    def variants(cls, target: PretrainedConfig, config: EngineConfig, longest: int) -> list[dict[str, Any]]:
        """Values of its settings, by name, that are worth a trial. longest: tokens of the longest expected sequence."""
        return [{}]

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        """Its name, with its own settings if the config has them."""
        return config.drafter

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        """A drafter for an engine."""
        return cls()

    def admit(self, slot: int, tokens: list[int]) -> None:
        """Put a sequence into a slot. tokens: prompt and committed tokens; copy the list to keep it, since it grows."""

    def prefill(self, batch: Batch) -> None:
        """Take in tokens of a prompt. Cached tokens are not fed again."""

    def replace(self, batch: Batch) -> None:
        """Take in the pending token and the tokens that a constraint has put in the draft's place."""
        if not self.follows:
            self.prefill(batch)

    @abstractmethod
    def propose(self, group: Group, limits: list[int]) -> Draft:
        """Draft at most limits[r] tokens after row r's pending token."""

    def committed(self, tokens: dict[int, list[int]]) -> None:
        """Take in the tokens that a round has committed, by slot, of sequences that continue."""

    def end(self, slot: int) -> None:
        """Drop the state of a slot whose sequence has ended."""

    def learn(self, prompt: Sequence[int], completion: list[int]) -> None:
        """Learn from a finished sequence of this engine, of another engine or of an earlier run."""

    def catch_up(self) -> None:
        """Learn now what would be learned in later rounds."""

    def forget(self) -> None:
        """Forget everything learned from finished sequences."""


class NoDraft(Drafter):
    """Plain decoding: proposes no tokens."""

    def propose(self, group: Group, limits: list[int]) -> Draft:
        return Draft(group.pending.new_zeros(len(group.pending), 0), torch.zeros_like(group.pending))
