"""What an actor asks about a chunk before it begins. Imports nothing heavy: whoever keeps the ledger has no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Attempt:
    """The ledger's answer: which attempt at the chunk this is, rows that one of them died of, and those suspected."""

    number: int
    bad: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    last_error: str = ""


class Ledger(Protocol):
    def begun(self, part: str) -> bool: ...
    def begin(self, part: str) -> Attempt: ...
    def mark(self, part: str, rows: Sequence[int]) -> None: ...
    def note(self, part: str, error: str) -> None: ...
    def window(self) -> int | None:
        """The most slots that an actor may still have; None before any ran out of memory."""
        ...

    def shrink(self, window: int) -> None:
        """An actor ran out of memory; those that start from now on get at most so many slots."""
        ...
