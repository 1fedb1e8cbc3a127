"""The tokens/s of a shape, predicted by a dry run of the scheduler."""

import random
import time
from collections.abc import Sequence
from itertools import cycle
from statistics import mean

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.lookup import label
from exspec.actors.engine.kv.pages import Boundless
from exspec.actors.engine.layers.programs import OutOfTimeError
from exspec.actors.engine.request import Request
from exspec.actors.engine.scheduling.grouping import grouping_of
from exspec.actors.engine.scheduling.pool import Pool
from exspec.actors.engine.scheduling.pool import Sequence as Decoded
from exspec.actors.engine.shape.costs import Costs
from exspec.actors.engine.shape.sample import Sample

ROUNDS = 100  # of a dry run
MORE = 20  # times as many if rows are split by width, because one kind waits while the other decodes


def predict(config: EngineConfig, costs: Costs, sample: Sample) -> float:
    """Tokens/s of a long job. The scheduler runs its own rounds on sequences that are only lengths."""
    rng = random.Random(0)
    pool, grouping = Pool(config.slots, PartlyCached(sample.cached), config.width), grouping_of(config)
    source = cycle(sample.lengths)
    # Plain decoding is probed only if nothing else is: otherwise the overhead of another probe stands in.
    name = label(config) if label(config) in sample.overhead else next(iter(sample.overhead))
    survival = sample.survival[name]
    seconds, tokens = 0.0, 0
    for number in range(ROUNDS * MORE if config.split_from else ROUNDS):
        if number >= ROUNDS and time.monotonic() > costs.deadline:
            raise OutOfTimeError
        while len(pool.waiting) < len(pool.free):
            prompt, completion = next(source)
            sequence = Decoded(Request(number, [0] * prompt, max_new_tokens=max(completion, 1)), config.capacity)
            if number == 0:  # the dry run begins in the middle of a long job
                sequence.tokens += [0] * rng.randrange(sequence.budget or 1)
            pool.waiting.append(sequence)
        admitted = pool.admit(grouping.room(pool))
        if admitted and number:
            seconds += costs.prefill(config, *(s.prefilled - s.cached for s in admitted))
        rows = grouping.select(pool.running)
        for sequence in pool.running:
            sequence.waited += 1
        for sequence in rows:
            sequence.waited = 0
        kv_columns = round_kv_columns(config, [s.length + 1 for s in rows])
        longest = max(s.length for s in rows)
        device, host = costs.round(config, kv_columns, longest), sample.overhead[name] * len(rows)
        seconds += max(device, host) if config.overlap else device + host
        for sequence in rows:
            chance, kept = rng.random(), 1
            kept += sum(chance < s for s in survival[: config.drafted_at(sequence.length)])
            kept = min(kept, sequence.budget)
            if config.attention != "in_place":  # in place, the KV columns of a round are a mean
                kept = min(kept, max(kv_columns - sequence.length, 1))
            sequence.tokens += [0] * kept
            tokens += kept
            if sequence.budget <= 0:
                pool.end(sequence, "length", None)
    return tokens / seconds


class PartlyCached(Boundless):
    """A store that has a share of every prompt cached."""

    def __init__(self, share: float) -> None:
        self.share = share

    def cached(self, tokens: Sequence[int], prefilled: int, adapter: int) -> int:  # noqa: ARG002
        return round(prefilled * self.share)

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int, adapter: int) -> int | None:  # noqa: ARG002
        return self.cached(tokens, prefilled, adapter)


def best_threshold(config: EngineConfig, costs: Costs, sample: Sample) -> float:
    """The chance of acceptance below which another draft step costs more than it saves.

    A step takes D seconds for R rows; a committed token is worth the round's time T over the R * E tokens that it
    commits. So the i-th token of a row's draft pays while its chance is at least (D / R) / (T / (R * E)) = D * E / T.
    """
    if not config.drafts:
        return config.threshold
    kv_columns = round_kv_columns(config, [round(mean(p + n / 2 for p, n in sample.lengths))])
    ratio = costs.draft_step(config, kv_columns) * sample.gain(config) / costs.round(config, kv_columns)
    return min(max(ratio, 0.01), 0.9)


def round_kv_columns(config: EngineConfig, lengths: list[int]) -> int:
    """KV columns that a row attends to in a round whose rows have these lengths."""
    if config.attention == "in_place":
        return min(round(mean(lengths)) + config.drafted, config.capacity)
    return config.round_shape(len(lengths), max(lengths))[1]
