"""How prompts are cut into prefill forwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from exspec.actors.engine.scheduling.pool import Sequence


@dataclass(frozen=True)
class Chunk:
    """A sequence's tokens from `start` to `end`, in a forward of `width` columns that attends up to `attended`."""

    sequence: Sequence
    start: int
    end: int
    width: int
    attended: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.end]


class Prefill(Protocol):
    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        """The forwards that prefill the sequences, in order; the chunks of one have the same shape.

        All of a prompt but its last token, and what was found: that one is pending, and the first round feeds it.
        """
        ...


class ChunkedPrefill:
    """Chunks of `columns` tokens, `rows` of them together, be they of one prompt or of several: a layer writes the
    keys and values of all rows before any row attends.

    A chunk's shape follows from its place alone, so what lands in the KV does not depend on who was admitted with
    whom, and no prompt is padded to the length of another.

    bucket: a forward attends the KV columns up to its chunks' end, rounded up to a multiple of this.
    """

    def __init__(self, rows: int, columns: int, capacity: int, bucket: int = 1) -> None:
        self.rows, self.columns, self.capacity, self.bucket = rows, columns, capacity, bucket

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        chunks = [self._chunk(s, start) for s in sequences for start in range(s.found, s.prefilled, self.columns)]
        chunks.sort(key=_attended)  # and so by their place within each prompt
        for _, group in groupby(chunks, key=_attended):
            alike = list(group)
            for i in range(0, len(alike), self.rows):
                yield alike[i : i + self.rows]

    def _chunk(self, sequence: Sequence, start: int) -> Chunk:
        attended = -(-(start + self.columns) // self.bucket) * self.bucket
        end = min(start + self.columns, sequence.prefilled)
        return Chunk(sequence, start, end, self.columns, min(attended, self.capacity))


class WholePrefill:
    """All prompts in one forward, padded to the longest: how a fixed batch starts."""

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        width = max((s.prefilled for s in sequences), default=0)
        if width:
            yield [Chunk(s, 0, s.prefilled, width, width) for s in sequences]


def _attended(chunk: Chunk) -> int:
    return chunk.attended
