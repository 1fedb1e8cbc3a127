"""Drafters with a head that compare every draft with one that is made without any cache."""

from abc import abstractmethod
from typing import Any, ClassVar

import pytest
from transformers import PreTrainedModel

from exspec.actors.engine import Engine
from exspec.actors.engine.drafters.drafter import Draft
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.scheduling.group import Group
from tests import tiny

PROMPTS = tiny.prompts(9)
ENGINES = pytest.mark.parametrize(
    "config",
    [{}, {"attention": "in_place", "bucket": tiny.CONTEXT}, {"exact": False, "bucket": 1}, {"pages": 14}],
    ids=["gathered", "in place", "free", "few pages"],
)


class Slow(HeadDrafter):
    """To be mixed into a drafter. whole: the target. own: the head. compared: how many drafts were compared."""

    whole: Any
    own: Any
    compared: ClassVar[int] = 0

    @abstractmethod
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """The draft of at most `count` tokens after these."""

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = super().propose(group, limits)
        for row, (sequence, limit) in enumerate(zip(group.sequences, limits, strict=True)):
            if sequence and limit and len(sequence.tokens) > 1:
                assert draft.tokens[row, : draft.lengths[row]].tolist() == self.slow(sequence.tokens, limit)
                Slow.compared += 1
        return draft


def slow_engine(drafter: type[Slow], target: PreTrainedModel, head: PreTrainedModel, **config: Any) -> Engine:
    def make(context: Any) -> Slow:
        made = drafter.build(context)
        made.whole, made.own = target, head
        return made

    return tiny.engine(target, str(head.config.head_for), head, make, draft_tokens=4, prefill_rows=3, **config)


def check_drafts(drafter: type[Slow], target: PreTrainedModel, head: PreTrainedModel, config: dict[str, Any]) -> None:
    """After prefill in chunks, after rounds of every acceptance, and after a sequence was preempted."""
    tiny.need(config.get("attention"))
    Slow.compared = 0
    engine = slow_engine(drafter, target, head, **config)
    assert tiny.decode(engine, tiny.requests(PROMPTS, 12), shuffle=0) == tiny.greedy(target, PROMPTS, 12)
    assert Slow.compared > 30
