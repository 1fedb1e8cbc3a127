"""The engine on a real GPU: completions are those of plain decoding in the same shape, with every drafter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Sampling
from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.layers.programs import compiler_trial
from exspec.actors.exactness import check_forward
from tests import tiny
from tests.actors.engine.test_cuda_rehearsal import constrained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")
CUDA = torch.device("cuda", 0)
SAMPLED = Sampling(temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.1)


def pair(drafter: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """A target whose first layers are often right, and its draft. A draft model is always right."""
    target = tiny.deep(dtype=dtype)
    if drafter == "model":
        return target.to(CUDA), tiny.deep(dtype=dtype).to(CUDA)
    draft = tiny.draft_of(drafter, target) if drafter_class(drafter).needs_draft else None
    return target.to(CUDA), draft.to(CUDA) if draft is not None else None


def shape(drafter: str, **changes: Any) -> EngineConfig:
    drafter, _, window = drafter.partition(" ")
    changes |= {"draft_window": int(window)} if window else {}
    return tiny.config(**{"window": 4, "batch_size": 2, "prefill_rows": 2, "drafter": drafter} | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d != "none"] + ["model 16", "eagle3 16", "dflash 16"])
@pytest.mark.parametrize(
    ("kernels", "attention"), [("eager", "in_place"), ("eager", "gathered"), ("compiled", "in_place")]
)
def test_completions_are_those_of_plain_decoding(
    kernels: str, attention: str, drafter: str, dtype: torch.dtype
) -> None:
    target, draft = pair(drafter.partition(" ")[0], dtype)
    config = shape(drafter, kernels=kernels, attention=attention)
    rows = [
        *tiny.requests(tiny.prompts(6, longest=24), 12),
        *(replace(r, id=f"s{r.id}") for r in tiny.requests(tiny.prompts(6, seed=1, longest=24), 12, SAMPLED)),
    ]
    rows.append(replace(rows[2], id="c", constraint=constrained))
    made = Engine(target, draft, config)
    assert (made.config.kernels, made.config.attention) == (kernels, attention)
    found = tiny.run(made, rows, shuffle=1)
    assert not [c.error for c in found.values() if c.error]
    expected = tiny.decode(Engine(target, None, config.plain()), rows)
    assert {name: c.tokens for name, c in found.items()} == expected
    if drafter in ("model", "early_exit"):
        assert tiny.total(found).accepted > 0


def test_the_kernel_and_the_compiler_pass_their_trials() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, kv_heads, size in ((4, 2, 16), (32, 8, 128), (12, 12, 64), (8, 1, 256)):
            assert trial(CUDA, dtype, heads, kv_heads, size, 16) is None
    assert compiler_trial(CUDA) is None


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_models_pass_the_check_at_load(family: str) -> None:
    check_forward(tiny.model(family, dtype=torch.bfloat16).to(CUDA), family)
