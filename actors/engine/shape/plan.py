"""What an engine will allocate, before it does; and the largest pool that fits a budget."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters import kind
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan, model_memory


def plan_memory(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
) -> MemoryPlan:
    """The memory of an engine of this shape."""
    config = replace(config, capacity=min(config.capacity, context_length(target)))
    return model_memory(target, config, dtype, config.width) + kind(config).memory(target, draft, config, dtype)


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


def _powers_below(number: int) -> list[int]:
    """Powers of two below the number, from the largest down."""
    return [2**i for i in reversed(range((number - 1).bit_length()))]
