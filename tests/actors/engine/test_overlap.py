"""Overlapping rounds: one is committed while the device works on the next, which has other sequences."""

from dataclasses import replace
from typing import Any

import pytest

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.tokens.constraint import Barred
from tests import tiny

PROMPTS = tiny.prompts(8)
SHAPE: dict[str, Any] = {"batch_size": 2, "window": 4, "overlap": True, "bucket": tiny.CONTEXT}


def test_a_round_is_committed_after_the_next_one_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), **SHAPE)
    verify, wait = engine.verify, engine.wait

    def note(event: str, group: Any) -> None:
        log.append((event, frozenset(s.request.id for s in group.sequences if s)))

    monkeypatch.setattr(engine, "verify", lambda group, draft: (note("start", group), verify(group, draft))[1])
    monkeypatch.setattr(engine, "wait", lambda running: (note("commit", running.group), wait(running))[1])
    assert tiny.decode(engine, tiny.requests(PROMPTS, 12)) == tiny.greedy(tiny.model(), PROMPTS, 12)
    running, counts = [], []
    for event, rows in log:
        if event == "start":
            assert not running or not running[-1] & rows, "a sequence is in two rounds at once"
            assert not running or len(rows) == 2, "a round that is not full was started beside another"
            running.append(rows)
        else:
            assert running.pop(0) == rows, "rounds were committed in another order"
        counts.append(len(running))
    assert running == []
    assert max(counts) == 2
    assert counts.count(2) > len(log) // 4


def test_no_sequence_of_a_running_round_is_preempted() -> None:
    prompts = tiny.prompts(10, seed=3)
    shape = SHAPE | {"pages": 13, "page": 8, "window": 8, "batch_size": 3}
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), **shape)
    preempted = []
    preempt = engine.pool._preempt

    def watched(sequence: Any) -> None:
        assert not engine._running
        preempted.append(sequence)
        preempt(sequence)

    engine.pool._preempt = watched  # type: ignore[method-assign]
    assert tiny.decode(engine, tiny.requests(prompts, 30), shuffle=1) == tiny.greedy(tiny.model(), prompts, 30)
    assert preempted


def test_a_round_under_constraints_is_committed_at_once() -> None:
    """The next round's masks would overwrite its own."""
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), **SHAPE)
    rows, expected = tiny.requests(PROMPTS, 12), tiny.greedy(tiny.model(), PROMPTS, 12)
    first = expected.pop(0)[0]
    for row in [replace(rows[0], bad_words=((first,),)), *rows[1:]]:
        engine.submit(row)
    while engine.busy:
        engine.step()
        for running in engine._running:
            assert not any(isinstance(s.constraint, Barred) for s in running.group.sequences if s)
    found = {c.id: c.tokens for c in engine.take()}
    assert first not in found.pop(0)
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "slots", "spare"),
    [({}, 5, 1), ({"window": 4}, 4, 0), ({"window": 3}, 3, 0), ({"overlap": False}, 3, 1), ({"overlap": None}, 3, 1)],
)
def test_overlapping_rounds_need_twice_the_slots(changes: dict[str, Any], slots: int, spare: int) -> None:
    shape = SHAPE | {"window": 9, "prefill_rows": 1} | changes
    engine = Engine(tiny.model(), None, EngineConfig(method="plain", capacity=tiny.CONTEXT, **shape))
    assert (engine.config.slots, engine.config.spare) == (slots, spare)


def test_free_shapes_do_not_overlap() -> None:
    assert tiny.engine(tiny.model(), **SHAPE | {"exact": False}).config.overlap is False
