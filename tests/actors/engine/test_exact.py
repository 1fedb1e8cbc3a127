"""Every token is the one that plain decoding gives: 100 %, or the test fails."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from tests import tiny

PROMPTS = tiny.prompts(14)
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9)


@cache
def reference(family: str = "llama", seed: int = 0, max_new_tokens: int = 20) -> dict[int, list[int]]:
    target = tiny.model(family, seed)
    return {i: tiny.generate(target, prompt, max_new_tokens) for i, prompt in enumerate(PROMPTS)}


def test_the_reference_is_worth_comparing_with() -> None:
    """Some sequences end early, some run on, and they are not all in a loop of one token."""
    rows = reference().values()
    assert {len(row) < 20 for row in rows} == {True, False}
    assert sum(len(set(row)) > 4 for row in rows) > len(PROMPTS) / 2


@pytest.mark.cover(1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", ["plain", "eqspec", "exspec"])
def test_float32_equals_generate_in_every_family(family: str, method: str) -> None:
    target, draft = tiny.model(family), tiny.model(family, seed=1)
    engine = tiny.engine(target, draft=draft, method=method)
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


def bfloat16_run(family: str, right: float | None, shuffle: int, sampling: Sampling | None, **config: object) -> object:
    """Tokens by id; `right` of None is plain decoding in the speculative shape."""
    target = tiny.model(family, dtype=torch.bfloat16)
    if right is None:
        engine = tiny.engine(target, method="plain", columns=4, **config)
    else:
        engine = tiny.engine(target, tiny.Scripted(bfloat16_reference(family, sampling), right), **config)
    return tiny.decode(engine, tiny.requests(PROMPTS, sampling=sampling), shuffle)


@cache
def bfloat16_reference(family: str, sampling: Sampling | None) -> dict[int, list[int]]:
    return bfloat16_run(family, None, shuffle=0, sampling=sampling)  # type: ignore[return-value]


@pytest.mark.cover(1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_bfloat16_equals_plain_in_the_same_shape(family: str, sampling: Sampling | None) -> None:
    """Whatever the drafter, the acceptance, the window and the order of admission."""
    expected = bfloat16_reference(family, sampling)
    for right, shuffle, config in [
        (0.0, 1, {}),
        (0.6, 2, {}),
        (1.0, 3, {}),
        (0.6, 4, {"window": 4}),
        (0.8, 5, {"window": 14}),
    ]:
        assert bfloat16_run(family, right, shuffle, sampling, **config) == expected, (right, config)


def test_bfloat16_by_itself_is_not_exact() -> None:
    """The reason for fixed shapes: without them, or against another shape, bfloat16 gives other tokens somewhere."""

    def differs(seed: int) -> bool:
        target = tiny.model("llama", seed, torch.bfloat16)
        rows = tiny.prompts(20, seed)
        engine = tiny.engine(target, draft=tiny.model("llama", seed + 9, torch.bfloat16))
        ours = tiny.decode(engine, tiny.requests(rows, 40))
        return any(ours[i] != tiny.generate(target, row, 40) for i, row in enumerate(rows))

    assert any(differs(seed) for seed in range(6))


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
    """Same seed, same tokens: for every method and drafter what one sequence alone, without a cache, would give."""
    target = tiny.model()
    rows = tiny.requests(PROMPTS, 16, sampling)
    expected = {r.id: tiny.slow_decode(target, r.prompt, r.sampling, 16) for r in rows}
    assert len({tuple(tokens) for tokens in expected.values()}) > 10
    for method in ("plain", "eqspec", "exspec"):
        engine = tiny.engine(target, draft=tiny.model(seed=1), method=method)
        assert tiny.decode(engine, rows, shuffle=1) == expected, method
    engine = tiny.engine(target, tiny.Scripted(expected, 0.7))
    assert tiny.decode(engine, rows, shuffle=2) == expected


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
def test_tokens_that_may_not_come(asked: dict[str, Any], sampling: Sampling) -> None:
    """Ends that come too early, or are none, and words that never come: as a slow loop has them."""
    target = tiny.model()
    rows = [Request(i, p, 16, replace(sampling, seed=i), **asked) for i, p in enumerate(PROMPTS)]
    expected = {r.id: tiny.slow_decode(target, r.prompt, r.sampling, 16, **asked) for r in rows}
    free = {r.id: tiny.slow_decode(target, r.prompt, r.sampling, 16) for r in rows}
    assert expected != free, "it bars nothing"
    for method in ("plain", "eqspec", "exspec"):
        engine = tiny.engine(target, draft=tiny.model(seed=1), method=method)
        assert tiny.decode(engine, rows, shuffle=1) == expected, method
    engine = tiny.engine(target, tiny.Scripted(free, 0.7))
    assert tiny.decode(engine, rows, shuffle=2) == expected


def test_no_stop_string_before_the_least_length() -> None:
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1))
    stop = lambda: lambda _: "there"  # noqa: E731
    rows = [Request(n, PROMPTS[4], 12, stop=stop, min_new_tokens=n, ignore_end=True) for n in range(12)]
    assert {n: len(tokens) for n, tokens in tiny.decode(engine, rows).items()} == {n: max(n, 1) for n in range(12)}


def test_greedy_and_sampled_rows_share_a_group() -> None:
    target = tiny.model()
    samplings = [Sampling(), Sampling(temperature=1.0, seed=7), Sampling(temperature=0.5, top_k=3, seed=8),
                 Sampling(repetition_penalty=1.5), Sampling(frequency_penalty=0.5),
                 Sampling(temperature=1.0, min_p=0.2, seed=9)]  # fmt: skip
    rows = [Request(i, p, max_new_tokens=12, sampling=samplings[i % 6]) for i, p in enumerate(PROMPTS)]
    expected = {r.id: tiny.slow_decode(target, r.prompt, r.sampling, 12) for r in rows}
    assert tiny.decode(tiny.engine(target, draft=tiny.model(seed=1)), rows) == expected


def test_prompts_up_to_the_context_limit() -> None:
    target, draft = tiny.model(), tiny.model(seed=1)
    rows = [tiny.prompts(1, seed)[0] * n for seed, n in enumerate((1, 50, 80, 90, tiny.CONTEXT - 1))]
    for method in ("plain", "eqspec", "exspec"):
        got = tiny.decode(tiny.engine(target, draft=draft, method=method), tiny.requests(rows, 30))
        for i, row in enumerate(rows):
            room = min(30, tiny.CONTEXT - len(row))
            assert got[i] == tiny.generate(target, row, room), (method, len(row))


def test_requests_may_come_at_any_time() -> None:
    """What is submitted between rounds decodes as what was there from the start."""
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1))
    done = {}
    for request in tiny.requests(PROMPTS):
        engine.submit(request)
        engine.step()
        engine.check()
        done |= {c.id: c.tokens for c in engine.take()}
    done |= {c.id: c.tokens for c in engine.run()}
    assert done == reference()


def test_a_padded_embedding_changes_nothing() -> None:
    """Draft and target may differ in the size of their embedding, to either side."""
    for size in (tiny.VOCABULARY - 20, tiny.VOCABULARY + 20):
        engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1, vocab_size=size))
        assert tiny.decode(engine, tiny.requests(PROMPTS)) == reference()
        penalised = [
            Request(i, p, sampling=Sampling(repetition_penalty=1.3), max_new_tokens=8) for i, p in enumerate(PROMPTS)
        ]
        expected = {r.id: tiny.slow_decode(tiny.model(), r.prompt, r.sampling, 8) for r in penalised}
        engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1, vocab_size=size))
        assert tiny.decode(engine, penalised) == expected


def test_an_engine_of_its_own_defaults() -> None:
    """Engine(target, draft) is enough; without a draft it decodes plainly."""
    target = tiny.model()
    for engine in (
        Engine(target, tiny.model(seed=1)),
        Engine(target),
        Engine(target, None, EngineConfig(method="plain")),
    ):
        assert tiny.decode(engine, tiny.requests(PROMPTS)) == reference()
