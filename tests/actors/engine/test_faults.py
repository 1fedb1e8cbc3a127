"""Faults of the paper's reference code in cost or state; faults about endings are in test_endings.py."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request
from tests import tiny


def shapes_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """A list that grows by the shape of every forward of the model, or of the engine's runtime copy of it."""
    shapes: list[tuple[int, ...]] = []

    def note(_: Any, __: Any, options: dict[str, Any]) -> None:
        shapes.append(tuple(options["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_the_bonus_token_is_kept_after_a_fully_accepted_draft(method: str) -> None:
    target, rows = tiny.model(eos_token_id=None), tiny.prompts(8)
    reference = tiny.greedy(target, rows, 24)
    engine = tiny.engine(target, tiny.Scripted(reference, 1.0), method=method, bucket=96)
    done = tiny.run(engine, tiny.requests(rows, 24))
    assert {name: c.tokens for name, c in done.items()} == reference
    assert tiny.total(done).acceptance_rate == 1
    assert tiny.total(done).mean_accepted_length == 4, "K = 3 drafts and the bonus"


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_the_drafter_keeps_its_kv_between_rounds(method: str) -> None:
    """The fault: it prefilled the whole prefix again every round. After admission it gets at most K + 1 tokens."""
    draft = tiny.model(seed=1)
    shapes = shapes_of(draft)
    engine = tiny.engine(tiny.model(), draft=draft, method=method, window=4, bucket=96)
    engine.submit(Request("long", [7] * 60, max_new_tokens=20))
    while engine.busy:
        before = engine.statistics.rounds
        shapes.clear()
        engine.step()
        if before:
            assert [columns for _, columns in shapes][:1] == [2]
            assert sum(columns for _, columns in shapes) <= 3 + 1


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
@pytest.mark.parametrize("bucket", [16, 96])
def test_a_drafter_that_is_the_target_itself_is_always_right(method: str, bucket: int) -> None:
    """So the draft's KV is right after every kind of round: fully accepted, cut at a bucket's end, or without a
    draft."""
    target = tiny.model()
    engine = tiny.engine(target, draft=target, method=method, bucket=bucket)
    total = tiny.total(tiny.run(engine, [Request(i, prompt, 1 + i) for i, prompt in enumerate(tiny.prompts(20))]))
    assert total.drafted > 100
    assert total.acceptance_rate == 1


def test_a_new_sequence_makes_no_other_prefill_again() -> None:
    rows = tiny.prompts(20)
    target = tiny.model()
    shapes = shapes_of(target)
    engine = tiny.engine(target, draft=tiny.model(seed=1))
    tiny.decode(engine, tiny.requests(rows))
    prefills = [shape for shape in shapes if shape == (1, 8)]
    assert len(prefills) == sum(-(-(len(row) - 1) // 8) for row in rows), "each prompt once, in chunks of 8"
    assert set(shapes) == {(1, 8), (4, 4)}, "the other forwards verify"
    assert engine.statistics.prefill_tokens == sum(len(row) - 1 for row in rows)


def test_prompts_of_different_lengths_are_not_padded_to_the_longest() -> None:
    rows = [[3] * n for n in (2, 5, 90, 3, 9)]
    target = tiny.model()
    shapes = shapes_of(target)
    tiny.decode(tiny.engine(target, draft=tiny.model(seed=1), prefill_rows=2), tiny.requests(rows, 4))
    prefills = [shape for shape in shapes if shape != (4, 4)]
    assert 0 < sum(rows * columns for rows, columns in prefills) <= sum(-(-len(row) // 8) * 8 * 2 for row in rows)


def test_rounds_move_no_kv() -> None:
    """The fault: every round copied all KV. Neither the stores nor a token's keys move."""
    engine = tiny.engine(tiny.model(eos_token_id=None), draft=tiny.model(seed=1))
    stores = [t for cache in (engine.target, *engine.drafter.caches) for t in (*cache.keys, *cache.values)]
    places = [t.data_ptr() for t in stores]

    def cached(slot: int, length: int) -> torch.Tensor:
        pages = engine.pool.store.table[slot].long()
        return engine.target.keys[0][pages].flatten(0, 1)[:length].clone()

    for request in tiny.requests(tiny.prompts(8), 20):
        engine.submit(request)
    engine.step()
    before = {s.request.id: (s.slot, s.length, cached(s.slot, s.length)) for s in engine.pool.running}
    engine.step()
    engine.step()
    for sequence in engine.pool.running:
        slot, length, keys = before[sequence.request.id]
        assert slot == sequence.slot
        assert torch.equal(cached(slot, length), keys)
    engine.run()
    assert [t.data_ptr() for t in stores] == places


def test_peak_kv_is_what_pages_and_layers_predict() -> None:
    """It does not grow with a thousand sequences through a window of 24."""
    engine = Engine(
        tiny.model(), tiny.model(seed=1), EngineConfig(window=24, capacity=64, bucket=32, prefill_columns=8)
    )
    pages, heads, columns, size, bytes_, layers, models = 24 * 8 + 1, 2, 8, 8, 4, 2, 2
    predicted = models * layers * 2 * pages * heads * columns * size * bytes_
    assert tiny.kv_bytes(engine) == predicted
    caches = (engine.target, *engine.drafter.caches)
    storage = lambda: [cache.keys[0].untyped_storage().nbytes() for cache in caches]  # noqa: E731
    held = storage()
    for i in range(1000):
        engine.submit(Request(i, [1 + i % 60] * (1 + i % 7), max_new_tokens=1 + i % 4))
    assert len(engine.run()) == 1000
    assert tiny.kv_bytes(engine) == predicted
    assert storage() == held


def test_a_full_queue_keeps_the_rows_busy() -> None:
    """While requests wait, every row of every round has a sequence, however uneven their lengths."""
    engine = tiny.engine(tiny.ArithmeticModel(), method="plain", bucket=64, capacity=64, window=8)
    for i in range(60):
        engine.submit(Request(i, [1 + i], max_new_tokens=40 if i % 8 == 0 else 3))
    while engine.pool.waiting:
        engine.step()
    assert engine.statistics.occupancy == 1
