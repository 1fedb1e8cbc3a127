"""Policies shorten drafts; they change no token, waste fewer drafts, and find back from a bad time."""

from typing import Any

import pytest
import torch

from exspec.actors.engine import DRAFT_LENGTHS, Completion, Engine, Request, SequenceStatistics
from exspec.actors.engine.drafters.draft_length import PROBE, History, Product
from exspec.actors.engine.scheduling.pool import Sequence
from tests import tiny

ROWS = tiny.prompts(24)
TOKENS = 24


def reference() -> dict[Any, list[int]]:
    target = tiny.model(eos_token_id=None)
    return {i: tiny.generate(target, row, TOKENS) for i, row in enumerate(ROWS)}


def run(engine: Engine) -> list[Completion]:
    for request in tiny.requests(ROWS, TOKENS):
        engine.submit(request)
    return engine.run()


def total(done: list[Completion]) -> SequenceStatistics:
    return sum((c.statistics for c in done), start=SequenceStatistics())


@pytest.mark.cover(1)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_no_policy_changes_a_token(draft_length: str, exact: bool) -> None:
    engine = tiny.engine(
        tiny.model(eos_token_id=None), draft=tiny.model(seed=1), draft_length=draft_length, exact=exact, threshold=0.02
    )
    assert {c.id: c.tokens for c in run(engine)} == reference()


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.2, 0.6, 0.95])
def test_history_wastes_less_than_a_fixed_length(right: float) -> None:
    """The worse the draft, the shorter; a good one keeps its length."""
    figures = {}
    for name in ("fixed", "implicit"):
        scripted = tiny.Scripted(reference(), right)
        engine = tiny.engine(tiny.model(eos_token_id=None), scripted, draft_length=name, draft_tokens=5, bucket=96)
        done = run(engine)
        assert {c.id: c.tokens for c in done} == reference()
        figures[name] = total(done)
    fixed, implicit = figures["fixed"], figures["implicit"]
    if right > 0.9:
        assert implicit.accepted > 0.9 * fixed.accepted
    else:
        assert implicit.drafted - implicit.accepted < 0.8 * (fixed.drafted - fixed.accepted)
        assert implicit.drafted < right * 2 * fixed.drafted


def test_a_draft_ends_before_its_first_doubtful_token() -> None:
    """Of probabilities 0.9, 0.5 and 0.9 the products are 0.9, 0.45 and 0.405: with a threshold of 0.42, two tokens."""
    chance = torch.ones(1)
    rule = Product(0.42)
    kept = []
    for probability in (0.9, 0.5, 0.9):
        logits = torch.tensor([[[probability, 1 - probability]]]).log()
        chance, survives = rule.survives(chance, logits, torch.tensor([[0]]))
        kept.append(bool(survives))
    assert kept == [True, True, False]
    torch.testing.assert_close(chance, torch.tensor([0.405]))


def test_the_drafter_stops_when_no_row_goes_on() -> None:
    """Random weights are sure of nothing: with a high threshold the loop ends after one step, and proposes nothing."""
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), draft_length="explicit", threshold=0.99)
    done = run(engine)
    assert total(done).drafted == 0
    assert total(done).rounds == total(done).completion_tokens


def test_history_tries_again_after_a_bad_time() -> None:
    rule = History(0.5)
    sequence = Sequence(Request("a", [1, 2], max_new_tokens=500), 999)
    limits = []
    for _ in range(2 * PROBE):
        limit = rule._limit(sequence)
        rule.learn(sequence, limit, 0)
        limits.append(limit)
        sequence.counters.grouped_rounds += 1
    assert limits[0] >= 1
    assert sum(limits[8:]) in (1, 2), "only the probes are left"
    for _ in range(400):
        limit = rule._limit(sequence)
        rule.learn(sequence, limit, limit)
        sequence.counters.grouped_rounds += 1
    assert rule._limit(sequence) >= 3
