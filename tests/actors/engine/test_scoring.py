"""Given completions: their log-probabilities are those of generation to the bit, and those of a slow loop."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError, Sampling
from exspec.actors.engine.drafters.registry import NONE
from tests import tiny
from tests.actors.engine.test_constraints import constraint_of
from tests.actors.engine.test_logprobs import SAMPLINGS, of, requests

PLAIN = {"method": "plain", "drafter": NONE}


def config(**changes: Any) -> EngineConfig:
    return tiny.config(**PLAIN | {"columns": 6} | changes)


def given(request: Request, tokens: list[int]) -> Request:
    return replace(request, given=tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_the_score_of_a_completion_is_that_of_its_generation(kernels: str, dtype: torch.dtype) -> None:
    """Every bit, whatever shares the rounds, and if KV is so short that sequences are preempted."""
    tiny.need("in_place", kernels)
    target = tiny.model(dtype=dtype)
    asked = [replace(r, ignore_end=True, logprobs=r.logprobs or 0) for r in requests(constrained=False)]
    own = config(kernels=kernels, attention="in_place" if kernels == "compiled" else "auto")
    expected = of(tiny.run(Engine(target, None, own), asked))
    scored = [given(r, expected[r.id][0]) for r in asked]
    assert of(tiny.run(Engine(target, None, own), scored)) == expected
    assert of(tiny.run(Engine(target, None, replace(own, pages=own.fewest_pages)), scored, shuffle=1)) == expected
    alone = Engine(target, None, own)
    assert all(of(tiny.run(alone, [r]))[r.id] == expected[r.id] for r in scored[::5])


def test_any_tokens_have_the_scores_of_a_slow_loop() -> None:
    """Of one token to more than a round has columns; ends among them do not end the completion."""
    target, chance = tiny.model(), random.Random(0)
    asked = [
        Request(i, prompt, sampling=SAMPLINGS[i % len(SAMPLINGS)], logprobs=2, given=chance.choices(range(61), k=n))
        for i, (prompt, n) in enumerate(zip(tiny.prompts(12), (1, 2, 5, 6, 7, 12, 13, 30, 6, 1, 18, 4), strict=True))
    ]
    found = tiny.run(Engine(target, None, config()), asked)
    for request in asked:
        assert request.given is not None
        tokens, logprobs = found[request.id].tokens, found[request.id].logprobs
        assert tokens == request.given
        with torch.no_grad():
            logits = target(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
        for token, row, one in zip(tokens, logits.log_softmax(-1), logprobs, strict=True):
            assert one.chosen.target == pytest.approx(float(row[token]), abs=1e-4)
            assert one.rank == 1 + int((row > row[token]).sum())
            assert [best.target for best in one.likeliest] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_given_rows_run_beside_others() -> None:
    """Beside rows that the target continues, some of them under a constraint."""
    target, free = tiny.model(), requests(constrained=False)
    expected = of(tiny.run(Engine(target, None, config()), free))
    rows = [given(replace(r, logprobs=r.logprobs or 0), expected[r.id][0]) if r.id % 2 else r for r in free]
    others = [Request(f"c{i}", p, 14, constraint=constraint_of(i), logprobs=1) for i, p in enumerate(tiny.prompts(6))]
    alone = of(tiny.run(Engine(target, None, config()), others))
    found = of(tiny.run(Engine(target, None, config()), [*rows, *others], shuffle=2))
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in (expected | alone).items()
    }
    assert all(found[name] == alone[name] for name in alone)
    assert all(found[r.id] == expected[r.id] for r in free if r.logprobs is not None)


def test_a_prompt_is_computed_once_for_many_completions() -> None:
    target, prompt = tiny.model(), list(range(1, 60))
    engine = Engine(target, None, config(prefill_columns=8, page=8))
    tiny.run(engine, [Request(i, prompt, logprobs=0, given=[i, i + 1]) for i in range(8)])
    assert engine.statistics.prefill_tokens < 2 * len(prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "given needs logprobs"),
        ({"given": []}, "max_new_tokens is 0"),
        ({"given": [61]}, "given: token id 61 is outside the vocabulary of 61"),
        ({"given": [1] * 95}, "3 prompt and 95 given tokens do not fit the context of 96"),
        ({"bad_words": ((1,),)}, "given excludes stop"),
        ({"constraint": constraint_of(0)}, "given excludes stop"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = Engine(tiny.model(), None, config())
    with pytest.raises(RequestError, match=message):
        engine.submit(replace(Request("x", [1, 2, 3], sampling=Sampling(), logprobs=0, given=[4]), **changes))


def test_an_engine_that_drafts_scores_nothing() -> None:
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1))
    with pytest.raises(RequestError, match="method plain"):
        engine.submit(Request("x", [1], logprobs=0, given=[4]))
