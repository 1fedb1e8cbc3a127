"""Running an engine against the clock."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from exspec.actors.engine import Completion, Engine, EngineStatistics, Request, SequenceStatistics
from exspec.actors.engine.layers.programs import OutOfTimeError
from exspec.actors.engine.statistics import EngineCounters

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One timed run: completions in the order of the prompts, seconds, and what an engine counted."""

    tokens: list[list[int]]
    seconds: float
    sequences: SequenceStatistics = field(default_factory=SequenceStatistics)
    engine: EngineStatistics = field(default_factory=EngineStatistics)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def decode(engine: Engine, requests: Iterable[Request], deadline: float = math.inf) -> Run:
    """Decode requests, whose ids are numbers. Raises OutOfTimeError at `deadline`, a value of time.monotonic."""

    def run() -> list[Completion]:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            check_time(deadline)
            engine.step()
        return engine.take()

    engine.counters = EngineCounters()
    completions, seconds = timed(run, engine.device)
    completions.sort(key=lambda c: int(str(c.id)))
    total = sum((c.statistics for c in completions), start=SequenceStatistics())
    return Run([c.tokens for c in completions], seconds, total, engine.statistics)


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The function's result, and its seconds until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_time(deadline: float) -> None:
    """Raise OutOfTimeError past a deadline, a value of time.monotonic."""
    if time.monotonic() > deadline:
        raise OutOfTimeError


def check_device(device: str) -> None:
    """Raise ValueError if a benchmark asks for a GPU on a machine without one."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device: {device} is not available: this machine has no GPU that torch can use")
