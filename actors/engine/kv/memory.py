"""What a model with its KV takes in memory, before it is made."""

import json
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.kv.cached_model import kv_shape

MEBIBYTE = 2**20
LOGIT = 40  # bytes: for a sampled token they are scaled in float32, and their noise is made in 32 bits


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. weights: of all models, as the engine holds them. kv: of all pages, to the byte, and for eqspec the most
    that it can grow to. logits, activations: the most that any forward holds at once. host: what a drafter remembers,
    on the host; as if it were on the device.
    """

    weights: int = 0
    kv: int = 0
    logits: int = 0
    activations: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.logits + self.activations + self.host

    def __add__(self, other: "MemoryPlan") -> "MemoryPlan":
        """Of both together, of which one computes at a time."""
        return MemoryPlan(
            self.weights + other.weights,
            self.kv + other.kv,
            max(self.logits, other.logits),
            max(self.activations, other.activations),
            self.host + other.host,
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / MEBIBYTE:.1f}" for name, value in vars(self).items() if value)
        return f"{self.total / MEBIBYTE:.1f} MiB ({parts})"


def model_memory(model: PretrainedConfig, config: EngineConfig, dtype: torch.dtype, columns: int) -> MemoryPlan:
    """Of a model with the KV of the engine's slots, whose forwards give the logits of `columns` columns a row."""
    return MemoryPlan(
        weights=_weights(model.to_json_string(), config.kernels == "packed") * dtype.itemsize,
        kv=_kv(model, config) * dtype.itemsize,
        logits=int(config.batch_size * columns * model.get_text_config().vocab_size * LOGIT),
        activations=_activations(model, config) * dtype.itemsize,
    )


def states_memory(config: EngineConfig, width: int, dtype: torch.dtype) -> MemoryPlan:
    """Of hidden states of so many numbers a token, remembered in the engine's pages."""
    return MemoryPlan(kv=_columns(config) * width * dtype.itemsize)


def _columns(config: EngineConfig) -> int:
    """Tokens that pages hold, the bin's among them."""
    return (config.page_count + 1) * config.page_size


@lru_cache(maxsize=8)
def _weights(config: str, packed: bool) -> int:
    """Numbers in a model's weights, from its configuration as JSON."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    held = sum(t.numel() for t in model.parameters()) + sum(t.numel() for t in model.buffers())
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    return int(held + (linear if packed else 0))


def _kv(model: PretrainedConfig, config: EngineConfig) -> int:
    layers, heads, head_size = kv_shape(model)
    # Pages and the bin; or, for eqspec, rows that may run up to a verify width past the longest, and one layer twice
    # while it is moved.
    columns = _columns(config)
    if config.method == "eqspec":
        columns = config.batch_size * (config.capacity + config.width) * (layers + 1) // layers
    return 2 * layers * heads * columns * head_size


def _activations(model: PretrainedConfig, config: EngineConfig) -> int:
    """Of one layer at its widest: hidden states, the feed-forward's middle, attention's scores, and the group's KV,
    which is gathered from its slots."""
    text = model.get_text_config()
    _, heads, head_size = kv_shape(model)
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    widest = 0
    for rows, columns in ((config.batch_size, config.width), (config.prefill_rows, config.prefill_columns)):
        states = rows * columns * (8 * text.hidden_size + 3 * width)
        scores = 3 * rows * columns * config.capacity * text.num_attention_heads
        gathered = 2 * rows * heads * config.capacity * head_size
        widest = max(widest, states + scores + gathered)
    return int(widest)
