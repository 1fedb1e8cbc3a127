"""How prompts are cut into prefill forwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from exspec.actors.engine.scheduling.pool import Sequence


@dataclass(frozen=True)
class Chunk:
    """A sequence's tokens from `start` to `end`, in a forward of `width` columns that attends to `kv_columns` of KV."""

    sequence: Sequence
    start: int
    end: int
    width: int
    kv_columns: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.end]


class Prefill(Protocol):
    """Cuts prompts into forwards."""

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        """The forwards that prefill the sequences, in order; the chunks of one have the same shape.

        It covers a prompt without its cached tokens and its last one: that is pending, and the first round feeds it.
        """
        ...


class ChunkedPrefill:
    """Chunks of `columns` tokens, `rows` of them together, be they of one prompt or of several: a layer writes the
    keys and values of all rows before any row attends.

    A chunk's shape follows from its position alone. So the KV does not depend on which prompts are admitted together,
    and no prompt is padded to the length of another.

    bucket: a forward attends to the KV columns up to its chunks' end, rounded up to a multiple of this.
    """

    def __init__(self, rows: int, columns: int, capacity: int, bucket: int = 1) -> None:
        self.rows, self.columns, self.capacity, self.bucket = rows, columns, capacity, bucket

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        chunks = [self._chunk(s, start) for s in sequences for start in range(s.cached, s.prefilled, self.columns)]
        chunks.sort(key=_kv_columns)  # and so by their place within each prompt
        for _, group in groupby(chunks, key=_kv_columns):
            alike = list(group)
            for i in range(0, len(alike), self.rows):
                yield alike[i : i + self.rows]

    def _chunk(self, sequence: Sequence, start: int) -> Chunk:
        kv_columns = -(-(start + self.columns) // self.bucket) * self.bucket
        end = min(start + self.columns, sequence.prefilled)
        return Chunk(sequence, start, end, self.columns, min(kv_columns, self.capacity))


class WholePrefill:
    """All prompts in one forward, padded to the longest: how a fixed batch starts."""

    def plan(self, sequences: list[Sequence]) -> Iterator[list[Chunk]]:
        width = max((s.prefilled for s in sequences), default=0)
        if width:
            yield [Chunk(s, 0, s.prefilled, width, width) for s in sequences]


def _kv_columns(chunk: Chunk) -> int:
    return chunk.kv_columns
