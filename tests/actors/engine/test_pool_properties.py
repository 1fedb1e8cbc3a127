"""Pool, KV store and grouping under random admissions and acceptances, against an oracle of plain arithmetic."""

from collections.abc import Hashable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.cached_model import SlotModel
from exspec.actors.engine.grouping import LengthBuckets
from exspec.actors.engine.pool import Sequence
from tests import tiny
from tests.tiny import ENDS, VOCABULARY, ArithmeticModel

PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)
REQUEST = st.tuples(PROMPT, st.integers(1, 25))
CONFIG = st.builds(
    lambda method, batch, more, drafts, bucket, rows, columns, exact: EngineConfig(
        method=method, batch_size=batch, window=batch + more, draft_tokens=drafts, capacity=64,
        bucket=max(bucket, drafts + 1) if exact else bucket, prefill_rows=rows, prefill_columns=columns, exact=exact,
    ),
    st.sampled_from(["plain", "eqspec", "exspec", "exspec", "exspec"]),
    st.integers(1, 5), st.integers(0, 7), st.integers(1, 6), st.sampled_from([1, 4, 7, 16, 64]),
    st.integers(1, 3), st.sampled_from([1, 5, 16]), st.booleans(),
)  # fmt: skip


def check_kv(engine: Engine) -> None:
    """Every column holds the token and the place that belong there."""
    if not isinstance(engine.target, SlotModel):
        return
    for sequence in engine.pool.running:
        columns = engine.target.keys[0][sequence.slot, 0, : sequence.length]
        expected = torch.tensor([[token, i] for i, token in enumerate(sequence.tokens[:-1])]).reshape(-1, 2)
        assert torch.equal(columns, expected.float())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONFIG, st.lists(st.one_of(REQUEST, st.just("step")), min_size=1, max_size=40), st.floats(0, 1))
def test_random_work_gives_the_oracles_tokens(
    config: EngineConfig, script: list[tuple[list[int], int] | str], right: float
) -> None:
    expected: dict[Hashable, list[int]] = {}
    engine = Engine(ArithmeticModel(), ArithmeticModel(), config)  # type: ignore[arg-type]
    if config.drafts:
        engine.drafter = tiny.Scripted(expected, right)
        engine.caches = engine.caches[:1]
    done: dict[Hashable, list[int]] = {}

    def step() -> None:
        engine.step()
        engine.check()
        check_kv(engine)
        done.update({c.id: c.tokens for c in engine.take()})

    for i, action in enumerate(script):
        if isinstance(action, tuple):
            prompt, budget = action
            expected[i] = ArithmeticModel.continuation(prompt, budget, ENDS[:1])
            engine.submit(Request(i, prompt, max_new_tokens=budget))
        else:
            step()
    rounds = 0
    while engine.busy:
        step()
        rounds += 1
        assert rounds < 5000, "some sequence starves"
    assert done == expected
    counted = engine.statistics
    assert counted.tokens == sum(map(len, expected.values()))
    assert 0 <= counted.dead_columns <= counted.columns
    assert sorted(engine.pool.free) == list(range(config.slots))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 8), st.sampled_from([1, 8, 64]), st.booleans()
)
def test_a_group_is_of_one_bucket_full_if_it_can_be_and_nobody_starves(
    lengths: list[int], batch_size: int, bucket: int, fallback: bool
) -> None:
    grouping = LengthBuckets(batch_size, bucket, fallback, patience=3)
    running = [Sequence(Request(i, [1] * n, max_new_tokens=9), 99) for i, n in enumerate(lengths)]
    seen: set[Hashable] = set()
    by_bucket = [sum(s.length // bucket == b for s in running) for b in range(61)]
    for round_ in range(60):
        group = grouping.select(running)
        kinds = {s.length // bucket for s in group}
        assert len(group) == len(set(map(id, group))) <= batch_size
        if fallback:
            assert len(group) == min(batch_size, len(running))
        else:
            assert len(kinds) == 1
            assert len(group) == min(batch_size, by_bucket[kinds.pop()])
        if round_ == 0 and not fallback:
            assert len(group) == min(batch_size, max(by_bucket)), "the fullest bucket first"
        for s in running:
            s.waited = 0 if s in group else s.waited + 1
        seen |= {s.request.id for s in group}
    assert seen == set(range(len(lengths)))


def test_check_finds_a_broken_pool_and_a_broken_store() -> None:
    """A check that cannot fail is none."""
    breakages = {
        "held": lambda e: e.pool.free.append(e.pool.running[0].slot),
        "prompt of": lambda e: e.pool.running[0].tokens.__setitem__(0, 60),
        "limit": lambda e: setattr(e.pool.running[0], "limit", 1),
        "NaN": lambda e: e.target.keys[0][3].fill_(float("nan")),
        "columns cached": lambda e: e.pool.running[0].tokens.extend([1] * 9),
        "past the end": lambda e: e.target.forward(
            torch.tensor([7]), torch.tensor([[1]]), torch.tensor([40]), attended=64
        ),
    }
    for words, damage in breakages.items():
        engine = tiny.engine(tiny.model(eos_token_id=None), draft=tiny.model(seed=1))
        for request in tiny.requests([[1, 2, 3]] * 4, 20):
            engine.submit(request)
        engine.step()
        engine.check()
        damage(engine)
        with pytest.raises(AssertionError, match=words):
            engine.check()
