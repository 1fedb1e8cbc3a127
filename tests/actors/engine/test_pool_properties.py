"""Pool, KV store and grouping under random admissions and acceptances, against plain arithmetic."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.pages import Boundless, Pages
from exspec.actors.engine.scheduling.grouping import LengthBuckets, grouping_of
from exspec.actors.engine.scheduling.pool import Pool, Sequence
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
    st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 8), st.sampled_from([1, 8, 64]),
    st.booleans(), st.sampled_from([0, 0, 20, 33]),
)  # fmt: skip
def test_a_group_has_one_bucket_and_as_many_rows_as_possible_and_no_sequence_starves(
    lengths: list[int], batch_size: int, bucket: int, fallback: bool, draft_from: int
) -> None:
    """Newcomers take the place of sequences that end, so that other buckets stay full. Rows that are drafted for are in
    other buckets than the rest."""
    grouping = LengthBuckets(batch_size, bucket, fallback, prefill=(1, 8), split_from=draft_from, patience=3)
    buckets = [(b, drafted) for b in range(70) for drafted in (False, True)]

    def bucket_of(s: Sequence) -> tuple[int, bool]:
        return s.length // bucket, s.length >= draft_from

    def sequence(i: int, length: int) -> Sequence:
        return Sequence(Request(i, [1] * length, max_new_tokens=9), 99)

    running = [sequence(i, n) for i, n in enumerate(lengths)]
    count, left = len(lengths), set(range(len(lengths)))
    for round_ in range(9 * 5 * len(lengths)):
        by_bucket = {b: sum(bucket_of(s) == b for s in running) for b in buckets}
        group = grouping.select(running)
        kinds = {bucket_of(s) for s in group}
        assert len(group) == len(set(map(id, group))) <= batch_size
        if fallback:
            assert len(group) == min(batch_size, len(running))
        else:
            assert len(kinds) == 1
            assert len(group) == min(batch_size, by_bucket[kinds.pop()])
        if round_ == 0 and not fallback:
            assert len(group) == min(batch_size, max(by_bucket.values())), "the fullest bucket first"
        for s in running:
            s.waited = 0 if s in group else s.waited + 1
        for s in group:
            s.tokens.append(1)
            if s.budget == 0:
                running.remove(s)
                left.discard(s.request.id)  # type: ignore[arg-type]
                running.append(sequence(count, lengths[count % len(lengths)]))
                count += 1
        if not left:
            break
    assert not left


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 4),
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 5),
)  # fmt: skip
def test_prompts_wait_to_fill_a_prefill_forward_and_leave_no_row_of_a_round_empty(
    jobs: list[tuple[int, int]], batch_size: int, rows: int, rounds: int, more: int
) -> None:
    config = tiny.config(
        method="plain", batch_size=batch_size, window=rounds * batch_size + more, prefill_rows=rows,
        bucket=tiny.CONTEXT, overlap=rounds > 1,
    )  # fmt: skip
    busy = min(rounds, 2) * batch_size
    pool, grouping = Pool(config.slots, Boundless(), 1), grouping_of(config)
    for i, (length, budget) in enumerate(jobs):
        pool.waiting.append(Sequence(Request(i, [1] * length, max_new_tokens=budget), 99))
    while pool.running or pool.waiting:
        needed = len(pool.running) < busy
        admitted = pool.admit(grouping.room(pool))
        chunks = sum(-(-s.prefilled // config.prefill_columns) for s in admitted)
        assert needed or -chunks % rows <= chunks / 8
        assert len(pool.running) >= busy or not pool.waiting
        for sequence in grouping.select(pool.running):
            sequence.tokens.append(1)
            if sequence.budget == 0:
                pool.end(sequence, "length", None)


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
            expected = pages.cached(tokens, length, 0)
            found = pages.begin(slot, tokens, length, length, 0)
            if found is not None:
                assert found == expected
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
