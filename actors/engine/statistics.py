"""Statistics of sequences and engines, as values that can be added. jobs/docs/words.md explains the words.

Plain counters change every round; they make a statistics value on request.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, takewhile, zip_longest
from typing import Any, Self

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Addable:
    """Adds field by field; tuples position by position, dictionaries key by key."""

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(_add(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
    if isinstance(a, dict):
        return {key: a.get(key, 0) + b.get(key, 0) for key in a | b}
    return a + b


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 if whole is 0."""
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class SequenceStatistics(Addable):
    """Statistics of one sequence, or the sum over several. Tokens after a sequence's end are not counted.

    drafted_by_position, accepted_by_position: proposed tokens and accepted tokens, by position in the draft.
    grouped_rounds: rounds whose rows were all in one length bucket; ragged_rounds: all others.
    early_drafted, early_accepted: tokens that a drafter checked itself, and tokens that passed this check.
    forced: tokens that a constraint left no alternative to.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    grouped_rounds: int = 0
    ragged_rounds: int = 0
    drafted_by_position: Counts = ()
    accepted_by_position: Counts = ()
    early_drafted: int = 0
    early_accepted: int = 0
    forced: int = 0
    seconds_queued: float = 0.0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0

    @property
    def rounds(self) -> int:
        return self.grouped_rounds + self.ragged_rounds

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.accepted, self.drafted)

    @property
    def early_acceptance_rate(self) -> float:
        """The acceptance rate of the drafter's own check."""
        return ratio(self.early_accepted, self.early_drafted)

    @property
    def mean_accepted_length(self) -> float:
        """Committed tokens per round, bonus included."""
        return ratio(self.completion_tokens, self.rounds)


@dataclass(frozen=True)
class EngineStatistics(Addable):
    """Statistics of an engine since its creation, or the sum over several.

    rows: B for every round; busy_rows: rows that held a sequence.
    prefill_tokens: prompt tokens that were computed; cached_tokens: prompt tokens that another sequence had cached.
        Tokens that a preempted sequence computes again are not counted again.
    columns: columns of all verify forwards; dead_columns: columns of dead rows or past a row's drafts.
    seconds: by phase of the round, without compiling.
    """

    rounds: int = 0
    rows: int = 0
    busy_rows: int = 0
    grouped_rounds: int = 0
    ragged_rounds: int = 0
    columns: int = 0
    dead_columns: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def occupancy(self) -> float:
        return ratio(self.busy_rows, self.rows)


class SequenceCounters:
    """The counters of a running sequence."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.grouped_rounds = self.ragged_rounds = self.forced = 0
        self.by_drafter: Counter[str] = Counter()  # by field of SequenceStatistics
        self.drafted: list[int] = []  # by n: rounds with n drafts
        self.accepted: list[int] = []  # by n: rounds with n accepted drafts

    @property
    def rounds(self) -> int:
        return self.grouped_rounds + self.ragged_rounds

    def round(self, grouped: bool, drafted: int, accepted: int, by_drafter: Mapping[str, int]) -> None:
        """Count a round with its numbers of drafted and accepted tokens. grouped: whether all rows were in one length
        bucket. by_drafter: the drafter's own counts, by field of SequenceStatistics."""
        self.by_drafter.update(by_drafter)
        if grouped:
            self.grouped_rounds += 1
        else:
            self.ragged_rounds += 1
        if drafted >= len(self.drafted):
            more = [0] * (drafted + 1 - len(self.drafted))
            self.drafted += more
            self.accepted += more
        self.drafted[drafted] += 1
        self.accepted[accepted] += 1

    @property
    def value(self) -> SequenceStatistics:
        return SequenceStatistics(
            prompt_tokens=self.prompt_tokens,
            grouped_rounds=self.grouped_rounds,
            ragged_rounds=self.ragged_rounds,
            drafted_by_position=_by_position(self.drafted),
            accepted_by_position=_by_position(self.accepted),
            forced=self.forced,
            **self.by_drafter,
        )


def _by_position(rounds: list[int]) -> Counts:
    """How many rounds had a token at each position, given the number of rounds with n tokens, by n."""
    reached = list(accumulate(reversed(rounds[1:])))[::-1]
    return tuple(takewhile(bool, reached))


class EngineCounters:
    """The counters of an engine. `add` takes fields of EngineStatistics by name, `spend` the seconds of a phase."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, **figures: int) -> None:
        for name, more in figures.items():
            self._counts[name] += more

    def spend(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds

    @property
    def value(self) -> EngineStatistics:
        return EngineStatistics(**self._counts, seconds=dict(self._seconds))
