"""Few pages, shared pages, attention in place and compiled layers: every token equals that of plain decoding."""

import os
import random
import subprocess
import sys
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.layers import programs
from exspec.actors.engine.layers.programs import FOLDER, Code
from tests import tiny


def alike(count: int = 16, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of any length."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(tiny.VOCABULARY) for _ in range(40)] for _ in range(2)]
    return [
        rng.choice(trunks)[: rng.choice([0, 7, 8, 9, 24, 40])]
        + [rng.randrange(tiny.VOCABULARY) for _ in range(1 + i % 7)]
        for i in range(count)
    ]


@cache
def expected(family: str = "llama") -> dict[int, list[int]]:
    return tiny.greedy(tiny.model(family), alike())


@pytest.mark.cover(1)
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@pytest.mark.parametrize("pages", [12, 14, 20, 40])
@pytest.mark.parametrize("method", ["plain", "exspec"])
def test_few_pages_change_no_token(method: str, pages: int, attention: str) -> None:
    """Sequences are admitted while there are free pages, and preempted when pages run out."""
    tiny.need(attention)
    engine = tiny.engine(
        tiny.model(), draft=tiny.model(seed=1), method=method, pages=pages, attention=attention, prefill_rows=3
    )
    preempted: set[Hashable] = set()
    for request in tiny.requests(alike()):
        engine.submit(request)
    done: dict[Hashable, list[int]] = {}
    while engine.busy:
        running = {s.request.id for s in engine.pool.running}
        engine.step()
        engine.check()
        done |= {c.id: c.tokens for c in engine.take()}
        preempted |= running & {s.request.id for s in engine.pool.waiting}
    assert done == expected()
    assert bool(preempted) == (pages < 40)
    assert engine.statistics.cached_tokens > 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("kernels", ["eager", "compiled", "compiled_packed"])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_k=20)], ids=["greedy", "sampled"])
def test_bfloat16_does_not_depend_on_neighbours(kernels: str, sampling: Sampling | None) -> None:
    """Nor on order, drafts, the number of pages, cached tokens or preemption: tokens are bit for bit the same."""
    tiny.need("in_place", kernels)
    target = tiny.model(dtype=torch.bfloat16)
    rows = tiny.requests(alike(), 24, sampling)
    shape: dict[str, Any] = {"attention": "in_place", "kernels": kernels, "prefill_rows": 3}
    reference = tiny.decode(tiny.engine(target, method="plain", columns=4, **shape), rows)
    for right, shuffle, changes in [(0.0, 1, {}), (0.6, 2, {"pages": 14}), (1.0, 3, {"pages": 20}), (0.8, 4, {})]:
        engine = tiny.engine(target, tiny.Scripted(reference, right), **shape | changes)
        assert tiny.decode(engine, rows, shuffle) == reference, (right, changes)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_in_place_equals_generate_in_every_family(family: str) -> None:
    tiny.need("in_place")
    for method in ("plain", "exspec"):
        engine = tiny.engine(
            tiny.model(family), draft=tiny.model(family, seed=1), method=method, attention="in_place", prefill_rows=2
        )
        assert engine.config.attention == "in_place"
        assert tiny.decode(engine, tiny.requests(alike()), shuffle=1) == expected(family)


@pytest.mark.fast("llama-compiled_packed")
@pytest.mark.parametrize("kernels", ["compiled", "compiled_packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_programs_equal_generate(family: str, kernels: str) -> None:
    tiny.need("in_place", kernels)
    pieces = []
    for layers in (3, 5):
        target, draft, code = tiny.model(family, num_hidden_layers=layers), tiny.model(family, seed=1), Code()
        with patch.object(programs, "CODE", code):
            engine = tiny.engine(target, draft=draft, attention="in_place", kernels=kernels)
            assert engine.config.kernels == kernels
            assert tiny.decode(engine, tiny.requests(alike(8), 12)) == tiny.greedy(target, alike(8), 12)
        codes = {key[0] for key in code.kept}  # type: ignore[index]
        pieces.append({text for text in codes if "attend_in_place" in text or "mm" in text or "packed" in text})
    assert pieces[0] == pieces[1], "equal layers share compiled code"


@pytest.mark.rare
def test_compiling_without_a_cache_works(tmp_path: Path) -> None:
    """All other tests reuse what earlier test runs compiled, except in a fresh clone."""
    tests = [
        f"{__file__}::{test.__name__}"
        for test in (test_programs_equal_generate, test_bfloat16_does_not_depend_on_neighbours)
    ]
    empty = {name: value for name, value in os.environ.items() if name != FOLDER} | {"EXSPEC_TEST_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-m", "not slow and not rare", *tests],
        env=empty,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    made = {path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("*.so")}
    assert len(made) == 2, "the attention kernel, and layers"


def test_whole_chunks_that_prompts_share_are_computed_once() -> None:
    trunk = [3 + i % 50 for i in range(64)]
    rows = [[*trunk, *tail] for tail in ([7] * 9, [8] * 3, [9], [7] * 9)]
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1))
    assert tiny.decode(engine, tiny.requests(rows, 8)) == tiny.greedy(tiny.model(), rows, 8)
    assert engine.statistics.cached_tokens == 64 + 64 + 72, "chunks of 8, in all prompts but the first"
    assert engine.statistics.prefill_tokens == sum(len(row) - 1 for row in rows) - 200


def test_without_a_compiler_the_engine_falls_back_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("exspec.actors.engine.kv.trial.trial", lambda *_: "no compiler here")
    for _ in range(2):
        engine = Engine(tiny.model(), None, EngineConfig(method="plain", batch_size=4, capacity=96, kernels="compiled"))
    assert (engine.config.attention, engine.config.kernels) == ("gathered", "eager")
    assert caplog.text.count("no compiler here") == 1
    engine.submit(Request(0, [1, 2, 3], 9))
    assert engine.run()[0].tokens == tiny.generate(tiny.model(), [1, 2, 3], 9)
    with pytest.raises(ValueError, match="attention: in_place does not work here: no compiler here"):
        Engine(tiny.model(), None, EngineConfig(method="plain", capacity=96, attention="in_place"))
