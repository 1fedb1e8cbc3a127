"""Pool, KV store and grouping under random admissions and acceptances, against plain arithmetic."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.scheduling.grouping import LengthBuckets
from exspec.actors.engine.scheduling.pool import Sequence
from tests import tiny
from tests.tiny import ENDS, VOCABULARY, ArithmeticModel

# Many share a beginning of any length.
PROMPT = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    st.builds(
        lambda same, own: [*([7, 8, 9] * 9)[:same], *own],
        st.integers(0, 27),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
    ),
)
REQUEST = st.tuples(PROMPT, st.integers(1, 25))
CONFIG = st.builds(
    lambda method, batch, more, drafts, bucket, rows, page, parts, pages, exact: EngineConfig(
        method=method, batch_size=batch, window=batch + more, draft_tokens=drafts, capacity=64,
        bucket=max(bucket, drafts + 1) if exact else bucket, prefill_rows=rows, prefill_columns=page * parts,
        page=page, pages=pages and -(-64 // page) + pages - 1, exact=exact, attention="gathered",
    ),
    st.sampled_from(["plain", "eqspec", "exspec", "exspec", "exspec"]),
    st.integers(1, 5), st.integers(0, 7), st.integers(1, 6), st.sampled_from([1, 4, 7, 16, 64]),
    st.integers(1, 3), st.sampled_from([1, 3, 5, 16]), st.integers(1, 2), st.sampled_from([None, None, 1, 3, 9]),
    st.booleans(),
)  # fmt: skip


def check_kv(engine: Engine) -> None:
    """Every KV column holds the right token and position."""
    if not isinstance(engine.target, PagedModel):
        return
    for sequence in engine.pool.running:
        pages = engine.target.pages.table[sequence.slot].long()
        columns = engine.target.keys[0][pages, :, 0].flatten(0, 1)[: sequence.length]
        expected = torch.tensor([[token, i] for i, token in enumerate(sequence.tokens[:-1])]).reshape(-1, 2)
        assert torch.equal(columns, expected.float())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONFIG, st.lists(st.one_of(REQUEST, st.just("step")), min_size=1, max_size=40), st.floats(0, 1))
def test_random_work_gives_the_right_tokens(
    config: EngineConfig, script: list[tuple[list[int], int] | str], right: float
) -> None:
    expected: dict[Hashable, list[int]] = {}
    scripted = tiny.Scripted(expected, right)
    engine = Engine(ArithmeticModel(), None, config, drafter=lambda _: scripted)  # type: ignore[arg-type]
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
def test_a_group_has_one_bucket_and_as_many_rows_as_possible_and_no_sequence_starves(
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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 24), st.integers(0, 2)), max_size=60),
)  # fmt: skip
def test_pages_are_shared_and_freed(
    slots: int, size: int, parts: int, more: int, script: list[tuple[int, int, int]]
) -> None:
    """Sequences begin, grow and end in any order: no page is lost, and cached pages hold the prompt's own tokens."""
    chunk = size * parts
    pages = Pages(slots, -(-24 // size) + more, size, chunk, 32, torch.device("cpu"))
    held: dict[int, list[int]] = {}
    written: dict[int, tuple[int, ...]] = {}  # tokens up to the end of each page
    for slot, length, kind in script:
        tokens = [kind] * (length - length % 3) + [5] * (length % 3)
        if slot in held:
            if length % 2 and pages.extend(slot, min(len(held[slot]) + size, 24)):
                held[slot] += [9] * size
            else:
                pages.end(slot)
                del held[slot]
        elif slot < slots:
            found = pages.begin(slot, tokens, length, length)
            if found is not None:
                held[slot] = tokens
                row = pages.table[slot].tolist()
                for i in range(length // size):
                    here = tuple(tokens[: (i + 1) * size])
                    if i * size < found:
                        assert written[row[i]] == here, "another prompt's page"
                    written[row[i]] = here
        pages.check({s: min(len(t), 24) for s, t in held.items()})
    for slot in held:
        pages.end(slot)
    pages.check({})
    assert len(pages.free) + pages.unused == pages.pages


BREAKAGES: dict[str, Callable[[Any], Any]] = {
    "held": lambda e: e.pool.free.append(e.pool.running[0].slot),
    "prompt of": lambda e: e.pool.running[0].tokens.__setitem__(0, 60),
    "limit": lambda e: setattr(e.pool.running[0], "limit", 1),
    "NaN": lambda e: e.target.keys[0][3].fill_(float("nan")),
    "pages for": lambda e: e.pool.running[0].tokens.extend([1] * 9),
    "allocated twice": lambda e: e.pool.store.free.append(e.pool.store.own[0][0]),
    "pages lost": lambda e: e.pool.store.free.pop(),
    "table has": lambda e: e.pool.store.table[1].fill_(1),
    "users": lambda e: setattr(next(iter(e.pool.store.root.children.values())), "users", 9),
}


@pytest.mark.parametrize("message", BREAKAGES)
def test_check_finds_a_broken_pool_or_store(message: str) -> None:
    engine = tiny.engine(tiny.model(eos_token_id=None), draft=tiny.model(seed=1))
    for request in tiny.requests([[1, 2, 3] * 4] * 4, 20):
        engine.submit(request)
    engine.step()
    engine.check()
    BREAKAGES[message](engine)
    with pytest.raises(AssertionError, match=message):
        engine.check()
