"""The head of DFlash (arXiv:2602.06036): a few layers that draft a whole block in one forward, and its file formats.

The block is [pending token, mask, mask, ...], N tokens at their own positions. Column k predicts the token at its own
position. H is the concatenation of the target's hidden states after a few of its layers, [R, C, F].

    c = hidden_norm(fc(H))                                   the context; the same in every layer
    keys and values = those of [c, norm(x)]                  queries: of norm(x) alone, x being the block's states
    x = x + attention        x = x + mlp(norm(x))            every query sees the context and the whole block
    logits = the target's head of norm(x)

In a causal layer, and with a sliding window, a query sees nothing after its own position.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from exspec.actors.engine.drafters.head import (
    HeadModel,
    check_proposed,
    checked,
    filled,
    read_pickled,
    read_tensors,
    write_speculators,
)

NAME, SLIDING = "dflash", "sliding_attention"
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # the inverse of d2t; copies of the target's
STORED = {"embeds": "embed_tokens.weight", "scores": "lm_head.weight", "masks": "mask_embedding"}
MASK_FILE = "mask_embedding.pt"
SUPPORTED = {  # settings that change what a head computes, and the only value that is supported
    "projector_type": NAME, "sample_from_anchor": False, "shift_label": False, "use_swa": False,
    "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "is_neox_style": True,
    "output_multiplier": 1, "final_logit_softcapping": 0,
}  # fmt: skip
OWN = ("model_type", "architectures", "auto_map", "dflash_config", "tie_word_embeddings", "is_causal", "block_size",
       "draft_vocab_size", "num_target_layers", "target_hidden_size", "input_embedding_scale", "swa_window_size",
       *SUPPORTED)  # fmt: skip


class DFlashConfig(Qwen3Config):
    """aux_layers: the target's layers whose outputs are the features, counted from 1. block_size: columns of a block,
    the pending token's included. mask_token_id: the token in the other columns. embedding_scale: a factor of the
    tokens' embeddings. causal: by layer, whether it is. target_layers: of the target, if it is known. draft_vocab_size:
    how many tokens the head can propose. embeds, scores: whether the head has its own embedding and output head. masks:
    whether it has an embedding of the mask.
    """

    model_type = NAME
    head_for = NAME  # the drafter that uses it

    def __init__(
        self,
        aux_layers: tuple[int, ...] | list[int] = (1,),
        block_size: int = 16,
        mask_token_id: int = 0,
        embedding_scale: float = 1.0,
        causal: list[bool] | None = None,
        target_layers: int | None = None,
        target_hidden_size: int | None = None,
        draft_vocab_size: int | None = None,
        embeds: bool = False,
        scores: bool = False,
        masks: bool = False,
        **qwen3: Any,
    ) -> None:
        super().__init__(**qwen3 | {"tie_word_embeddings": False})
        self.aux_layers, self.block_size, self.mask_token_id = list(aux_layers), block_size, mask_token_id
        self.embedding_scale = embedding_scale
        self.causal = [kind == SLIDING for kind in self.layer_types or []] if causal is None else list(causal)
        self.target_layers, self.target_hidden_size = target_layers, target_hidden_size or self.hidden_size
        self.draft_vocab_size = draft_vocab_size or self.vocab_size
        self.embeds, self.scores, self.masks = embeds, scores, masks


def is_head(values: dict[str, Any]) -> bool:
    """Whether the values of a config.json describe a head of DFlash, in one of its published formats."""
    architectures = values.get("architectures") or []
    return values.get("speculators_model_type") == NAME or "DFlashDraftModel" in architectures


def read_config(values: dict[str, Any], tensors: set[str] | None = None) -> DFlashConfig:
    """The config of a head from the values of its config.json, in the authors' format or that of speculators.

    tensors: the names of the head's tensors. Without them, a head of speculators is assumed to have its own embedding
    and output head. Raises ValueError naming what is not supported.
    """
    nested = "transformer_layer_config" in values
    layers, inner = values.get("transformer_layer_config", values), values.get("dflash_config") or {}
    for key, part in (("transformer_layer_config", layers), ("dflash_config", inner)):
        if not isinstance(part, dict):
            raise ValueError(f"config.json: {key} is {part!r}; expected settings by name")
    found = {key: value for key, value in (values | inner).items() if value is not None}
    for key, harmless in SUPPORTED.items():
        if found.get(key, harmless) != harmless:
            raise ValueError(f"config.json: {key} is {found[key]!r}; expected {harmless!r}, the only supported value")
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"layers of {layers['model_type']} are not supported; expected those of qwen3")
    key, first = ("aux_hidden_state_layer_ids", 1) if nested else ("target_layer_ids", 0)
    ids = found.get(key)
    if not isinstance(ids, list) or not ids or not all(type(n) is int and n >= first for n in ids):
        raise ValueError(f"config.json: {key} is {ids!r}; expected numbers of the target's layers, from {first} on")
    size, mask, vocabulary = found.get("block_size"), found.get("mask_token_id"), layers.get("vocab_size")
    if type(vocabulary) is not int:
        raise ValueError(f"config.json: vocab_size is {vocabulary!r}; expected the target's number of tokens")
    if type(size) is not int or size < 2:
        raise ValueError(f"config.json: block_size is {size!r}; expected the length of a block, at least 2")
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ValueError(f"config.json: mask_token_id is {mask!r}; expected one of the {vocabulary} tokens")
    own = {"embeds": nested, "scores": nested}
    if tensors is not None:
        own = {setting: name in tensors for setting, name in STORED.items()}
    sliding = [kind == SLIDING for kind in layers.get("layer_types") or []]
    causal = found.get("is_causal", found.get("causal"))  # of all layers
    if any(sliding) and (causal is False or found.get("sliding_window_non_causal")):
        raise ValueError("sliding layers that are not causal are not supported")
    settings = {key: value for key, value in layers.items() if key not in OWN} | own
    if any(sliding):
        settings["use_sliding_window"] = True
        settings["sliding_window"] = found.get("swa_window_size", layers.get("sliding_window"))
    settings |= {
        "aux_layers": [n + 1 - first for n in ids],  # only speculators counts them from 1
        "block_size": size,
        "mask_token_id": mask,
        "embedding_scale": found.get("input_embedding_scale", 1.0),
        "causal": None if causal is None else [causal] * layers.get("num_hidden_layers", 0),
        "target_layers": found.get("num_target_layers"),
        "target_hidden_size": found.get("target_hidden_size"),
        "draft_vocab_size": found.get("draft_vocab_size"),
    }
    return checked(DFlashConfig, DFlashHead, settings)


class DFlashAttention(Qwen3Attention):
    """Attention of a block's columns. It stores keys and values of the context and of the block."""

    def __init__(self, config: DFlashConfig, number: int) -> None:
        super().__init__(config, number)
        self.causal = config.causal[number]

    def forward(  # type: ignore[override]
        self, hidden: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], cache: Any
    ) -> Tensor | None:
        """hidden, result: [R, N, D]; None for an empty block. context: [R, C, D]. turns, tables: see `DFlashHead`."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for both in (torch.cat([context, hidden], dim=1),)
            for project, x in ((self.q_proj, hidden), (self.k_proj, both), (self.v_proj, both))
        )
        key, value = cache.update(rotated(self.k_norm(key), *turns), value, self.layer_idx)
        if not query.shape[2]:
            return None
        query = rotated(self.q_norm(query), *(turn[:, context.shape[1] :] for turn in turns))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        options = {"scaling": self.scaling, "sliding_window": self.sliding_window}
        if self.causal:
            mixed = attend(self, query, key, value, tables[0], **options)[0]
        else:  # all columns stand at the last position of the block, as more heads of one column
            heads = query.shape[1:3]
            mixed = attend(self, query.flatten(1, 2)[:, :, None], key, value, tables[1], **options)[0]
            mixed = mixed.unflatten(2, heads)[:, 0].transpose(1, 2)
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]


class DFlashLayer(nn.Module):
    """A layer of the head."""

    def __init__(self, config: DFlashConfig, number: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = DFlashAttention(config, number), Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = norm(config), norm(config)

    def forward(self, hidden: Tensor, *attention: Any) -> Tensor:
        """hidden, result: [R, N, D]."""
        mixed = self.self_attn(self.input_layernorm(hidden), *attention)
        if mixed is None:
            return hidden
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class DFlashHead(HeadModel):
    """A causal language model whose forward also takes features and returns the last states [R, N, D] in place of
    logits. It only runs over pages. A head without an embedding or an output head uses the target's."""

    config: DFlashConfig
    config_class = DFlashConfig
    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, wide = config.hidden_size, len(config.aux_layers) * config.target_hidden_size
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, size) if config.embeds else None
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if config.masks else None
        self.fc = nn.Linear(wide, size, bias=False)
        self.hidden_norm, self.norm = norm(config), norm(config)
        self.layers = nn.ModuleList([DFlashLayer(config, n) for n in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.scores else None
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        few = config.draft_vocab_size != config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if few else None)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: Any,
        **_: Any,
    ) -> CausalLMOutput:
        """input_ids: [R, C + N]; the tokens of the first C columns, which are the context, are not read. features: the
        target's hidden states at the context's positions, [R, C, F]. attention_mask: a page table."""
        count = features.shape[1]
        context, hidden = self.hidden_norm(self.fc(features)), self.embedded(input_ids[:, count:])
        turns = self.rotary_emb(context, position_ids)
        tables = block_tables(attention_mask, count, hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, context, turns, tables, past_key_values)
        return CausalLMOutput(logits=self.norm(hidden))

    def embedded(self, block: Tensor) -> Tensor:
        """The states [R, N, D] before the first layer. block: [R, N]."""
        hidden: Tensor = self.embed_tokens(block) * self.config.embedding_scale
        if self.mask_embedding is None:
            return hidden
        return torch.where(torch.arange(block.shape[1], device=block.device)[:, None] > 0, self.mask_embedding, hidden)


AutoConfig.register(NAME, DFlashConfig)
AutoModelForCausalLM.register(DFlashConfig, DFlashHead)


def norm(config: DFlashConfig) -> nn.Module:
    """One of the head's norms."""
    layer: nn.Module = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    return layer


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [R, H, Q, D] turned by the factors [R, Q, D] of their positions."""
    turned: Tensor = x * cos[:, None] + rotate_half(x) * sin[:, None]
    return turned


def block_tables(table: Tensor, before: int, width: int) -> tuple[Tensor, Tensor]:
    """Page tables for the block's columns: one for a causal layer, and one for columns that all stand at the position
    of the last one. table: of a forward of `before` columns of context and the `width` columns of the block."""
    start, end, pages = table[..., :1], table[..., 1:2], table[..., 2:]
    last = torch.minimum(start + before + width, end) - 1  # at the capacity the block ends early
    return torch.cat([start + before, end, pages], dim=-1), torch.cat([last, end, pages], dim=-1)


def load_head(
    folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu", *, allow_pickle: bool = False
) -> DFlashHead:
    """Load the head of a folder with config.json and model.safetensors, or pytorch_model.bin if pickle is allowed. Only
    then an embedding of the mask is loaded, too.

    Raises ValueError naming the file, and the tensor that is missing, unknown or of another shape.
    """
    tensors = {name: t for name, t in read_tensors(folder, allow_pickle).items() if name not in IGNORED}
    mask = folder / MASK_FILE
    names = {*tensors, STORED["masks"]} if mask.exists() else set(tensors)
    config = read_config(json.loads((folder / "config.json").read_text()), names)
    if mask.exists():
        tensors[STORED["masks"]] = read_mask(mask, config.mask_token_id, allow_pickle)
    if config.draft_vocab_size == config.vocab_size:
        tensors.pop("d2t", None)
    head = filled(DFlashHead(config), tensors, folder, "a head of DFlash", dtype, device)
    if head.d2t is not None:
        check_proposed(head.d2t, config.vocab_size, folder)
    return head


def read_mask(file: Path, token: int, allow_pickle: bool) -> Tensor:
    """The embedding [D] of the mask token, from a pickled file. Raises ValueError naming the file."""
    if not allow_pickle:
        raise ValueError(f"{file}: the embedding of the mask is not safetensors; expected allow_pickle: true")
    found = read_pickled(file)
    if isinstance(found, dict):
        if (other := found.get("mask_token_id")) not in (None, token):
            raise ValueError(f"{file}: the embedding of token {other!r}; expected that of token {token}")
        found = found.get("embedding")
    if not isinstance(found, Tensor):
        raise ValueError(f"{file}: expected a tensor, or one named embedding")
    return found.flatten()


def write_head(head: DFlashHead, target: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a head in the format of speculators."""
    config = head.config
    values = {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": config.aux_layers,
        "num_target_layers": config.target_layers,
        "input_embedding_scale": config.embedding_scale,
    }
    write_speculators(folder, NAME, "qwen3", head, target, config.block_size - 1, values, dtype)
