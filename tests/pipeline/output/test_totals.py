"""Figures of a report, on summaries that are written by hand."""

import pickle
from random import Random

import pytest

from exspec.pipeline.output.state import Summary
from exspec.pipeline.output.totals import Totals

NOW = 1.8e9


def totals(*work: tuple[str, float, float]) -> Totals:
    """work: actor, start and end of each chunk."""
    made = Totals()
    for actor, start, end in work:
        made.add(Summary(0, 0, 8, 0, actor=actor, started=NOW + start, ended=NOW + end), "s.parquet")
    return made


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([("a", 0, 100), ("b", 0, 100)], 1),
        ([("a", 0, 100), ("b", 0, 90)], 0.5),
        ([("a", 0, 100), ("b", 0, 95)], 0.75),
        ([("a", 0, 100), ("b", 0, 50), ("b", 92, 97)], 0.75),
        ([("a", 0, 60), ("a", 50, 100), ("b", 0, 95), ("b", 10, 95)], 0.75),
        ([("a", 0, 100), ("b", 0, 50), ("c", 51, 100)], 1),
        ([("a", 0, 50), ("b", 0, 50), ("a", 1000, 1050), ("b", 1000, 1045)], 0.75),
        ([("a", 0, 95), ("b", 0, 95), ("a", 1000, 1005)], 0.75),
        ([("a", 0, 0)], None),
        ([], None),
    ],
    ids=[
        "two to the end", "one to the end", "one ends in the tail", "one pauses", "chunks at once", "one is replaced",
        "two runs", "the tail is in two runs", "no time", "no chunk",
    ],
)  # fmt: skip
def test_occupancy_of_the_last_tenth(work: list[tuple[str, float, float]], expected: float | None) -> None:
    assert totals(*work).tail_occupancy() == (expected if expected is None else pytest.approx(expected, abs=1e-6))


def test_its_size_does_not_grow_with_the_chunks() -> None:
    """Chunks in the order of their rows, with pauses between those of an actor."""
    rng = Random(0)
    chunks = [(f"{i % 8}", i + 0.01 * rng.random(), i + 7.9) for i in range(20_000)]
    found = totals(*chunks)
    assert len(pickle.dumps(found)) < 1.5 * len(pickle.dumps(totals(*chunks[:5000])))
    assert sum(map(len, found.work.values())) < 4 * 400 * 8
    assert found.tail_occupancy() == pytest.approx(1, abs=0.03)
