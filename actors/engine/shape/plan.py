"""The memory plan of an engine before allocation, and the largest pool that fits a budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.lookup import kind
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan, device_memory, layer_sizes, model_memory
from exspec.actors.engine.kv.split import layer_counts, spread
from exspec.actors.engine.layers.packed import is_quantized

SHARE = 0.9  # of the free memory for the plan; libraries need some too


def plan_memory(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
) -> MemoryPlan:
    """The memory of an engine of this shape; on several devices, that of the fullest."""
    return max(device_plans(target, draft, config, dtype), key=lambda plan: plan.total)


def device_plans(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
) -> list[MemoryPlan]:
    """The memory of an engine of this shape, by device. The drafter is on the first."""
    config = replace(spread(target, config), capacity=min(config.capacity, context_length(target)))
    whole = model_memory(target, config, dtype, config.width)
    drafter = kind(config).memory(target, draft, config, dtype)
    if (layers := layer_counts(target)) is None:
        return [whole + drafter]
    first, *others = device_memory(whole, target, layers, dtype)
    return [first + drafter, *others]


def balanced(
    target: PretrainedConfig, draft: PretrainedConfig | None, devices: int, dtype: torch.dtype, capacity: int
) -> tuple[int, ...]:
    """How many layers each device gets, so that the fullest one holds as little as possible, KV included. The draft is
    on the first device. capacity: in tokens.

    Raises ValueError for a target that cannot be split so.
    """
    sizes = layer_sizes(target)
    count = len(sizes)
    if devices > count:
        raise ValueError(f"its {count} layers cannot be split over {devices} devices; expected at most {count}")
    if is_quantized(target) or len(set(sizes)) > 1:
        what = "weights are quantized" if is_quantized(target) else "layers differ in size"
        raise ValueError(f"its {what}; expected a target on one device")
    usual = EngineConfig(method="plain", drafter=NONE, capacity=min(capacity, context_length(target)))
    whole = model_memory(target, usual, dtype, 1)
    first = 0 if draft is None else model_memory(draft, usual, dtype, 1).total

    def splits() -> Iterator[tuple[int, ...]]:
        for own in range(1, count - devices + 2):
            each, more = divmod(count - own, devices - 1)
            yield (own, *[each + (number < more) for number in range(devices - 1)])

    def fullest(layers: tuple[int, ...]) -> int:
        own, *others = (plan.total for plan in device_memory(whole, target, layers, dtype))
        return max(own + first, *others)

    return min(splits(), key=fullest)


def fit(
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    config: EngineConfig,
    dtype: torch.dtype,
    budget: int,
) -> EngineConfig:
    """The config with as many pages as fit `budget` bytes. If less than a quarter of the pages for all its slots fits,
    the window shrinks, and then the batch.

    The capacity stays: a smaller capacity would reject rows. On several devices the budget is that of each. Raises
    ValueError with the smallest sufficient budget.
    """
    config = spread(target, config)

    def needed(candidate: EngineConfig) -> int:
        return plan_memory(target, draft, candidate, dtype).total

    for rows in (config.batch_size, *_powers_below(config.batch_size)):
        low, high = rows, max(rows, config.window)
        shapes = [replace(config, batch_size=rows, window=window, pages=None) for window in range(high, low - 1, -1)]
        for shape in shapes if config.method != "eqspec" else shapes[-1:]:
            fitted = _fitted(shape, budget, needed)
            if fitted is not None:
                return fitted
    least = device_plans(target, draft, replace(config, batch_size=1, window=1, pages=None), dtype)
    smallest = max(plan.total for plan in least)
    devices = f" on each device ({by_device(least)})" if len(least) > 1 else ""
    raise ValueError(
        f"memory: {budget / MEBIBYTE:.1f} MiB are too few for one sequence of {config.capacity} tokens; expected at "
        f"least {smallest / MEBIBYTE:.1f} MiB{devices}, or a smaller capacity"
    )


def by_device(plans: Sequence[MemoryPlan]) -> str:
    """Memory plans as text."""
    if len(plans) == 1:
        return str(plans[0])
    return "; ".join(f"device {number}: {plan}" for number, plan in enumerate(plans))


def _fitted(shape: EngineConfig, budget: int, needed: Callable[[EngineConfig], int]) -> EngineConfig | None:
    """The shape with as many pages as fit, at least a quarter of all; None if a quarter does not fit."""
    if needed(shape) <= budget or shape.method == "eqspec":
        return shape if needed(shape) <= budget else None
    most = shape.page_count
    low, high = max(shape.fewest_pages, most // 4), most
    if needed(replace(shape, pages=low)) > budget:
        return None
    while low < high:  # bisection for the most pages that fit
        middle = (low + high + 1) // 2
        fits = needed(replace(shape, pages=middle)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(shape, pages=low)


@dataclass(frozen=True)
class Models:
    """The models of an engine, and the memory in bytes that it may use on each device; None: no limit."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    budget: int | None = None

    @property
    def draft_config(self) -> PretrainedConfig | None:
        return None if self.draft is None else self.draft.config

    def fitted(self, config: EngineConfig) -> EngineConfig:
        """The config with a window and a batch that fit. Raises ValueError with the smallest sufficient budget."""
        if self.budget is None:
            return spread(self.target.config, config)
        return fit(self.target.config, self.draft_config, config, self.target.dtype, self.budget)

    def memory(self, config: EngineConfig, longest: int) -> int:
        """Bytes of an engine of this shape with pages for rows of `longest` tokens in all slots, weights included. It
        is a budget with which `fitted` keeps the window and the batch."""
        if config.method != "eqspec":
            config = replace(config, pages=None)
            most, least = config.page_count, max(config.fewest_pages, config.page_count // 4)
            needed = config.slots * -(-(longest + config.width) // config.page_size)
            config = replace(config, pages=min(max(needed, least), most))
        return plan_memory(self.target.config, self.draft_config, config, self.target.dtype).total

    def rows(self, config: EngineConfig) -> int:
        """Rows of the largest batch that fits, at most the config's."""
        try:
            return self.fitted(config).batch_size
        except ValueError:
            return 0

    def fit_together(self, configs: list[EngineConfig]) -> bool:
        """Whether engines of all configs fit at once. They share the weights, except packed ones."""
        if self.budget is None:
            return True
        plans = [device_plans(self.target.config, self.draft_config, c, self.target.dtype) for c in configs]
        return all(self._together(of_device, configs) <= self.budget for of_device in zip(*plans, strict=True))

    def _together(self, plans: Sequence[MemoryPlan], configs: Sequence[EngineConfig]) -> int:
        """Bytes of engines on one device."""
        weights = [plan.weights for plan in plans]
        packed = [plan.weights for plan, c in zip(plans, configs, strict=True) if c.packs]
        others = sum(plan.total - plan.weights for plan in plans)
        return others + max(sum(packed), max(weights))


def free_memory(device: torch.device) -> int:
    """Free bytes of the device; on a CPU, the memory that the system reports as available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _powers_below(number: int) -> list[int]:
    return [2**i for i in reversed(range((number - 1).bit_length()))]  # the largest first
