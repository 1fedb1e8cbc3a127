"""The head of EAGLE-3 (arXiv:2503.01840): one decoder layer over features of the target, and its file formats.

For a token's embedding and the feature of the token before it, both [R, Q, D]:

    e, h = norm(embedding), norm(feature)      residual = h if norm_before_residual else feature
    a = residual + attention([e, h])           y = a + mlp(norm(a))

The logits are lm_head(norm(y)). y replaces the feature that the next token needs, where the target has none yet.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from exspec.actors.engine.drafters.head import (
    HeadModel,
    check_proposed,
    checked,
    filled,
    read_tensors,
    widened,
    write_speculators,
)

NAME = "eagle3"
AUTHORS, OURS = "midlayer.", "layers.0."  # prefixes of the layer's tensors; speculators uses ours
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # the inverse of d2t; copies of the target's
UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")  # settings of later formats that change the forward


class Eagle3Config(LlamaConfig):
    """aux_layers: the target's layers whose inputs are the features, counted from 0. draft_vocab_size: how many tokens
    the head can propose. target_hidden_size: width of the feature of one layer. embeds: whether the head has its own
    embedding."""

    model_type = NAME
    head_for = NAME  # the drafter that uses it

    def __init__(
        self,
        aux_layers: tuple[int, ...] | list[int] | None = None,
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        norm_before_residual: bool = False,
        embeds: bool = False,
        **llama: Any,
    ) -> None:
        super().__init__(**llama | {"num_hidden_layers": 1, "tie_word_embeddings": False})
        self.aux_layers = None if aux_layers is None else list(aux_layers)
        self.draft_vocab_size = draft_vocab_size or self.vocab_size
        self.target_hidden_size = target_hidden_size or self.hidden_size
        self.norm_before_residual, self.embeds = norm_before_residual, embeds


def read_config(values: dict[str, Any], tensors: set[str] | None = None) -> Eagle3Config:
    """The config of a head from the values of its config.json, in the authors' format or that of speculators.

    tensors: the names of the head's tensors. Without them, the head is assumed to have its own embedding only if its
    width differs from the target's. Raises ValueError naming what is not supported.
    """
    nested = "transformer_layer_config" in values  # the format of speculators
    llama = dict(values.get("transformer_layer_config") or values)
    aux_layers = values.get("eagle_aux_hidden_state_layer_ids")
    aux_layers = aux_layers or (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if later := [key for key in UNSUPPORTED if values.get(key)]:
        raise ValueError(f"{later[0]}: {values[later[0]]} is not supported; expected a head without it")
    layers = llama.get("num_hidden_layers", 1)
    kind = llama.get("model_type", "qwen3" if nested else "llama")
    # A head in the authors' format has one layer, even if its config still has the number of another model.
    if kind != "llama" or (layers != 1 and nested):
        raise ValueError(f"a head of {layers} layers of {kind} is not supported; expected one layer of llama")
    own = ("model_type", "architectures", "num_hidden_layers", "tie_word_embeddings", "eagle_config", "auto_map")
    heads = ("draft_vocab_size", "target_hidden_size", "norm_before_residual")
    settings = {key: value for key, value in llama.items() if key not in (*own, *heads)}
    settings |= {key: values[key] for key in heads if values.get(key) is not None}
    embeds = values.get("target_hidden_size") not in (None, llama.get("hidden_size"))
    if tensors is not None:
        embeds = "embed_tokens.weight" in tensors
    return checked(Eagle3Config, Eagle3Head, {"aux_layers": aux_layers, "embeds": embeds, **settings})


def norm(config: Eagle3Config) -> nn.Module:
    """One of the head's norms."""
    layer: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    return layer


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention takes the embedding and the feature side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (norm(config) for _ in range(3))

    def forward(self, feature: Tensor, embedding: Tensor, **attention: Any) -> Tensor:
        """feature, embedding, result: [R, Q, D]."""
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        mixed, _ = self.self_attn(torch.cat([self.input_layernorm(embedding), normed], dim=-1), **attention)
        hidden = residual + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Head(HeadModel):
    """A causal language model whose forward also takes features [R, Q, D]. Its logits cover the target's vocabulary:
    tokens that the head cannot propose have the lowest logit."""

    config: Eagle3Config
    d2t: Tensor
    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        wide = len(config.aux_layers or (0, 0, 0)) * config.target_hidden_size
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, config.hidden_size) if config.embeds else None
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """features: of the tokens before input_ids [R, Q]; features of the target have already gone through `fc`."""
        embedding = self.embed_tokens(input_ids)
        hidden = self.layers[0](
            features,
            embedding,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=self.rotary_emb(embedding, position_ids),
        )
        logits = self.lm_head(self.norm(hidden[:, -logits_to_keep:]))
        return CausalLMOutput(logits=widened(logits, self.d2t, self.config.vocab_size))


AutoConfig.register(NAME, Eagle3Config)
AutoModelForCausalLM.register(Eagle3Config, Eagle3Head)


def is_head(values: dict[str, Any]) -> bool:
    """Whether the values of a config.json describe a head of EAGLE-3, in one of its published formats."""
    architectures = [str(name).lower() for name in values.get("architectures") or []]
    named = values.get("speculators_model_type") == NAME or any(NAME in name for name in architectures)
    other = "speculators_model_type" in values or "dflash_config" in values
    return named or ("draft_vocab_size" in values and not other)  # some of the authors' name the architecture Llama


def load_head(
    folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu", *, allow_pickle: bool = False
) -> Eagle3Head:
    """Load the head of a folder with config.json and model.safetensors, or pytorch_model.bin if pickle is allowed.

    Raises ValueError naming the file, and the tensor that is missing, unknown or of another shape.
    """
    tensors = read_tensors(folder, allow_pickle)
    config = read_config(json.loads((folder / "config.json").read_text()), set(tensors))
    head = Eagle3Head(config)
    weights = {name.replace(AUTHORS, OURS): tensor for name, tensor in tensors.items() if name not in IGNORED}
    if config.draft_vocab_size == config.vocab_size:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    filled(head, weights, folder, "a head of EAGLE-3", dtype, device)
    check_proposed(weights["d2t"], config.vocab_size, folder)
    return head


def write_head(head: Eagle3Head, target: PreTrainedModel, folder: Path, dtype: torch.dtype, drafts: int) -> None:
    """Write a head in the format of speculators. drafts: K that it was trained for."""
    config = head.config
    values = {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": config.aux_layers,
    }
    write_speculators(folder, NAME, "llama", head, target, drafts, values, dtype)
