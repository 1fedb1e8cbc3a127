"""Sums over the summaries of a job's chunks."""

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import floor

from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.state import Summary

SUMMED = ("rows", "errors", "prompt_tokens", "prefill_tokens", "found_tokens", "completion_tokens", "rounds", "forced")
MOST_BINS = 400  # of the plot of tokens by time
SLOWEST = 5  # chunks
TAIL = 0.1  # of the decoding time


@dataclass
class HostTotals:
    """What one host decoded. sums: its rows and tokens. spans: as `work` in Totals, of all its actors."""

    actors: set[str] = field(default_factory=set)
    hardware: set[tuple[str, ...]] = field(default_factory=set)
    sums: Counter[str] = field(default_factory=Counter)
    spans: list[tuple[float, float]] = field(default_factory=list)


class Totals:
    """Sums that take little memory, whatever the number of chunks.

    spans: times during which any chunk was decoded, as (start, end) in seconds. bins, rounds: tokens, and the rounds of
    sequences, by time, of `width` seconds. work: like spans, by actor, without gaps below `width`.
    """

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        self.actors: Counter[str] = Counter()
        self.hardware: Counter[tuple[str, ...]] = Counter()
        self.hosts: defaultdict[str, HostTotals] = defaultdict(HostTotals)
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.slowest: list[tuple[float, str, int]] = []
        self.spans: list[tuple[float, float]] = []
        self.work: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.bins: Counter[int] = Counter()
        self.rounds: Counter[int] = Counter()
        self.width = 1 / 16
        self.reasons = Reasons()

    def add(self, s: Summary, shard: str) -> None:
        """Add a chunk of the shard of this name."""
        self.sums.update({name: getattr(s, name) for name in SUMMED})
        self.sums["repeated"] += s.attempt > 1
        self.reasons.merge(s.reasons)
        self.lengths.update({int(n): count for n, count in s.lengths.items()})
        self.actors[s.actor] += s.rows
        kind = tuple(sorted(s.hardware.values()))
        self.hardware[kind] += s.rows
        self.drafted = _added(self.drafted, s.drafted_by_position)
        self.accepted = _added(self.accepted, s.accepted_by_position)
        chunk = f"{shard}, rows {s.first} to {s.first + s.rows - 1}"
        end = max(s.started, s.ended)  # an older version took the time from a clock that may step back
        self.slowest = heapq.nlargest(SLOWEST, [*self.slowest, (end - s.started, chunk, s.completion_tokens)])
        _cover(self.spans, s.started, end)
        host = self.hosts[s.host]
        host.actors.add(s.actor)
        host.hardware.add(kind)
        host.sums.update(rows=s.rows, prompt_tokens=s.prompt_tokens, completion_tokens=s.completion_tokens)
        _cover(host.spans, s.started, end, self.width)
        _cover(self.work[s.actor], s.started, end, self.width)
        self._widen()
        pieces = s.produced or [s.completion_tokens]
        each = s.rounds / max(s.completion_tokens, 1)
        _spread(self.bins, pieces, s.started, end, self.width)
        _spread(self.rounds, [tokens * each for tokens in pieces], s.started, end, self.width)

    def length_figures(self) -> dict[str, int] | None:
        """Lower median and maximum of the completion lengths."""
        passed, half = 0, sum(self.lengths.values()) / 2
        for length in sorted(self.lengths):
            passed += self.lengths[length]
            if passed >= half:
                return {"median": length, "longest": max(self.lengths)}
        return None

    def _widen(self) -> None:
        """Double the width of bins until all spans fit into a few: a clock that was wrong, or a pause between runs, may
        have put them years apart."""
        while (self.spans[-1][1] - self.spans[0][0]) / self.width > MOST_BINS:
            self.bins, self.rounds, self.width = _halved(self.bins), _halved(self.rounds), 2 * self.width

    def decoding(self, start: float, end: float) -> float:
        """Seconds between two times during which any chunk was decoded."""
        return _within(self.spans, start, end)

    def tail_occupancy(self) -> float | None:
        """Mean share of actors at work in the last tenth of the decoding time; 1: as many as ever worked at once."""
        left = seconds = TAIL * sum(b - a for a, b in self.spans)
        if not seconds:
            return None
        for start, end in reversed(self.spans):
            if left <= end - start:
                break
            left -= end - start
        steps = sorted((at, step) for spans in self.work.values() for a, b in spans for at, step in ((a, 1), (b, -1)))
        actors = max(accumulate(step for _, step in steps))
        worked = sum(_within(spans, end - left, self.spans[-1][1]) for spans in self.work.values())
        return min(1.0, worked / (seconds * actors))


def _spread(bins: Counter[int], pieces: Sequence[float], start: float, end: float, width: float) -> None:
    """Add pieces, which took the time from start to end in equal parts, to bins of this width."""
    each = (end - start) / len(pieces)
    for n, amount in enumerate(pieces):
        first, last = (floor((start + (n + k) * each) / width) for k in (0, 1))
        for i in range(first, last + 1):
            bins[i] += amount / (last - first + 1)  # type: ignore[assignment]


def _halved(bins: Counter[int]) -> Counter[int]:
    """The bins, of twice the width."""
    wider: Counter[int] = Counter()
    for i, amount in bins.items():
        wider[i // 2] += amount
    return wider


def _added(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _within(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of the spans between two times."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in spans)


def _cover(spans: list[tuple[float, float]], start: float, end: float, gap: float = 0.0) -> None:
    """Add a span to a sorted list of disjoint spans. Pauses between runs do not count as decoding time. gap: spans that
    are no farther apart become one."""
    low = bisect.bisect_left(spans, start - gap, key=lambda span: span[1])
    high = bisect.bisect_right(spans, end + gap, key=lambda span: span[0])
    if low < high:
        start, end = min(start, spans[low][0]), max(end, spans[high - 1][1])
    spans[low:high] = [(start, end)]
