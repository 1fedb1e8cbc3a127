"""Statistics are values with `+`, and the figures derived from them are those of the sum."""

from exspec.actors.engine import EngineStatistics, SequenceStatistics


def test_sequences_add_up_by_position() -> None:
    one = SequenceStatistics(3, 6, 2, 0, (2, 2), (2, 1))
    other = SequenceStatistics(4, 4, 1, 1, (2, 1, 1), (1, 1, 1), 0.5, 0.25, 1.0)
    both = one + other
    assert both == SequenceStatistics(7, 10, 3, 1, (4, 3, 1), (3, 2, 1), 0.5, 0.25, 1.0)
    assert (both.rounds, both.drafted, both.accepted) == (4, 8, 6)
    assert (both.acceptance_rate, both.mean_accepted_length) == (0.75, 2.5)
    assert sum([one, other], start=SequenceStatistics()) == both


def test_engines_add_up_by_phase() -> None:
    both = EngineStatistics(rounds=1, rows=8, busy_rows=8, seconds={"draft": 1.0}) + EngineStatistics(
        rounds=1, rows=8, busy_rows=4, seconds={"draft": 0.5, "verify": 2.0}
    )
    assert both.occupancy == 0.75
    assert both.seconds == {"draft": 1.5, "verify": 2.0}


def test_nothing_divides_by_zero() -> None:
    assert SequenceStatistics().acceptance_rate == SequenceStatistics().mean_accepted_length == 0
    assert EngineStatistics().occupancy == 0
