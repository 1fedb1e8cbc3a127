"""Rows with adapters of their own decode to what a target with that adapter in its weights decodes to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.adapter import adapt, merge
from exspec.actors.engine import Engine, Request, RequestError
from exspec.actors.engine.config import DRAFTERS, KERNELS, NONE
from exspec.actors.engine.drafters.lookup import drafter_class
from tests import tiny
from tests.actors.engine.test_logprobs import of, requests
from tests.actors.test_adapter import save_adapter

PROMPTS = tiny.prompts(12)
ADAPTED = {
    "llama": [
        ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"),
        ("model.layers.1.self_attn.v_proj",),
    ],
    "gpt2": [("transformer.h.0.attn.c_attn",), ("transformer.h.1.mlp.c_proj", "transformer.h.0.attn.c_attn")],
}


def folders(target: PreTrainedModel, folder: Path, family: str = "llama") -> list[str]:
    """Two adapters for a target, of different layers and ranks."""
    made = [save_adapter(folder / str(i), target, names, seed=i) for i, names in enumerate(ADAPTED[family])]
    return [str(one) for one in made]


def merged(family: str, folder: str | None) -> PreTrainedModel:
    target = tiny.model(family)
    if folder:
        merge(target, folder)
    return target


@pytest.mark.parametrize("method", ["plain", "eqspec", "exspec"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ADAPTED)
def test_each_row_equals_one_of_the_merged_target(family: str, kernels: str, method: str, tmp_path: Path) -> None:
    in_place = None if method == "eqspec" else "in_place"
    tiny.need(in_place, kernels)
    target = tiny.model(family)
    made = folders(target, tmp_path, family)
    adapt(target, made)
    rows = [Request(i, prompt, 20, adapter=i % 3) for i, prompt in enumerate(PROMPTS)]
    settings: dict[str, Any] = {"attention": in_place} if in_place else {"kernels": "eager"}
    engine = tiny.engine(target, draft=tiny.model(family, seed=1), **{"kernels": kernels, "method": method} | settings)
    found = tiny.decode(engine, rows, shuffle=1)
    expected = [tiny.greedy(merged(family, folder), PROMPTS) for folder in (None, *made)]
    assert found == {i: expected[i % 3][i] for i in range(len(PROMPTS))}
    assert len({tuple(tokens[0]) for tokens in expected}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != NONE])
def test_no_drafter_and_no_neighbour_changes_a_bit(drafter: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against plain decoding in the same shape, and row by row. Rows without an adapter have the bits of the base."""
    base, target = tiny.deep(dtype=dtype), tiny.deep(dtype=dtype)
    draft = tiny.draft_of(drafter, base) if drafter_class(drafter).needs_draft else None
    adapt(target, folders(base, tmp_path))
    asked = [replace(r, adapter=i % 3) for i, r in enumerate(requests())]
    config = tiny.config(drafter=drafter, pages=30)
    expected = of(tiny.run(Engine(target, None, config.plain()), asked))
    assert of(tiny.run(Engine(target, draft, config), asked, shuffle=1)) == expected
    alone = Engine(target, None, config.plain())
    for request in asked[::4]:
        assert of(tiny.run(alone, [request]))[request.id] == expected[request.id]
    plain = of(tiny.run(Engine(base, None, config.plain()), requests()))
    same = [plain[r.id] == expected[r.id] for r in asked]
    assert [r.adapter == 0 for r in asked] == same


def test_prompts_share_pages_only_with_the_same_adapter(tmp_path: Path) -> None:
    target, prompt = tiny.model(), tiny.prompts(1, longest=40)[0] + [7] * 33
    made = folders(target, tmp_path)
    adapt(target, made)
    engine = tiny.engine(target, method="plain", window=4, batch_size=4)
    rows = [Request(i, prompt, 6, adapter=i % 2) for i in range(8)]
    found = tiny.decode(engine, rows)
    for i in range(2):
        alone = tiny.greedy(merged("llama", made[0] if i else None), [prompt], 6)[0]
        assert all(found[n] == alone for n in range(i, 8, 2))
    whole = len(prompt[:-1]) // 8 * 8
    assert engine.statistics.cached_tokens == 6 * whole
    assert engine.statistics.prefill_tokens == 8 * (len(prompt) - 1) - 6 * whole
    engine.check()


@pytest.mark.parametrize("adapter", [-1, 3])
def test_a_number_out_of_range_is_refused(adapter: int, tmp_path: Path) -> None:
    target = tiny.model()
    adapt(target, folders(target, tmp_path))
    with pytest.raises(RequestError, match=f"adapter is {adapter}, expected 0 to 2"):
        tiny.engine(target).submit(Request(0, [1], adapter=adapter))
