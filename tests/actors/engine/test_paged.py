"""Pages shared, taken back and moved, attention in place and compiled layers: every token that of plain decoding."""

import os
import random
import subprocess
import sys
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.layers.fused import FOLDER, Code, compiled_by
from tests import tiny


def alike(count: int = 16, seed: int = 0) -> list[list[int]]:
    """Prompts that begin as others do, and go apart at any place."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(tiny.VOCABULARY) for _ in range(40)] for _ in range(2)]
    return [
        rng.choice(trunks)[: rng.choice([0, 7, 8, 9, 24, 40])]
        + [rng.randrange(tiny.VOCABULARY) for _ in range(1 + i % 7)]
        for i in range(count)
    ]


@cache
def expected(family: str = "llama", new: int = 20) -> dict[int, list[int]]:
    return {i: tiny.generate(tiny.model(family), row, new) for i, row in enumerate(alike())}


@pytest.mark.cover(1)
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@pytest.mark.parametrize("pages", [12, 14, 20, 40])
@pytest.mark.parametrize("method", ["plain", "exspec"])
def test_few_pages_change_no_token(method: str, pages: int, attention: str) -> None:
    """Sequences are admitted while pages last, and taken back where they run out."""
    tiny.need(attention)
    engine = tiny.engine(
        tiny.model(), draft=tiny.model(seed=1), method=method, pages=pages, attention=attention, prefill_rows=3
    )
    waited: set[Hashable] = set()
    for request in tiny.requests(alike()):
        engine.submit(request)
    done: dict[Hashable, list[int]] = {}
    while engine.busy:
        running = {s.request.id for s in engine.pool.running}
        engine.step()
        engine.check()
        done |= {c.id: c.tokens for c in engine.take()}
        waited |= running & {s.request.id for s in engine.pool.waiting}
    assert done == expected()
    assert bool(waited) == (pages < 40), "what was admitted went back to the queue"
    assert engine.statistics.cached_tokens > 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_k=20)], ids=["greedy", "sampled"])
def test_bfloat16_depends_on_no_neighbour(kernels: str, sampling: Sampling | None) -> None:
    """Bit for bit: not on order, drafts, pages, what was found, or what was taken back and made again."""
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


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_compiled_layers_equal_generate(family: str) -> None:
    tiny.need("in_place", "compiled")
    target, draft = tiny.model(family, num_hidden_layers=3), tiny.model(family, seed=1)
    wanted = {i: tiny.generate(target, row, 12) for i, row in enumerate(alike(8))}
    code = Code()
    with compiled_by(code):
        engine = tiny.engine(target, draft=draft, attention="in_place", kernels="compiled")
        assert engine.config.kernels == "compiled"
        assert tiny.decode(engine, tiny.requests(alike(8), 12)) == wanted
    assert 0 < len(code.kept) <= 9, "one piece serves all layers that are alike, one for each shape"


@pytest.mark.slow
def test_what_is_compiled_from_nothing_works_too(tmp_path: Path) -> None:
    """All other tests find what an earlier session of tests has compiled."""
    tests = [
        f"{__file__}::{test.__name__}"
        for test in (test_compiled_layers_equal_generate, test_bfloat16_depends_on_no_neighbour)
    ]
    empty = {name: value for name, value in os.environ.items() if name != FOLDER} | {"EXSPEC_TEST_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", *tests],
        env=empty,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    made = {path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("*.so")}
    assert len(made) == 2, "the kernel of attention, and layers"


def test_what_prompts_have_in_common_is_computed_once() -> None:
    trunk = [3 + i % 50 for i in range(64)]
    rows = [[*trunk, *tail] for tail in ([7] * 9, [8] * 3, [9], [7] * 9)]
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), capacity=96)
    found = tiny.decode(engine, tiny.requests(rows, 8))
    assert found == {i: tiny.generate(tiny.model(), row, 8) for i, row in enumerate(rows)}
    assert engine.statistics.cached_tokens == 64 + 64 + 72, "whole chunks of 8, of all but the first"
    assert engine.statistics.prefill_tokens == sum(len(row) - 1 for row in rows) - 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "paged"}, "attention: expected one of auto, in_place, gathered, not 'paged'"),
        ({"kernels": "fast"}, "kernels: expected one of eager, packed, compiled, not 'fast'"),
        ({"page": 6}, r"prefill_columns: expected a multiple of page \(6\), not 8"),
        ({"pages": 11}, "pages: expected at least 12, which hold one sequence of 96 tokens, not 11"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{"capacity": tiny.CONTEXT, "prefill_columns": 8, "bucket": 32, "draft_tokens": 3, **changes})


def test_without_a_compiler_it_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once."""
    monkeypatch.setattr("exspec.actors.engine.methods.trial", lambda *_: "no compiler here")
    for _ in range(2):
        engine = Engine(tiny.model(), None, EngineConfig(method="plain", batch_size=4, capacity=96, kernels="compiled"))
    assert (engine.config.attention, engine.config.kernels) == ("gathered", "eager")
    assert caplog.text.count("no compiler here") == 1
    engine.submit(Request(0, [1, 2, 3], 9))
    assert engine.run()[0].tokens == tiny.generate(tiny.model(), [1, 2, 3], 9)
    with pytest.raises(ValueError, match="attention: in_place does not work here: no compiler here"):
        Engine(tiny.model(), None, EngineConfig(method="plain", capacity=96, attention="in_place"))
