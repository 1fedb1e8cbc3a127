"""Counters and gauges of a generator, for the cluster's Prometheus."""

from typing import Any

from exspec.actors.engine import EngineStatistics

COUNTED = {
    "rows": "rows done",
    "errors": "rows done, but with an error",
    "prompt_tokens": "tokens of prompts",
    "completion_tokens": "tokens of completions",
    "drafted": "tokens drafted",
    "accepted": "drafted tokens that the target agreed with",
}
TAGS = ("actor", "host")


class RayMeter:
    """Reports through ray.util.metrics, tagged by actor and host."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def report(self, actor: str, host: str, result: dict[str, Any], engine: EngineStatistics) -> None:
        """Count a chunk that was staged or set aside, and report the state of the engine."""
        from ray.util.metrics import Counter, Gauge

        if not self._made:
            made: dict[str, Any] = {name: Counter(f"exspec_{name}", text, TAGS) for name, text in COUNTED.items()}
            made["set_aside"] = Counter("exspec_chunks_set_aside", "chunks set aside", TAGS)
            made["occupancy"] = Gauge("exspec_occupancy", "busy rows / B since the actor began", TAGS)
            self._made = made
        tags = {"actor": actor, "host": host}
        if result["set_aside"]:
            self._made["set_aside"].inc(1, tags)
        else:
            (summary,) = result["file"]["chunks"]
            counts = {name: summary[name] for name in COUNTED if name in summary}
            counts |= {name: sum(summary[f"{name}_by_position"]) for name in ("drafted", "accepted")}
            for name, count in counts.items():
                if count:
                    self._made[name].inc(count, tags)
        self._made["occupancy"].set(engine.occupancy, tags)
