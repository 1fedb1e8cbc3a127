"""The head of EAGLE-3 (arXiv:2503.01840): one decoder layer over features of the target, and the formats it comes in.

For a token and the feature of the token before it, both [R, Q, D]:

    e, h = norm(embedding), norm(feature)      residual = h if norm_before_residual else feature
    a = residual + attention([e, h])           y = a + mlp(norm(a))

The logits are the head's over norm(y), and y is the feature of the next token where the target has none yet.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from exspec.actors.engine.drafters.head import checked, filled, read_tensors

NAME = "eagle3"
AUTHORS, OURS = "midlayer.", "layers.0."  # what the tensors of the layer are called; speculators' are as ours
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # tells what d2t tells; the target's own
UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")  # of later formats, which change the forward


class Eagle3Config(LlamaConfig):
    """aux_layers: layers of the target whose inputs are the features, counted from 0. draft_vocab_size: tokens that it
    can propose. target_hidden_size: width of a feature of one layer. embeds: whether it has an embedding of its own."""

    model_type = NAME
    head_for = NAME  # the drafter

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


def read_config(found: dict[str, Any], tensors: set[str] | None = None) -> Eagle3Config:
    """The config of a head, of its config.json as the authors or speculators write it, and the names of its tensors:
    without them it has an embedding of its own where it cannot do without.

    Raises ValueError naming what is not supported.
    """
    llama = dict(found.get("transformer_layer_config") or found)
    aux_layers = found.get("eagle_aux_hidden_state_layer_ids")
    aux_layers = aux_layers or (found.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if later := [key for key in UNSUPPORTED if found.get(key)]:
        raise ValueError(f"{later[0]}: {found[later[0]]} is not supported; expected a head without it")
    layers = llama.get("num_hidden_layers", 1)
    kind = llama.get("model_type", "llama" if "transformer_layer_config" not in found else "qwen3")
    # The authors' have one layer, whatever number was left in what they were made of.
    if kind != "llama" or (layers != 1 and "transformer_layer_config" in found):
        raise ValueError(f"a head of {layers} layers of {kind} is not supported; expected one layer of llama")
    own = ("model_type", "architectures", "num_hidden_layers", "tie_word_embeddings", "eagle_config", "auto_map")
    heads = ("draft_vocab_size", "target_hidden_size", "norm_before_residual")
    settings = {key: value for key, value in llama.items() if key not in (*own, *heads)}
    settings |= {key: found[key] for key in heads if found.get(key) is not None}
    embeds = found.get("target_hidden_size") not in (None, llama.get("hidden_size"))
    if tensors is not None:
        embeds = "embed_tokens.weight" in tensors
    return checked(Eagle3Config, Eagle3Head, {"aux_layers": aux_layers, "embeds": embeds, **settings})


def norm(config: Eagle3Config) -> nn.Module:
    """One of the head's norms."""
    made: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    return made


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention sees the embedding beside the feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.before = config.norm_before_residual
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
        residual = normed if self.before else feature
        mixed, _ = self.self_attn(torch.cat([self.input_layernorm(embedding), normed], dim=-1), **attention)
        hidden = residual + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Head(PreTrainedModel):
    """As a causal language model whose forward takes features [R, Q, D] too. Its logits are over the target's
    vocabulary: what it cannot propose has the least."""

    config: Eagle3Config
    d2t: Tensor
    config_class = Eagle3Config
    _supports_attention_backend = True
    _supports_sdpa = True

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

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> Any:
        return self.lm_head

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
        """features: of the tokens before input_ids [R, Q], through `fc` where they are the target's."""
        embedding = self.embed_tokens(input_ids)
        hidden = self.layers[0](
            features,
            embedding,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=self.rotary_emb(embedding, position_ids),
        )
        return CausalLMOutput(logits=self.widened(self.lm_head(self.norm(hidden[:, -logits_to_keep:]))))

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [..., V] of those of the tokens that can be proposed [..., V']."""
        size, own = self.config.vocab_size, logits.shape[-1]
        if own == size:
            return logits
        wide = logits.new_full((*logits.shape[:-1], size), torch.finfo(logits.dtype).min)
        return wide.index_copy_(-1, torch.arange(own, device=logits.device) + self.d2t, logits)


AutoConfig.register(NAME, Eagle3Config)
AutoModelForCausalLM.register(Eagle3Config, Eagle3Head)


def is_head(found: dict[str, Any]) -> bool:
    """Whether a config.json is that of a head of EAGLE-3, in one of the formats that it is published in."""
    named = [str(name).lower() for name in found.get("architectures") or []]
    told = found.get("speculators_model_type") == NAME or any(NAME in name for name in named)
    return told or "draft_vocab_size" in found  # of the authors' own, some name the architecture Llama


def load_head(
    folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu", *, allow_pickle: bool = False
) -> Eagle3Head:
    """The head in a folder: config.json beside model.safetensors or, if that is allowed, pytorch_model.bin.

    Raises ValueError naming the file, and the tensor that is missing, not known or of another shape.
    """
    tensors = read_tensors(folder, allow_pickle)
    config = read_config(json.loads((folder / "config.json").read_text()), set(tensors))
    head = Eagle3Head(config)
    found = {name.replace(AUTHORS, OURS): tensor for name, tensor in tensors.items() if name not in IGNORED}
    if config.draft_vocab_size == config.vocab_size:
        found.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    filled(head, found, folder, "a head of EAGLE-3", dtype, device)
    proposed = found["d2t"] + torch.arange(len(found["d2t"]))
    if not ((proposed >= 0) & (proposed < config.vocab_size)).all():
        raise ValueError(f"{folder}: d2t leads out of the vocabulary of {config.vocab_size} tokens")
    return head
