"""The scaling law of drafters."""

import math
import random

import pytest
from scipy import stats

from exspec.jobs.training.law import CONFIDENCE, Point, fit, quantile


def points(a: float, b: float, c: float, noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = random.Random(seed)
    grid = [(tokens, layers) for tokens in (1e4, 5e4, 2e5, 1e6) for layers in (1, 2, 4)]
    law = lambda tokens, layers: a + b * math.log10(tokens) + c * math.log10(layers)  # noqa: E731
    return [Point(tokens, layers, law(tokens, layers) + rng.gauss(0, noise)) for tokens, layers in grid]


def test_a_fit_finds_the_law_behind_points() -> None:
    found = fit(points(-1.0, 0.8, 0.5), 7)
    assert found.values == pytest.approx((-1.0, 0.8, 0.5))
    assert found.at(1e5, 3)[0] == pytest.approx(-1 + 4 + 0.5 * math.log10(3))


def test_the_interval_holds_what_it_promises() -> None:
    """Of many noisy fits, as many predictions are off by more than the interval as CONFIDENCE allows."""
    truth = -1 + 0.8 * 5.5 + 0.5 * math.log10(2)
    off = 0
    for seed in range(400):
        expected, within = fit(points(-1.0, 0.8, 0.5, 0.1, seed), 7).at(10**5.5, 2)
        measured = truth + random.Random(1000 + seed).gauss(0, 0.1)
        off += abs(measured - expected) > within
    assert 0.02 < off / 400 < 0.09


def test_one_run_tells_nothing_of_layers() -> None:
    found = fit([p for p in points(-1.0, 0.8, 0.5) if p.layers == 2], 7)
    assert found.values[1:] == pytest.approx((0.8, 0.0))


def test_no_length_is_more_than_a_whole_draft_and_the_bonus() -> None:
    assert fit(points(-1.0, 0.8, 0.5), 3).at(1e9, 4)[0] == 4
    assert fit(points(-9.0, 0.8, 0.5), 3).at(1e5, 1)[0] == 1


def test_two_points_promise_nothing() -> None:
    found = fit([Point(1e4, 1, 2.0), Point(1e5, 1, 3.0)], 5)
    assert found.at(1e6, 1) == (pytest.approx(4.0), float("inf"))
    with pytest.raises(ValueError, match="different numbers of tokens"):
        fit([Point(1e4, 1, 2.0), Point(1e4, 1, 3.0)], 5)


@pytest.mark.parametrize("free", [1, 2, 3, 4, 6, 10, 30, 200])
def test_quantiles_are_those_of_students_t(free: int) -> None:
    assert quantile(free) == pytest.approx(stats.t.ppf((1 + CONFIDENCE) / 2, free), rel=0.01)
