"""DFlash: drafts equal those of the formula without a cache, and heads load in both published formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.drafters import dflash_head
from exspec.actors.engine.drafters.dflash import DFlash
from exspec.actors.engine.drafters.dflash_head import DFlashConfig, DFlashHead, is_head
from exspec.actors.engine.drafters.lookup import available
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice
from exspec.actors.source import ModelError
from tests import tiny
from tests.actors.engine.drafters.slow import ENGINES, PROMPTS, Slow, check_drafts, slow_engine


def states(head: Any, embedded: Tensor, features: Tensor) -> Tensor:
    """The head's last states [N, D] of a block with the embeddings [N, D] behind a context with features [C, F]."""
    context, x, before = head.hidden_norm(head.fc(features)), embedded, len(features)
    positions = torch.arange(before + len(x))
    turns = head.rotary_emb(x[None], positions[None])
    for layer in head.layers:
        at = layer.self_attn
        normed = layer.input_layernorm(x)
        both = torch.cat([context, normed])
        query, key, value = (
            project(y).view(len(y), -1, at.head_dim)
            for project, y in ((at.q_proj, normed), (at.k_proj, both), (at.v_proj, both))
        )
        query = torch.cat([torch.zeros(before, *query.shape[1:]), at.q_norm(query)])
        query, key = (
            y[0].transpose(0, 1)
            for y in apply_rotary_pos_emb(query[None].transpose(1, 2), at.k_norm(key)[None].transpose(1, 2), *turns)
        )
        key, value = (y.repeat_interleave(at.num_key_value_groups, 1) for y in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[before:], key) * at.scaling
        if at.causal:
            apart = positions[before:, None] - positions
            scores = scores.masked_fill((apart < 0) | (apart >= (at.sliding_window or 1000)), -torch.inf)
        x = x + at.o_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    found: Tensor = head.norm(x)
    return found


class SlowDFlash(Slow, DFlash):
    @torch.inference_mode()
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """Column k of the block predicts the token at its own position."""
        config, before = self.own.config, len(tokens) - 1
        hidden = self.whole(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[n][0] for n in config.aux_layers], dim=-1)
        length = min(config.block_size, self.context.config.capacity - before)
        rows = (self.own.embed_tokens or self.whole.get_input_embeddings()).weight
        embedded = config.embedding_scale * rows[[tokens[-1], *[config.mask_token_id] * (length - 1)]]
        if config.masks:
            embedded[1:] = self.own.mask_embedding
        score = self.own.lm_head or self.whole.get_output_embeddings()
        found = score(states(self.own, embedded, features)[1 : 1 + count]).argmax(-1)
        if config.draft_vocab_size != config.vocab_size:
            found = found + self.own.d2t[found]
        return found.tolist()  # type: ignore[no-any-return]


OWN: dict[str, dict[str, Any]] = {
    "as published": {},
    "a sliding layer": {"sliding_window": 6},
    "causal layers": {"causal": [True, True]},
    "a short block": {"block_size": 3},
    "few tokens": {"embeds": True, "scores": True, "draft_vocab_size": 41, "hidden_size": 16},
    "a mask of its own": {"masks": True},
    "a scale": {"embedding_scale": 3.0},
}
owned = pytest.mark.parametrize("own", OWN.values(), ids=OWN)


@pytest.mark.cover(1)
@owned
@ENGINES
def test_drafts_are_those_of_the_formula_without_a_cache(config: dict[str, Any], own: dict[str, Any]) -> None:
    target = tiny.deep(5, 0.3)
    check_drafts(SlowDFlash, target, tiny.dflash(target, **own), config)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_drafts_are_right_with_every_family(family: str) -> None:
    target = tiny.model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3})
    check_drafts(SlowDFlash, target, tiny.dflash(target, aux_layers=[2, 1]), {})


def test_drafts_are_right_after_rounds_without_drafts() -> None:
    target = tiny.deep(5, 0.3)
    engine = slow_engine(SlowDFlash, target, tiny.dflash(target), draft_from=8, bucket=tiny.CONTEXT)
    assert tiny.decode(engine, tiny.requests(PROMPTS, 12), shuffle=0) == tiny.greedy(target, PROMPTS, 12)
    assert any(len(prompt) < 8 for prompt in PROMPTS)


def test_a_draft_ends_with_the_capacity_and_preempts_no_more_than_it_must() -> None:
    """The block reaches past the tokens that a row may have; then it has pages of its own, or ends."""
    target = tiny.deep(5, 0.3)
    engine = slow_engine(SlowDFlash, target, tiny.dflash(target, block_size=16), capacity=40, bucket=40)
    rows = [tiny.prompts(3)[2][:n] for n in (20, 31, 33)]
    assert tiny.decode(engine, tiny.requests(rows, 7)) == tiny.greedy(target, rows, 7)


def test_the_rows_of_a_scaled_embedding_are_not_scaled() -> None:
    """Gemma scales the states that leave its embedding; a head has a scale of its own."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": tiny.VOCABULARY, "max_position_embeddings": tiny.CONTEXT}  # fmt: skip
    config = Gemma3TextConfig(**shape, num_hidden_layers=3, head_dim=8, layer_types=["full_attention"] * 3)
    torch.manual_seed(0)
    target: Any = Gemma3ForCausalLM(config).eval()
    check_drafts(SlowDFlash, target, tiny.dflash(target, embedding_scale=2.0), {})


def test_a_block_behind_a_window_takes_no_pages_of_the_target() -> None:
    target = tiny.deep(5, 0.3)
    config: dict[str, Any] = {"draft_tokens": 4, "page": 4, "prefill_columns": 8, "pages": 26, "batch_size": 6}
    rows = [prompt[:12] for prompt in tiny.prompts(9)]
    for window, ahead in ((16, 0), (None, 30)):
        engine = tiny.engine(target, "dflash", tiny.dflash(target, block_size=30), draft_window=window, **config)
        assert engine.pool.ahead == ahead
        assert tiny.decode(engine, tiny.requests(rows, 24)) == tiny.greedy(target, rows, 24)


def test_tokens_that_a_constraint_puts_into_a_draft_need_no_forward() -> None:
    """The next round feeds their context."""
    target, fed = tiny.deep(5, 0.3), list[Any]()
    engine = tiny.engine(target, "dflash", tiny.dflash(target), draft_tokens=4)
    engine.drafter.prefill = fed.append  # type: ignore[method-assign]
    start = choice([[7, 8, 9, 10, 11], [12, 3, 9, 20, 21]], chain([22, 23, tiny.ENDS[0]], Node()))
    found = tiny.run(engine, [Request(0, [1], 9, constraint=lambda: Automaton(start))])[0]
    assert found.statistics.forced > 2
    assert not fed


def test_all_of_a_draft_comes_from_one_forward() -> None:
    target, calls = tiny.deep(5, 0.3), []
    engine = tiny.engine(target, "dflash", tiny.dflash(target), draft_tokens=6)
    engine.drafter.head.model.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[attr-defined]
    tiny.decode(engine, tiny.requests(PROMPTS[:1], 6))
    assert len(calls) <= engine.statistics.rounds


SHAPES = {  # of a head for Qwen3-8B
    "fc.weight": [4096, 20480],
    "hidden_norm.weight": [4096],
    "norm.weight": [4096],
    "layers.4.self_attn.q_proj.weight": [4096, 4096],
    "layers.4.self_attn.k_proj.weight": [1024, 4096],
    "layers.4.self_attn.v_proj.weight": [1024, 4096],
    "layers.4.self_attn.o_proj.weight": [4096, 4096],
    "layers.4.self_attn.q_norm.weight": [128],
    "layers.4.self_attn.k_norm.weight": [128],
    "layers.4.mlp.gate_proj.weight": [12288, 4096],
    "layers.4.mlp.up_proj.weight": [12288, 4096],
    "layers.4.mlp.down_proj.weight": [4096, 12288],
    "layers.4.input_layernorm.weight": [4096],
    "layers.4.post_attention_layernorm.weight": [4096],
}
PUBLISHED = {  # the authors' config for Qwen3-8B
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "block_size": 16, "num_target_layers": 36, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 5, "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "auto_map": {"AutoModel": "x"},
}  # fmt: skip


def test_the_authors_config_makes_a_head_of_the_published_tensors() -> None:
    config = DFlash.read(PUBLISHED)
    assert (config.aux_layers, config.block_size, config.mask_token_id) == ([2, 10, 18, 26, 34], 16, 151669)
    assert config.rope_parameters["rope_theta"] == 1000000
    with torch.device("meta"):
        found = {name: list(t.shape) for name, t in DFlashHead(config).state_dict().items()}
    assert found == {
        name.replace("layers.4.", f"layers.{n}."): shape for name, shape in SHAPES.items() for n in range(5)
    }


def as_published(head: DFlashHead, folder: Path, layout: str, pickled: bool = False, **changes: Any) -> Path:
    """Write the head as its authors do, or as the library speculators does."""
    folder.mkdir()
    config = head.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size", "rms_norm_eps", "layer_types", "sliding_window")  # fmt: skip
    layers = {"model_type": "qwen3", "max_position_embeddings": 2048} | {name: getattr(config, name) for name in names}
    if layout == "authors":
        own = {"mask_token_id": config.mask_token_id, "target_layer_ids": [n - 1 for n in config.aux_layers]}
        found = {**layers, "architectures": ["DFlashDraftModel"], "block_size": config.block_size, "dflash_config": own}
        found["num_target_layers"] = config.target_layers
        if config.target_hidden_size != config.hidden_size:
            found["target_hidden_size"] = config.target_hidden_size
        if config.embedding_scale != 1:
            own["input_embedding_scale"] = config.embedding_scale
        if config.causal != [kind == "sliding_attention" for kind in config.layer_types]:
            own["causal"] = config.causal[0]
    else:
        found = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
                 "transformer_layer_config": layers,
                 "draft_vocab_size": config.draft_vocab_size, "block_size": config.block_size,
                 "target_hidden_size": config.target_hidden_size, "aux_hidden_state_layer_ids": config.aux_layers,
                 "mask_token_id": config.mask_token_id, "projector_type": "dflash", "shift_label": False,
                 "input_embedding_scale": config.embedding_scale, "is_causal": None,
                 "sliding_window_non_causal": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found | changes))
    tensors = {name: t.contiguous() for name, t in head.state_dict().items()}
    if (mask := tensors.pop("mask_embedding", None)) is not None:
        torch.save({"mask_token_id": config.mask_token_id, "embedding": mask}, folder / "mask_embedding.pt")
    if layout == "speculators":
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@owned
@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_both_published_formats_load(layout: str, own: dict[str, Any], tmp_path: Path) -> None:
    if layout == "speculators" and "causal" in own:
        pytest.skip("this format has no such heads")
    if layout == "authors" and "scores" in own:
        own = {"target_hidden_size": 32}  # this format has no vocabulary of its own
    target = tiny.deep(5)
    head = tiny.dflash(target, **own)
    folder = as_published(head, tmp_path / "head", layout)
    assert is_head(json.loads((folder / "config.json").read_text()))
    found = dflash_head.load_head(folder, torch.float32, allow_pickle=True)
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in head.state_dict().items())
    engines = [Engine(target, h, EngineConfig(drafter="dflash", capacity=64, bucket=64)) for h in (found, head)]
    done = [tiny.run(engine, tiny.requests(PROMPTS, 12)) for engine in engines]
    accepted = [{name: c.statistics.accepted_by_position for name, c in run.items()} for run in done]
    assert accepted[0] == accepted[1], "a setting that the forward depends on was not read"


def test_pickled_weights_and_masks_need_allow_pickle(tmp_path: Path) -> None:
    head = tiny.dflash(tiny.deep(5), masks=True)
    for folder in (
        as_published(tiny.dflash(tiny.deep(5)), tmp_path / "weights", "authors", pickled=True),
        as_published(head, tmp_path / "mask", "authors"),
    ):
        with pytest.raises(ModelError, match=r"expected .*allow_pickle"):
            tiny.load_head(folder)
        tiny.load_head(folder, allow_pickle=True)
    assert torch.equal(tiny.load_head(tmp_path / "mask", allow_pickle=True).mask_embedding, head.mask_embedding)
    (tmp_path / "mask" / "mask_embedding.pt").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"mask_embedding.pt: not a file of tensors"):
        tiny.load_head(tmp_path / "mask", allow_pickle=True)
    torch.save({"mask_token_id": 7, "embedding": torch.ones(32)}, tmp_path / "mask" / "mask_embedding.pt")
    with pytest.raises(ModelError, match=r"mask_embedding.pt: the embedding of token 7; expected that of token 5"):
        tiny.load_head(tmp_path / "mask", allow_pickle=True)
    torch.save({"other": 1}, tmp_path / "mask" / "mask_embedding.pt")
    with pytest.raises(ModelError, match=r"mask_embedding.pt: expected a tensor, or one named embedding"):
        tiny.load_head(tmp_path / "mask", allow_pickle=True)


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1]}},
         "config.json: mask_token_id is 61; expected one of the 61 tokens"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is None; expected one of the 61 tokens"),
        ({"dflash_config": {"mask_token_id": 5}}, "target_layer_ids is None; expected numbers of .* layers, from 0"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, r"target_layer_ids is \[-1\]; expected numbers"),
        ({"dflash_config": [1]}, r"dflash_config is \[1\]; expected settings by name"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config is 'x'; expected settings by name"),
        ({"vocab_size": None}, "vocab_size is None; expected the target's number of tokens"),
        ({"block_size": 1}, "block_size is 1; expected the length of a block, at least 2"),
        ({"attention_sink_bias": True}, "attention_sink_bias is True; expected False, the only supported value"),
        ({"projector_type": "domino"}, "projector_type is 'domino'; expected 'dflash'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True; expected False"),
        ({"is_neox_style": False}, "is_neox_style is False; expected True"),
        ({"output_multiplier": 2.0}, "output_multiplier is 2.0; expected 1"),
        ({"model_type": "llama"}, "layers of llama are not supported; expected those of qwen3"),
        ({**SLIDES, "is_causal": False}, "sliding layers that are not causal are not supported"),
        ({"hidden_act": "swish2"}, "config.json: no head can be made with it .*swish2"),
        ({"num_target_layers": 36}, "the head is for a target of 36 layers, but the target has 5"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = as_published(tiny.dflash(tiny.deep(5)), tmp_path / "head", "authors", **changes)
    with pytest.raises(ModelError, match=message):
        tiny.load_head(folder)


def test_a_head_that_does_not_fit_is_refused() -> None:
    target, config = tiny.deep(5), EngineConfig(drafter="dflash")
    refusal = lambda head: str(DFlash.refusal(target.config, head, config))  # noqa: E731
    same = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    assert refusal(DFlashConfig([5], **same)) == (
        "the head asks for the output of layer 5 of the 5 layers; expected an earlier one"
    )
    assert refusal(DFlashConfig([2], target_hidden_size=32, **same | {"hidden_size": 64})) == (
        "the head uses the target's embedding, but its width of 64 differs from the target's 32"
    )
    assert "the head uses the target's output head" in refusal(
        DFlashConfig([2], target_hidden_size=32, embeds=True, **same | {"hidden_size": 64})
    )
    assert available(target.config, tiny.dflash(target).config, tiny.config()) == ["dflash", "suffix", "early_exit"]
