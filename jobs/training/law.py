"""How accept length grows with training (scaling laws for speculative decoding: Scylla, arXiv:2505.07858).

T1.1: in the training tokens, and T1.2: in the size of the drafter, the accept length grows with the logarithm:

    accept length = a + b log10(tokens) + c log10(layers)

All constants are fitted to measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, tan
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Point(NamedTuple):
    """A measured drafter: tokens it has learned, its layers, and its accept length on rows that were held out."""

    tokens: float
    layers: int
    accept_length: float


@dataclass(frozen=True)
class Fit:
    """The law, fitted to points by least squares.

    values: a, b and c. covariance: of the values. variance: of the residuals; both are infinite if there are no more
    points than values. free: degrees of freedom. drafts: K; no accept length is more than K + 1. residuals: measured
    minus fitted accept length, by point. leverages: by point, how far the fit follows it.
    """

    points: tuple[Point, ...]
    values: tuple[float, ...]
    covariance: np.ndarray
    variance: float
    free: int
    drafts: int
    residuals: np.ndarray
    leverages: np.ndarray

    def at(self, tokens: float, layers: int) -> tuple[float, float]:
        """The expected accept length, and how far it may be off with a chance of 1 - CONFIDENCE."""
        x = _features(tokens, layers)
        length = self._within(float(x @ self.values))
        if not self.free:
            return length, float("inf")
        return length, quantile(self.free) * float(self.variance + x @ self.covariance @ x) ** 0.5

    @property
    def r2(self) -> float:
        """The share of the variance of the accept lengths that the law explains; 1 if all are the same."""
        lengths = np.array([p.accept_length for p in self.points])
        spread = float(((lengths - lengths.mean()) ** 2).sum())
        return 1 - float(self.residuals @ self.residuals) / spread if spread else 1.0

    @property
    def errors(self) -> list[float]:
        """How far a fit to all other points is off at each point, as a share of its accept length; infinite where the
        others tell nothing."""
        found = []
        for point, residual, leverage in zip(self.points, self.residuals, self.leverages, strict=True):
            if leverage > 1 - 1e-9:
                found.append(float("inf"))
                continue
            expected = self._within(point.accept_length - float(residual) / (1 - float(leverage)))
            found.append(expected / point.accept_length - 1)
        return found

    def outside(self, tokens: float, layers: int) -> list[str]:
        """What lies outside the range of the points, in words."""
        ranges = {"training tokens": (tokens, [p.tokens for p in self.points])}
        ranges["layers"] = (layers, [p.layers for p in self.points])
        return [
            f"{value:,.0f} {name}: {min(known):,.0f} to {max(known):,.0f} were measured"
            for name, (value, known) in ranges.items()
            if not min(known) <= value <= max(known)
        ]

    def _within(self, length: float) -> float:
        return min(max(length, 1.0), self.drafts + 1.0)


def fit(points: Sequence[Point], drafts: int) -> Fit:
    """Fit the law. Points of drafters with the same number of layers tell nothing of c, which is then 0.

    Raises ValueError for fewer than two points, or points that all have as many tokens.
    """
    if len({p.tokens for p in points}) < 2:
        raise ValueError("a fit needs drafters that have learned from different numbers of tokens")
    design = np.array([_features(p.tokens, p.layers) for p in points])
    if len({p.layers for p in points}) == 1:
        design[:, 2] = 0.0
    lengths = np.array([p.accept_length for p in points])
    inverse = np.linalg.pinv(design.T @ design)
    values = inverse @ design.T @ lengths
    residuals = lengths - design @ values
    free = len(points) - int(np.linalg.matrix_rank(design))
    variance = float(residuals @ residuals) / free if free else float("inf")
    covariance = variance * inverse if free else np.full_like(inverse, float("inf"))
    leverages = np.einsum("ij,jk,ik->i", design, inverse, design)
    return Fit(tuple(points), tuple(values.tolist()), covariance, variance, free, drafts, residuals, leverages)


def _features(tokens: float, layers: int) -> np.ndarray:
    return np.array([1.0, np.log10(tokens), np.log10(layers)])


def quantile(free: int) -> float:
    """Of Student's t with so many degrees of freedom, two-sided at CONFIDENCE: an expansion in the normal quantile
    (Abramowitz and Stegun 26.7.5), with an error below 1 %."""
    if free == 1:
        return tan(pi * CONFIDENCE / 2)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    value: float = z + sum(term / free**power for power, term in enumerate(terms, 1))
    return value
