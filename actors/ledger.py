"""The ledger: it counts attempts at chunks and collects the actors' heartbeats.

Imports neither torch nor transformers: the process that keeps the ledger has no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Attempt:
    """An attempt at a chunk: its number, the rows that have killed a process, the suspected rows, and the error of the
    last attempt."""

    number: int
    bad: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    last_error: str = ""


@dataclass(frozen=True)
class Signs:
    """The sum of the actors' heartbeats: how many actors are alive, the tokens that all of them have decoded, and the
    seconds in which any of them had a chunk."""

    actors: int
    tokens: int
    seconds: float


class Ledger(Protocol):
    """Counts attempts. part: a chunk's key."""

    def begun(self, part: str) -> bool:
        """Whether a chunk has been attempted before."""
        ...

    def begin(self, part: str) -> Attempt:
        """Count a new attempt at a chunk."""
        ...

    def mark(self, part: str, rows: Sequence[int]) -> None:
        """Record the rows that are decoded now: if the process dies, they are suspected."""
        ...

    def note(self, part: str, error: str) -> None:
        """Record the error that ends this attempt."""
        ...

    def sign(self, actor: str, tokens: int) -> None:
        """Record an actor's heartbeat, with the number of tokens that it has decoded."""
        ...

    def window(self) -> int | None:
        """The most slots that a new actor may have; None if no actor has run out of memory."""
        ...

    def shrink(self, window: int) -> None:
        """Limit the slots of actors that start from now on, after one has run out of memory."""
        ...
