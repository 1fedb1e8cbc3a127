"""Which sequences a round advances, and when waiting sequences are admitted."""

from collections import defaultdict

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.scheduling.pool import Pool, Sequence


class FixedBatch:
    """EQSPEC: a batch starts together and stays until its last row has ended."""

    def room(self, pool: Pool) -> int:
        return 0 if pool.running else pool.slots

    def select(self, running: list[Sequence]) -> list[Sequence]:
        return list(running)


class LengthBuckets:
    """EXSPEC: slots are refilled at once, and a round takes rows of one length bucket, the fullest bucket first.

    A row that has waited for more than `patience` rounds brings its bucket to the front, so that no row starves.
    With `fallback`, rows of other buckets fill a group that is not full, which makes it ragged. With buckets of one
    column this is the paper's equal-length grouping.
    """

    def __init__(self, batch_size: int, bucket: int, fallback: bool, patience: int = 16) -> None:
        self.batch_size, self.bucket, self.fallback, self.patience = batch_size, bucket, fallback, patience

    def room(self, pool: Pool) -> int:
        """How many sequences to admit now."""
        return len(pool.free)

    def select(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences of the next round, at most B; at least one if any is running."""
        by_wait = sorted(running, key=lambda s: -s.waited)
        buckets: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in by_wait:
            buckets[sequence.length // self.bucket].append(sequence)
        if by_wait[0].waited > self.patience:
            first = buckets[by_wait[0].length // self.bucket]
        else:
            first = max(buckets.values(), key=lambda rows: (min(len(rows), self.batch_size), rows[0].waited))
        others = [s for s in by_wait if s not in first] if self.fallback else []
        return [*first, *others][: self.batch_size]


Grouping = FixedBatch | LengthBuckets


def grouping_of(config: EngineConfig) -> Grouping:
    """The grouping of a config's rounds."""
    if config.method == "eqspec":
        return FixedBatch()
    return LengthBuckets(config.batch_size, config.bucket, fallback=not config.exact)
