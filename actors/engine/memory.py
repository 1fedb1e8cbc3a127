"""What an engine will allocate, before it does; and the largest pool that fits a budget."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from exspec.actors.engine.cached_model import context_length, kv_shape
from exspec.actors.engine.config import EngineConfig

MEBIBYTE = 2**20
LOGIT = 40  # bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device. weights: of both models, as the engine holds them. kv: of all pages, to the byte, and for
    eqspec the most that it can grow to. logits, activations: the most that any forward holds at once.
    """

    weights: int
    kv: int
    logits: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.logits + self.activations

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / MEBIBYTE:.1f}" for name, value in vars(self).items())
        return f"{self.total / MEBIBYTE:.1f} MiB ({parts})"


def plan_memory(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
) -> MemoryPlan:
    """The memory of an engine of this shape."""
    models = [target, draft] if draft is not None and config.drafts else [target]
    capacity = min(config.capacity, context_length(target))
    size = dtype.itemsize
    return MemoryPlan(
        weights=sum(_weights(m.to_json_string(), config.kernels == "packed") for m in models) * size,
        kv=sum(_kv(m, config, capacity) for m in models) * size,
        logits=max(_logits(m, config, i) for i, m in enumerate(models)),
        activations=max(_activations(m, config, capacity) for m in models) * size,
    )


def fit(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
    budget: int,
) -> EngineConfig:
    """The config whose plan fits `budget` bytes, with as many pages as do; where not even a quarter of what its slots
    could hold does, with a smaller window, and then a smaller batch.

    The capacity stays: a smaller one would refuse rows. Raises ValueError with the smallest budget that would do.
    """

    def needed(candidate: EngineConfig) -> int:
        return plan_memory(target, draft, candidate, dtype).total

    for rows in (config.batch_size, *_powers_below(config.batch_size)):
        low, high = rows, max(rows, config.window)
        shapes = [replace(config, batch_size=rows, window=window, pages=None) for window in range(high, low - 1, -1)]
        for shape in shapes if config.method != "eqspec" else shapes[-1:]:
            found = _fitted(shape, budget, needed)
            if found is not None:
                return found
    smallest = needed(replace(config, batch_size=1, window=1, pages=None))
    raise ValueError(
        f"memory: {budget / MEBIBYTE:.1f} MiB are too few for one sequence of {config.capacity} tokens; expected at "
        f"least {smallest / MEBIBYTE:.1f} MiB, or a smaller capacity"
    )


def _fitted(shape: EngineConfig, budget: int, needed: Callable[[EngineConfig], int]) -> EngineConfig | None:
    """The shape with as many pages as fit, a quarter of all at least; None where those do not."""
    if needed(shape) <= budget or shape.method == "eqspec":
        return shape if needed(shape) <= budget else None
    most = shape.page_count
    low, high = max(shape.fewest_pages, most // 4), most
    if needed(replace(shape, pages=low)) > budget:
        return None
    while low < high:  # pages cost the same each, so the most that fit are found by halving
        middle = (low + high + 1) // 2
        fits = needed(replace(shape, pages=middle)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(shape, pages=low)


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free now; on a CPU, what the system counts as available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


@lru_cache(maxsize=8)
def _weights(config: str, packed: bool) -> int:
    """Numbers in a model's weights, from its configuration as JSON."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    held = sum(t.numel() for t in model.parameters()) + sum(t.numel() for t in model.buffers())
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    return int(held + (linear if packed else 0))


def _kv(model: PretrainedConfig, config: EngineConfig, capacity: int) -> int:
    layers, heads, head_size = kv_shape(model)
    # Pages and the bin; or, for eqspec, rows that may run up to a verify width past the longest, and one layer twice
    # while it is moved.
    columns = (replace(config, capacity=capacity).page_count + 1) * config.page_size
    if config.method == "eqspec":
        columns = config.batch_size * (capacity + config.width) * (layers + 1) // layers
    return 2 * layers * heads * columns * head_size


def _logits(model: PretrainedConfig, config: EngineConfig, place: int) -> int:
    """Of verify for the target (the first model), of a draft step of two columns for the draft, 40 bytes each: for a
    sampled token they are scaled in float32, and their noise is made in 32 bits: more than is held."""
    vocabulary = model.get_text_config().vocab_size
    columns = config.batch_size * (config.width if place == 0 else 2)
    return int(columns * vocabulary * LOGIT)


def _activations(model: PretrainedConfig, config: EngineConfig, capacity: int) -> int:
    """Of one layer at its widest: hidden states, the feed-forward's middle, attention's scores, and the group's KV,
    which is gathered from its slots."""
    text = model.get_text_config()
    _, heads, head_size = kv_shape(model)
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    widest = 0
    for rows, columns in ((config.batch_size, config.width), (config.prefill_rows, config.prefill_columns)):
        states = rows * columns * (8 * text.hidden_size + 3 * width)
        scores = 3 * rows * columns * capacity * text.num_attention_heads
        gathered = 2 * rows * heads * capacity * head_size
        widest = max(widest, states + scores + gathered)
    return int(widest)


def _powers_below(number: int) -> list[int]:
    """Powers of two below the number, from the largest down."""
    return [2**i for i in reversed(range((number - 1).bit_length()))]
