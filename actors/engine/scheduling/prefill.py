"""How prompts are cut into prefill forwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from exspec.actors.engine.kv.window import first_page
from exspec.actors.engine.scheduling.pool import Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """A sequence's tokens from `start` to `end`, in a forward of `width` columns with `kv_columns` KV columns."""

    sequence: Sequence
    start: int
    end: int
    width: int
    kv_columns: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.end]


class ChunkedPrefill:
    """Chunks of `columns` tokens, `rows` of them in a forward. They may belong to one prompt, since a layer writes the
    keys and values of all rows before any row attends.

    A chunk's shape depends only on its position. So the KV does not depend on which prompts are admitted together, and
    no prompt is padded to the length of another.

    bucket: a forward attends to the KV columns up to its chunks' end, rounded up to a multiple of this.
    """

    def __init__(self, rows: int, columns: int, capacity: int, bucket: int = 1) -> None:
        self.rows, self.columns, self.capacity, self.bucket = rows, columns, capacity, bucket

    def plan(self, sequences: list[Sequence]) -> Iterator[list[PrefillChunk]]:
        """The forwards that prefill the sequences, in order; the chunks of one forward have the same shape.

        They skip a prompt's cached tokens and its last token: that is the pending token, which the first round feeds.
        """
        chunks = [self._chunk(s, start) for s in sequences for start in range(s.cached, s.prefilled, self.columns)]
        yield from self._alike(chunks)

    def windows(self, sequences: list[Sequence], window: int, page: int, ahead: int) -> Iterator[list[PrefillChunk]]:
        """The forwards that give a drafter the first page of the sequences' tokens and the last `window` ones, without
        the pending token. page: tokens of a page. ahead: how many positions before its own a token's KV lies.

        In the forwards of the first page, columns past it are dead.
        """
        chunks = []
        for s in sequences:
            first = first_page(s.length, window, page) * page
            for begin, stop, kv_columns in ((0, page + ahead, page), (first, s.length, self.capacity)):
                for start in range(begin, min(stop, s.length), self.columns):
                    end = min(start + self.columns, s.length)
                    chunks.append(PrefillChunk(s, start, end, self.columns, kv_columns))
        yield from self._alike(chunks)

    def _alike(self, chunks: list[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
        """The chunks in forwards, those with fewer KV columns first: so each prompt's chunks are in order."""
        for _, group in groupby(sorted(chunks, key=_kv_columns), key=_kv_columns):
            alike = list(group)
            for i in range(0, len(alike), self.rows):
                yield alike[i : i + self.rows]

    def _chunk(self, sequence: Sequence, start: int) -> PrefillChunk:
        kv_columns = -(-(start + self.columns) // self.bucket) * self.bucket
        end = min(start + self.columns, sequence.prefilled)
        return PrefillChunk(sequence, start, end, self.columns, min(kv_columns, self.capacity))


class WholePrefill:
    """All prompts in one forward, padded to the longest, as a fixed batch starts."""

    def plan(self, sequences: list[Sequence]) -> Iterator[list[PrefillChunk]]:
        width = max((s.prefilled for s in sequences), default=0)
        if width:
            yield [PrefillChunk(s, 0, s.prefilled, width, width) for s in sequences]

    def windows(self, *_: object) -> Iterator[list[PrefillChunk]]:
        raise AssertionError("method eqspec refuses windows")


Prefill = ChunkedPrefill | WholePrefill


def _kv_columns(chunk: PrefillChunk) -> int:
    return chunk.kv_columns
