"""Statistics are immutable values that add up; rates are derived from the sum."""

from hypothesis import given
from hypothesis import strategies as st

from exspec.actors.engine import EngineStatistics, SequenceStatistics
from exspec.actors.engine.statistics import EngineCounters, SequenceCounters


def test_sequence_statistics_add_up_by_position() -> None:
    one = SequenceStatistics(3, 6, 2, 0, (2, 2), (2, 1))
    other = SequenceStatistics(4, 4, 1, 1, (2, 1, 1), (1, 1, 1), 0.5, 0.25, 1.0)
    both = one + other
    assert both == SequenceStatistics(7, 10, 3, 1, (4, 3, 1), (3, 2, 1), 0.5, 0.25, 1.0)
    assert (both.rounds, both.drafted, both.accepted) == (4, 8, 6)
    assert (both.acceptance_rate, both.mean_accepted_length) == (0.75, 2.5)
    assert sum([one, other], start=SequenceStatistics()) == both


def test_engine_statistics_add_up_by_phase() -> None:
    both = EngineStatistics(rounds=1, rows=8, busy_rows=8, seconds={"draft": 1.0}) + EngineStatistics(
        rounds=1, rows=8, busy_rows=4, seconds={"draft": 0.5, "verify": 2.0}
    )
    assert both.occupancy == 0.75
    assert both.seconds == {"draft": 1.5, "verify": 2.0}


def test_rates_of_nothing_are_zero() -> None:
    assert SequenceStatistics().acceptance_rate == SequenceStatistics().mean_accepted_length == 0
    assert EngineStatistics().occupancy == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 7)), max_size=30))
def test_counters_equal_the_sum_of_their_rounds(rounds: list[tuple[bool, int, int]]) -> None:
    counters, total = SequenceCounters(9), SequenceStatistics(prompt_tokens=9)
    for grouped, drafted, most in rounds:
        accepted = min(drafted, most)
        counters.round(grouped, drafted, accepted, {})
        total += SequenceStatistics(
            grouped_rounds=int(grouped),
            ragged_rounds=int(not grouped),
            drafted_by_position=(1,) * drafted,
            accepted_by_position=(1,) * accepted,
        )
    assert counters.value == total
    assert counters.rounds == total.rounds == len(rounds)


def test_a_value_does_not_change_when_its_counters_do() -> None:
    """Another thread reads the value while the engine counts."""
    counters = EngineCounters()
    counters.add(rounds=1, tokens=5)
    counters.spend("draft", 0.5)
    before = counters.value
    counters.add(rounds=1, tokens=2)
    counters.spend("draft", 0.25)
    assert before == EngineStatistics(rounds=1, tokens=5, seconds={"draft": 0.5})
    assert counters.value == EngineStatistics(rounds=2, tokens=7, seconds={"draft": 0.75})
