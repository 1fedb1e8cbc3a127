"""Policies shorten drafts. They change no token, waste fewer drafts, and recover after a bad time."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.engine import DRAFT_LENGTHS, Request
from exspec.actors.engine.drafters.draft_length import PROBE, History, Product
from exspec.actors.engine.scheduling.pool import Sequence
from tests import tiny

ROWS = tiny.prompts(24)
TOKENS = 24
REQUESTS = tiny.requests(ROWS, TOKENS)


@cache
def target() -> PreTrainedModel:
    """It has no end token."""
    return tiny.model(eos_token_id=None)


@cache
def reference() -> dict[Any, list[int]]:
    return tiny.greedy(target(), ROWS, TOKENS)


@pytest.mark.cover(1)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_no_policy_changes_a_token(draft_length: str, exact: bool) -> None:
    draft = tiny.model(seed=1)
    engine = tiny.engine(target(), draft=draft, draft_length=draft_length, exact=exact, threshold=0.02)
    assert tiny.decode(engine, REQUESTS) == reference()


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.2, 0.6, 0.95])
def test_history_wastes_less_than_a_fixed_length(right: float) -> None:
    """Bad drafts get shorter; good ones keep their length."""
    figures = {}
    for name in ("fixed", "implicit"):
        scripted = tiny.Scripted(reference(), right)
        engine = tiny.engine(target(), scripted, draft_length=name, draft_tokens=5, bucket=96)
        done = tiny.run(engine, REQUESTS)
        assert {name: c.tokens for name, c in done.items()} == reference()
        figures[name] = tiny.total(done)
    fixed, implicit = figures["fixed"], figures["implicit"]
    if right > 0.9:
        assert implicit.accepted > 0.9 * fixed.accepted
    else:
        assert implicit.drafted - implicit.accepted < 0.8 * (fixed.drafted - fixed.accepted)
        assert implicit.drafted < right * 2 * fixed.drafted


def test_a_draft_ends_before_its_first_doubtful_token() -> None:
    """The products of 0.9, 0.5 and 0.9 are 0.9, 0.45 and 0.405: with a threshold of 0.42, two tokens remain."""
    chance = torch.ones(1)
    rule = Product(0.42)
    kept = []
    for probability in (0.9, 0.5, 0.9):
        logits = torch.tensor([[[probability, 1 - probability]]]).log()
        chance, survives = rule.survives(chance, logits, torch.tensor([[0]]))
        kept.append(bool(survives))
    assert kept == [True, True, False]
    torch.testing.assert_close(chance, torch.tensor([0.405]))


def test_drafting_stops_when_no_row_continues() -> None:
    """Random weights are never confident: with a high threshold the loop ends after one step and proposes nothing."""
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), draft_length="explicit", threshold=0.99)
    total = tiny.total(tiny.run(engine, REQUESTS))
    assert total.drafted == 0
    assert total.rounds == total.completion_tokens


def test_history_probes_after_a_bad_time_and_recovers() -> None:
    rule = History(0.5)
    sequence = Sequence(Request("a", [1, 2], max_new_tokens=500), 999)

    def round_limit(accepted: bool) -> int:
        limit = rule._limit(sequence)
        rule.learn(sequence, limit, limit if accepted else 0)
        sequence.counters.grouped_rounds += 1
        return limit

    limits = [round_limit(accepted=False) for _ in range(2 * PROBE)]
    assert limits[0] >= 1
    assert sum(limits[8:]) in (1, 2), "only the probes are left"
    for _ in range(400):
        round_limit(accepted=True)
    assert rule._limit(sequence) >= 3
