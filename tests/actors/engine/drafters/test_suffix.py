"""The suffix drafter: it counts what follows in kept completions, within a memory limit."""

import random

import pytest

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.drafters.suffix import CONTEXT, NODE, SLICE, STORE, TOKEN, Row, Suffix, Tree
from tests import tiny
from tests.actors.engine.drafters.suffix_memory import alone, filled, peak


def draft(drafter: Suffix, tokens: list[int], most: int = 8) -> list[int]:
    drafter.admit(0, tokens)
    found = drafter._row(0, most)
    assert drafter.rows[0].tokens == tokens
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_counts_the_completions_that_it_keeps(seed: int) -> None:
    rng = random.Random(seed)
    tree = Tree(rng.choice([40, 300, 3000]) * NODE)
    for _ in range(60):
        size = rng.choice([1, 3, 9, 30])
        tree.learn([rng.randrange(rng.choice([2, 5, 50])) for _ in range(size)])
        assert len(tree.children) <= tree.nodes
        assert tree.held <= tree.room
        tree.check()
        asked = [rng.randrange(3) for _ in range(12)]
        kept = [tuple(k.tolist()) for k in tree.kept]
        longest = max(
            (n for n in range(CONTEXT + 1) if any(_count(k, tuple(asked[len(asked) - n :])) for k in kept)), default=0
        )
        node, depth = tree.find(asked[-CONTEXT:])
        assert depth == longest
        token, chance = tree.guess(node)
        assert 0 <= chance < 1
        assert (chance == 0) == (token == -1)
        if chance:
            suffixes = [tuple(asked[len(asked) - n :]) for n in range(1, longest + 1)]
            rates = [
                sum(_count(k, (*s, token)) for k in kept) / (sum(_count(k, s) for k in kept) + 1) for s in suffixes
            ]
            assert chance <= max(rates) + 1e-9


def _count(tokens: tuple[int, ...], string: tuple[int, ...]) -> int:
    return sum(tokens[i : i + len(string)] == string for i in range(len(tokens) - len(string) + 1))


def test_the_most_likely_follower_of_any_suffix_is_drafted() -> None:
    drafter = Suffix(1)
    for follower in (5, 6, 6):
        drafter.learn([], [1, 2, 3, follower])
    assert draft(drafter, [1, 2, 3], 1) == [6], "two of three"
    assert draft(drafter, [4, 2, 3], 1) == [6]
    assert draft(drafter, [4, 0, 7]) == [], "an unknown context has no draft"
    for _ in range(9):
        drafter.learn([], [9, 2, 3, 7])
    assert draft(drafter, [8, 9, 2, 3], 1) == [7]
    assert draft(drafter, [1, 2, 3], 1) == [7], "nine of twelve beat two of three"


def test_a_sequence_is_its_own_source_if_its_match_is_better() -> None:
    drafter = Suffix(1)
    drafter.learn([], [2, 3, 9])
    assert draft(drafter, [7, 1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5], "a match of three tokens beats one observation"
    for _ in range(20):
        drafter.learn([], [2, 3, 9, 9])
    assert draft(drafter, [7, 1, 2, 3, 4, 5, 1, 2, 3], 2) == [9, 9]


def test_a_draft_ends_when_acceptance_becomes_unlikely() -> None:
    drafter = Suffix(1, worth=0.5)
    for follower in (5, 6, 6):
        drafter.learn([], [1, 2, 3, follower, 8, 8])
    chances = [3 / 4, 2 / 4]  # of 3 after 1, 2, and of 6 after 3
    assert chances[0] > 0.5 > chances[0] * chances[1]
    assert draft(drafter, [1, 2]) == [3]
    assert draft(Suffix(1), [1, 2]) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_row_finds_the_last_occurrence_of_its_end(seed: int) -> None:
    """It grows token by token, and is compared with a search through all positions."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(60)]
    row = Row(tokens[:7])
    for end in range(8, 61):
        row.extend(tokens[end - 1 : end])
        assert row.tokens == tokens[:end]
        for size in (3, 2):
            places = [p for p in range(size, end) if tokens[p - size : p] == tokens[end - size : end]]
            if places:
                place, matched = row.find()
                assert place == places[-1]
                assert tokens[place - matched : place] == tokens[end - matched : end]
                break
        else:
            assert row.find() == (0, 0)
    assert Row(tokens).last == row.last


def test_a_repetition_is_drafted_on() -> None:
    assert Row([4, 1, 2, 3, 1, 2, 3]).find() == (4, 3)
    assert draft(Suffix(1), [4, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_long_completion_is_learned_completely_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences end at once, the backlog shrinks every round."""
    at_once: list[int] = []
    add = Tree._add
    monkeypatch.setattr(Tree, "_add", lambda tree, tokens: (at_once.append(len(tokens)), add(tree, tokens))[1])
    rng = random.Random(0)
    drafter, long = Suffix(4), [rng.randrange(50_000) for _ in range(20 * SLICE + 17)]
    for _ in range(3):
        drafter.learn([7] * 30, long)
    assert sum(at_once) <= 3 * (SLICE + CONTEXT)
    rounds = 0
    while drafter.waiting:
        before = len(at_once)
        drafter.committed({0: [1] * SLICE, 1: [2] * SLICE})
        assert sum(at_once[before:]) <= 5 * (SLICE + CONTEXT), "twice as many as the round has committed"
        rounds += 1
    assert max(at_once) <= SLICE + CONTEXT
    assert 10 < rounds <= 3 * 21 // 4 + 1
    drafter.tree.check()
    for end in range(CONTEXT, len(long), 97):
        node, depth = drafter.tree.find(long[end - CONTEXT : end])
        assert depth == CONTEXT
        assert drafter.tree.guess(node)[0] == long[end]
    drafter.learn([], long)
    drafter.forget()
    assert not drafter.waiting
    drafter.learn([], long)
    drafter.catch_up()
    assert not drafter.waiting
    drafter.tree.check()


@pytest.mark.slow
@pytest.mark.parametrize("size", [60, 600, 20_000])
def test_the_store_holds_no_more_than_its_limit(size: int) -> None:
    """At any moment, for completions that have nothing in common."""
    assert 0.4 * STORE < alone(peak, size) <= STORE


@pytest.mark.slow
def test_memory_stays_within_what_the_plan_counts() -> None:
    """After many completions that have nothing in common, many equal ones and a very long one; and with long rows."""
    store = 4 * 2**20
    learned, nodes, rows = alone(filled, store)
    assert 0.4 * store < learned <= store, f"{learned / nodes:.0f} bytes a node, not {NODE}"
    assert rows <= 8 * 4096 * TOKEN, f"{rows / 8 / 4096:.0f} bytes a token, not {TOKEN}"


def test_a_repeated_prompt_is_drafted_completely() -> None:
    """And after `forget`, not at all."""
    target, prompt = tiny.model(), [3, 4]
    expected = tiny.generate(target, prompt, 20)
    assert len(set(expected)) > 5
    made = Engine(target, None, EngineConfig(drafter="suffix", batch_size=1, window=1, capacity=64, bucket=64))
    rounds = []
    for turn in range(3):
        if turn == 2:
            made.forget()
        made.submit(Request(turn, prompt, 20))
        (done,) = made.run()
        assert done.tokens == expected
        rounds.append(done.statistics.rounds)
    assert rounds[1] <= -(-len(expected) // 4) < rounds[0] == rounds[2]
