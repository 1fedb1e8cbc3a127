"""Exact batch speculative decoding. Knows torch and transformers; nothing of Ray, files or text."""

from exspec.actors.engine.config import DRAFT_LENGTHS, METHODS, DraftLengthName, EngineConfig, Method
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.request import Completion, MakeStop, Request, RequestError, Room, Sampling, StopCheck
from exspec.actors.engine.statistics import EngineStatistics, SequenceStatistics
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
