"""How prompts are cut into prefill forwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from exspec.actors.engine.pool import Sequence

STEP = 16  # a chunk's width in whole steps: few shapes, little padding


@dataclass(frozen=True)
class Chunk:
    """`width` columns of a prompt from token `start` on, which attend `attended` KV columns."""

    sequence: Sequence
    start: int
    width: int
    attended: int


class Prefill(Protocol):
    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        """The forwards that prefill the sequences, in order; the chunks of one have the same start and shape.

        All of a prompt but its last token: that one is pending, and the first round feeds it.
        """
        ...


class ChunkedPrefill:
    """Chunks of `columns` tokens, the last one as wide as it needs to be, `rows` of one shape together.

    A chunk's shape follows from its own prompt alone, so what lands in the KV does not depend on who was admitted
    with whom, and no prompt is padded to the length of another.

    step: a chunk's width is rounded up to a multiple of this. bucket: so are the KV columns that it attends.
    """

    def __init__(self, rows: int, columns: int, capacity: int, step: int = STEP, bucket: int = 1) -> None:
        self.rows, self.columns, self.capacity, self.step, self.bucket = rows, columns, capacity, step, bucket

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        chunks = [self._chunk(s, start) for s in sequences for start in range(0, s.length, self.columns)]
        chunks.sort(key=_shape)
        for _, group in groupby(chunks, key=_shape):
            alike = list(group)
            for i in range(0, len(alike), self.rows):
                yield alike[i : i + self.rows]

    def _chunk(self, sequence: Sequence, start: int) -> Chunk:
        width = min(-(-(sequence.length - start) // self.step) * self.step, self.columns)
        attended = -(-(start + width) // self.bucket) * self.bucket
        return Chunk(sequence, start, width, min(attended, self.capacity))


class WholePrefill:
    """All prompts in one forward, padded to the longest: how a fixed batch starts."""

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        width = max((s.length for s in sequences), default=0)
        if width:
            yield [Chunk(s, 0, width, width) for s in sequences]


def _shape(chunk: Chunk) -> tuple[int, int]:
    return chunk.start, chunk.width
