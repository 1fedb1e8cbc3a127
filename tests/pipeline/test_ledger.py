"""The row to blame for dead processes is the one that was alone twice, not rows on preempted nodes."""

import time
from pathlib import Path

import pytest

from exspec.actors.generator import _parts
from exspec.actors.ledger import SILENCE, Attempt, HostSigns, Ledger
from tests.pipeline import in_process, jobs

MOST = 6  # default attempts of a job


def groups(attempt: Attempt, rows: int) -> list[list[int]]:
    """The groups of a repeated chunk in the generator's order."""
    rest = [i for i in range(rows) if i not in attempt.bad]
    innocent, suspects = ([i for i in rest if (i in attempt.suspects) == suspect] for suspect in (False, True))
    return [*_parts(suspects), *_parts(innocent)]


def run(ledger: Ledger, rows: int, poison: set[int]) -> tuple[Attempt, int]:
    """Retry the chunk until no row kills its process. Returns the last attempt and the number of deaths."""
    deaths = 0
    while True:
        attempt = ledger.begin("p")
        if attempt.number > MOST or len(attempt.bad) > MOST:
            return attempt, deaths
        left = poison - attempt.bad
        if attempt.number == 1 and not left:
            return attempt, deaths
        if attempt.number > 1:
            for group in groups(attempt, rows):
                ledger.mark("p", group)
                if left & set(group):
                    break
                ledger.mark("p", [])
            else:
                return attempt, deaths
        deaths += 1


def test_two_preemptions_of_a_small_chunk_blame_nobody() -> None:
    """In a small chunk, every row is a group of its own."""
    ledger = Ledger()
    ledger.begin("p")
    second = ledger.begin("p")
    ledger.mark("p", groups(second, 8)[3])
    third = ledger.begin("p")
    assert (third.number, third.bad, third.suspects) == (3, set(), {3})
    assert groups(third, 8)[0] == [3], "the suspect comes first, alone"
    assert run(ledger, 8, set())[0].bad == set()


def test_preemptions_at_different_rows_blame_nobody() -> None:
    ledger = Ledger()
    ledger.begin("p")
    for row in (3, 5, 1):
        attempt = ledger.begin("p")
        assert [row] in groups(attempt, 8)
        ledger.mark("p", [row])
    assert ledger.begin("p").bad == set()


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 20, 64, 100])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_the_row_that_kills_is_found_and_no_other(rows: int, place: float) -> None:
    poison = int(place * rows)
    last, deaths = run(Ledger(), rows, {poison})
    assert last.bad == {poison}
    assert last.number <= 4
    assert deaths <= 5


@pytest.mark.parametrize("poison", [{0, 1}, {3, 60}, {10, 20, 30}])
def test_several_rows_that_kill(poison: set[int]) -> None:
    last, _ = run(Ledger(), 64, poison)
    assert last.bad == poison
    assert last.number <= MOST


@pytest.mark.parametrize("rows", [1, 8, 64, 1000])
def test_the_search_is_bounded_where_every_row_kills(rows: int) -> None:
    _, deaths = run(Ledger(), rows, set(range(rows)))
    assert deaths <= 3 * MOST + 3


def test_heartbeats_are_summed_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host is gone while all its actors are silent. Tokens of an actor that died still count."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ledger = Ledger()
    for actor, host, tokens in (("a", "one", 5), ("b", "one", 7), ("c", "two", 9), ("b", "one", 8)):
        ledger.sign(actor, host, tokens)
    assert ledger.signs().seconds == 0, "no chunk has begun"
    ledger.begin("p")
    now[0] += SILENCE
    ledger.sign("a", "one", 6)
    signs = ledger.signs()
    assert signs.hosts == {"one": HostSigns(1, 14, 0.0), "two": HostSigns(0, 9, SILENCE)}
    assert (signs.actors, signs.tokens, signs.seconds) == (1, 23, SILENCE)
    ledger.sign("d", "two", 1)
    assert ledger.signs().hosts["two"] == HostSigns(1, 10, 0.0), "another actor has taken its place"


def test_an_actor_that_has_left_is_neither_alive_nor_silent() -> None:
    """Even if a heartbeat comes late. Its tokens count."""
    ledger = Ledger()
    ledger.sign("a", "one", 5)
    ledger.sign("b", "one", 7)
    ledger.leave("a")
    ledger.sign("a", "one", 6)
    assert (ledger.signs().actors, ledger.signs().tokens, ledger.signs().left) == (1, 13, 1)
    ledger.leave("b")
    assert ledger.signs().hosts == {"one": HostSigns(0, 13, 0.0)}


def test_it_forgets_finished_chunks(pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Ledger] = []

    class Kept(Ledger):
        def __init__(self, slots: int | None = None) -> None:
            super().__init__(slots)
            made.append(self)

    monkeypatch.setattr(in_process, "Ledger", Kept)
    with in_process.in_process():
        assert jobs.run(pair, tmp_path, 60, jobs.ArithmeticLoader()) == 0
    (ledger,) = made
    assert ledger.first is not None
    assert not ledger.chunks
