"""Estimates of the memory of a model and its KV, before they are allocated."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.kv.cached_model import kv_shape
from exspec.actors.engine.kv.window import ring_pages
from exspec.actors.engine.layers.spans import layers_of

MEBIBYTE = 2**20
# Attributes of a configuration: bytes of quantized weights, and of adapters that rows have.
LOADED, ADAPTERS = "loaded_bytes", "adapter_bytes"
LOGIT = 40  # bytes of a logit while a token is sampled: its copies in float32, and its noise


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes. weights: of all models, as the engine holds them. kv: of all pages, exactly; for eqspec the most
    that it can grow to. logits, activations: the most that any forward holds at once. host: what a drafter remembers on
    the host; `total` includes it.
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
        """The memory of both together if only one of them computes at a time."""
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


def model_memory(
    model: PretrainedConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    columns: int,
    window: int | None = None,
    widest: int | None = None,
) -> MemoryPlan:
    """The memory of a model with KV in the engine's slots. columns: per row, those whose logits a forward computes.
    window: tokens that its KV is limited to. widest: columns of its widest forward; default: of the target's."""
    weights = getattr(model, LOADED, None) or _weights(model, config.packs, config.embeds) * dtype.itemsize
    text = model.get_text_config()
    return MemoryPlan(
        weights=weights + getattr(model, ADAPTERS, 0) * (2 if config.packs else 1),
        kv=_kv(model, config, window, widest) * dtype.itemsize,
        logits=int(config.batch_size * columns * (text.hidden_size if config.embeds else text.vocab_size) * LOGIT),
        activations=_activations(model, config) * dtype.itemsize,
    )


def device_memory(
    plan: MemoryPlan, model: PretrainedConfig, layers: Sequence[int], dtype: torch.dtype
) -> list[MemoryPlan]:
    """A model's memory by device. plan: of the whole model. layers: how many layers each device has. The first device
    also has what is no layer."""
    count, inside = sum(layers), sum(layer_sizes(model)) * dtype.itemsize + getattr(model, ADAPTERS, 0)
    weights = [inside * n // count for n in layers]
    weights[0] += plan.weights - inside
    return [
        MemoryPlan(own, plan.kv * n // count, 0 if number else plan.logits, plan.activations)
        for number, (n, own) in enumerate(zip(layers, weights, strict=True))
    ]


def states_memory(config: EngineConfig, width: int, dtype: torch.dtype, window: int | None = None) -> MemoryPlan:
    """The memory of hidden states of `width` numbers per token, kept in pages as KV is."""
    return MemoryPlan(kv=_columns(config, window) * width * dtype.itemsize)


def _columns(config: EngineConfig, window: int | None, widest: int | None = None) -> int:
    """Tokens that all pages hold, including the bin."""
    pages = config.page_count
    if window is not None:
        pages = config.slots * ring_pages(window, widest or config.widest, config.page_size)
    return (pages + 1) * config.page_size


def _weights(model: PretrainedConfig, packed: bool, headless: bool) -> int:
    """How many numbers a model's weights have. headless: without the output head."""
    held, linear, _ = _sizes(model.to_json_string(), headless)
    return held + (linear if packed else 0)


def layer_sizes(model: PretrainedConfig) -> list[int]:
    """How many numbers the weights of each layer have."""
    return _sizes(model.to_json_string())[2]


@lru_cache(maxsize=8)
def _sizes(config: str, headless: bool = False) -> tuple[int, int, list[int]]:
    """How many numbers the weights of a model have, of its linear layers, and of each of its layers, given its
    configuration as JSON."""
    with torch.device("meta"):
        kind: Any = AutoModel if headless else AutoModelForCausalLM
        model = kind.from_config(AutoConfig.for_model(**json.loads(config)))
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    return _held(model), linear, [_held(layer) for layer in layers_of(model)]


def _held(module: nn.Module) -> int:
    return sum(t.numel() for t in (*module.parameters(), *module.buffers()))


def _kv(model: PretrainedConfig, config: EngineConfig, window: int | None, widest: int | None) -> int:
    layers, heads, head_size = kv_shape(model)
    columns = _columns(config, window, widest)
    if config.method == "eqspec":  # rows reach up to a verify width past the capacity; a layer is copied to realign it
        columns = config.batch_size * (config.capacity + config.width) * (layers + 1) // layers
    return 2 * layers * heads * columns * head_size


def _activations(model: PretrainedConfig, config: EngineConfig) -> int:
    """How many numbers a layer holds at most: hidden and feed-forward states, attention's scores, the gathered KV."""
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
