"""Drafters with a head that check every draft against one that is made without any cache."""

from abc import abstractmethod
from typing import Any, ClassVar

from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters.drafter import Draft
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.scheduling.group import Group
from tests import tiny


class Slow(HeadDrafter):
    """To be put before a drafter. whole: the target. own: the head. checked: how many drafts were compared, of all."""

    whole: Any
    own: Any
    checked: ClassVar[int] = 0

    @abstractmethod
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """The draft after these tokens, of so many tokens at most."""

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = super().propose(group, limits)
        for row, (sequence, limit) in enumerate(zip(group.sequences, limits, strict=True)):
            if sequence and limit and len(sequence.tokens) > 1:
                assert draft.tokens[row, : draft.lengths[row]].tolist() == self.slow(sequence.tokens, limit)
                Slow.checked += 1
        return draft


def slow_engine(made_of: type[Slow], target: PreTrainedModel, head: PreTrainedModel, **config: Any) -> Engine:
    def make(given: Any) -> Slow:
        made = made_of.build(given)
        made.whole, made.own = target, head
        return made

    shape = {"batch_size": 4, "window": 10, "draft_tokens": 4, "bucket": 32, "capacity": tiny.CONTEXT,
             "prefill_columns": 8, "prefill_rows": 3, "page": 8, "attention": "gathered"}  # fmt: skip
    drafter = str(head.config.head_for)
    return Engine(target, head, EngineConfig(drafter=drafter, **{**shape, **config}), None, None, make)
