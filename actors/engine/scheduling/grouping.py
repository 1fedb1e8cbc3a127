"""Which sequences a round advances, and when waiting sequences are admitted."""

from collections import defaultdict
from itertools import islice

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.scheduling.pool import Pool, Sequence

PATIENCE = 16  # rounds that a row waits at most before its bucket comes first
GATHERING = 512  # the same if rows are split by width: the rarer kind should gather until it fills rounds
EMPTY = 1 / 8  # rows of prefill forwards that may be empty, for each one that is not


class FixedBatch:
    """EQSPEC: a batch starts together and stays until its last row has ended."""

    def room(self, pool: Pool) -> int:
        return 0 if pool.running else pool.slots

    def select(self, running: list[Sequence]) -> list[Sequence]:
        return list(running)


class LengthBuckets:
    """EXSPEC: slots are refilled while other rows decode, and a round takes rows of one length bucket.

    The fullest bucket comes first. A row that has waited for more than `patience` rounds brings its own to the front:
    no row starves. With `fallback`, rows of other buckets fill a group that is not full, which makes it ragged. With
    buckets of one column this is the paper's equal-length grouping.

    prefill: rows and columns of a prefill forward. spare: how many slots may stay free until their prompts fill one.
    split_from: no bucket has rows with fewer cached tokens and rows with more.
    """

    def __init__(
        self,
        batch_size: int,
        bucket: int,
        fallback: bool,
        prefill: tuple[int, int],
        spare: int = 0,
        split_from: int = 0,
        patience: int = PATIENCE,
    ) -> None:
        self.batch_size, self.bucket, self.fallback, self.patience = batch_size, bucket, fallback, patience
        self.prefill, self.spare, self.split_from = prefill, spare, split_from

    def room(self, pool: Pool) -> int:
        """How many sequences to admit now: all if more than the spare slots are free, else as many as fill their
        prefill forwards."""
        if len(pool.free) > self.spare:
            return len(pool.free)
        rows, columns = self.prefill
        chunks = filling = 0
        for number, sequence in enumerate(islice(pool.waiting, len(pool.free)), start=1):
            chunks += -(-pool.to_prefill(sequence) // columns)
            if -chunks % rows <= EMPTY * chunks:
                filling = number
        return filling

    def select(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences of the next round, at most B; at least one if any is running. Within a bucket the oldest come
        first: they end first, and their KV is still in the processor's caches."""
        buckets: dict[tuple[int, bool], list[Sequence]] = defaultdict(list)
        for sequence in running:
            buckets[self._bucket(sequence)].append(sequence)
        overdue = max(running, key=lambda s: s.waited)
        if overdue.waited > self.patience:
            first = buckets[self._bucket(overdue)]
        else:
            first = max(buckets.values(), key=self._worth)
        others = [s for s in running if s not in first] if self.fallback else []
        return [*first, *others][: self.batch_size]

    def _bucket(self, sequence: Sequence) -> tuple[int, bool]:
        return sequence.length // self.bucket, sequence.length >= self.split_from

    def _worth(self, rows: list[Sequence]) -> tuple[int, int]:
        return min(len(rows), self.batch_size), max(s.waited for s in rows)


Grouping = FixedBatch | LengthBuckets


def grouping_of(config: EngineConfig) -> Grouping:
    """The grouping of a config's rounds."""
    if config.method == "eqspec":
        return FixedBatch()
    return LengthBuckets(
        config.batch_size,
        config.bucket,
        fallback=not config.exact,
        prefill=(config.prefill_rows, config.prefill_columns),
        spare=config.spare,
        split_from=config.split_from,
        patience=GATHERING if config.split_from and config.bucket >= config.capacity else PATIENCE,
    )
