"""EAGLE-3: drafts equal those of a forward without a cache, and heads load in both published formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters import eagle3_head
from exspec.actors.engine.drafters.eagle3 import Eagle3
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head, is_head
from exspec.actors.engine.drafters.lookup import available
from exspec.actors.source import ModelError
from tests import tiny
from tests.actors.engine.drafters.slow import ENGINES, PROMPTS, Slow, check_drafts


def forward(head: Any, target: Any, ids: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """The head's logits; a head without an embedding uses the target's."""
    own = head.embed_tokens
    head.embed_tokens = own or target.get_input_embeddings()
    logits: Tensor = head(input_ids=ids, features=features, position_ids=positions).logits
    head.embed_tokens = own
    return logits


class SlowEagle3(Slow, Eagle3):
    @torch.inference_mode()
    def slow(self, tokens: list[int], count: int) -> list[int]:
        """As in the paper: token j + 1 with the target's feature of token j. Past the target's features, the head's own
        output for the token before stands in."""
        hidden = self.whole(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = self.own.fc(torch.cat([hidden[n] for n in self.aux_layers], dim=-1))
        outputs: list[Tensor] = []
        hook = self.own.layers[0].register_forward_hook(lambda *seen: outputs.append(seen[2]))
        drafted: list[int] = []
        for _ in range(count):
            ids = torch.tensor([[*tokens[1:], *drafted]])
            logits = forward(self.own, self.whole, ids, features, torch.arange(ids.shape[1])[None])
            drafted.append(int(logits[0, -1].argmax()))
            features = torch.cat([features, outputs[-1][:, -1:]], dim=1)
        hook.remove()
        return drafted


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [{}, {"embeds": True, "hidden_size": 16}, {"norm_before_residual": True}, {"size": 61}],
                         ids=["as published", "its own embedding", "norm before residual", "all tokens"])  # fmt: skip
@ENGINES
def test_drafts_are_those_of_a_forward_without_a_cache(config: dict[str, Any], own: dict[str, Any]) -> None:
    target = tiny.deep(5, 0.3)
    check_drafts(SlowEagle3, target, tiny.head(target, **own), config)


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
    shape = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config(draft_vocab_size=32000, **shape))
    found = {name.replace("layers.0.", "midlayer."): list(t.shape) for name, t in head.state_dict().items()}
    assert found == SHAPES


def test_features_come_from_a_low_a_middle_and_a_high_layer_unless_the_head_names_others() -> None:
    target = tiny.model(num_hidden_layers=32).config
    assert Eagle3.aux_layers_of(target, Eagle3Config()) == (2, 16, 29)
    assert Eagle3.aux_layers_of(target, Eagle3Config(aux_layers=[1, 2, 31])) == (1, 2, 31)


def as_published(head: Eagle3Head, folder: Path, layout: str, pickled: bool = False, **changes: Any) -> Path:
    """Write the head as its authors do, or as the library speculators does."""
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
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in head.state_dict().items())
    positions = torch.arange(9)[None]
    features = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [forward(h, target, positions, features, positions) for h in (found, head)]
    assert torch.equal(*logits), "a setting that the forward depends on was not read"
    engines = [Engine(target, h, EngineConfig(drafter="eagle3", capacity=64, bucket=64)) for h in (found, head)]
    done = [tiny.run(engine, tiny.requests(PROMPTS, 12)) for engine in engines]
    accepted = [{name: c.statistics.accepted_by_position for name, c in run.items()} for run in done]
    assert accepted[0] == accepted[1]


def test_pickled_weights_need_allow_pickle(tmp_path: Path) -> None:
    head = tiny.head(tiny.deep(5))
    folder = str(as_published(head, tmp_path / "head", "authors", pickled=True))
    message = r"the weights are not safetensors; expected model\.safetensors, or allow_pickle"
    with pytest.raises(ModelError, match=message):
        tiny.load_head(folder)
    assert torch.equal(tiny.load_head(folder, allow_pickle=True).fc.weight, head.fc.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": True}, "norm_output: True is not supported; expected a head without it"),
        (
            {"transformer_layer_config": {"num_hidden_layers": 2, "model_type": "llama"}},
            "a head of 2 layers of llama is not supported; expected one layer of llama",
        ),
        ({"transformer_layer_config": {"hidden_size": 32}}, "a head of 1 layers of qwen3 is not supported"),
    ],
)
def test_unknown_formats_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "speculators", **changes)
    with pytest.raises(ModelError, match=message):
        tiny.load_head(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "authors", pickled=name.endswith("bin"))
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ModelError, match=f"{name}: not a "):
        tiny.load_head(folder, allow_pickle=True)
    if name.endswith("bin"):
        torch.save({"state_dict": {}}, folder / name)
        with pytest.raises(ModelError, match=r"pytorch_model.bin: not a file of tensors; expected tensors by name"):
            tiny.load_head(folder, allow_pickle=True)


def test_the_layers_and_architecture_in_an_authors_config_are_ignored(tmp_path: Path) -> None:
    """Some of their configs give those of the target."""
    made = {"num_hidden_layers": 40, "architectures": ["LlamaForCausalLM"]}
    folder = as_published(tiny.head(tiny.deep(5)), tmp_path / "head", "authors", **made)
    assert is_head(json.loads((folder / "config.json").read_text()))
    assert len(tiny.load_head(folder).layers) == 1


def test_a_head_for_a_target_of_another_shape_is_refused() -> None:
    target, config = tiny.deep(5), EngineConfig(drafter="eagle3")
    refusal = lambda head: str(Eagle3.refusal(target.config, head, config))  # noqa: E731
    assert refusal(Eagle3Config(vocab_size=61, hidden_size=64, target_hidden_size=32)) == (
        "the head has no embedding, and its width of 64 differs from the target's"
    )
    assert refusal(Eagle3Config(aux_layers=[1, 2, 5], vocab_size=61, hidden_size=32)) == (
        "the head asks for the input of layer 5; the target has 5 layers"
    )


def test_a_head_is_not_taken_for_a_draft_model() -> None:
    target, config = tiny.deep(5), EngineConfig(capacity=64)
    assert available(target.config, tiny.head(target).config, config) == ["eagle3", "suffix", "early_exit"]
    assert available(target.config, tiny.clover(target).config, config) == ["clover", "suffix", "early_exit"]
    assert available(target.config, tiny.model().config, config) == ["model", "suffix", "early_exit"]
    with pytest.raises(ValueError, match="the drafter model: the draft is a head for eagle3"):
        Engine(target, tiny.head(target), EngineConfig())
