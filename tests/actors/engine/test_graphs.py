"""Recorded forwards, with a recorder that stands in for CUDA graphs.

It traces a forward into a static graph of operations over buffers that stay in place, and plays the graph. What would
make a CUDA graph wrong makes this one wrong: a decision in Python at recording time, a tensor made from values that
change, a wait for the device.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from exspec.actors.engine import Engine, Sampling
from exspec.actors.engine.graphs import Eager, Play, Recordings
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice
from tests import tiny

WAITS = {"_local_scalar_dense", "is_nonzero", "item", "nonzero", "masked_select", "equal", "unique", "_unique2"}


class NoWaiting(TorchDispatchMode):
    """Fails at an operation that makes Python wait for the device, or whose shape depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


class Traced(Recordings):
    def __init__(self) -> None:
        super().__init__(self._record)
        self.recorded = self.played = 0

    def _record(self, run: Play) -> Play:
        run()
        with NoWaiting():
            graph = make_fx(run)()
        self.recorded += 1

        def play() -> Any:
            self.played += 1
            return graph()

        return play


@pytest.fixture(autouse=True)
def _plain_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights packed for CPUs cannot be traced; GPUs have none."""
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)


def engine(recorder: Any, **config: Any) -> Engine:
    return tiny.engine(tiny.model(), draft=tiny.model(seed=1), recorder=recorder, prefill_rows=4, **config)


@pytest.mark.fast("exspec-filtered")
@pytest.mark.parametrize(
    "sampling",
    [None, Sampling(temperature=0.8), Sampling(temperature=1.0, top_k=9, top_p=0.9), Sampling(repetition_penalty=1.3)],
    ids=["greedy", "sampled", "filtered", "penalised"],
)
@pytest.mark.parametrize("method", ["plain", "exspec"])
def test_recorded_forwards_give_the_same_tokens(method: str, sampling: Sampling | None) -> None:
    requests = tiny.requests(tiny.prompts(10), 12, sampling)
    recorder = Traced()
    played = tiny.decode(engine(recorder, method=method), requests)
    assert played == tiny.decode(engine(Eager(), method=method), requests)
    assert recorder.played > 3 * recorder.recorded, "few shapes are used again"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "exspec"])
def test_recorded_forwards_under_constraints(method: str) -> None:
    """Masks and candidates come from the host through the same recordings."""
    words = lambda: Automaton(choice([[10, 11], [10, 11, 12], [20]], chain([40, 41, tiny.ENDS[0]], Node())))  # noqa: E731
    requests = [
        replace(r, constraint=words if i % 3 else None, scored=1000 * (i % 3 == 1))
        for i, r in enumerate(tiny.requests(tiny.prompts(14), 12))
    ]
    recorder = Traced()
    played, eager = (tiny.run(engine(r, method=method), requests) for r in (recorder, Eager()))
    for name, completion in played.items():
        other = eager[name]
        assert completion.tokens == other.tokens
        # With recorded shapes prompts are prefilled in wider chunks, so scores differ by rounding.
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(completion.scores, other.scores, strict=True))
    assert recorder.played > recorder.recorded


@pytest.mark.fast("96-fixed")
@pytest.mark.parametrize(("bucket", "draft_length"), [(96, "fixed"), (32, "fixed"), (32, "both")])
def test_few_shapes_are_recorded(bucket: int, draft_length: str) -> None:
    """However many rounds there are."""
    recorder = Traced()
    made = engine(recorder, bucket=bucket, draft_length=draft_length)
    tiny.decode(made, tiny.requests(tiny.prompts(16), 20))
    buckets = -(-tiny.CONTEXT // bucket)
    drafts = buckets * (1 + made.config.draft_tokens)
    assert recorder.recorded <= 2 * buckets + buckets + drafts


def test_tokens_are_chosen_by_one_recording_in_all_buckets() -> None:
    """Choosing reads logits, not KV, and a recording holds buffers as large as the logits."""
    recorded: Counter[str] = Counter()

    class Named:
        records = True

        def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
            def record(run: Play) -> Play:
                recorded[function.__name__] += 1
                return run

            return Recordings(record).wrap(function)

    free = Node()
    free.children = dict.fromkeys(range(tiny.VOCABULARY), free)
    requests = [replace(r, constraint=lambda: Automaton(free)) for r in tiny.requests(tiny.prompts(3), 40)]
    tiny.decode(engine(Named(), bucket=8, attention="gathered", method="plain"), requests)
    assert recorded["forward"] > 2, "several buckets"
    assert recorded["pick"] == 1


def test_the_stand_in_finds_a_recording_that_reads_a_value() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(AssertionError, match="waits for the device"):
        Traced().wrap(waits)(torch.ones(3))


def test_the_stand_in_keeps_what_was_decided_at_recording_time() -> None:
    """As a CUDA graph does."""
    calls = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    wrapped = Traced().wrap(counts)
    first, second = wrapped(torch.zeros(1)), wrapped(torch.zeros(1))
    assert first.equal(second)
    assert len(calls) == 2, "once to warm up, once to record"
