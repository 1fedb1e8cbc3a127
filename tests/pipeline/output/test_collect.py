"""Prefill counts of chunks, which share the statistics of an engine."""

from collections import Counter
from typing import Any

from exspec.actors.engine import EngineStatistics
from exspec.pipeline.input.plan import Chunk, Shard
from exspec.pipeline.output.collect import Collector
from exspec.pipeline.output.parts import Task
from exspec.pipeline.output.state import File, Summary

SHARD = Shard("a.parquet", "a.parquet", 100, 1, "1")


class Kept:
    """A writer that records commits."""

    def __init__(self) -> None:
        self.files: list[File] = []

    def commit(self, files: list[File]) -> None:
        self.files += files


def result(first: int, actor: str, prefill: int, found: int, set_aside: str = "") -> dict[str, Any]:
    chunk = Chunk(SHARD, 0, first, 8)
    summary = Summary(0, first, 8, 0, 0, 0, [], [], 0, 0, {}, actor, {}, 0.0, 1.0, 1)
    engine = EngineStatistics(prefill_tokens=prefill, cached_tokens=found)
    file = vars(File("", f"staged-{first}", 1, "", 1, [summary])) | {"chunks": [vars(summary)]}
    return {"task": Task(chunk), "actor": actor, "engine": engine, "set_aside": set_aside, "file": file}


def test_the_sums_over_chunks_are_what_the_engines_did() -> None:
    """With two actors, a chunk that is set aside, and a result that overtakes an earlier one."""
    writer = Kept()
    collector = Collector(writer, Counter())  # type: ignore[arg-type]
    for received in (
        result(0, "a", 100, 0),
        result(8, "b", 70, 30),
        result(24, "a", 180, 120, set_aside="why"),
        result(32, "a", 260, 240),
        result(16, "a", 200, 150),
    ):
        collector.add(received)
    collector.flush()
    counts = {s.first: (s.prefill_tokens, s.found_tokens) for file in writer.files for s in file.chunks}
    assert counts == {0: (100, 0), 8: (70, 30), 32: (160, 240), 16: (0, 0)}
