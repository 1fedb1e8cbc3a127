"""The engine on CUDA tensors without values: wrong devices, waits for the device and wrong dtypes show without a GPU.

Everything runs but the kernels, the compiler and the CUDA graphs.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from exspec.actors.engine import Engine, Request, Sampling
from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.actors.engine.kv import attention
from exspec.actors.engine.kv.split import LAYERS, SplitModel
from exspec.actors.engine.layers import programs
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.tokens.constraint import Automaton, Node
from exspec.actors.engine.tokens.sampling import Sampler
from tests import tiny
from tests.actors.engine.fake_cuda import CUDA, Rehearsal, Uncompiled, load_guard, move, placed, rehearsing

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
HOST = torch.arange(3)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8),
    "small_k": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "large_k": Sampling(temperature=0.8, top_k=300),
    "wide_p": Sampling(temperature=0.8, top_p=0.9),
    "min_p": Sampling(temperature=0.8, min_p=0.1),
    "penalised": Sampling(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "all": Sampling(0.8, 9, 0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.2),
}


@pytest.fixture(autouse=True)
def _guard() -> None:
    if (reason := load_guard()) is not None:
        pytest.skip(reason)


@pytest.fixture
def fake() -> Iterator[tuple[Rehearsal, Uncompiled]]:
    with rehearsing() as made:
        yield made


def engine(drafter: str, rehearsal: Rehearsal, family: str = "llama", **settings: Any) -> Engine:
    """An engine on the GPU in bfloat16. drafter: its name, and a window if it has one."""
    drafter, _, window = drafter.partition(" ")
    settings |= {"draft_window": int(window)} if window else {}
    depth = {"num_hidden_layers": 4} if family != "gpt2" else {}
    target = placed(lambda: tiny.model(family, dtype=torch.bfloat16, **depth))
    needed = drafter != "none" and drafter_class(drafter).needs_draft
    draft = placed(lambda: tiny.draft_of(drafter, target)) if needed else None
    method = {"method": "plain"} if drafter == "none" else {"drafter": drafter}
    shape = {"window": 4, "batch_size": 2, "prefill_rows": 2, "draft_tokens": 2, "overlap": True}
    config = tiny.config(**shape | method | settings)
    return Engine(target, draft, config, recorder=rehearsal.recorder())


def constrained() -> Automaton:
    """One token is forced after every choice. The chosen token is 0, as the host reads it here."""
    choice, must = Node(), Node()
    choice.children, must.children = {0: must, 2: must}, {0: choice}
    return Automaton(choice)


def decode(made: Engine, requests: list[Request]) -> set[tuple[torch.device, torch.dtype]]:
    """Decode the requests; returns the device and dtype of all logits that tokens were chosen from."""
    found = set()
    distribution = Sampler.distribution

    def record(sampler: Sampler, logits: Tensor, *given: Any, **named: Any) -> Tensor:
        found.add((logits.device, logits.dtype))
        return distribution(sampler, logits, *given, **named)

    with patch.object(Sampler, "distribution", record):
        for request in requests:
            made.submit(request)
        completions = made.run()
    assert not [c.error for c in completions if c.error]
    assert len(completions) == len(requests)
    return found


def weights(made: Engine) -> list[Tensor]:
    """All tensors that stay on the device."""
    stores = [made.target, *made.drafter.caches]
    held = [t for s in stores for t in (*s.model.parameters(), *s.model.buffers(), *s.keys, *s.values)]  # type: ignore[union-attr]
    return [*held, made.target.pages.on_device, made.samplers._numbers, made.samplers._integers]  # type: ignore[union-attr]


@pytest.mark.fast("compiled-in_place-model")
@pytest.mark.parametrize("drafter", [*DRAFTERS, "model 16", "eagle3 16", "clover 16", "dflash 16"])
@pytest.mark.parametrize(
    ("kernels", "attention"), [("eager", "in_place"), ("eager", "gathered"), ("compiled", "in_place")]
)
def test_nothing_waits_or_leaves_the_device(
    kernels: str, attention: str, drafter: str, fake: tuple[Rehearsal, Uncompiled]
) -> None:
    """Whole requests: prefill, rounds that overlap, and constraints with scores."""
    rehearsal, code = fake
    made = engine(drafter, rehearsal, kernels=kernels, attention=attention)
    assert (made.config.kernels, made.config.attention) == (kernels, attention)
    rows = tiny.requests(tiny.prompts(3, longest=12), 6)
    rows.append(replace(rows[2], id="c", constraint=constrained, scored=5))
    rows.append(replace(rows[2], id="l", logprobs=2))
    assert decode(made, rows) == {(CUDA, torch.bfloat16)}
    assert {t.device for t in weights(made)} == {CUDA}
    assert bool(code.pieces) == (kernels == "compiled")
    assert f"attend_{attention}" in rehearsal.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("greedy", "large_k", "wide_p", "all") else pytest.mark.rare)
        for name in SAMPLINGS
    ],
)
def test_sampling_stays_on_the_device(name: str, fake: tuple[Rehearsal, Uncompiled]) -> None:
    made = engine("model", fake[0], kernels="compiled", attention="in_place")
    rows = tiny.requests(tiny.prompts(2, longest=12), 4, SAMPLINGS[name])
    rows.append(replace(rows[0], id="c", constraint=constrained))
    assert decode(made, rows) <= {(CUDA, torch.bfloat16), (CUDA, torch.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_families_stay_on_the_device(family: str, fake: tuple[Rehearsal, Uncompiled]) -> None:
    made = engine("none", fake[0], family, kernels="compiled", attention="in_place")
    assert decode(made, tiny.requests(tiny.prompts(3, longest=12), 4)) == {(CUDA, torch.bfloat16)}


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_hidden_states_stay_on_the_device(kernels: str, fake: tuple[Rehearsal, Uncompiled]) -> None:
    """Of an engine that embeds: its rounds overlap too, and it chooses no token."""
    made = engine("none", fake[0], kernels=kernels, attention="in_place", embeds=True, columns=3)
    rows = [Request(i, p[:1], given=[*p[1:], 0]) for i, p in enumerate(tiny.prompts(4, longest=12))]
    assert decode(made, rows) == set()
    assert {t.device for t in weights(made)} == {CUDA}


def test_trials_run_up_to_their_first_look(fake: tuple[Rehearsal, Uncompiled]) -> None:
    """They compare values, which are absent here; everything before is right."""
    del fake
    pytest.importorskip("triton")
    found = attention.trial.__wrapped__(CUDA, torch.bfloat16, 4, 2, 16, 8)
    assert found == "_local_scalar_dense waits for the device"
    assert programs.compiler_trial.__wrapped__(CUDA) == "equal waits for the device"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.sum().item(), "waits for the device"),
        (lambda x: x[x > 0], "by a mask waits for the device"),
        (lambda x: x.cpu(), "to the host waits for the device"),
        (lambda x: x[HOST], "takes tensors of both devices"),
        (lambda x: x + HOST.to(CUDA, non_blocking=True), "in a recording"),
    ],
    ids=["item", "mask", "cpu", "mixed", "copied"],
)  # fmt: skip
def test_the_rehearsal_finds_what_is_wrong(wrong: Any, message: str, fake: tuple[Rehearsal, Uncompiled]) -> None:
    with pytest.raises(AssertionError, match=message):
        fake[0].recorder().wrap(wrong)(torch.zeros(3, device=CUDA))


@pytest.mark.parametrize("drafter", ["none", "model", "suffix"])
def test_a_target_on_two_devices_mixes_none(drafter: str, fake: tuple[Rehearsal, Uncompiled]) -> None:
    """An operation with tensors of both devices would fail. The first one chooses tokens, and holds all but layers."""
    rehearsal, other = fake[0], torch.device("cuda", 1)
    target = placed(lambda: tiny.model(dtype=torch.bfloat16, num_hidden_layers=4))
    for layer in layers_of(target)[2:]:
        move(layer, other)
    setattr(target.config, LAYERS, [2, 2])
    draft = placed(lambda: tiny.model(seed=1, dtype=torch.bfloat16)) if drafter == "model" else None
    method = {"method": "plain"} if drafter == "none" else {"drafter": drafter}
    config = tiny.config(window=8, batch_size=2, prefill_rows=2, draft_tokens=2, attention="in_place", **method)
    nothing: Any = lambda *_: nullcontext()  # noqa: E731
    with (
        patch("torch.cuda.Stream"),
        patch("torch.cuda.stream", nothing),
        patch("torch.cuda.device", nothing),
        patch.object(Tensor, "record_stream", nothing),
        patch("exspec.actors.engine.methods.recorder_for", lambda *_: rehearsal.recorder()),
    ):
        made = Engine(target, draft, config, recorder=rehearsal.recorder())
        rows = tiny.requests(tiny.prompts(6, longest=12), 6)
        rows.append(replace(rows[2], id="c", constraint=constrained, scored=5))
        rows.append(replace(rows[2], id="l", logprobs=2))
        assert decode(made, rows) == {(CUDA, torch.bfloat16)}
    assert isinstance(made.target, SplitModel)
    first, second = made.target.stages
    assert {t.device for t in (*first.keys[:2], *first.values[:2])} == {CUDA}
    assert {t.device for t in (*second.keys[2:], *second.values[2:])} == {other}
