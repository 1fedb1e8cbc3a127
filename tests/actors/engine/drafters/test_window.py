"""Drafters that read a window of their KV: what they see, what they write, and what they cannot change."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters.drafter import Draft
from exspec.actors.engine.drafters.model import DraftModel
from exspec.actors.engine.drafters.sparse import Sparse
from exspec.actors.engine.kv import cached_model
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.pages import BIN
from exspec.actors.engine.kv.window import Reads, Rings, chosen_pages, first_page, ring_pages, window_pages
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.shape.plan import fit, plan_memory
from exspec.jobs.benchmarks.shapes import SHAPES
from tests import tiny

PAGE = 8
PROMPTS = [*tiny.prompts(9), *tiny.prompts(5, seed=1, longest=70)]
PLACES = pytest.mark.parametrize(
    "config",
    [{}, {"attention": "in_place", "bucket": tiny.CONTEXT}, {"exact": False, "bucket": 1}, {"pages": 14}],
    ids=["gathered", "in place", "free", "few pages"],
)


def visible(position: int, first: int, sliding: int) -> list[int]:
    """Positions that a column attends to if its pages are page 0 and those from `first` on. A sliding layer counts the
    columns of the short table."""
    seen = [*range(min(PAGE, position + 1)), *range(first * PAGE, position + 1)]
    return seen[-sliding:] if sliding else seen


@torch.inference_mode()
def slow_draft(model: Any, tokens: list[int], count: int, firsts: list[int], begin: int, own: int, sliding: int) -> Any:
    """Greedy tokens of a model whose columns from `begin` on see a window; `own` is its vocabulary. firsts: by step,
    the page with which the window begins. Earlier columns see everything."""
    drafted: list[int] = []
    for _ in range(count):
        n = len(tokens) + len(drafted)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if sliding:
            mask &= mask.triu(1 - sliding)
        for step, position in enumerate(range(begin, n)):
            mask[position] = False
            mask[position, visible(position, firsts[step], sliding)] = True
        logits = model(input_ids=torch.tensor([tokens + drafted]), attention_mask=mask[None, None]).logits[0, -1]
        drafted.append(int(logits[:own].argmax()))
    return drafted


class SlowSparse(Sparse):
    """Compares every draft with one that is made without a cache."""

    whole: Any
    compared = shortened = 0

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = super().propose(group, limits)
        sliding = getattr(self.whole.config, "sliding_window", None) or 0
        for row, (s, limit) in enumerate(zip(group.sequences, limits, strict=True)):
            if s and limit:
                most = max(limits)
                first = (s.length + most - 1) // PAGE - window_pages(self.budget, most, PAGE) + 1
                firsts = [max(first, 1)] * limit
                slow = slow_draft(self.whole, s.tokens, limit, firsts, s.length, tiny.VOCABULARY, sliding)
                assert draft.tokens[row, : draft.lengths[row]].tolist() == slow
                SlowSparse.compared += 1
                SlowSparse.shortened += firsts[-1] > 1
        return draft


@PLACES
@pytest.mark.parametrize("sliding", [None, 11], ids=["", "sliding"])
def test_a_sparse_draft_is_the_targets_over_few_pages(config: dict[str, Any], sliding: int | None) -> None:
    tiny.need(config.get("attention"))
    target = tiny.model("mistral", sliding_window=sliding)

    def make(context: Any) -> SlowSparse:
        made = SlowSparse.build(context)
        made.whole = target
        return made

    SlowSparse.compared = SlowSparse.shortened = 0
    made = tiny.engine(target, "sparse", None, make, draft_window=9, draft_tokens=4, **config)
    done = tiny.run(made, tiny.requests(PROMPTS, 12), shuffle=0)
    assert {name: c.tokens for name, c in done.items()} == tiny.greedy(target, PROMPTS, 12)
    assert SlowSparse.compared > SlowSparse.shortened > 10
    rate = tiny.total(done).acceptance_rate
    assert 0 < rate < 1 or (sliding and rate == 1), "the window may hold all that sliding layers see"


class SlowModel(DraftModel):
    """Compares every draft with one that is made without a cache. The draft model has one layer, so that its KV does
    not depend on what a column saw."""

    whole: Any
    compared = shortened = 0

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = super().propose(group, limits)
        assert self.window
        assert self.rings
        for row, (s, limit) in enumerate(zip(group.sequences, limits, strict=True)):
            if s and limit:
                begins = int(self.rings.begins[s.slot])
                ends = [(s.length + i) // PAGE for i in range(limit)]
                counts = [window_pages(self.window, columns, PAGE) for columns in [2] + [1] * (limit - 1)]
                firsts = [max(end - count + 1, begins) for end, count in zip(ends, counts, strict=True)]
                slow = slow_draft(self.whole, s.tokens, limit, firsts, s.length, tiny.VOCABULARY, 0)
                assert draft.tokens[row, : draft.lengths[row]].tolist() == slow
                SlowModel.compared += 1
                SlowModel.shortened += firsts[-1] > begins > 1
        return draft


@PLACES
@pytest.mark.parametrize("columns", [8, 24])
def test_a_windowed_draft_model_sees_its_window(config: dict[str, Any], columns: int) -> None:
    """After prefill in chunks of one or three pages, shared prefixes, rounds of every acceptance, and preemption."""
    tiny.need(config.get("attention"))
    target, draft = tiny.model(), tiny.model(num_hidden_layers=1)

    def make(context: Any) -> SlowModel:
        made = SlowModel.build(context)
        made.whole = draft
        return made

    SlowModel.compared = SlowModel.shortened = 0
    shape = {"draft_window": 9, "draft_tokens": 4, "page": PAGE, "prefill_columns": columns, "prefill_rows": 3}
    made = tiny.engine(target, "model", draft, make, **shape | config)
    rows = [*PROMPTS, *([*PROMPTS[2], i] for i in range(4))]
    assert tiny.decode(made, tiny.requests(rows, 24), shuffle=0) == tiny.greedy(target, rows, 24)
    assert SlowModel.compared > SlowModel.shortened > 10


@pytest.mark.parametrize("name", ["model", "sparse"])
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_a_window_above_the_text_drops_nothing(name: str, attention: str) -> None:
    """The target drafts for itself, or for itself as a draft model: all is accepted."""
    tiny.need(attention)
    target = tiny.model()
    made = tiny.engine(target, name, draft_window=tiny.CONTEXT - 1, attention=attention)
    done = tiny.run(made, tiny.requests(PROMPTS, 12))
    assert {n: c.tokens for n, c in done.items()} == tiny.greedy(target, PROMPTS, 12)
    assert tiny.total(done).acceptance_rate == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_wrong_pages_and_poisoned_kv_change_no_token(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft reads random pages, of other rows too, and leaves huge keys and values at the positions that it
    feeds. Then the KV of the target has the bits that plain decoding gives it."""
    tiny.need("in_place")
    random = torch.Generator().manual_seed(0)
    target = tiny.model(dtype=dtype)

    def anything(rows: Tensor, latest: Tensor, count: int, size: int) -> Reads:
        numbers = torch.randint(0, 40, (len(rows), 1 + count), generator=random)
        return Reads(numbers, torch.minimum(latest // size, torch.full_like(latest, 3)))

    class Poisoned(Sparse):
        def _next(self, batch: Any, state: None) -> Any:
            found = super()._next(batch, state)
            cached: Any = self.cached
            write = cached.located(batch).write
            for store in (*cached.keys, *cached.values):
                store.flatten(0, 1)[write[write >= PAGE]] = 1e4
            return found

    monkeypatch.setattr(cached_model, "recent_pages", anything)
    shape = {"attention": "in_place", "draft_window": 9, "draft_tokens": 4, "batch_size": 3}
    made = tiny.engine(target, "sparse", None, lambda context: Poisoned.build(context), **shape)
    plain = Engine(target, None, made.config.plain())
    rows = tiny.requests(PROMPTS, 20)
    assert tiny.decode(made, rows) == tiny.decode(plain, rows)
    assert kv_after(made, PROMPTS[2], 12) == kv_after(plain, PROMPTS[2], 12)


def kv_after(engine: Engine, prompt: list[int], tokens: int) -> list[list[float]]:
    """All keys and values of a sequence once `tokens` have been committed."""
    (request,) = tiny.requests([prompt], 90 - len(prompt), ignore_end=True)
    engine.submit(request)
    while not engine.pool.running or len(engine.pool.running[0].committed) < tokens:
        engine.step()
    (s,) = engine.pool.running
    cached: Any = engine.target
    pages = cached.pages.table[s.slot].long()
    stores = [store[pages].flatten(0, 1)[: len(prompt) + tokens - 1] for store in (*cached.keys, *cached.values)]
    engine.run()
    return [store.flatten().tolist() for store in stores]


def test_a_draft_never_writes_a_shared_page(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []  # slot and page
    drafting = [False]

    class Told(Sparse):
        def propose(self, group: Group, limits: list[int]) -> Draft:
            drafting[0] = True
            draft = super().propose(group, limits)
            drafting[0] = False
            return draft

    located = cached_model.PagedModel.located

    def watched(self: Any, batch: Any, *rest: Any) -> Any:
        found = located(self, batch, *rest)
        if drafting[0]:
            written.extend(zip(batch.slots.tolist(), (found[2] // PAGE).tolist(), strict=True))
        return found

    monkeypatch.setattr(cached_model.PagedModel, "located", watched)
    trunk = tiny.prompts(3)[2]
    rows = [[*trunk, *tail] for tail in ([1], [1, 2], [3], [4, 5, 9])]
    made = tiny.engine(tiny.model(), "sparse", None, lambda context: Told.build(context), draft_window=9)
    pages: Any = made.pool.store
    for request in tiny.requests(rows, 20):
        made.submit(request)
    while made.busy:
        made.admit()
        own = [set(p) for p in pages.own]
        written.clear()
        group = made.group()
        own = [set(p) for p in pages.own]
        made.commit(group, made.wait(made.verify(group, made.draft(group))))
        assert written
        assert all(page == BIN or page in own[slot] for slot, page in written if slot < made.pool.slots)
    assert made.statistics.cached_tokens > 0


def test_rings_hold_the_window_and_what_lies_ahead() -> None:
    for window, columns, size in product([1, 7, 8, 9, 40], [2, 8, 9, 24], [1, 3, 8]):
        rings = Rings(2, window, columns, size, 200, torch.device("cpu"))
        for length in range(150):
            first = first_page(length, window, size)
            ahead = (length + columns - 1) // size
            held = rings.table[0, [0, *range(first, ahead + 1)]].tolist()
            assert len(set(held)) == len(held), "no page of the window is overwritten"
            assert length - window + 1 <= 0 or first * size <= max(length - window + 1, size)
        assert not set(rings.table[0].tolist()) & set(rings.table[1].tolist())
        assert rings.pages == 2 * ring_pages(window, columns, size) == rings.table.max()


def test_the_plan_counts_the_window_only() -> None:
    """Qwen3-8B with Qwen3-0.6B at 8,000 tokens on a card of 80 GB."""
    target, draft = (AutoConfig.for_model(**SHAPES[name]) for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"))
    config = EngineConfig(batch_size=48, window=48, capacity=8192, bucket=8192, attention="in_place")
    budget = int(79 * 2**30 * 0.9)
    rows = {}
    for window in (None, 512):
        fitted = fit(target, draft, replace(config, draft_window=window), torch.bfloat16, budget)
        rows[window] = fitted.page_count * fitted.page_size / 8000
        assert plan_memory(target, draft, fitted, torch.bfloat16).total <= budget
    assert rows[512] >= 1.6 * rows[None], rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_window": 31}, r"draft_window: expected at least a page \(32 tokens\), not 31"),
        ({"draft_window": 0}, "draft_window: expected a positive number, not 0"),
        ({"draft_window": 1024}, r"draft_window: expected fewer tokens than the capacity \(1024\), not 1024"),
        ({"draft_window": 64, "method": "eqspec"}, "draft_window: method eqspec moves the KV of whole rows"),
    ],
)
def test_a_window_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "eqspec", "draft_window": None}, "method eqspec moves the KV that it would share with the target"),
        ({"draft_window": None}, "it reads 256 tokens, but the capacity is 96; set draft_window or a larger capacity"),
    ],
)
def test_sparse_is_refused_where_it_cannot_draft(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"with the drafter sparse: {message}"):
        tiny.engine(tiny.model(), "sparse", **settings)


def test_windows_are_tried_for_long_texts_only() -> None:
    target: PreTrainedModel = tiny.model()
    config = EngineConfig(capacity=16384)
    assert Sparse.variants(target.config, config, 3000) == []
    chosen = [{"draft_window": 819, "draft_chosen": tokens} for tokens in (None, 819)]
    assert Sparse.variants(target.config, config, 8000) == chosen
    asked = replace(config, draft_chosen=64)
    assert Sparse.variants(target.config, asked, 500) == [{"draft_window": 819, "draft_chosen": 64}]
    assert DraftModel.variants(target.config, config, 500) == [{}]
    assert DraftModel.variants(target.config, config, 8000) == [{}, {"draft_window": 512}]
    assert DraftModel.variants(target.config, replace(config, draft_window=64), 500) == [{"draft_window": 64}]


def test_the_heaviest_pages_are_chosen_by_layer() -> None:
    """Beside the first page and the recent ones; a short row reads all that it has, in order."""
    rows = 10 + torch.arange(2 * 12).view(2, 12)
    weights = torch.zeros(2, 2, 12)
    weights[0, 0, [3, 5, 2, 8]] = torch.tensor([4.0, 3.0, 1.0, 9.0])  # 8 is recent, and 11 lies ahead
    weights[1, 0, [6, 11]] = torch.tensor([1.0, 99.0])
    weights[1, 0, 1] = 0.5
    weights[:, 1] = torch.rand(2, 12)
    found = chosen_pages(rows, weights, torch.tensor([75, 31]), recent=2, chosen=2, size=8)
    assert (found.pages[0, 0] - 10).tolist() == [0, 3, 5, 8, 9]
    assert (found.pages[1, 0] - 10).tolist() == [0, 1, 6, 8, 9]
    assert (found.pages[:, 1, :4] - 22).tolist() == [[0, 1, 2, 3]] * 2
    assert found.skipped.tolist() == [5, 0]


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_page_weights_are_those_of_a_dense_softmax(family: str, attention: str) -> None:
    """Of the first and the last column of each verify, by layer, added over heads."""
    tiny.need(attention)
    target = tiny.model(family, **({"sliding_window": 11} if family == "mistral" else {}))
    whole: Any = tiny.model(family, **({"sliding_window": 11} if family == "mistral" else {}))
    whole.set_attn_implementation("eager")
    made = tiny.engine(target, "sparse", draft_window=8, draft_chosen=8, attention=attention, draft_tokens=4)
    checked = 0
    for request in tiny.requests(PROMPTS, 24, ignore_end=True):
        made.submit(request)
    cached: Any = made.target
    while made.busy:
        made.admit()
        group = made.group()
        draft = made.draft(group)
        before = {s.slot: (list(s.tokens), s.length) for s in group.sequences if s}
        made.commit(group, made.wait(made.verify(group, draft)))
        for row, s in enumerate(group.sequences[: len(before)]):
            assert s
            tokens, start = before[int(group.slots[row])]
            if start + made.config.width > s.limit:
                continue  # its last columns have no page
            fed = [*tokens, *draft.tokens[row].tolist(), *[0] * made.config.width]  # a verify is padded
            fed = fed[: min(start + made.config.width, group.kv_columns)]
            with torch.inference_mode():
                attentions = whole(input_ids=torch.tensor([fed]), output_attentions=True).attentions
            for layer, dense in enumerate(attentions):  # [1, heads, n, n]
                both = dense[0][:, [start, len(fed) - 1]].sum((0, 1))
                pages = -(-len(fed) // PAGE)
                expected = torch.nn.functional.pad(both, (0, pages * PAGE - len(fed))).view(pages, PAGE).sum(1)
                found = cached.weights[layer, int(group.slots[row])]
                assert torch.allclose(found[:pages], expected, atol=1e-4)
                assert not found[pages:].any()
                checked += 1
    assert checked > 100


def test_a_slots_weights_do_not_outlive_its_sequence() -> None:
    """So acceptance, too, does not depend on which sequence had a slot before."""
    made = tiny.engine(tiny.model(), "sparse", draft_window=8, draft_chosen=8, batch_size=1, window=1)
    (alone,) = tiny.run(made, tiny.requests(PROMPTS[2:3], 30, ignore_end=True)).values()
    made.forget()
    both = tiny.run(made, tiny.requests([PROMPTS[1], PROMPTS[2]], 30, ignore_end=True))
    assert both[1].statistics.accepted_by_position == alone.statistics.accepted_by_position


def test_a_part_of_the_layers_leaves_the_weights_alone() -> None:
    """Calibration times early exit on the target that sparse has used."""
    made = tiny.engine(tiny.deep(4), "sparse", draft_window=8, draft_chosen=8)
    tiny.decode(made, tiny.requests(PROMPTS[:3], 9))
    cached: Any = made.target
    kept = cached.weights.clone()
    cached.remember([1])
    zeros = torch.zeros(1, 2, dtype=torch.long)
    batch = Batch(torch.zeros(1, dtype=torch.long), zeros, torch.tensor([3]), 32)
    cached.forward(batch, last=1)
    cached.forward(batch, first=1)
    assert torch.equal(cached.weights, kept)
    assert kept.any()
