"""Where sequences end. Nothing past the end is kept or counted."""

import re

import pytest

from exspec.actors.engine import Engine, Request, RequestError
from tests import tiny
from tests.tiny import ENDS, ArithmeticModel

PROMPTS = tiny.prompts(20, longest=30)
METHODS = ["plain", "eqspec", "exspec"]


def arithmetic_engine(references: dict[object, list[int]] | None = None, **config: object) -> Engine:
    drafter = tiny.Scripted(references, 1.0) if references else "model"
    return tiny.engine(ArithmeticModel(), drafter, **{"capacity": 64, **config})


@pytest.mark.parametrize("method", METHODS)
def test_ends_at_the_end_token_and_counts_nothing_past_it(method: str) -> None:
    """The fault: tokens after an accepted end token were kept and counted. Here drafts continue past every end."""
    longer = {i: ArithmeticModel.continuation(p, 30, ends=()) for i, p in enumerate(PROMPTS)}
    done = tiny.run(arithmetic_engine(longer, method=method, draft_tokens=7), tiny.requests(PROMPTS, 24))
    for i, prompt in enumerate(PROMPTS):
        expected = ArithmeticModel.continuation(prompt, 24)
        assert done[i].tokens == expected
        ended = expected[-1] == ENDS[0]
        assert (done[i].finish_reason, done[i].stopped_by) == (("stop", ENDS[0]) if ended else ("length", None))
        counted = done[i].statistics
        assert counted.completion_tokens == len(expected)
        assert counted.accepted + counted.rounds >= len(expected) >= counted.accepted
        assert counted.accepted == counted.drafted, "drafts past the end do not count"


def test_every_end_token_of_the_model_and_of_the_request_ends_a_sequence() -> None:
    """The fault: only one end id counted."""
    target = tiny.model()
    target.generation_config.eos_token_id = [7, 8]
    rows = [Request(i, p, max_new_tokens=30, end_ids=frozenset([9])) for i, p in enumerate(PROMPTS)]
    done = tiny.run(tiny.engine(target, draft=tiny.model(seed=1)), rows)
    assert {c.stopped_by for c in done.values()} >= {7, 8, 9}
    for completion in done.values():
        assert not {7, 8, 9} & set(completion.tokens[:-1])


def test_pad_ids_are_tokens_like_others() -> None:
    """The fault: masks were made from `ids != pad`."""
    target, draft = tiny.model(pad_token_id=0), tiny.model(seed=1, pad_token_id=0)
    other = tiny.model(pad_token_id=None)
    other.load_state_dict(target.state_dict())
    rows = [[0], [0, 0, 0], [4, 0, 0], [0, 9, 0, 11, 0], [0] * 30]
    for method in METHODS:
        got = tiny.decode(tiny.engine(target, draft=draft, method=method), tiny.requests(rows))
        assert got == tiny.decode(tiny.engine(other, draft=draft, method=method), tiny.requests(rows))
        assert got == tiny.greedy(target, rows)


def test_a_rows_budget_does_not_limit_other_rows() -> None:
    """The fault: the smallest budget limited the drafts of the whole group."""
    longer = {i: ArithmeticModel.continuation(p, 40, ends=()) for i, p in enumerate(PROMPTS)}
    engine = arithmetic_engine(longer, batch_size=20, window=20, draft_tokens=5, bucket=64)
    engine.end_ids = frozenset()
    done = tiny.run(engine, [Request(i, prompt, 1 + i) for i, prompt in enumerate(PROMPTS)])
    for i, completion in enumerate(done[i] for i in range(len(PROMPTS))):
        assert completion.tokens == longer[i][: 1 + i]
        assert completion.statistics.rounds == -(-(1 + i) // 6), "K + 1 tokens every round, as all drafts are right"
    assert engine.drafter.asked[0] == (20, 5)


def test_completions_have_the_ids_of_their_requests() -> None:
    """The fault: sorting by length lost the order. An id is any hashable value."""
    names = [f"row-{i}" if i % 2 else ("shard", i) for i in range(len(PROMPTS))]
    rows = [Request(name, prompt, max_new_tokens=9) for name, prompt in zip(names, PROMPTS, strict=True)]
    got = tiny.decode(arithmetic_engine(method="plain", bucket=8), rows, shuffle=3)
    assert got == {name: ArithmeticModel.continuation(p, 9) for name, p in zip(names, PROMPTS, strict=True)}


def test_the_models_context_limit_ends_a_sequence() -> None:
    done = tiny.run(arithmetic_engine(method="plain"), [Request("a", [1] * 60, max_new_tokens=50)])
    assert len(done["a"].tokens) == 4
    assert done["a"].finish_reason == "length"


def test_a_stop_check_sees_the_completion_after_each_of_its_tokens() -> None:
    """Its result ends the sequence there, although more tokens had been accepted."""
    longer = {0: ArithmeticModel.continuation([3, 1], 40, ends=())}
    engine = arithmetic_engine(longer, draft_tokens=7)
    engine.end_ids = frozenset()
    seen: list[int] = []

    def check(token: int) -> str | None:
        seen.append(token)
        return "enough" if len(seen) == 11 else None

    done = tiny.run(engine, [Request(0, [3, 1], max_new_tokens=30, stop=lambda: check)])
    assert seen == longer[0][:11]
    assert (done[0].tokens, done[0].finish_reason, done[0].stopped_by) == (longer[0][:11], "stop", "enough")
    assert done[0].statistics.completion_tokens == 11


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("r", []), "the prompt is empty, expected at least one token"),
        (Request("r", [1], max_new_tokens=0), "max_new_tokens is 0, expected at least 1"),
        (Request("r", [1, 61]), "token id 61 is outside the vocabulary of 61 tokens"),
        (Request("r", [1, -1]), "token id -1 is outside"),
        (Request("r", [1] * 96), "a prompt of 96 tokens leaves no room in the context of 96"),
        (Request("r", [1] * 20, max_new_tokens=21), "do not fit the slots' capacity of 40 tokens; raise capacity"),
    ],
)
def test_impossible_requests_are_refused_by_name(request_: Request, message: str) -> None:
    engine = tiny.engine(tiny.model(), draft=tiny.model(seed=1), capacity=40)
    with pytest.raises(RequestError, match=f"request 'r': .*{re.escape(message)}"):
        engine.submit(request_)
    assert not engine.busy


def test_an_id_is_refused_while_it_is_in_use() -> None:
    engine = arithmetic_engine(method="plain")
    engine.submit(Request("same", [1]))
    with pytest.raises(RequestError, match="'same': a request with this id is already being decoded"):
        engine.submit(Request("same", [2]))
    engine.run()
    engine.submit(Request("same", [2]))
    assert [c.id for c in engine.run()] == ["same"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method: expected one of plain, eqspec, exspec, not 'magic'"),
        ({"batch_size": 0}, "batch_size: expected a positive number, not 0"),
        ({"draft_tokens": 0}, "draft_tokens: expected a positive number, not 0"),
        ({"batch_size": 8, "window": 4}, "window: expected at least batch_size (8), not 4"),
        ({"columns": 3, "draft_tokens": 5}, "columns: expected at least 6"),
        ({"bucket": 1, "draft_tokens": 5}, "bucket: expected at least the verify width (6) with exact, not 1"),
        ({"attention": "paged"}, "attention: expected one of auto, in_place, gathered, not 'paged'"),
        ({"kernels": "fast"}, "kernels: expected one of eager, packed, compiled, compiled_packed, not 'fast'"),
        ({"page": 6}, "prefill_columns: expected a multiple of page (6), not 8"),
        ({"pages": 11}, "pages: expected at least 12, enough for one sequence of 96 tokens, not 11"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny.config(**settings)


def test_a_draft_with_a_shorter_context_than_the_capacity_is_refused() -> None:
    short = tiny.model(max_position_embeddings=32)
    with pytest.raises(ValueError, match="draft model's context of 32 tokens is shorter than the capacity of 96"):
        Engine(tiny.model(), short)
