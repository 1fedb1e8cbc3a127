"""Policies that shorten drafts. They change neither the shape of verify nor the committed tokens.

A token is proposed while the chance that it and all drafts before it are accepted is at least a threshold. `History`
estimates the chance before the draft, from the sequence's acceptance so far. `Confidence` estimates it during the
draft, from the draft model's probabilities. One step drafts a token for all rows at the price of one row, so a group
continues while the mean chance of its rows is at least the threshold.
"""

import math

import torch
from torch import Tensor

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Sequence

# A sequence that drafts nothing tries one token every PROBE rounds; otherwise its estimate would never change.
PROBE = 16
WEIGHT = 8.0  # the acceptance of all sequences weighs as much as this many drafts of the sequence itself


class Fixed:
    """K tokens, or as many as the row has room for."""

    def limits(self, group: Group) -> list[int]:
        return group.useful

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass


class History:
    """With p the accepted share of a sequence's decided drafts, the i-th token is drafted while p^i >= threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.accepted, self.decided = 3.0, 4.0  # over all sequences; drafts after a rejected one are not decided

    def limits(self, group: Group) -> list[int]:
        """The most tokens that each row may draft, up to the group's `useful`."""
        rows = list(zip(group.sequences, group.useful, strict=True))
        limits = [0 if s is None else min(useful, self._limit(s)) for s, useful in rows]
        chances = [self._chance(s) if s else 0.0 for s, _ in rows]
        live, n = sum(s is not None for s, _ in rows), 1
        while sum(c**n for c, most in zip(chances, limits, strict=True) if most >= n) >= self.threshold * live:
            n += 1
        return [min(most, max(n - 1, 1)) for most in limits]

    def _chance(self, sequence: Sequence) -> float:
        common = self.accepted / self.decided
        return min((sequence.accepted + WEIGHT * common) / (sequence.decided + WEIGHT), 1 - 1e-9)

    def _limit(self, sequence: Sequence) -> int:
        longest = math.floor(math.log(self.threshold) / math.log(self._chance(sequence)))
        return longest or int(sequence.counters.rounds % PROBE == PROBE - 1)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count the drafted and the accepted tokens of a row's round."""
        decided = min(accepted + 1, drafted)
        sequence.accepted += accepted
        sequence.decided += decided
        self.accepted += accepted
        self.decided += decided


class Unasked:
    """Keeps every token."""

    def survives(self, chance: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return chance, torch.ones_like(chance, dtype=torch.bool)

    def pays(self, chance: Tensor, goes_on: Tensor, live: Tensor) -> Tensor:
        return goes_on.any()


class Product:
    """The product of the draft's probabilities of its tokens: the chance of all of them if the draft is calibrated."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def survives(self, chance: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """After a draft step: the chance [R] so far, and which rows [R] keep their new token.

        logits: [R, 1, V], from which the tokens [R, 1] were chosen.
        """
        chance = chance * logits[:, 0].float().softmax(dim=-1).gather(1, tokens)[:, 0]
        return chance, chance >= self.threshold

    def pays(self, chance: Tensor, goes_on: Tensor, live: Tensor) -> Tensor:
        """Whether another step pays for the group. live: [R], rows that draft. goes_on: [R], rows that continue."""
        return (chance * goes_on).sum() >= self.threshold * live.sum()


DraftLength = Fixed | History
Confidence = Unasked | Product


def draft_length(config: EngineConfig) -> DraftLength:
    """The policy that limits drafts before a round."""
    return History(config.threshold) if config.draft_length in ("implicit", "both") else Fixed()


def confidence(config: EngineConfig) -> Confidence:
    """The policy that shortens drafts of a model while they are made."""
    return Product(config.threshold) if config.draft_length in ("explicit", "both") else Unasked()
