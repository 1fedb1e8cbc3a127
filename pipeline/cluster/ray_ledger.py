"""Counts attempts at chunks, and finds rows that kill their process."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from exspec.actors.ledger import Attempt, Signs

PATIENCE = 5.0  # seconds to wait for the actor's answer
SILENCE = 15.0  # seconds without a heartbeat after which an actor does not count


@dataclass
class ChunkRecord:
    """What the ledger knows of a chunk. The sets are row numbers."""

    attempts: int = 0
    marked: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    error: str = ""


@dataclass
class Book:
    """The ledger's state. Rows that are marked when a new attempt begins may have killed the process of the last one.

    A node that is preempted kills processes of innocent rows too. So a row is bad only if it was alone at two deaths.
    """

    entries: dict[str, ChunkRecord] = field(default_factory=lambda: defaultdict(ChunkRecord))
    slots: int | None = None
    signed: dict[str, tuple[float, int]] = field(default_factory=dict)  # by actor: time and number of tokens
    first: float | None = None  # when the first chunk was begun

    def begun(self, part: str) -> bool:
        return self.entries[part].attempts > 0

    def begin(self, part: str) -> Attempt:
        entry = self.entries[part]
        self.first = self.first or time.monotonic()
        entry.attempts += 1
        if len(entry.marked) > 1:
            entry.suspects = entry.marked
        elif found := entry.marked & entry.alone:
            entry.attempts -= 2  # the two attempts that found the row do not count
            entry.bad |= found
            entry.suspects -= found
        else:
            entry.suspects |= entry.marked
            entry.alone |= entry.marked
        entry.marked = frozenset()
        return Attempt(entry.attempts, entry.bad, entry.suspects, entry.error)

    def mark(self, part: str, rows: Sequence[int]) -> None:
        self.entries[part].marked = frozenset(rows)

    def note(self, part: str, error: str) -> None:
        self.entries[part].error = error

    def sign(self, actor: str, tokens: int) -> None:
        self.signed[actor] = time.monotonic(), tokens

    def signs(self) -> Signs:
        now = time.monotonic()
        alive = sum(now - at < SILENCE for at, _ in self.signed.values())
        seconds = 0.0 if self.first is None else now - self.first
        return Signs(alive, sum(tokens for _, tokens in self.signed.values()), seconds)

    def window(self) -> int | None:
        return self.slots

    def shrink(self, window: int) -> None:
        self.slots = min(window, self.slots or window)


class RayLedger:
    """A Book in its own Ray actor, which outlives the generators. It is on the driver's node: losing that node ends the
    job anyway."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        book: Any = ray.remote(num_cpus=0, max_restarts=0)(Book)
        self._signs = Signs(0, 0, 0.0)
        self._actor: Any = book.options(scheduling_strategy=here).remote()

    def _call(self, method: str, *values: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*values))

    def begun(self, part: str) -> bool:
        return bool(self._call("begun", part))

    def begin(self, part: str) -> Attempt:
        attempt: Attempt = self._call("begin", part)
        return attempt

    def mark(self, part: str, rows: Sequence[int]) -> None:
        self._call("mark", part, list(rows))

    def note(self, part: str, error: str) -> None:
        self._call("note", part, error)

    def sign(self, actor: str, tokens: int) -> None:
        self._actor.sign.remote(actor, tokens)  # do not wait: the driver may be gone

    def signs(self) -> Signs:
        """The present signs, or the last known ones if the actor does not answer: they are only for display."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            self._signs = ray.get(self._actor.signs.remote(), timeout=PATIENCE)
        return self._signs

    def window(self) -> int | None:
        slots: int | None = self._call("window")
        return slots

    def shrink(self, window: int) -> None:
        self._call("shrink", window)
