"""`python -m tests.tools.answers [KERNELS]`: what scores and samples cost on this CPU, as ratios of alternating runs.

- scores: tokens/s of scored prompts and completions, against a bare prefill of as many tokens
- choices: rows/s of eight choices on a prompt of 1,000 tokens, against eight rows that share no KV
- samples: samples/s of eight samples of such a prompt, against eight rows that share no KV

The target has random weights: 8 layers x 384, vocabulary 4,096, float32. Rows that share no KV give the same values.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from exspec.actors.engine import Completion, Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.drafters.registry import NONE
from tests.tools.overhead import llama

TURNS, PROMPT, SAMPLES = 5, 1000, 8
COLUMNS, ROWS = 64, 8  # of a round that scores


def engine(target: Any, share: bool = True, **shape: Any) -> Engine:
    made = Engine(target, None, EngineConfig(method="plain", drafter=NONE, capacity=2048, **shape), frozenset())
    if not share:
        made.pool.store._chunks = lambda *_: iter(())  # type: ignore[attr-defined]
    return made


def decode(made: Engine, requests: list[Request]) -> tuple[dict[Any, Completion], float]:
    """The completions, and the seconds they took."""
    made.forget()
    start, done = time.perf_counter(), {}
    for request in requests:
        made.submit(request)
    while made.busy:
        made.step()
        done |= {completion.id: completion for completion in made.take()}
    return done, time.perf_counter() - start


def compare(name: str, first: Callable[[], float], second: Callable[[], float]) -> dict[str, Any]:
    """How many times as fast the first is as the second, with the lowest and the highest turn."""
    taken = [(first(), second()) for _ in range(TURNS + 1)][1:]
    ratios = sorted(slow / fast for fast, slow in taken)
    return {"name": name, "ratio": round(median(ratios), 2), "from": round(ratios[0], 2), "to": round(ratios[-1], 2)}


def shared(name: str, target: Any, asked: list[Request], shape: dict[str, Any]) -> dict[str, Any]:
    """Rows of one prompt, against rows that share no KV. Fails if a value differs."""
    together, apart = engine(target, **shape), engine(target, share=False, **shape)
    values = [{i: (c.tokens, c.logprobs) for i, c in decode(e, asked)[0].items()} for e in (together, apart)]
    assert values[0] == values[1], "sharing changes a value"
    return compare(name, lambda: decode(together, asked)[1], lambda: decode(apart, asked)[1])


def measure(kernels: str) -> list[dict[str, Any]]:
    chance, target = random.Random(0), llama(8, 384, 6)

    def tokens(count: int) -> list[int]:
        return chance.choices(range(4096), k=count)

    wide: dict[str, Any] = {"kernels": kernels, "columns": COLUMNS, "batch_size": ROWS, "window": 4 * ROWS}
    narrow: dict[str, Any] = {"kernels": kernels, "batch_size": ROWS, "window": ROWS}
    rows = [(tokens(64), tokens(192)) for _ in range(64)]
    scored = [Request(i, p, sampling=Sampling(), logprobs=0, given=c) for i, (p, c) in enumerate(rows)]
    filled = [Request(i, [*p, *c], 1) for i, (p, c) in enumerate(rows)]
    scoring, prefill = engine(target, **wide), engine(target, **narrow)
    prompt = tokens(PROMPT)
    choices = [Request(i, prompt, logprobs=0, given=tokens(8)) for i in range(SAMPLES)]
    samples = [Request(i, prompt, 32, Sampling(temperature=1.0, seed=i)) for i in range(SAMPLES)]
    return [
        compare("scores", lambda: decode(scoring, scored)[1], lambda: decode(prefill, filled)[1]),
        shared("choices", target, choices, wide | {"columns": 8}),
        shared("samples", target, samples, narrow),
    ]


if __name__ == "__main__":
    torch.set_num_threads(2)
    for found in measure(sys.argv[1] if len(sys.argv) > 1 else "compiled_packed"):
        print(json.dumps(found))
