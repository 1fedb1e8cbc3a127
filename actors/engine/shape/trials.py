"""Trials that choose the settings that all shapes share: kernels and prefill."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.layers.programs import CODE, OutOfTimeError
from exspec.actors.engine.methods import resolve
from exspec.actors.engine.request import Request
from exspec.actors.engine.shape.candidates import TO_COMPILED, TRIED, device_kind, prefill_shapes
from exspec.actors.engine.shape.costs import Costs
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import Models


class Trials:
    """Times forwards of the settings to choose from. Parameters: see `Costs`.

    Settings that would make the batch smaller are left out, and so are those that the time does not suffice for.
    """

    def __init__(
        self,
        models: Models,
        requests: Sequence[Request],
        longest: int,
        kept: Kept | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.models, self.requests, self.longest, self.kept, self.deadline = models, requests, longest, kept, deadline

    def choose(self, config: EngineConfig, free: Sequence[str]) -> EngineConfig:
        """The config with the fastest of the kernels that are tried first on the device, and the fastest prefill. free:
        which of the two may change."""
        if "kernels" in free:
            config = self._kernels([replace(config, kernels=name) for name in TRIED[device_kind(self.models)]])
        if "prefill" in free:
            config = self._fastest(self._fitting(prefill_shapes(self.models, config), config), self._prefill)
        return config

    def compiled(self, config: EngineConfig) -> EngineConfig:
        """The config with compiled kernels where they are faster. They are tried last, because each shape takes seconds
        to compile."""
        if config.kernels not in TO_COMPILED:
            return config
        return self._kernels([config, replace(config, kernels=TO_COMPILED[config.kernels])])

    def _prefill(self, costs: Costs) -> float:
        """Seconds to prefill the requests' prompts together."""
        return costs.prefill(costs.config, *(len(request.prompt) for request in self.requests))

    def _kernels(self, shapes: list[EngineConfig]) -> EngineConfig:
        middle = self.longest // 2 + 1
        return self._fastest(self._fitting(shapes, shapes[0]), lambda costs: costs.round(costs.config, middle))

    def _fitting(self, shapes: list[EngineConfig], like: EngineConfig) -> list[EngineConfig]:
        rows = self.models.rows(like)
        return [shape for shape in shapes if self.models.rows(shape) >= rows] or [like]

    def _fastest(self, shapes: list[EngineConfig], seconds: Callable[[Costs], float]) -> EngineConfig:
        """The fastest of the shapes that work here; of equally fast ones, the first."""
        timed: list[tuple[float, EngineConfig]] = []
        for shape in shapes if len(shapes) > 1 else []:
            costs = Costs(self.models, self.requests, self.longest, shape, self.kept, self.deadline)
            with suppress(torch.OutOfMemoryError, OutOfTimeError), CODE.until(self.deadline):
                if resolve(self.models.target, self.models.draft, shape).kernels == shape.kernels:
                    timed.append((seconds(costs), shape))
            costs.forget()
        return min(timed, key=lambda pair: pair[0])[1] if timed else shapes[0]
