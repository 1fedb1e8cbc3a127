"""Log-probabilities: of a slow loop, and the same bits whatever is drafted and whoever shares the rounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, Request, RequestError, Sampling
from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.actors.engine.request import MOST_LIKELY, Completion
from tests import tiny
from tests.actors.engine.test_constraints import constraint_of

SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_k=5, top_p=0.9, seed=2),
    Sampling(temperature=0.9, top_k=300, seed=3),
    Sampling(temperature=0.7, top_p=0.8, min_p=0.05, repetition_penalty=1.2, seed=4),
]


def requests(constrained: bool = True) -> list[Request]:
    """With every sampling, some of them under a constraint, with none, few or many of the likeliest tokens."""
    made = []
    for i, prompt in enumerate(tiny.prompts(18)):
        constraint = constraint_of(i) if constrained and i % 3 == 0 else None
        sampling, logprobs = SAMPLINGS[i % len(SAMPLINGS)], (None, 0, 3, MOST_LIKELY, 1)[i % 5]
        made.append(Request(i, prompt, 14, sampling, constraint=constraint, logprobs=logprobs))
    return made


def of(done: dict[Any, Completion]) -> dict[Any, Any]:
    return {name: (c.tokens, c.logprobs) for name, c in done.items()}


def compare(target: PreTrainedModel, request: Request, completion: Completion) -> None:
    """With a slow loop."""
    tokens, expected = tiny.slow_logprobs(target, request)
    assert completion.tokens == tokens
    if request.logprobs is None:
        assert completion.logprobs == []
        return
    for token, (own, drawn), found in zip(tokens, expected, completion.logprobs, strict=True):
        assert found.chosen.token == token
        wanted = own.topk(request.logprobs).values.tolist()
        assert [one.target for one in found.likeliest] == pytest.approx(wanted, abs=1e-4)
        for one in (found.chosen, *found.likeliest):
            assert one.target == pytest.approx(float(own[one.token]), abs=1e-4)
            assert one.drawn == pytest.approx(float(drawn[one.token]), abs=1e-4)


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_they_are_those_of_a_slow_loop(kernels: str) -> None:
    tiny.need("in_place", kernels)
    target, asked = tiny.model(), requests()
    found = tiny.run(tiny.engine(target, draft=tiny.model(seed=1), kernels=kernels, attention="in_place"), asked)
    for request in asked:
        compare(target, request, found[request.id])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != NONE])
def test_no_drafter_and_no_neighbour_changes_a_bit(drafter: str, dtype: torch.dtype) -> None:
    """Against plain decoding in the same shape, and row by row."""
    target = tiny.deep(dtype=dtype)
    draft = tiny.draft_of(drafter, target) if drafter_class(drafter).needs_draft else None
    config, asked = tiny.config(drafter=drafter, pages=30), requests()
    expected = of(tiny.run(Engine(target, None, config.plain()), asked))
    assert of(tiny.run(Engine(target, draft, config), asked, shuffle=1)) == expected
    alone = Engine(target, None, config.plain())
    for request in asked[::4]:
        assert of(tiny.run(alone, [request]))[request.id] == expected[request.id]


def test_they_change_no_token_and_more_of_the_likeliest_change_no_value() -> None:
    target, asked = tiny.model(dtype=torch.bfloat16), requests(constrained=False)
    config = tiny.config(method="plain", drafter=NONE)
    without = tiny.decode(Engine(target, None, config), [replace(r, logprobs=None) for r in asked])
    few, many = (
        of(tiny.run(Engine(target, None, config), [replace(r, logprobs=n) for r in asked])) for n in (0, MOST_LIKELY)
    )
    for name, (tokens, found) in few.items():
        assert tokens == many[name][0] == without[name]
        assert [one.chosen for one in found] == [one.chosen for one in many[name][1]]


def test_a_number_out_of_range_is_refused() -> None:
    made = tiny.engine(tiny.model(), method="plain", drafter=NONE)
    for number in (-1, MOST_LIKELY + 1):
        with pytest.raises(RequestError, match=f"logprobs is {number}, expected 0 to 20"):
            made.submit(Request("x", [1], logprobs=number))
    with pytest.raises(RequestError, match="logprobs: expected whole numbers, not float"):
        Request("x", [1], logprobs=1.5)  # type: ignore[arg-type]
