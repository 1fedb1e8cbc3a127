"""What a drafter is, and what the engine gives it.

A drafter is a class in a file of this folder and a line in its registry. It derives from `Drafter` and overrides what
it has to do with. Settings of its own are a dataclass in NAME_settings.py, which EngineConfig derives from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.kv.cached_model import CachedModel
from exspec.actors.engine.kv.memory import MemoryPlan, model_memory
from exspec.actors.engine.scheduling.group import Group


class Draft(NamedTuple):
    """tokens: [R, N]. lengths: [R], how many of a row's tokens are proposed; what lies past them means nothing.
    known: the same by row on the host, where it was drafted there: nobody has to wait for it. early: [R, 2], where the
    drafter has a verifier of its own, how many tokens it was shown and how many it agreed with. since: layers of the
    target that have computed the pending token and the draft already, where shapes are free."""

    tokens: Tensor
    lengths: Tensor
    known: list[list[int]] | None = None
    early: Tensor | None = None
    since: int = 0


@dataclass(frozen=True)
class Given:
    """What a drafter is made of.

    target: the model that verifies. verifier: it with its KV. draft: what is there to draft with, if anything. config:
    settled. cached: gives a model KV in the engine's slots. recorder: records functions of fixed shapes. step: KV
    columns that are attended are rounded up to a multiple of it, so that shapes are few.
    """

    target: PreTrainedModel
    verifier: CachedModel
    draft: PreTrainedModel | None
    config: EngineConfig
    cached: Callable[[PreTrainedModel], CachedModel]
    recorder: Recorder
    step: int


MakeDrafter = Callable[[Given], "Drafter"]


class Drafter(ABC):
    """Proposes tokens. Any may be wrong; constraints are walked by the engine.

    What it learns of a sequence it keeps by slot: from `admit` on a slot is another sequence's. Rows without a sequence
    are dead, and have a slot that nobody is admitted to.

    needs_draft: whether it works with a draft. follows: whether it takes in what the target has chosen after each
    column of a round, as soon as it has, those that will not be committed too. lengths: the K that are worth a trial.
    looked_at: the K that it is first measured with, beyond which it is extrapolated. learns: whether it makes use of
    completions. caches: its KV, which the engine checks and counts.
    """

    needs_draft: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    lengths: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 6, 8)
    looked_at: ClassVar[int] = 5
    learns: ClassVar[bool] = False
    caches: Sequence[CachedModel] = ()

    @classmethod
    def reads(cls, found: dict[str, Any]) -> bool:  # noqa: ARG003
        """Whether a config.json is that of a head of its own."""
        return False

    @classmethod
    def refusal(
        cls,
        target: PretrainedConfig,  # noqa: ARG003
        draft: PretrainedConfig | None,
        config: EngineConfig,  # noqa: ARG003
    ) -> str | None:
        """Why it cannot draft for this target with this draft, if it cannot."""
        return "it needs a draft model" if cls.needs_draft and draft is None else None

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:  # noqa: ARG003
        """Why it cannot draft for this very model, as a look at it tells, if it cannot."""
        return None

    @classmethod
    def models(cls, draft: PretrainedConfig | None) -> list[PretrainedConfig]:  # noqa: ARG003
        """The models beside the target that it keeps KV of in the engine's slots."""
        return []

    @classmethod
    def memory(
        cls,
        target: PretrainedConfig,  # noqa: ARG003
        draft: PretrainedConfig | None,
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> MemoryPlan:
        """What it takes beside the target."""
        # Two columns: as many as any step of a draft asks the logits of, but for those that plan more themselves.
        return sum((model_memory(m, config, dtype, columns=2) for m in cls.models(draft)), start=MemoryPlan())

    @classmethod
    def lengths_with(cls, draft: PretrainedConfig | None) -> tuple[int, ...]:  # noqa: ARG003
        """The K that are worth a trial with this draft."""
        return cls.lengths

    @classmethod
    def variants(cls, target: PretrainedConfig, config: EngineConfig) -> list[dict[str, Any]]:  # noqa: ARG003
        """Settings of its own, by name, that are worth a trial."""
        return [{}]

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        """Its name, with the settings of its own that the config has."""
        return config.drafter

    @classmethod
    def build(cls, given: Given) -> Self:  # noqa: ARG003
        """One for an engine."""
        return cls()

    def admit(self, slot: int, tokens: list[int]) -> None:
        """A sequence has come into a slot, with its prompt and, if it comes back, what it had committed. The list goes
        on growing: what is to be kept has to be copied."""

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        """Take in tokens [R, C] of the sequences in `slots` [R], at positions starts[r] + c: of a prompt, or those that
        stand in place of what was proposed. KV that another sequence has filled is not fed again."""

    @abstractmethod
    def propose(self, group: Group, limits: list[int]) -> Draft:
        """Draft at most limits[r] tokens after row r's pending token."""

    def committed(self, tokens: dict[int, list[int]]) -> None:
        """What was committed, by slot, of sequences that go on."""

    def end(self, slot: int) -> None:
        """The sequence in a slot has ended."""

    def learn(self, prompt: Sequence[int], completion: list[int]) -> None:
        """A sequence has ended: in this engine, in another, or in an earlier run."""

    def catch_up(self) -> None:
        """Learn at once what it would otherwise learn in the rounds to come."""

    def forget(self) -> None:
        """Let go of what it has learned of sequences that have ended."""
