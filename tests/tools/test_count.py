"""The counted costs of a round are within limits, and an added kernel, byte or wait is found."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from exspec.actors.engine import Engine
from exspec.actors.engine.kv import cached_model
from exspec.actors.engine.shape.roofline import Sizes
from exspec.actors.engine.tokens import sampling
from exspec.jobs.benchmarks.models import build
from tests.tools import count

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # in torch's compiler

TINY = partial(count.resolved, rows=4, window=4, capacity=64, drafted=3, kernels="compiled")
LARGE = partial(count.resolved, drafted=5, kernels="compiled")
VERIFY, DRAFT, RATIO = 600, 2000, 1.17  # at most


@pytest.fixture(scope="module")
def pair() -> count.Pair:
    return count.Pair("tiny", "tiny")


@pytest.fixture(scope="module")
def costs(pair: count.Pair) -> tuple[count.Cost, count.Cost]:
    return pair.forwards(TINY())


@pytest.fixture(scope="module")
def large() -> count.Pair:
    return count.Pair("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


@pytest.fixture(scope="module")
def eight(large: count.Pair) -> tuple[count.Cost, count.Cost]:
    return large.forwards(LARGE(8, 8, 512))


@contextmanager
def counting() -> Iterator[count.Tally]:
    with FakeTensorMode(), count.Tally() as tally:
        yield tally


def test_a_round_of_a_large_pair_is_within_its_limits(large: count.Pair, eight: tuple[count.Cost, count.Cost]) -> None:
    config = LARGE(8, 8, 512)
    verify, draft = eight
    assert (verify.calls, draft.calls) == (36, 5 * 28), "every layer attends once"
    assert verify.kernels <= VERIFY
    assert draft.kernels <= DRAFT
    eager = large.forwards(LARGE(8, 8, 512, kernels="eager"))
    assert eager[0].kernels > 3 * verify.kernels
    assert 1 < count.bytes_ratio(large, config, (verify, draft), count.random_lengths(8, 512, 5)) <= RATIO


def test_partial_results_of_attention_are_counted(pair: count.Pair) -> None:
    """One for each split of each query: the sum of values, the sum of weights and the highest score."""
    model = pair.models[0].config
    layers, heads, size = 2, 4, 16
    expected = 2 * (5 + 5) * layers * heads * (size + 2) * 4
    assert count.split_bytes(model, [10, 507], [5]) == expected
    assert count.split_bytes(model, [508], [5]) == expected, "a second split begins at token 512"


@pytest.mark.slow
def test_many_rows_of_a_large_pair_move_few_bytes_more(large: count.Pair) -> None:
    config = LARGE(64, 192, 1024)
    assert 1 < count.bytes_ratio(large, config, large.forwards(config), count.random_lengths(64, 1024, 5)) <= RATIO


def test_layers_are_counted_as_if_all_of_them_ran(pair: count.Pair) -> None:
    assert pair.forwards(TINY()) == pair._of_layers(TINY(), 2), "tiny has two"


def test_a_kernel_more_in_choosing_tokens_is_found(pair: count.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = pair.forwards(TINY(kernels="eager"))
    distribution = sampling.Sampler.distribution
    more: Any = lambda self, logits, *rest, **named: distribution(self, logits + 1, *rest, **named)  # noqa: E731
    monkeypatch.setattr(sampling.Sampler, "distribution", more)
    verify, draft = pair.forwards(TINY(kernels="eager"))
    assert verify.kernels == costs[0].kernels + 1
    assert draft.kernels == costs[1].kernels + 3
    assert verify.bytes == costs[0].bytes + 2 * (4 * 4 * 128 * 2)


def test_the_last_column_is_one_product(pair: count.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft's first two columns the last is kept. Without a copy, torch would read the weights once per row."""
    before = pair.forwards(TINY(kernels="eager"))[1].bytes
    monkeypatch.setattr(cached_model, "_contiguous", lambda _, inputs: inputs)
    assert pair.forwards(TINY(kernels="eager"))[1].bytes > before + 2 * (128 * 64 * 2), (
        "three rows more read the weights"
    )


def test_views_and_empty_memory_are_no_kernels() -> None:
    with counting() as tally:
        x = torch.empty(4, 6)
        x.view(24).view(6, 4).T.unsqueeze(0)[:, 1:].expand(3, 3, 6)
    assert tally.kernels.total() == 0
    with counting() as tally:
        y = torch.empty(4, 6)
        torch.nn.functional.linear(y + 1, torch.empty(3, 6))
    assert dict(tally.kernels) == {"aten.add.Tensor": 1, "aten.mm.default": 1}
    assert tally.bytes == 4 * (24 + 24) + 4 * (24 + 18 + 12)


def test_what_is_picked_is_read_and_not_the_table() -> None:
    with counting() as tally:
        torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long), torch.empty(1000, 8))
    assert tally.bytes < 1000


def test_columns_that_are_read_are_those_of_the_rows() -> None:
    verify, draft = count.columns_read(TINY(), [10, 1, 30, 7])
    assert verify == 10 + 1 + 30 + 7 + 4 * 4
    assert draft == 3 * (10 + 1 + 30 + 7) + 4 * (1 + 2 + 3)


def test_kv_that_is_read_past_the_rows_is_found(
    pair: count.Pair, costs: tuple[count.Cost, count.Cost], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [10, 1, 30, 7]
    ratio = count.bytes_ratio(pair, TINY(), costs, lengths)
    read = count.columns_read(TINY(), lengths)
    monkeypatch.setattr(count, "columns_read", lambda *_: (read[0] + 100, read[1]))
    sizes = Sizes.of(pair.models[0].config, pair.models[0].dtype)
    more = 100 * sizes.kv / ((1 + 3) * (sizes.read + sum(lengths) * sizes.kv))
    assert count.bytes_ratio(pair, TINY(), costs, lengths) == pytest.approx(ratio + more)


def test_a_constrained_round_waits_twice_however_long_its_drafts() -> None:
    model = build("tiny", torch.float32, "cpu")
    found = [count.waits(model, model, count.every_other_forced, drafted=drafted) for drafted in (2, 5, 9)]
    assert found == [2, 2, 2]


def test_a_greedy_round_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("tiny", torch.float32, "cpu")
    assert count.waits(model, model) == 1
    draft = Engine.draft

    def reading(self: Engine, group: Any) -> Any:
        found = draft(self, group)
        assert found.lengths.sum() >= 0
        found.tokens.tolist()
        return found

    monkeypatch.setattr(Engine, "draft", reading)
    assert count.waits(model, model) == 3


def test_layers_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "alike", lambda _: False)
    with pytest.raises(ValueError, match="the layers of tiny are not alike"):
        count.Pair("tiny", "tiny")


def test_a_layer_of_another_shape_is_not_alike() -> None:
    with FakeTensorMode():
        model = count.shaped("tiny")
        assert count.alike(model)
        model.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 64)  # type: ignore[union-attr]
        assert not count.alike(model)


def test_it_prints_one_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(count, "host_milliseconds", lambda: {"greedy": 0.5})
    monkeypatch.setattr(count, "count", partial(count.count, batches=((4, 64),)))
    count.main("tiny:tiny")
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert set(found) >= {"verify_kernels", "draft_kernels", "before", "bytes_ratio", "waits", "host_ms"}
    assert set(found["bytes_ratio"]["4"]) == {"4", "12"}
    assert found["waits"] == {"greedy": 1, "constrained": 2}


WINDOWS: dict[str, dict[str, Any]] = {
    "model": {"draft_window": 512},
    "sparse": {"drafter": "sparse", "draft_window": 512},
    "chosen": {"drafter": "sparse", "draft_window": 512, "draft_chosen": 512},
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 32, 128])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_draft_step_reads_its_budget_and_has_no_kernel_more(large: count.Pair, rows: int, name: str) -> None:
    """At any length of the text. The logits of 128 rows are a part of what a small draft model moves."""
    config = LARGE(rows, rows, 16384, drafted=3)
    windowed = replace(config, **WINDOWS[name])
    model = large.models[name == "model"]
    step = count.draft_step(large, windowed)
    whole = count.draft_step(large, config)
    per_layer = model.config.num_hidden_layers / large.models[1].config.num_hidden_layers
    assert step.kernels <= whole.kernels * per_layer
    most = 1.12 if (name, rows) == ("model", 128) else 1.1
    for length in (4000, 16000):
        assert 0.9 < count.budget_ratio(model, windowed, step, length) < most
