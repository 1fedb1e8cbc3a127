"""Embeddings: sums of hidden states equal those of transformers, and no bit depends on the other rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.kv.memory import model_memory
from tests import tiny

PLAIN = {"method": "plain", "drafter": NONE, "embeds": True}
BEGINNING = list(range(7, 31))  # that some prompts share


def config(**changes: Any) -> EngineConfig:
    return tiny.config(**PLAIN | {"columns": 6} | changes)


def requests() -> list[Request]:
    """Of each prompt, the last state; and the sum over all of them, whose rest is read in rounds."""
    prompts = [*tiny.prompts(10), *([*BEGINNING, n, n + 1] for n in range(4))]
    asked = [Request(("last", i), prompt, given=[0]) for i, prompt in enumerate(prompts)]
    return asked + [Request(("mean", i), p[:1], given=[*p[1:], 0]) for i, p in enumerate(prompts)]


def states(engine: Engine, asked: list[Request], shuffle: int | None = None) -> dict[Any, list[float]]:
    return {name: done.state.tolist() for name, done in tiny.run(engine, asked, shuffle).items()}


@torch.inference_mode()
def reference(target: PreTrainedModel, request: Request) -> Tensor:
    """The sum [D] over the states that transformers computes for the tokens before each given one."""
    assert request.given is not None
    ids = torch.tensor([[*request.prompt, *request.given[:-1]]])
    hidden: Tensor = target.base_model(input_ids=ids).last_hidden_state[0]
    return hidden[len(request.prompt) - 1 :].sum(0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_states_are_those_of_transformers(family: str) -> None:
    target, asked = tiny.model(family), requests()
    found = states(Engine(target, None, config()), asked)
    for request in asked:
        assert found[request.id] == pytest.approx(reference(target, request).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("eager", torch.float32),
        ("eager", torch.bfloat16),
        ("packed", torch.float32),
        ("compiled", torch.float32),
        ("compiled_packed", torch.bfloat16),
    ],
)
def test_no_bit_depends_on_the_other_rows(kernels: str, dtype: torch.dtype) -> None:
    """Alone and in company, in any order, with shared beginnings and without, preempted or not."""
    tiny.need("in_place", kernels)
    target, asked = tiny.model(dtype=dtype), requests()
    own = config(kernels=kernels, attention="in_place" if "compiled" in kernels else "gathered")
    engine = Engine(target, None, own)
    expected = states(engine, asked)
    assert states(engine, asked, shuffle=1) == expected  # more of the beginnings are cached now
    for request in asked[::7]:
        engine.forget()
        assert states(engine, [request])[request.id] == expected[request.id]
    short = Engine(target, None, replace(own, pages=own.fewest_pages))
    assert states(short, asked, shuffle=2) == expected
    if dtype == torch.float32:
        for request in asked[::3]:
            near = reference(target, request).tolist()
            assert expected[request.id] == pytest.approx(near, abs=1e-4)


def test_a_beginning_is_computed_once() -> None:
    engine = Engine(tiny.model(), None, config(page=8))
    tiny.run(engine, [Request(i, [*BEGINNING, i], given=[0]) for i in range(8)])
    assert engine.statistics.prefill_tokens < 2 * len(BEGINNING)


def test_the_output_head_is_neither_kept_nor_run() -> None:
    target = tiny.model()
    target.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the head ran"))  # type: ignore[operator]
    engine = Engine(target, None, config())
    tiny.run(engine, requests()[::5])
    assert engine.target.model.get_output_embeddings() is None
    text = target.config.get_text_config()
    least = model_memory(target.config, config(), torch.float32, 1).weights
    assert least == model_memory(target.config, config(embeds=False), torch.float32, 1).weights - 4 * (
        text.vocab_size * text.hidden_size
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"given": None}, "the engine embeds: expected given tokens, and no logprobs"),
        ({"logprobs": 0}, "the engine embeds: expected given tokens, and no logprobs"),
        ({"given": [1] * 95}, "3 prompt and 95 given tokens do not fit the context of 96"),
        ({"bad_words": ((1,),)}, "given excludes stop"),
    ],
)
def test_what_cannot_be_embedded_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = Engine(tiny.model(), None, config())
    with pytest.raises(RequestError, match=message):
        engine.submit(replace(Request("x", [1, 2, 3], given=[0]), **changes))


def test_an_engine_that_drafts_does_not_embed() -> None:
    with pytest.raises(ValueError, match="embeds: expected method plain, not exspec"):
        tiny.config(embeds=True)
