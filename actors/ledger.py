"""What an actor asks about a chunk before it begins, and shows of itself. Imports nothing heavy.

Whoever keeps the ledger has no model.
"""

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


@dataclass(frozen=True)
class Signs:
    """What the actors of a job have shown of themselves: how many live, the tokens of all, and for how many seconds any
    of them has had a chunk."""

    actors: int
    tokens: int
    seconds: float


class Ledger(Protocol):
    def begun(self, part: str) -> bool: ...
    def begin(self, part: str) -> Attempt: ...
    def mark(self, part: str, rows: Sequence[int]) -> None: ...
    def note(self, part: str, error: str) -> None: ...
    def sign(self, actor: str, tokens: int) -> None:
        """An actor lives, and has made so many tokens."""
        ...

    def window(self) -> int | None:
        """The most slots that an actor may still have; None before any ran out of memory."""
        ...

    def shrink(self, window: int) -> None:
        """An actor ran out of memory; those that start from now on get at most so many slots."""
        ...
