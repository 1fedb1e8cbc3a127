"""`python -m tests.tools.overhead [KERNELS]`: milliseconds of a round's programs on this CPU, and of their products.

The pair has random weights: a target of 6 layers x 256 and a draft of 2 layers x 128, vocabulary 4,096, float32. B = 8,
K = 5, and rows of about 240 tokens.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.layers.packed import packed_product
from exspec.actors.engine.layers.pieces import trace
from exspec.actors.engine.layers.programs import Compiled, pieces_of, program

aten = torch.ops.aten
ROWS, LENGTH, DRAFTED = 8, 240, 5
REPEATS = 30
NAMES = {"_choices": "verify", "_draft": f"draft of {DRAFTED}", "fill": "prefill", "_fill": "prefill of the draft"}


def llama(layers: int, size: int, heads: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def milliseconds(run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


def products(function: Callable[..., Any], arguments: tuple[Any, ...], packs: bool) -> list[Callable[[], Any]]:
    """The matrix products of a program, with random inputs and the program's own weights."""
    found: list[Callable[[], Any]] = []
    for piece in pieces_of(trace(function, arguments), packs):
        nodes = list(piece.graph.graph.nodes)
        given: dict[Any, Any] = dict(zip((n for n in nodes if n.op == "placeholder"), piece.inputs, strict=True))
        for node in nodes:
            if node.target is packed_product:
                found.append(partial(packed_product, _random(node.args[0]), given[node.args[1]], node.args[2]))
            elif node.target in (aten.mm.default, aten.addmm.default):
                x, right = node.args[-2:]
                weight = given[right] if right in given else given[right.args[0]].t()
                found.append(partial(torch.mm, _random(x), weight))
    return found


def _random(like: Any) -> Tensor:
    return torch.randn(like.meta["val"].shape)


@torch.inference_mode()
def measure(kernels: Any) -> dict[str, dict[str, float]]:
    """By program: its milliseconds, and those of its products."""
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    wrap = Compiled.wrap

    def watched(self: Compiled, function: Callable[..., Any]) -> Callable[..., Any]:
        run = wrap(self, function)

        def call(*arguments: Any) -> Any:
            if function.__name__ != "_draft" or arguments[0].most == DRAFTED:
                calls[function.__name__] = function, arguments
            return run(*arguments)

        return call

    Compiled.wrap = watched  # type: ignore[method-assign]
    shape: dict[str, Any] = {"batch_size": ROWS, "window": ROWS, "draft_tokens": DRAFTED, "prefill_rows": 16}
    engine = Engine(llama(6, 256, 4), llama(2, 128, 2), EngineConfig(kernels=kernels, **shape), frozenset())
    assert engine.config.compiles, "nothing is compiled here"
    for i in range(ROWS):
        engine.submit(Request(i, [(i * LENGTH + n) % 4096 for n in range(LENGTH)], 64))
    for _ in range(4):
        engine.step()
    result = {}
    for name, (function, arguments) in calls.items():
        if name in NAMES:
            made, packs = program(function, arguments, engine.config.packs), engine.config.packs
            alone = products(function, arguments, packs)
            whole, part = milliseconds(lambda: made(*arguments)), milliseconds(lambda: [run() for run in alone])  # noqa: B023
            result[NAMES[name]] = {"ms": round(whole, 2), "products_ms": round(part, 2)}
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1] if len(sys.argv) > 1 else "compiled_packed")))
