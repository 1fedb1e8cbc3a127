"""EAGLE-3: drafts are those of a forward without a cache, and heads load in both published formats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters import available, eagle3_head
from exspec.actors.engine.drafters.eagle3 import Eagle3
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head, is_head
from exspec.actors.exactness import ModelError
from exspec.actors.models import load_head, load_pair
from exspec.jobs.demo import TARGET
from tests import tiny
from tests.actors.engine.drafters.slow import Slow, slow_engine

PROMPTS = tiny.prompts(9)


class SlowEagle3(Slow, Eagle3):
    @torch.inference_mode()
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """As the paper tells it: token j + 1 with the target's feature of token j; where the target has none yet, with
        what the layer gave for the token before."""
        hidden = self.whole(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = self.own.fc(torch.cat([hidden[n] for n in self.aux_layers], dim=-1))
        drafted: list[int] = []
        for _ in range(count):
            ids = torch.tensor([[*tokens[1:], *drafted]])
            left: list[Tensor] = []
            hook = self.own.layers[0].register_forward_hook(lambda *seen: left.append(seen[2]))  # noqa: B023
            embed = self.own.embed_tokens or self.whole.get_input_embeddings()
            kept, self.own.embed_tokens = self.own.embed_tokens, embed
            places = torch.arange(ids.shape[1])[None]
            logits = self.own(input_ids=ids, features=features, position_ids=places).logits
            self.own.embed_tokens = kept
            hook.remove()
            drafted.append(int(logits[0, -1].argmax()))
            features = torch.cat([features, left[0][:, -1:]], dim=1)
        return drafted


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [{}, {"embeds": True, "hidden_size": 16}, {"norm_before_residual": True}, {"size": 61}],
                         ids=["as published", "its own embedding", "norm before residual", "all tokens"])  # fmt: skip
@pytest.mark.parametrize(
    "way",
    [{}, {"attention": "in_place", "bucket": tiny.CONTEXT}, {"exact": False, "bucket": 1}, {"pages": 14}],
    ids=["gathered", "in place", "free", "few pages"],
)
def test_drafts_are_those_of_a_forward_without_a_cache(way: dict[str, Any], own: dict[str, Any]) -> None:
    """After prefill in chunks, after rounds of every acceptance, and after a sequence was taken back."""
    tiny.need(way.get("attention"))
    target = tiny.deep(5, 0.3)
    made = slow_engine(SlowEagle3, target, tiny.head(target, **own), **way)
    Slow.checked = 0
    expected = {r.id: tiny.generate(target, r.prompt, 12) for r in tiny.requests(PROMPTS, 12)}
    assert tiny.decode(made, tiny.requests(PROMPTS, 12), shuffle=0) == expected
    assert Slow.checked > 30


def test_prompts_that_begin_alike_share_features_too() -> None:
    """But for the last place that they share, where there is what was fed last: one prompt after the other here."""
    target = tiny.deep(5, 0.3)
    made = slow_engine(SlowEagle3, target, tiny.head(target), prefill_columns=8, batch_size=1, window=1)
    trunk = tiny.prompts(3)[2][:24]
    for tail in ([3], [4, 5], [3, 9]):
        found = tiny.decode(made, tiny.requests([[*trunk, *tail]], 9))
        assert found[0] == tiny.generate(target, [*trunk, *tail], 9)
    assert made.statistics.cached_tokens == 2 * 24


SHAPES = {  # of a head for Llama-3.1-8B, D = 4096, 32 and 8 heads of 128: by name in the authors' format
    "fc.weight": [4096, 12288],
    "midlayer.self_attn.q_proj.weight": [4096, 8192],
    "midlayer.self_attn.k_proj.weight": [1024, 8192],
    "midlayer.self_attn.v_proj.weight": [1024, 8192],
    "midlayer.self_attn.o_proj.weight": [4096, 4096],
    "midlayer.mlp.gate_proj.weight": [14336, 4096],
    "midlayer.mlp.up_proj.weight": [14336, 4096],
    "midlayer.mlp.down_proj.weight": [4096, 14336],
    "midlayer.hidden_norm.weight": [4096],
    "midlayer.input_layernorm.weight": [4096],
    "midlayer.post_attention_layernorm.weight": [4096],
    "norm.weight": [4096],
    "lm_head.weight": [32000, 4096],
    "d2t": [32000],
}


def test_tensors_have_the_published_names_and_shapes() -> None:
    with torch.device("meta"):
        head = Eagle3Head(
            Eagle3Config(
                draft_vocab_size=32000,
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_attention_heads=32,
                num_key_value_heads=8,
            )
        )
    found = {name.replace("layers.0.", "midlayer."): list(t.shape) for name, t in head.state_dict().items()}
    assert found == SHAPES


def test_features_are_of_a_low_a_middle_and_a_high_layer_unless_the_head_says() -> None:
    target = tiny.model(num_hidden_layers=32).config
    assert Eagle3.aux_layers_of(target, Eagle3Config()) == (2, 16, 29)
    assert Eagle3.aux_layers_of(target, Eagle3Config(aux_layers=[1, 2, 31])) == (1, 2, 31)


def as_published(head: Eagle3Head, folder: Path, layout: str, pickled: bool = False, **changes: Any) -> Path:
    """The head's files as its authors or speculators lay them out."""
    folder.mkdir()
    config = head.config
    llama = {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1, "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": 2048,
        "model_type": "llama",
    }  # fmt: skip
    own = {"draft_vocab_size": config.draft_vocab_size, "norm_before_residual": config.norm_before_residual}
    if layout == "authors":
        found = {**llama, **own, "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float16"}
        found["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.aux_layers, "use_aux_hidden_state": True}
    else:
        found = {**own, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                 "transformer_layer_config": llama, "eagle_aux_hidden_state_layer_ids": config.aux_layers,
                 "target_hidden_size": None, "speculators_config": {"algorithm": "eagle3"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found | changes))
    layer = "midlayer." if layout == "authors" else "layers.0."
    tensors = {name.replace("layers.0.", layer): t.contiguous() for name, t in head.state_dict().items()}
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[head.d2t + torch.arange(config.draft_vocab_size)] = True
    tensors["t2d"] = known
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("own", [{}, {"embeds": True}, {"size": 61}, {"norm_before_residual": True}])
@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_both_published_formats_load(layout: str, own: dict[str, Any], tmp_path: Path) -> None:
    target = tiny.deep(5)
    head = tiny.head(target, **own)
    folder = as_published(head, tmp_path / "head", layout)
    assert is_head(json.loads((folder / "config.json").read_text()))
    found = eagle3_head.load_head(folder, torch.float32)
    assert found.config.aux_layers == head.config.aux_layers
    given = {"input_ids": torch.arange(9)[None], "position_ids": torch.arange(9)[None]}
    features = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    embeds = [h.embed_tokens or target.get_input_embeddings() for h in (found, head)]
    with torch.inference_mode():
        logits = []
        for h, embedding in zip((found, head), embeds, strict=True):
            own, h.embed_tokens = h.embed_tokens, embedding
            logits.append(h(**given, features=features).logits)
            h.embed_tokens = own
    assert torch.equal(*logits), "every setting that its forward depends on was read"
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in head.state_dict().items())
    rows = tiny.requests(PROMPTS, 12)
    made = Engine(target, found, EngineConfig(drafter="eagle3", capacity=64, bucket=64))
    other = Engine(target, head, EngineConfig(drafter="eagle3", capacity=64, bucket=64))
    for engine in (made, other):
        for request in rows:
            engine.submit(request)
    drafts = [{c.id: c.statistics.accepted_by_position for c in engine.run()} for engine in (made, other)]
    assert drafts[0] == drafts[1]


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


def _shrink(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["fc_norm.0.weight"] = torch.ones(32)


def _lead_out(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + tiny.VOCABULARY


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_drop, r"no tensor layers.0.hidden_norm.weight; expected one of \[32\]"),
        (_shrink, r"fc.weight is \[32, 32\], and its config.json asks for \[32, 96\]"),
        (_add, "a head of EAGLE-3 has no tensor fc_norm.0.weight"),
        (_lead_out, "d2t leads out of the vocabulary of 61 tokens"),
    ],
)
def test_what_is_wrong_with_a_head_is_named(
    spoil: Callable[[dict[str, Tensor]], None], told: str, tmp_path: Path
) -> None:
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "authors")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=told):
        load_head(str(folder), torch.float32)


def test_weights_that_are_no_safetensors_need_a_permission(tmp_path: Path) -> None:
    head = tiny.head(tiny.deep(5))
    folder = as_published(head, tmp_path / "head", "authors", pickled=True)
    with pytest.raises(
        ModelError, match=r"its weights are no safetensors; expected model\.safetensors, or allow_pickle"
    ):
        load_head(str(folder), torch.float32)
    found = load_head(str(folder), torch.float32, allow_pickle=True)
    assert torch.equal(found.fc.weight, head.fc.weight)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm_output": True}, "norm_output: True is not supported; expected a head without it"),
        (
            {"transformer_layer_config": {"num_hidden_layers": 2, "model_type": "llama"}},
            "a head of 2 layers of llama is not supported; expected one layer of llama",
        ),
        ({"transformer_layer_config": {"hidden_size": 32}}, "a head of 1 layers of qwen3 is not supported"),
    ],
)
def test_formats_that_are_not_known_are_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "speculators", **changes)
    with pytest.raises(ModelError, match=told):
        load_head(str(folder), torch.float32)


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    for number, pickled in enumerate((False, True)):
        folder = as_published(tiny.head(tiny.deep(5)), tmp_path / str(number), "authors", pickled=pickled)
        weights = folder / ("pytorch_model.bin" if pickled else "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:100])
        with pytest.raises(ModelError, match=f"{weights.name}: no "):
            load_head(str(folder), torch.float32, allow_pickle=True)
    torch.save({"state_dict": {}}, weights)
    with pytest.raises(ModelError, match=r"pytorch_model.bin: no file of tensors; expected tensors by name"):
        load_head(str(folder), torch.float32, allow_pickle=True)


def test_what_a_head_was_made_of_does_not_count(tmp_path: Path) -> None:
    """Some of the authors' say the layers and the architecture of their target."""
    made = {"num_hidden_layers": 40, "architectures": ["LlamaForCausalLM"]}
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "authors", **made)
    assert is_head(json.loads((folder / "config.json").read_text()))
    assert len(load_head(str(folder), torch.float32).layers) == 1


def test_rotary_factors_stay_in_float32(tmp_path: Path) -> None:
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "authors")
    found = load_head(str(folder), torch.bfloat16)
    assert found.fc.weight.dtype == torch.bfloat16
    assert torch.equal(found.rotary_emb.inv_freq, load_head(str(folder), torch.float32).rotary_emb.inv_freq)


def test_a_head_of_another_target_is_refused() -> None:
    target, config = tiny.deep(5), EngineConfig(drafter="eagle3")
    refusal = lambda head: Eagle3.refusal(target.config, head, config)  # noqa: E731
    assert refusal(None) == "it needs a head of EAGLE-3 as its draft"
    assert refusal(tiny.model().config) == "it needs a head of EAGLE-3 as its draft"
    told = refusal(Eagle3Config(vocab_size=99, hidden_size=32))
    assert told is not None
    assert "is for a vocabulary of 99 and hidden states of 32, and the target has 61 and 32" in told
    told = refusal(Eagle3Config(vocab_size=61, hidden_size=64, target_hidden_size=32))
    assert told == "the head has no embedding, and its width of 64 is not the target's"
    told = refusal(Eagle3Config(aux_layers=[1, 2, 5], vocab_size=61, hidden_size=32))
    assert told == "the head asks for the input of layer 5; the target has 5 layers"


def test_a_draft_model_and_a_head_are_told_apart() -> None:
    target, config = tiny.deep(5), EngineConfig(capacity=64)
    assert available(target.config, tiny.head(target).config, config) == ["eagle3", "suffix", "early_exit"]
    assert available(target.config, tiny.model().config, config) == ["model", "suffix", "early_exit"]
    with pytest.raises(ValueError, match="the drafter model: the draft is a head for eagle3"):
        Engine(target, tiny.head(target), EngineConfig())


def test_a_pair_of_a_target_and_a_head_is_loaded(tmp_path: Path) -> None:
    """The head has no tokenizer: its config tells what it is."""
    target = load_pair(str(TARGET), None).target
    config = target.config
    made = Eagle3Head(Eagle3Config(
        draft_vocab_size=300, vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2,
    ))  # fmt: skip
    folder = as_published(made, tmp_path / "head", "speculators")
    pair = load_pair(str(TARGET), str(folder), torch.bfloat16)
    assert isinstance(pair.draft, Eagle3Head)
    assert {p.dtype for p in pair.draft.parameters()} == {torch.bfloat16}
    other = as_published(tiny.head(tiny.deep(5)), tmp_path / "other", "authors")
    with pytest.raises(ModelError, match="other: the head is for a vocabulary of 61"):
        load_pair(str(TARGET), str(other))
