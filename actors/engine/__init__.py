"""Exact batch speculative decoding. It uses torch and transformers, and knows nothing about Ray, files or text.

Settings, requests and statistics are available without torch: only `Engine` and `EngineThread` import it.
"""

from typing import TYPE_CHECKING, Any

from exspec.actors.engine.config import DRAFT_LENGTHS, METHODS, DraftLengthName, EngineConfig, Method
from exspec.actors.engine.request import Completion, MakeStop, Request, RequestError, Room, Sampling, StopCheck
from exspec.actors.engine.statistics import EngineStatistics, SequenceStatistics

if TYPE_CHECKING:
    from exspec.actors.engine.engine import Engine
    from exspec.actors.engine.thread import EngineThread

__all__ = [
    "DRAFT_LENGTHS",
    "METHODS",
    "Completion",
    "DraftLengthName",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineThread",
    "MakeStop",
    "Method",
    "Request",
    "RequestError",
    "Room",
    "Sampling",
    "SequenceStatistics",
    "StopCheck",
]


def __getattr__(name: str) -> Any:
    if name not in ("Engine", "EngineThread"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from exspec.actors.engine import thread

    return getattr(thread, name)
