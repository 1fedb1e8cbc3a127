"""Clover: drafts equal those of a forward without a cache, its folder is checked, and training starts well."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exspec.actors.engine import Engine, Sampling
from exspec.actors.engine.drafters.clover import Clover
from exspec.actors.engine.drafters.clover_head import CloverHead
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.learners.clover import CloverLearner
from exspec.actors.engine.learners.learner import Growth
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.candidates import candidates
from exspec.actors.engine.shape.plan import Models
from exspec.actors.source import ModelError
from tests import tiny
from tests.actors.engine.drafters.slow import ENGINES, PROMPTS, Slow, check_drafts


def step(head: Any, number: int, hidden: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The step of one position [D] as in the papers, one attention head at a time."""
    config, token = head.config, row / row.pow(2).mean().add(torch.finfo(row.dtype).eps).sqrt()
    size, parts = config.hidden_size // config.num_attention_heads, []
    for first in range(0, config.hidden_size, size):
        query, key, value = (
            matrix.weight[first : first + size] @ x
            for matrix, x in ((head.q_proj, hidden), (head.k_proj, token), (head.v_proj, token))
        )
        parts.append(query.dot(key) / (query.norm() * key.norm()) * value)
    hidden = hidden + torch.cat(parts)
    inner = head.mlps[number].weight @ hidden + head.mlps[number].bias
    return hidden, hidden + inner * inner.sigmoid()


class SlowClover(Slow, Clover):
    @torch.inference_mode()
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """The head's layer over the output of the target's last one; then one step per token, first the pending one."""
        ids, outputs = torch.tensor([tokens[:-1]]), list[Any]()
        hook = list(layers_of(self.whole))[-1].register_forward_hook(lambda *seen: outputs.append(seen[2]))
        self.whole(input_ids=ids)
        hook.remove()
        last: Tensor = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        positions = torch.arange(ids.shape[1])[None]
        hidden = self.own(input_ids=ids, features=last, position_ids=positions).logits[0, -1]
        drafted = [tokens[-1]]
        for i in range(min(count, self.own.config.heads)):
            hidden, output = step(self.own, i, hidden, self.whole.lm_head.weight[drafted[-1]])
            drafted.append(int(self.whole.lm_head(output).argmax()))
        return drafted[1:]


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [{}, {"heads": 1}, {"heads": 6}, {"num_attention_heads": 2}],
                         ids=["three", "one", "more than K", "other attention heads"])  # fmt: skip
@ENGINES
def test_drafts_are_those_of_a_forward_without_a_cache(config: dict[str, Any], own: dict[str, Any]) -> None:
    target = tiny.deep(5, 0.3)
    check_drafts(SlowClover, target, tiny.clover(target, **own), config)


def test_a_saved_head_loads_unchanged(tmp_path: Path) -> None:
    head = tiny.clover(tiny.deep(5), heads=2)
    head.save_pretrained(tmp_path)
    found = tiny.load_head(tmp_path)
    assert isinstance(found, CloverHead)
    assert found.config.heads == 2
    assert {n: t.tolist() for n, t in found.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads is 0; expected the number of tokens that the head can draft"),
        ({"heads": "three"}, "heads is 'three'; expected the number"),
        ({"hidden_size": "wide"}, "config.json: .*hidden_size"),
        ({"num_attention_heads": 5}, "config.json: .*attention heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: .*"),
        ({"hidden_act": "swish2"}, "config.json: no head can be made with it .*swish2"),
        ({"rope_parameters": "x"}, "config.json: .*"),
        ({"heads": True}, "heads is True; expected the number"),
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.clover(tiny.deep(5)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        tiny.load_head(tmp_path)


def kv(engine: Any, slot: int, length: int) -> list[Tensor]:
    """Keys and values of a slot's first tokens, by layer."""
    pages, size = engine.pool.store.table[slot], engine.config.page_size
    columns = torch.tensor([int(pages[i // size]) * size + i % size for i in range(length)], dtype=torch.long)
    return [store.flatten(0, 1)[columns] for store in engine.target.keys + engine.target.values]


@pytest.mark.fast("greedy-compiled_packed")
@pytest.mark.parametrize("kernels", ["eager", "compiled", "compiled_packed"])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_k=20)], ids=["greedy", "sampled"])
def test_the_targets_kv_and_tokens_are_bit_for_bit_those_of_plain_decoding(
    kernels: Any, sampling: Sampling | None
) -> None:
    """With Clover the target's last layer runs to its end for prompts, because the head needs its output."""
    tiny.need("in_place", kernels)
    target = tiny.deep(4, 0.3, torch.bfloat16)
    rows = tiny.requests(tiny.prompts(12, longest=60), 16, sampling)
    config: dict[str, Any] = {"attention": "in_place", "kernels": kernels, "prefill_rows": 3}
    clover = tiny.engine(target, "clover", tiny.clover(target, dtype=target.dtype), **config)
    plain = Engine(target, None, clover.config.plain())
    assert clover.config.kernels == plain.config.kernels == kernels
    for engine in (clover, plain):
        for request in rows[:4]:
            engine.submit(request)
        engine.step()
    for slot, request in enumerate(rows[:4]):
        ours, theirs = (kv(engine, slot, len(request.prompt) - 1) for engine in (clover, plain))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    clover, plain = (Engine(target, e.drafter_context.draft, e.config) for e in (clover, plain))
    assert tiny.decode(clover, rows, shuffle=3) == tiny.decode(plain, rows, shuffle=4)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_calibration_tries_no_more_tokens_than_the_head_can_draft(heads: int) -> None:
    target = tiny.deep(4, 0.3)
    head = tiny.clover(target, heads=heads)
    config = tiny.config(drafter="clover", window=4, draft_tokens=1, attention="auto")
    shapes = candidates(Models(target, head), config, [{"drafter": "clover"}], ("draft_tokens",))
    tried = {shape.draft_tokens for shape in shapes}
    assert tried == set(range(1, heads + 1))
    found = calibrate(target, head, tiny.requests(PROMPTS, 10), config, ("draft_tokens",), seconds=1.0)
    assert {c.config.draft_tokens for c in found.candidates} <= tried


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_training_starts_from_the_last_layer_of_a_llama(family: str) -> None:
    """For other families its layer is random. The steps from token to token change nothing at first."""
    target = tiny.model(family)
    head: Any = CloverLearner.grow(target, Growth(2))
    if family in ("llama", "mistral"):
        own, last = head.layers[0].state_dict(), list(layers_of(target))[-1].state_dict()
        assert {n: t.tolist() for n, t in own.items()} == {n: t.tolist() for n, t in last.items()}
    hidden, row = torch.randn(2, 1, 3, 32)
    for number in range(2):
        after, given = head.step(number, hidden, row)
        assert torch.equal(after, hidden)
        assert torch.equal(given, hidden)
    engine = tiny.engine(target, "clover", head)
    assert tiny.decode(engine, tiny.requests(PROMPTS, 6)) == tiny.greedy(target, PROMPTS, 6)
