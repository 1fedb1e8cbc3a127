"""Every token equals that of plain decoding: 100 %, or the test fails."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.kv.batch import Batch
from tests import tiny

PROMPTS = tiny.prompts(14)
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9)
METHODS = ["plain", "eqspec", "exspec"]


@cache
def reference(family: str = "llama") -> dict[int, list[int]]:
    return tiny.greedy(tiny.model(family), PROMPTS)


def test_the_reference_has_short_and_long_sequences_that_do_not_repeat_one_token() -> None:
    rows = reference().values()
    assert {len(row) < 20 for row in rows} == {True, False}
    assert sum(len(set(row)) > 4 for row in rows) > len(PROMPTS) / 2


@pytest.mark.cover(1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_float32_equals_generate_in_every_family(family: str, method: str) -> None:
    engine = tiny.engine(tiny.model(family), draft=tiny.model(family, seed=1), method=method)
    assert tiny.decode(engine, tiny.requests(PROMPTS)) == reference(family)


@pytest.mark.cover(2)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0], ids=["always wrong", "coin", "always right"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
@pytest.mark.parametrize(
    "shape",
    [
        {"method": "eqspec", "batch_size": 4},
        {"method": "eqspec", "batch_size": 5},
        {"method": "exspec", "batch_size": 1, "window": 1},
        {"method": "exspec", "batch_size": 4, "window": 4},
        {"method": "exspec", "batch_size": 7, "window": 14, "prefill_rows": 3},
        {"method": "exspec", "batch_size": 4, "window": 10, "bucket": 16},
        {"method": "exspec", "batch_size": 4, "window": 9, "bucket": 96},
        {"method": "exspec", "batch_size": 4, "window": 10, "bucket": 1, "exact": False},
        {"method": "exspec", "batch_size": 3, "window": 20, "bucket": 16, "exact": False},
    ],
    ids=lambda shape: "-".join(str(v) for v in shape.values()),
)
def test_float32_equals_generate_whatever_is_drafted(shape: dict[str, object], draft_tokens: int, right: float) -> None:
    drafter = tiny.Scripted(reference(), right)
    engine = tiny.engine(tiny.model(), drafter, draft_tokens=draft_tokens, **shape)
    assert tiny.decode(engine, tiny.requests(PROMPTS), shuffle=draft_tokens) == reference()


@cache
def bfloat16_reference(family: str, sampling: Sampling | None) -> dict[Hashable, list[int]]:
    """Plain decoding in the shape of speculation."""
    engine = tiny.engine(tiny.model(family, dtype=torch.bfloat16), method="plain", columns=4)
    return tiny.decode(engine, tiny.requests(PROMPTS, sampling=sampling), shuffle=0)


@pytest.mark.cover(1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_bfloat16_equals_plain_in_the_same_shape(family: str, sampling: Sampling | None) -> None:
    """The tokens do not depend on the drafter, the acceptance rate, the window or the order of admission."""
    target, expected = tiny.model(family, dtype=torch.bfloat16), bfloat16_reference(family, sampling)
    for shuffle, (right, window) in enumerate([(0.0, 10), (0.6, 10), (1.0, 10), (0.6, 4), (0.8, 14)], 1):
        engine = tiny.engine(target, tiny.Scripted(expected, right), window=window)
        found = tiny.decode(engine, tiny.requests(PROMPTS, sampling=sampling), shuffle)
        assert found == expected, (right, window)


def watch(engine: Engine) -> list[tuple[int, int]]:
    """Where the engine's verify forwards begin in their rows, and their widths; it fills while the engine decodes."""
    found: list[tuple[int, int]] = []
    choose = engine.choose

    def watched(batch: Batch, *given: Any) -> Any:
        found.extend((start, batch.tokens.shape[1]) for start in batch.starts[batch.slots < engine.pool.slots].tolist())
        return choose(batch, *given)

    engine.choose = watched
    return found


@pytest.mark.cover(1)
@pytest.mark.parametrize("shape", [{}, {"attention": "in_place"}, {"bucket": 16}, {"pages": 14}], ids=str)
@pytest.mark.parametrize("draft_from", [26, 40])
def test_short_rows_decode_as_plain_and_longer_ones_are_drafted_for(draft_from: int, shape: dict[str, Any]) -> None:
    """The width of a verify depends on the position alone, so no bit depends on neighbours, drafts or preemption."""
    tiny.need(shape.get("attention"), None)
    target = tiny.model(dtype=torch.bfloat16)

    def engine(**changes: Any) -> Engine:
        return tiny.engine(target, draft_from=draft_from, **shape | changes)

    expected = tiny.decode(engine(method="plain", columns=4), tiny.requests(PROMPTS), shuffle=0)
    short = {i for i, tokens in expected.items() if len(PROMPTS[int(str(i))]) + len(tokens) <= draft_from}
    alone = tiny.decode(tiny.engine(target, method="plain", **shape), tiny.requests(PROMPTS))
    assert 0 < len(short) < len(PROMPTS)
    assert {i: expected[i] for i in short} == {i: alone[i] for i in short}, "as if there were no drafts"
    for shuffle, (right, window) in enumerate([(0.0, 10), (0.6, 4), (1.0, 14)], 1):
        made = tiny.engine(target, tiny.Scripted(expected, right), draft_from=draft_from, window=window, **shape)
        verified = watch(made)
        assert tiny.decode(made, tiny.requests(PROMPTS), shuffle) == expected, (right, window)
        assert {width for start, width in verified if start < draft_from} == {1}
        assert {width for start, width in verified if start >= draft_from} == {4}


def test_bfloat16_differs_between_shapes() -> None:
    """Why shapes are fixed: in another shape, bfloat16 gives other tokens somewhere."""

    def differs(seed: int) -> bool:
        target, rows = tiny.model(seed=seed, dtype=torch.bfloat16), tiny.prompts(20, seed)
        engine = tiny.engine(target, draft=tiny.model(seed=seed + 9, dtype=torch.bfloat16))
        return tiny.decode(engine, tiny.requests(rows, 40)) != tiny.greedy(target, rows, 40)

    assert any(differs(seed) for seed in range(6))


def every_engine_gives(
    expected: dict[Hashable, list[int]], requests: Sequence[Request], drafted: dict[Hashable, list[int]]
) -> None:
    """Every method, and drafts of which 70 % follow `drafted`."""
    for method in METHODS:
        engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), method=method)
        assert tiny.decode(engine, requests, shuffle=1) == expected, method
    assert tiny.decode(tiny.engine(tiny.model(), tiny.Scripted(drafted, 0.7)), requests, shuffle=2) == expected


@pytest.mark.fast(
    "temperature=1.5 top_k=5",
    "temperature=1.0 top_k=20 top_p=0.9 min_p=0.05",
    "frequency_penalty=-0.03",
    "temperature=0.8 repetition_penalty=1.1 presence_penalty=0.3 frequency_penalty=0.2",
)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(temperature=1.0, top_p=0.7),
        SAMPLED,
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2),
        Sampling(temperature=1.2, min_p=0.1),
        Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
        Sampling(presence_penalty=0.05),
        Sampling(frequency_penalty=-0.03),
        Sampling(temperature=0.8, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1),
    ],
    ids=lambda sampling: " ".join(f"{k}={v}" for k, v in vars(sampling).items() if v != getattr(Sampling(), k)),
)
def test_sampled_tokens_equal_a_slow_loop(sampling: Sampling) -> None:
    """With the same seed, every method and drafter gives what one sequence alone, without a cache, gives."""
    requests = tiny.requests(PROMPTS, 16, sampling)
    expected = tiny.slow_decode(tiny.model(), requests)
    assert len({tuple(tokens) for tokens in expected.values()}) > 10
    every_engine_gives(expected, requests, drafted=expected)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "asked",
    [
        {"min_new_tokens": 9},
        {"ignore_end": True},
        {"bad_words": ((5,), (9,), (40, 41), (7, 7, 7))},
        {"min_new_tokens": 16, "bad_words": ((11,),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, seed=3)], ids=["greedy", "sampled"])
def test_forbidden_tokens_equal_a_slow_loop(asked: dict[str, Any], sampling: Sampling) -> None:
    """Minimum length, ignored end tokens and bad words, though the drafts know nothing of them."""
    free = [Request(i, prompt, 16, replace(sampling, seed=i)) for i, prompt in enumerate(PROMPTS)]
    bound = [replace(request, **asked) for request in free]
    drafted, expected = (tiny.slow_decode(tiny.model(), requests) for requests in (free, bound))
    assert expected != drafted, "nothing was forbidden"
    every_engine_gives(expected, bound, drafted)


def test_no_stop_string_ends_a_completion_before_its_minimum_length() -> None:
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1))
    stop = lambda: lambda _: "there"  # noqa: E731
    rows = [Request(n, PROMPTS[4], 12, stop=stop, min_new_tokens=n, ignore_end=True) for n in range(12)]
    assert {n: len(tokens) for n, tokens in tiny.decode(engine, rows).items()} == {n: max(n, 1) for n in range(12)}


@pytest.mark.parametrize("method", METHODS)
def test_prompts_up_to_the_context_limit(method: str) -> None:
    target = tiny.model()
    rows = [tiny.prompts(1, seed)[0] * n for seed, n in enumerate((1, 50, 80, 90, tiny.CONTEXT - 1))]
    found = tiny.decode(tiny.engine(target, draft=tiny.model(seed=1), method=method), tiny.requests(rows, 30))
    assert found == {i: tiny.generate(target, row, min(30, tiny.CONTEXT - len(row))) for i, row in enumerate(rows)}


@pytest.mark.parametrize("size", [tiny.VOCABULARY - 20, tiny.VOCABULARY + 20])
def test_the_draft_may_have_a_smaller_or_larger_embedding(size: int) -> None:
    draft = tiny.model(seed=1, vocab_size=size)
    assert tiny.decode(tiny.engine(tiny.model(), draft=draft), tiny.requests(PROMPTS)) == reference()
    penalised = tiny.requests(PROMPTS, 8, Sampling(repetition_penalty=1.3))
    found = tiny.decode(tiny.engine(tiny.model(), draft=draft), penalised)
    assert found == tiny.slow_decode(tiny.model(), penalised)


@pytest.mark.parametrize("more", [(tiny.model(seed=1),), (), (None, EngineConfig(method="plain"))],
                         ids=["draft", "no draft", "plain"])  # fmt: skip
def test_an_engine_needs_no_config_and_no_draft(more: tuple[Any, ...]) -> None:
    """Without a draft it decodes plainly."""
    assert tiny.decode(Engine(tiny.model(), *more), tiny.requests(PROMPTS)) == reference()
