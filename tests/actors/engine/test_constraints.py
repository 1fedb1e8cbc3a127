"""Constrained decoding: every token equals that of plain decoding under the same constraint."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from transformers import AutoTokenizer

from exspec.actors.answers.grammar import Grammar
from exspec.actors.answers.json_schema import Json
from exspec.actors.engine import Engine, EngineConfig, Request, RequestError, Sampling
from exspec.actors.engine.tokens.constraint import (
    Automaton,
    Barred,
    Few,
    Node,
    chain,
    choice,
    forced,
    mask_of,
    tokens_of,
    unpacked,
)
from exspec.actors.engine.tokens.constraint_walker import Masks
from exspec.jobs.demo import TARGET
from tests import tiny

END = tiny.ENDS[0]
LABELS = {"a": [10], "ab": [10, 11], "abc": [10, 11, 12, 13], "b": [20, 21, 22], "c": [20, 23], "d": [30, 10, 11]}


def labels() -> Automaton:
    """Forced tokens, a label, two forced tokens, another label, the end."""
    end = chain([END], Node())
    second = choice(LABELS.values(), end)
    return Automaton(chain([40, 41, 42], choice(LABELS.values(), chain([50, 51], second))))


def maze(seed: int) -> Callable[[], Automaton]:
    """A random automaton with loops, forced tokens and wide choices, in which the end is never far."""
    rng = random.Random(seed)
    nodes = [Node() for _ in range(12)]
    for node in nodes:
        width = rng.choice([1, 1, 1, 2, 5, tiny.VOCABULARY - 2])
        usual = [t for t in range(tiny.VOCABULARY) if t not in tiny.ENDS]
        node.children = {t: rng.choice(nodes) for t in rng.sample(usual, min(width, len(usual)))}
        if width > 1 and rng.random() < 0.5:
            node.children[END] = Node()
    return lambda: Automaton(nodes[0])


def constraint_of(i: int) -> Callable[[], Automaton]:
    return labels if i % 3 == 0 else maze(i)


def requests(sampled: bool) -> list[Request]:
    """Two of three are constrained; the third shares their rounds."""
    made = []
    for i, prompt in enumerate(tiny.prompts(18)):
        sampling = Sampling(temperature=1.3, seed=i) if sampled and i % 2 else Sampling()
        constraint = None if i % 3 == 2 else constraint_of(i)
        made.append(Request(i, prompt, 20, sampling, constraint=constraint, scored=1000 * (i % 3 == 0)))
    return made


CONFIGS = {
    "plain": EngineConfig(method="plain", batch_size=4, window=6, capacity=96, bucket=32),
    "eqspec": EngineConfig(method="eqspec", batch_size=4, window=4, draft_tokens=3, capacity=96),
    "exspec": EngineConfig(batch_size=4, window=6, draft_tokens=5, capacity=96, bucket=32),
    "one by one": EngineConfig(batch_size=1, window=1, draft_tokens=7, capacity=96, bucket=96),
    "free shapes": EngineConfig(batch_size=4, window=9, draft_tokens=4, capacity=96, bucket=1, exact=False),
    "explicit": EngineConfig(batch_size=4, window=6, draft_tokens=5, capacity=96, bucket=32, draft_length="both"),
}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_those_of_one_sequence_at_a_time(name: str, sampled: bool) -> None:
    target, asked = tiny.model(), requests(sampled)
    draft = None if name == "plain" else tiny.model(seed=0 if sampled else 1)  # once a draft that is always right
    assert tiny.decode(Engine(target, draft, CONFIGS[name]), asked) == tiny.slow_decode(target, asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_scores_do_not_depend_on_the_drafts(dtype: torch.dtype) -> None:
    """In the same shape they are bit for bit the same, in either precision."""
    target, config = tiny.model(dtype=dtype), CONFIGS["exspec"]
    found = []
    for draft, shape in ((None, config.plain()), (tiny.model(seed=1, dtype=dtype), config), (target, config)):
        done = tiny.run(Engine(target, draft, shape), requests(sampled=True))
        found.append({name: (c.tokens, c.scores, c.finish_reason) for name, c in done.items()})
    assert found[0] == found[1] == found[2]


def test_scores_are_the_probabilities_among_the_allowed_tokens() -> None:
    target = tiny.model()
    asked = {request.id: request for request in requests(sampled=False) if request.scored}
    for name, completion in tiny.run(Engine(target, None, CONFIGS["plain"]), [*asked.values()]).items():
        walk = labels()
        for place, token in enumerate(completion.tokens):
            allowed = sorted(walk.path[-1].children)
            scores = completion.scores[place]
            assert sorted(scores) == (allowed if len(allowed) > 1 else [])
            if scores:
                ids = torch.tensor([[*asked[name].prompt, *completion.tokens[:place]]])
                logits = target(input_ids=ids).logits[0, -1, allowed].log_softmax(0)
                assert torch.allclose(torch.tensor([scores[t] for t in allowed]), logits, atol=1e-4)
                assert token == max(scores, key=lambda t: scores[t])
            walk.advance(token)


def test_forced_tokens_take_no_round() -> None:
    """A forced beginning is prefilled with the prompt, and a forced end is appended: only a choice takes a round."""
    constraint = lambda: Automaton(chain([40, 41, 42], choice([[10, 11, 12], [20, 21]], chain([50, END], Node()))))  # noqa: E731
    engine = Engine(tiny.model(), None, CONFIGS["plain"])
    completion = tiny.run(engine, [Request("x", [1, 2, 3], 20, constraint=constraint)])["x"]
    assert completion.tokens in ([40, 41, 42, 10, 11, 12, 50, END], [40, 41, 42, 20, 21, 50, END])
    assert completion.statistics.rounds == 1
    assert completion.statistics.forced == len(completion.tokens) - 1


def test_forced_tokens_in_the_middle_are_drafts_that_are_always_right() -> None:
    middle = lambda: Automaton(choice([[10], [20]], chain([50, 51, 52], choice([[30], [31]], chain([END], Node())))))  # noqa: E731
    config = EngineConfig(batch_size=1, window=1, draft_tokens=4, capacity=96)
    engine = Engine(tiny.model(), tiny.model(seed=1), config)
    for completion in tiny.run(engine, tiny.requests(tiny.prompts(8), constraint=middle)).values():
        assert completion.statistics.forced == 4
        assert completion.statistics.rounds <= 2, "one round per choice"


def test_drafts_continue_from_forced_tokens() -> None:
    """The draft model is the target, so it is right as long as its KV holds the forced tokens, which it would not
    choose."""
    target, wide = tiny.model(), Node()
    wide.children = {t: wide for t in range(tiny.VOCABULARY) if t not in tiny.ENDS}
    engine = Engine(target, target, EngineConfig(batch_size=2, window=2, draft_tokens=6, capacity=96))
    start = choice([[10], [20]], chain([50, 51, 52], wide))
    rows = tiny.requests(tiny.prompts(6), 33, constraint=lambda: Automaton(start))
    for completion in tiny.run(engine, rows).values():
        assert completion.tokens[1:4] == [50, 51, 52]
        statistics = completion.statistics
        assert statistics.forced == 3
        assert statistics.drafted - statistics.accepted == 2, "the first round's drafts that forced tokens replaced"
        assert statistics.rounds <= 8


def test_a_constrained_completion_ends_at_its_budget_or_its_end_token() -> None:
    engine = Engine(tiny.model(), tiny.model(seed=1), CONFIGS["exspec"])
    rows = [Request(budget, [1, 2], budget, constraint=labels) for budget in range(1, 12)]
    for budget, completion in tiny.run(engine, rows).items():
        assert len(completion.tokens) <= int(budget)  # type: ignore[call-overload]
        assert (completion.finish_reason == "length") == (completion.tokens[-1] != END)
    with pytest.raises(RequestError, match="stop and constraint exclude"):
        engine.submit(Request("x", [1], 5, constraint=labels, stop=lambda: lambda _: None))


@given(st.sets(st.integers(0, 200), max_size=40))
def test_a_mask_holds_the_tokens_it_was_made_of(tokens: set[int]) -> None:
    mask = mask_of(tokens)
    assert tokens_of(mask) == sorted(tokens)
    assert Few.of(tokens).only == (min(tokens) if len(tokens) == 1 else None)
    padded = torch.nn.functional.pad(mask, (0, 7 - len(mask)))
    assert unpacked(padded, 201).nonzero()[:, 0].tolist() == sorted(tokens)


def test_an_option_that_begins_another_must_be_followed_by_another_token() -> None:
    with pytest.raises(ValueError, match="token 11 both continues"):
        choice([[10], [10, 11]], chain([11], Node()))
    walk = Automaton(choice([[10], [10, 11]], chain([END], Node())))
    assert forced(walk, 9) == [10]
    walk.advance(10)
    assert tokens_of(walk.allowed()) == [END, 11]
    walk.advance(11)
    walk.rollback(2)
    assert tokens_of(walk.allowed()) == [10]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("padding", [0, 5, -1], ids=["as the tokenizer", "padded", "smaller"])
def test_the_masks_of_a_schema_equal_the_librarys_after_any_walk(padding: int) -> None:
    """Several walkers go back and forth, and are compared with a new matcher that goes straight there."""
    tokenizer, rng = AutoTokenizer.from_pretrained(TARGET), random.Random(0)
    answers = Json(tokenizer, SCHEMA, {})
    library = from_tokenizer(tokenizer, eos_token=tokenizer.eos_token_id)
    words = -(-library.vocab_size // 32)
    walks = [answers.constraint() for _ in range(3)]
    paths: list[list[int]] = [[] for _ in walks]
    masks = np.full((5, words + padding), 7, dtype=np.int32)
    longest = 0
    for _ in range(80):
        asked = [(walk, 2 * row) for row, walk in enumerate(walks) if walk.kept() is None]
        if asked:
            Grammar.compute(asked, masks)
        for walk, path in zip(walks, paths, strict=True):
            fresh = LLMatcher(library, answers.grammar)
            assert fresh.consume_tokens(path)
            expected = np.zeros((1, words), dtype=np.int32)
            fill_next_token_bitmask(fresh, expected)
            must = fresh.compute_ff_tokens()[:1]
            allowed = must or tokens_of(torch.from_numpy(expected[0]))
            assert tokens_of(walk.allowed()) == allowed
            place = 2 * walks.index(walk)
            if (walk, place) in asked:
                both = min(words, words + padding)
                assert (masks[place, :both] == expected[0, :both]).all()
                assert not masks[place, both:].any()
            if allowed == [tokenizer.eos_token_id] or (path and rng.random() < 0.2):
                back = min(rng.choice([1, 2, 6]), len(path))
                walk.rollback(back)
                del path[len(path) - back :]
            else:
                path.append(rng.choice(allowed))
                walk.advance(path[-1])
            longest = max(longest, len(path))
    assert longest > 20


def test_a_schema_accepts_the_tokens_of_its_mask_and_no_others() -> None:
    """Ids past the tokenizer's too, which a draft with a padded vocabulary may propose. Asking changes nothing."""
    answers, rng = Json(AutoTokenizer.from_pretrained(TARGET), SCHEMA, {}), random.Random(1)
    for _ in range(3):
        walk, length = answers.constraint(), 0
        while (allowed := tokens_of(walk.allowed())) and length < 60:
            asked = rng.sample(range(walk.vocabulary + 100), 60) + allowed[:20] + [walk.vocabulary, walk.end]
            assert [token for token in asked if walk.accepts(token)] == [t for t in asked if t in allowed]
            assert tokens_of(walk.allowed()) == allowed
            walk.advance(rng.choice(allowed))
            length += 1
        assert length > 10


def test_drafted_ids_past_the_tokenizer_are_cut() -> None:
    """The draft model proposes only an id that the tokenizer lacks. The tokens equal those of plain decoding."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    answers, end = Json(tokenizer, SCHEMA, {}), tokenizer.eos_token_id
    vocabulary = len(tokenizer) + 50
    target, draft = tiny.model(vocab_size=vocabulary), tiny.model(vocab_size=vocabulary, seed=1)
    draft.lm_head = torch.nn.Linear(draft.config.hidden_size, vocabulary)
    torch.nn.init.zeros_(draft.lm_head.weight)
    torch.nn.init.zeros_(draft.lm_head.bias)
    draft.lm_head.bias.data[len(tokenizer) + 7] = 9.0
    found = []
    for config in (CONFIGS["exspec"].plain(), CONFIGS["exspec"]):
        engine = Engine(target, draft if config.drafts else None, config, frozenset({end}))
        found.append(tiny.decode(engine, tiny.requests(tiny.prompts(6), 40, constraint=answers.constraint)))
    assert found[0] == found[1]
    assert engine.statistics.tokens > 100


def test_a_rows_mask_is_cleared_for_its_next_sequence() -> None:
    """Masks stay on the device from round to round."""
    masks = Masks(2, 3, 70, torch.device("cpu"))
    few, wide = Automaton(chain([3], Node())), Barred(70, {69}, 1, ())
    masks.write(0, {0: few, 1: wide})
    masks.write(1, {0: wide})
    assert [tokens_of(masks.device[0, row]) for row in range(2)] == [[3], list(range(69))]
    assert tokens_of(masks.device[1, 0]) == list(range(69))
    masks.write(0, {0: Automaton(chain([66], Node())), 1: few})
    assert [tokens_of(masks.device[0, row]) for row in range(2)] == [[66], [3]]
    masks.free([0, 2])
    assert (masks.device[:, 0] == -1).all()
    assert tokens_of(masks.device[0, 1]) == [3]
    masks.write(0, {0: Automaton(chain([66], Node()))})
    assert tokens_of(masks.device[0, 0]) == [66]
