"""Rounds that overlap: one is committed while the device works on the next, which is of other sequences."""

from dataclasses import replace
from typing import Any

import pytest

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.tokens.constraint import Barred
from tests import tiny

SHAPE: dict[str, Any] = {"batch_size": 2, "window": 4, "overlap": True, "bucket": tiny.CONTEXT}


def test_a_round_is_committed_after_the_next_one_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    target, log = tiny.model(), []
    engine = tiny.engine(target, draft=tiny.model(seed=1), **SHAPE)
    verify, wait = engine.verify, engine.wait

    def started(group: Any, draft: Any) -> Any:
        log.append(("start", frozenset(s.request.id for s in group.sequences if s)))
        return verify(group, draft)

    def landed(flying: Any) -> Any:
        log.append(("commit", frozenset(s.request.id for s in flying.group.sequences if s)))
        return wait(flying)

    monkeypatch.setattr(engine, "verify", started)
    monkeypatch.setattr(engine, "wait", landed)
    prompts = tiny.prompts(8)
    found = tiny.decode(engine, tiny.requests(prompts, 12))
    assert found == {i: tiny.generate(target, row, 12) for i, row in enumerate(prompts)}
    starts, commits = ([rows for what, rows in log if what == kind] for kind in ("start", "commit"))
    assert starts == commits, "every round is committed, in its turn"
    flying, most, overlapped = [], 0, 0
    for what, rows in log:
        if what == "start":
            assert not flying or not flying[-1] & rows, "a sequence is in two rounds at once"
            assert not flying or len(rows) == 2, "a round that is not full was started beside another"
            flying.append(rows)
        else:
            assert flying.pop(0) == rows
        most, overlapped = max(most, len(flying)), overlapped + (len(flying) == 2)
    assert most == 2
    assert overlapped > len(starts) // 2


def test_where_pages_run_out_no_sequence_of_a_running_round_is_preempted() -> None:
    prompts = tiny.prompts(10, seed=3)
    shape = SHAPE | {"pages": 13, "page": 8, "window": 8, "batch_size": 3}
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), **shape)
    taken = []
    preempt = engine.pool._preempt

    def watched(sequence: Any) -> None:
        assert engine._running is None
        taken.append(sequence)
        preempt(sequence)

    engine.pool._preempt = watched  # type: ignore[method-assign]
    found = tiny.decode(engine, tiny.requests(prompts, 30), shuffle=1)
    assert found == {i: tiny.generate(tiny.model(), row, 30) for i, row in enumerate(prompts)}
    assert taken


def test_a_round_under_constraints_is_committed_at_once() -> None:
    """Its masks are written where the next round's would be."""
    prompts = tiny.prompts(8)
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), **SHAPE)
    rows = tiny.requests(prompts, 12)
    first = tiny.generate(tiny.model(), prompts[0], 1)[0]
    for row in [replace(rows[0], bad_words=((first,),)), *rows[1:]]:
        engine.submit(row)
    while engine.busy:
        engine.step()
        if engine._running:
            assert not any(isinstance(s.constraint, Barred) for s in engine._running.group.sequences if s)
    found = {c.id: c.tokens for c in engine.take()}
    assert first not in found.pop(0)
    assert found == {i: tiny.generate(tiny.model(), prompts[i], 12) for i in range(1, 8)}


@pytest.mark.parametrize(
    ("changes", "slots"), [({}, 4), ({"window": 3}, 3), ({"overlap": False}, 2), ({"overlap": None}, 2)]
)
def test_overlapping_rounds_need_twice_the_slots(changes: dict[str, Any], slots: int) -> None:
    engine = Engine(tiny.model(), None, EngineConfig(method="plain", capacity=tiny.CONTEXT, **SHAPE | changes))
    assert engine.config.slots == slots


def test_free_shapes_do_not_overlap() -> None:
    engine = tiny.engine(tiny.model(), **SHAPE | {"exact": False})
    assert engine.config.overlap is False
