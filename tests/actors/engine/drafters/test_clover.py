"""Clover: drafts are those of a forward without a cache, and its folder is what it says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling, SequenceStatistics
from exspec.actors.engine.drafters import available
from exspec.actors.engine.drafters.clover import Clover
from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.candidates import candidates
from exspec.actors.engine.shape.plan import Models
from exspec.actors.exactness import ModelError
from exspec.actors.models import load_head, load_pair
from exspec.jobs.demo import TARGET
from exspec.jobs.demo.messages import examples
from exspec.jobs.training.clover import LastHidden, new_head, train
from exspec.jobs.training.demo import prompt_text
from tests import tiny
from tests.actors.engine.drafters.slow import Slow, slow_engine

PROMPTS = tiny.prompts(9)


def said(head: Any, number: int, hidden: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The step of one place [D] as the papers tell it, attention head by attention head."""
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
        """The layer over what has left the target's last one; then from token to token, beginning with the pending."""
        ids, last = torch.tensor([tokens[:-1]]), LastHidden(self.whole)
        self.whole(input_ids=ids)
        last.remove()
        places = torch.arange(ids.shape[1])[None]
        hidden = self.own(input_ids=ids, features=last.hidden, position_ids=places).logits[0, -1]
        drafted = [tokens[-1]]
        for i in range(min(count, self.own.config.heads)):
            hidden, given = said(self.own, i, hidden, self.whole.lm_head.weight[drafted[-1]])
            drafted.append(int(self.whole.lm_head(given).argmax()))
        return drafted[1:]


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [{}, {"heads": 1}, {"heads": 6}, {"num_attention_heads": 2}],
                         ids=["three", "one", "more than K", "other attention heads"])  # fmt: skip
@pytest.mark.parametrize(
    "way",
    [{}, {"attention": "in_place", "bucket": tiny.CONTEXT}, {"exact": False, "bucket": 1}, {"pages": 14}],
    ids=["gathered", "in place", "free", "few pages"],
)
def test_drafts_are_those_of_a_forward_without_a_cache(way: dict[str, Any], own: dict[str, Any]) -> None:
    """After prefill in chunks, after rounds of every acceptance, and after a sequence was taken back."""
    tiny.need(way.get("attention"))
    target = tiny.deep(5, 0.3)
    made = slow_engine(SlowClover, target, tiny.clover(target, **own), **way)
    Slow.checked = 0
    expected = {r.id: tiny.generate(target, r.prompt, 12) for r in tiny.requests(PROMPTS, 12)}
    assert tiny.decode(made, tiny.requests(PROMPTS, 12), shuffle=0) == expected
    assert Slow.checked > 30


def test_prompts_that_begin_alike_share_features_too() -> None:
    target = tiny.deep(5, 0.3)
    made = slow_engine(SlowClover, target, tiny.clover(target), prefill_columns=8, batch_size=1, window=1)
    trunk = tiny.prompts(3)[2][:24]
    for tail in ([3], [4, 5], [3, 9]):
        found = tiny.decode(made, tiny.requests([[*trunk, *tail]], 9))
        assert found[0] == tiny.generate(target, [*trunk, *tail], 9)
    assert made.statistics.cached_tokens == 2 * 24


def save(head: CloverHead, folder: Path) -> Path:
    head.save_pretrained(folder)
    return folder


def test_a_saved_head_is_the_same_one(tmp_path: Path) -> None:
    head = tiny.clover(tiny.deep(5), heads=2)
    found = load_head(str(save(head, tmp_path / "head")), torch.float32)
    assert isinstance(found, CloverHead)
    assert found.config.heads == 2
    assert {n: t.tolist() for n, t in found.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }
    rounded = load_head(str(tmp_path / "head"), torch.bfloat16)
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    assert torch.equal(rounded.rotary_emb.inv_freq, head.rotary_emb.inv_freq)


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["v_proj.weight"]


def _shrink(tensors: dict[str, Tensor]) -> None:
    tensors["mlps.0.weight"] = tensors["mlps.0.weight"][:8].clone()


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["o_proj.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_drop, r"head: no tensor v_proj.weight; expected one of \[32, 32\]"),
        (_shrink, r"head: mlps.0.weight is \[8, 32\], but its config.json asks for \[32, 32\]"),
        (_add, "head: a head of Clover has no tensor o_proj.weight"),
    ],
)
def test_a_damaged_head_is_refused_by_name(
    damage: Callable[[dict[str, Tensor]], None], told: str, tmp_path: Path
) -> None:
    folder = save(tiny.clover(tiny.deep(5)), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=told):
        load_head(str(folder), torch.float32)


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = save(tiny.clover(tiny.deep(5)), tmp_path / "head")
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | change))
    with pytest.raises(ModelError, match=told):
        load_head(str(folder), torch.float32)


def test_a_head_of_another_target_is_refused() -> None:
    target, config = tiny.deep(5), EngineConfig(drafter="clover")
    refusal = lambda head, **other: Clover.refusal(target.config, head, EngineConfig(drafter="clover", **other))  # noqa: E731
    assert Clover.refusal(target.config, None, config) == "it needs a head of Clover as its draft"
    assert refusal(tiny.head(target).config) == "it needs a head of Clover as its draft"
    told = refusal(CloverConfig(vocab_size=61, hidden_size=64))
    assert told == ("the head is for a vocabulary of 61 and hidden states of 64, but the target has 61 and 32")
    assert refusal(tiny.clover(target).config, method="eqspec") == (
        "method eqspec moves the KV, but not the features of the head"
    )
    assert available(target.config, tiny.clover(target).config, config) == ["clover", "suffix", "early_exit"]


def test_a_pair_of_a_target_and_a_head_is_loaded(tmp_path: Path) -> None:
    folder = save(new_head(load_pair(str(TARGET), None).target, 3), tmp_path / "head")
    assert isinstance(load_pair(str(TARGET), str(folder)).draft, CloverHead)
    other = save(tiny.clover(tiny.deep(5)), tmp_path / "other")
    with pytest.raises(ModelError, match="other: the head is for a vocabulary of 61"):
        load_pair(str(TARGET), str(other))


def kept(engine: Any, slot: int, length: int) -> list[Tensor]:
    """Keys and values of a slot's first tokens, by layer."""
    pages, size = engine.pool.store.table[slot], engine.config.page_size
    places = torch.tensor([int(pages[i // size]) * size + i % size for i in range(length)], dtype=torch.long)
    return [store.flatten(0, 1)[places] for store in engine.target.keys + engine.target.values]


@pytest.mark.fast("greedy-compiled")
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_k=20)], ids=["greedy", "sampled"])
def test_what_the_target_keeps_of_prompts_is_bit_for_bit_that_of_plain_decoding(
    kernels: Any, sampling: Sampling | None
) -> None:
    """Though here its last layer runs to its end for prompts, for what leaves it is remembered."""
    tiny.need("in_place", kernels)
    target = tiny.deep(4, 0.3, torch.bfloat16)
    rows = tiny.requests(tiny.prompts(12, longest=60), 16, sampling)
    shape: dict[str, Any] = {"attention": "in_place", "kernels": kernels, "prefill_rows": 3, "batch_size": 4}
    made = tiny.engine(target, draft=tiny.clover(target, dtype=target.dtype), drafter="clover", **shape)
    plain = Engine(target, None, made.config.plain())
    assert made.config.kernels == plain.config.kernels == kernels
    for engine in (made, plain):
        for request in rows[:4]:
            engine.submit(request)
        engine.step()
    for slot, request in enumerate(rows[:4]):
        ours, theirs = (kept(e, slot, len(request.prompt) - 1) for e in (made, plain))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    made, plain = (Engine(target, e.drafter_context.draft, e.config) for e in (made, plain))
    assert tiny.decode(made, rows, shuffle=3) == tiny.decode(plain, rows, shuffle=4)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_no_more_is_tried_than_the_head_can_draft(heads: int) -> None:
    target = tiny.deep(4, 0.3)
    head = tiny.clover(target, heads=heads)
    config = EngineConfig(drafter="clover", batch_size=4, window=4, draft_tokens=1, bucket=32, capacity=tiny.CONTEXT,
                          prefill_columns=8, page=8)  # fmt: skip
    shapes = candidates(Models(target, head), config, [{"drafter": "clover"}], ("draft_tokens",))
    tried = {shape.draft_tokens for shape in shapes}
    assert tried == set(range(1, heads + 1))
    found = calibrate(target, head, tiny.requests(PROMPTS, 10), config, ("draft_tokens",), seconds=1.0)
    assert {c.config.draft_tokens for c in found.candidates} <= tried


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_training_begins_with_the_targets_last_layer(family: str) -> None:
    """Where the target is a Llama; and no step from token to token changes anything."""
    target = tiny.model(family)
    head = new_head(target, 2)
    if family in ("llama", "mistral"):
        own, last = head.layers[0].state_dict(), list(layers_of(target))[-1].state_dict()
        assert {n: t.tolist() for n, t in own.items()} == {n: t.tolist() for n, t in last.items()}
    hidden, row = torch.randn(2, 1, 3, 32)
    for number in range(2):
        after, given = head.step(number, hidden, row)
        assert torch.equal(after, hidden)
        assert torch.equal(given, hidden)
    made = tiny.engine(target, draft=head, drafter="clover")
    expected = {r.id: tiny.generate(target, r.prompt, 6) for r in tiny.requests(PROMPTS, 6)}
    assert tiny.decode(made, tiny.requests(PROMPTS, 6)) == expected


@pytest.mark.slow
def test_a_head_that_is_trained_for_a_minute_is_accepted() -> None:
    pair = load_pair(str(TARGET), None)
    words, stream = pair.tokenizer, examples(seed=78)
    end = words.convert_tokens_to_ids("<|end|>")
    rows = [
        (words(prompt_text(e.message))["input_ids"], [*words(e.completion)["input_ids"], end])
        for e in (next(stream) for _ in range(512))
    ]
    head = train(pair.target, rows, 3, minutes=1000, steps=60).eval()
    engine = Engine(pair.target, head, EngineConfig(drafter="clover", draft_tokens=3, capacity=1024))
    for i in range(16):
        prompt = words(prompt_text(next(stream).message))["input_ids"]
        engine.submit(Request(i, prompt, max_new_tokens=60))
    total = sum((c.statistics for c in engine.run()), start=SequenceStatistics())
    assert total.acceptance_rate > 0.15, "one that knows nothing has less than a hundredth"
