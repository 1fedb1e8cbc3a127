"""Which drafter a job should train, from scaling laws and the times of rounds (Scylla, arXiv:2505.07858).

The seconds of a job are those of the training, and those of decoding by T1.3. The accept length is that of the law.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np

from exspec.jobs.training.law import Fit
from exspec.jobs.training.scale import Measured, Timed

PLAIN = "plain"
FURTHER, STEPS = 10, 10  # times the most measured tokens that a choice may have; its numbers of tokens per decade


@dataclass(frozen=True)
class Choice:
    """How a job of so many rows should decode on one device.

    drafter: what to train, or PLAIN. layers, training_tokens, training_seconds: of the training. accept_length:
    expected on new rows, give or take `within`. ratio: T_SD / T_AR at this B. seconds: of training and decoding;
    plain_seconds: of plain decoding with the best B. outside: what lies outside the measured range.
    """

    rows: int
    drafter: str
    batch_size: int
    tokens_per_second: float
    seconds: float
    plain_seconds: float
    layers: int = 0
    training_tokens: int = 0
    training_seconds: float = 0.0
    draft_tokens: int = 0
    accept_length: float = 1.0
    within: float = 0.0
    ratio: float = 1.0
    outside: tuple[str, ...] = ()


class Choices:
    """Chooses for jobs of any size. row_tokens: tokens of a completion. Raises ValueError if nothing was timed."""

    def __init__(
        self, fits: Mapping[tuple[str, int], Fit], measured: Sequence[Measured], timed: Sequence[Timed],
        row_tokens: float,
    ) -> None:  # fmt: skip
        if not timed:
            raise ValueError("--batch-sizes: none of them fits into memory")
        self.fits, self.timed, self.row_tokens = fits, timed, row_tokens
        self.measured = sorted(measured, key=lambda m: m.tokens)
        tokens = [m.tokens for m in measured]
        decades = math.log10(FURTHER * max(tokens) / min(tokens))
        self.tokens = [int(n) for n in np.geomspace(min(tokens), FURTHER * max(tokens), 1 + round(STEPS * decades))]
        speeds = defaultdict[int, list[float]](list)
        for one in timed:
            speeds[one.batch_size].append(one.plain.speed)
        self.plain = {rows: median(found) for rows, found in speeds.items()}  # tokens/s by B
        self.best = max(self.plain, key=lambda rows: self.plain[rows])

    def of(self, rows: int) -> Choice:
        """What takes the fewest seconds."""
        return min([self._plain(rows), *self._drafting(rows)], key=lambda choice: choice.seconds)

    @property
    def pays_from(self) -> int | None:
        """Rows of the smallest job that a training makes shorter; None if none does."""
        begun = self._plain(1).seconds
        rows = [
            choice.training_seconds / saved
            for choice in self._drafting(1)
            if (saved := begun - (choice.seconds - choice.training_seconds)) > 0
        ]
        return math.ceil(min(rows)) if rows else None

    def _plain(self, rows: int) -> Choice:
        speed = self.plain[self.best]
        seconds = rows * self.row_tokens / speed
        return Choice(rows, PLAIN, self.best, speed, seconds, seconds)

    def _training_seconds(self, drafter: str, layers: int, tokens: int) -> float:
        """Between two measured trainings; beyond the longest one, in proportion to it."""
        own = [m for m in self.measured if (m.drafter, m.layers) == (drafter, layers)]
        within = float(np.interp(tokens, [m.tokens for m in own], [m.seconds for m in own]))
        return within * max(1.0, tokens / own[-1].tokens)

    def _drafting(self, rows: int) -> Iterator[Choice]:
        plain_seconds = self._plain(rows).seconds
        for one, tokens in product(self.timed, self.tokens):
            law = self.fits[one.drafter, one.draft_tokens]
            length, within = law.at(tokens, one.layers)
            gain = one.drafting.at(length) / one.plain.speed  # both were timed in turns
            speed = gain * self.plain[one.batch_size]
            training = self._training_seconds(one.drafter, one.layers, tokens)
            yield Choice(
                rows, one.drafter, one.batch_size, speed, training + rows * self.row_tokens / speed, plain_seconds,
                one.layers, tokens, training, one.draft_tokens, length, within, 1 / gain,
                tuple(law.outside(tokens, one.layers)),
            )  # fmt: skip
