"""The simulation of a job's end is right where it can be checked by hand, and smaller chunks pay."""

import random

import pytest

from exspec.pipeline.input import passes
from tests.tools import tail


def test_rows_of_chunks_that_are_computed_by_hand() -> None:
    """Of two actors with a slot, one gets the chunks of 4 and 1 tokens, and the other that of 2 and 2 tokens."""
    found = tail.simulate([[4], [2, 2], [1]], actors=2, slots=1, calls=1)
    assert found == pytest.approx((1 / 10, 1 / 10, 10 / 9, 3))
    found = tail.simulate([[4], [2], [2], [1]], actors=2, slots=2, calls=2)
    assert found == pytest.approx((1 / 4, 7 / 16, 16 / 9, 4)), "the second actor has nothing to do for two steps"


@pytest.mark.skipif(not tail.PROMPTS.exists(), reason="SpecBench is not there")
def test_eight_actors_are_idle_for_less_than_three_percent_on_spec_bench() -> None:
    lengths = tail.spec_bench(5000)
    before, now = (tail.figures(lengths, smaller) for smaller in (False, True))
    assert now.actors < 0.03 < before.actors
    assert now.steps < before.steps


@pytest.mark.parametrize("shards", [1, 3, 12])
def test_actors_are_less_idle_whatever_the_shards(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is a pass of its own, and nine readers read at the same time."""
    monkeypatch.setattr(passes, "ENOUGH_ROWS", 1)
    lengths = [random.Random(i).randint(20, 60) for i in range(6000)]
    before, now = (tail.figures(lengths, smaller, shards=shards) for smaller in (False, True))
    assert now.actors < before.actors / 2
