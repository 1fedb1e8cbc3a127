"""How long a draft should be. A policy may shorten the drafts of each row; the shape of verify stays, and so do the
tokens.

A token is proposed while the chance that it will be accepted, it and all before it, is at least a threshold. The
chance is estimated from the sequence's own record before anything is drafted (`History`), or from the draft model's
confidence in what it drafts (`Confidence`, in the draft loop itself). A step drafts a token for every row at the price
of one, so a group goes on while the mean of its rows' chances is at least the threshold.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Sequence

PROBE = 16  # rounds after which a sequence that drafts nothing tries one token: its record would else never change
WEIGHT = 8.0  # drafted tokens that the record of all sequences counts for in that of one


class DraftLength(Protocol):
    """Decides before a round how far each row is drafted."""

    def limits(self, group: Group) -> list[int]:
        """How many tokens each row may draft, at most its `useful`."""
        ...

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a row's draft."""
        ...


class Fixed:
    """As many as there is room for: K."""

    def limits(self, group: Group) -> list[int]:
        return group.useful

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass


class History:
    """With p the share of a sequence's decided drafts that were accepted, place i is drafted while p^i >= threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.accepted, self.decided = 3.0, 4.0  # over all sequences; drafts past a rejected one were not decided

    def limits(self, group: Group) -> list[int]:
        rows = list(zip(group.sequences, group.useful, strict=True))
        limits = [0 if s is None else min(useful, self._limit(s)) for s, useful in rows]
        chances = [self._chance(s) if s else 0.0 for s, _ in rows]
        live, place = sum(s is not None for s, _ in rows), 1
        while sum(c**place for c, most in zip(chances, limits, strict=True) if most >= place) >= self.threshold * live:
            place += 1
        return [min(most, max(place - 1, 1)) for most in limits]

    def _chance(self, sequence: Sequence) -> float:
        """Of one draft to be accepted."""
        common = self.accepted / self.decided
        return min((sequence.accepted + WEIGHT * common) / (sequence.decided + WEIGHT), 1 - 1e-9)

    def _limit(self, sequence: Sequence) -> int:
        longest = math.floor(math.log(self.threshold) / math.log(self._chance(sequence)))
        return longest or int(sequence.counters.rounds % PROBE == PROBE - 1)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        decided = min(accepted + 1, drafted)
        sequence.accepted += accepted
        sequence.decided += decided
        self.accepted += accepted
        self.decided += decided


class Confidence(Protocol):
    """Decides during a draft which rows go on."""

    def survives(self, chance: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """After a draft step: the chance [R] so far, and which rows [R] keep the token they drafted.

        logits: [R, 1, V] that the tokens [R, 1] were chosen from.
        """
        ...

    def pays(self, chance: Tensor, goes_on: Tensor, live: Tensor) -> Tensor:
        """Whether one more step for the group is worth it, of whose `live` rows [R] those in `goes_on` [R] go on."""
        ...


class Unasked:
    """Every token is kept."""

    def survives(self, chance: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return chance, torch.ones_like(chance, dtype=torch.bool)

    def pays(self, chance: Tensor, goes_on: Tensor, live: Tensor) -> Tensor:  # noqa: ARG002
        return goes_on.any()


class Product:
    """The product of the draft's probabilities of its tokens, which is the chance of all if the draft is calibrated."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def survives(self, chance: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        chance = chance * logits[:, 0].float().softmax(dim=-1).gather(1, tokens)[:, 0]
        return chance, chance >= self.threshold

    def pays(self, chance: Tensor, goes_on: Tensor, live: Tensor) -> Tensor:
        return (chance * goes_on).sum() >= self.threshold * live.sum()


def draft_length(config: EngineConfig) -> DraftLength:
    """What shortens the rows' drafts before a round."""
    return History(config.threshold) if config.draft_length in ("implicit", "both") else Fixed()


def confidence(config: EngineConfig) -> Confidence:
    """What shortens the drafts of a model while they are made."""
    return Product(config.threshold) if config.draft_length in ("explicit", "both") else Unasked()
