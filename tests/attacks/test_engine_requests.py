"""Poisoned requests to a shared engine: each ends alone, and its neighbours get exactly their tokens."""

import sys
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from exspec.actors import samples
from exspec.actors.engine import EngineThread, Request, Sampling
from exspec.actors.engine.tokens.constraint import Automaton, Constraint, Node, chain
from exspec.actors.stop_strings import StopMatcher, completion_text
from tests import tiny
from tests.pipeline import jobs
from tests.tiny import ArithmeticModel

BEYOND = tiny.VOCABULARY
END = tiny.ENDS[0]


class OwnError(RuntimeError):
    """What the poisoned functions raise."""


def fail(*_: object) -> Any:
    raise OwnError("on purpose")


def recurse(token: int) -> Any:
    return recurse(token)


def late(_: object, tokens: int = 3) -> Callable[[int], None]:
    """A stop check that raises after a few tokens."""
    left = iter(range(tokens))
    return lambda _: None if next(left, None) is not None else fail()


class Poisoned(Automaton):
    """Allows ten tokens one after the other, with a choice at each. One method raises after `left` calls."""

    def __init__(self, method: str, left: int = 4) -> None:
        end = Node()
        end.children[END] = Node()
        super().__init__(end)
        for _ in range(10):
            node = Node()
            node.children = {7: self.path[0], 8: self.path[0]}
            self.path = [node]
        self.method, self.left = method, left

    def _count(self, method: str) -> None:
        self.left -= method == self.method
        if self.left < 0:
            fail()

    def kept(self) -> Any:
        self._count("kept")
        return None if self.method == "compute" else super().kept()

    def accepts(self, token: int) -> bool:
        self._count("accepts")
        return super().accepts(token)

    def advance(self, token: int) -> None:
        self._count("advance")
        super().advance(token)

    def rollback(self, count: int) -> None:
        self._count("rollback")
        super().rollback(count)

    @classmethod
    def compute(cls, rows: Any, masks: Any) -> None:
        for constraint, row in rows:
            constraint._count("compute")
            masks[row] = 0
            masks[row, 0] = 1 << 7 | 1 << 8


def allowing(*tokens: int) -> Callable[[], Constraint]:
    return lambda: Automaton(chain(tokens, Node()))


class Unhashable:
    def __hash__(self) -> int:
        return hash(fail())


# What is changed in a good request; and the error, or None if it is decoded.
POISONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a bad word beyond the vocabulary": ({"bad_words": ((3, BEYOND),)}, "bad_words: token id 61 is outside"),
    "a bad word below the vocabulary": ({"bad_words": ((-1,),)}, "bad_words: token id -1 is outside"),
    "an end id beyond the vocabulary": ({"end_ids": frozenset([BEYOND])}, "end_ids: token id 61 is outside"),
    "a huge end id before which no end may come": (
        {"end_ids": frozenset([2**40]), "min_new_tokens": 2},
        "end_ids: token id 1099511627776 is outside",
    ),
    "an end id that is no whole number": ({"end_ids": frozenset([2.5])}, "end_ids: expected whole numbers, not float"),
    "end ids as a list of numpy numbers": ({"end_ids": [np.int64(9)]}, None),
    "a prompt token beyond the vocabulary": ({"prompt": [BEYOND]}, "prompt: token id 61 is outside"),
    "a prompt of small numpy numbers": ({"prompt": np.array([60] * 20, np.uint8)}, None),
    "a prompt that is text": ({"prompt": "abc"}, "prompt: expected whole numbers, not str"),
    "a prompt that is a tensor": ({"prompt": torch.tensor([1, 2])}, "prompt: expected whole numbers, not Tensor"),
    "a numpy seed": ({"sampling": {"temperature": 1.0, "seed": np.int64(2**62)}}, None),
    "a numpy seed of eight bits": ({"sampling": {"temperature": 1.0, "seed": np.uint8(255)}}, None),
    "a numpy top_k and temperature": (
        {"sampling": {"temperature": np.float32(0.5), "top_k": np.uint8(200), "top_p": np.float32(0.5)}},
        None,
    ),
    "a temperature that is a fraction": ({"sampling": {"temperature": Fraction(1, 3)}}, None),
    "a penalty that is a fraction": ({"sampling": {"presence_penalty": Fraction(1, 3)}}, None),
    "a temperature that is not a number": (
        {"sampling": {"top_p": float("nan")}},
        "top_p: expected",
    ),
    "no sampling": ({"sampling": None}, "sampling: expected Sampling, not NoneType"),
    "sampling that is a list": ({"sampling": [3]}, "sampling: expected Sampling, not list"),
    "a numpy max_new_tokens": ({"max_new_tokens": np.int8(3)}, None),
    "half a scored token": ({"scored": 2.5}, "scored: expected whole numbers, not float"),
    "a stop check that raises at once": ({"stop": lambda: fail}, "on purpose"),
    "a stop check that raises later": ({"stop": lambda: late(0)}, "on purpose"),
    "a stop check that recurses": ({"stop": lambda: recurse}, "recursion"),
    "a stop check that exits": ({"stop": lambda: sys.exit}, "SystemExit"),
    "a stop whose making exits": ({"stop": sys.exit}, "SystemExit"),
    "a stop check that is none": ({"stop": lambda: 5}, "not callable"),
    "a stop whose making raises": ({"stop": fail}, "on purpose"),
    "a stop that takes an argument": ({"stop": lambda _: None}, "missing 1 required positional argument"),
    "a constraint whose making raises": ({"constraint": fail}, "on purpose"),
    "a constraint that is none": ({"constraint": lambda: 5}, "no attribute"),
    "a constraint that allows a token beyond the vocabulary": (
        {"constraint": allowing(7, BEYOND, 8)},
        "[61] is outside",
    ),
    "a constraint that forces a token far beyond": ({"constraint": allowing(10**6)}, "[1000000] is outside"),
    "a constraint that ends without an end token": ({"constraint": allowing(7, 8)}, "KeyError"),
    "a constraint that allows a negative token": ({"constraint": allowing(-1)}, "[-1] is outside"),
    "an id whose hash raises": ({"id": Unhashable()}, "on purpose"),
    "an id that is a list": ({"id": []}, "unhashable"),
    **{
        f"a constraint that raises in {method}, after {left} calls": (
            {"constraint": lambda method=method, left=left: Poisoned(method, left), "scored": 1 + left},
            "on purpose",
        )
        for method in ("kept", "accepts", "advance", "rollback", "compute")
        for left in (0, 1, 5)
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "exspec": {"method": "exspec"},
    "eqspec": {"method": "eqspec"},
    "overlapping": {"method": "exspec", "overlap": True, "draft_tokens": 1},
}
ROWS = tiny.prompts(7, longest=20)


def made(changes: dict[str, Any]) -> Request:
    given: dict[str, Any] = {"id": "poisoned", "prompt": [3, 1], "max_new_tokens": 9} | changes
    sampling = changes.get("sampling")
    return Request(**given | ({"sampling": Sampling(**sampling)} if isinstance(sampling, dict) else {}))


def outcome(thread: EngineThread, changes: dict[str, Any]) -> BaseException | None:
    """The error of a poisoned request, when it is made or decoded; None if it was decoded."""
    try:
        return thread.submit(made(changes)).exception(timeout=60)
    except Exception as error:
        return error


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("method", SETTINGS)
def test_a_poisoned_request_ends_alone(method: str, poison: str) -> None:
    """It has more rows than slots, so that the poisoned one's slot and pages are used again."""
    drafter = tiny.Scripted(defaultdict(list), 1.0)  # drafts zeros
    engine = tiny.engine(ArithmeticModel(), drafter, capacity=64, window=4, **SETTINGS[method])
    changes, message = POISONS[poison]
    if method == "plain" and "accepts" in poison:
        message = None  # without drafts nobody asks
    with EngineThread(engine) as thread:
        before = [thread.submit(Request(i, row, max_new_tokens=12)) for i, row in enumerate(ROWS)]
        error = outcome(thread, changes)
        later = [thread.submit(Request(f"later {i}", row, max_new_tokens=12)) for i, row in enumerate(ROWS)]
        if message is None:
            assert error is None
        else:
            assert message in f"{type(error).__name__}: {error}"
        for row, future in zip([*ROWS, *ROWS], [*before, *later], strict=True):
            assert future.result(timeout=60).tokens == ArithmeticModel.continuation(row, 12)
        again = thread.submit(Request("poisoned", [3, 1], max_new_tokens=9))
        assert again.result(timeout=60).tokens == ArithmeticModel.continuation([3, 1], 9)
    engine.check()
    assert len(engine.pool.free) == engine.config.slots


def test_a_callback_that_raises_costs_nobody_a_token() -> None:
    with EngineThread(tiny.engine(ArithmeticModel(), method="plain", capacity=64)) as thread:
        futures = [thread.submit(Request(i, row, max_new_tokens=9)) for i, row in enumerate(ROWS)]
        futures[0].add_done_callback(fail)
        for row, future in zip(ROWS, futures, strict=True):
            assert future.result(timeout=60).tokens == ArithmeticModel.continuation(row, 9)


def test_an_end_token_of_the_model_beyond_its_vocabulary_is_not_barred() -> None:
    engine = tiny.engine(ArithmeticModel(), method="plain", capacity=64)
    engine.end_ids = frozenset([END, 10**6])
    (done,) = tiny.run(engine, [Request("a", [3, 1], max_new_tokens=9, min_new_tokens=2)]).values()
    assert done.tokens == ArithmeticModel.continuation([3, 1], 9)


def test_a_future_that_was_cancelled_does_not_hold_up_later_callers() -> None:
    """The fault: after the engine's failure, a cancelled future ended the loop that answers the others."""
    engine = tiny.engine(ArithmeticModel(), method="plain", capacity=64)
    engine.step = fail  # type: ignore[method-assign]
    with EngineThread(engine) as thread:
        thread.submit(Request("first", [1])).exception(timeout=60)
        for i in range(50):
            thread.submit(Request(i, [1])).cancel()
        with pytest.raises(OwnError):
            thread.submit(Request("last", [1])).result(timeout=60)


def test_a_stop_check_that_raises_costs_a_job_one_row(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_shards(tmp_path / "in", 24)
    matcher = StopMatcher.__call__

    def odd(self: StopMatcher, token: int) -> str | None:
        return fail() if "w7" in self.stop.strings else matcher(self, token)

    monkeypatch.setattr(StopMatcher, "__call__", odd)
    for shard in sorted((tmp_path / "in").iterdir()):
        table = pq.read_table(shard)
        stops = ["w7" if key == 5 else "w99" for key in table["key"].to_pylist()]
        pq.write_table(table.append_column("stop", [stops]), shard)
    assert jobs.run(pair, tmp_path, stop_column="stop") == 0
    check_one_error(tmp_path / "out", "OwnError: on purpose")


def test_a_completion_that_cannot_be_decoded_costs_a_job_one_row(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_shards(tmp_path / "in", 24)
    text = completion_text
    bad = ArithmeticModel.continuation(jobs.prompt(5), jobs.budget(5))
    odd = lambda tokenizer, completion, stop: fail() if completion.tokens == bad else text(tokenizer, completion, stop)  # noqa: E731
    monkeypatch.setattr(samples, "completion_text", odd)
    assert jobs.run(pair, tmp_path) == 0
    check_one_error(tmp_path / "out", "OwnError: on purpose")


def check_one_error(output: Path, message: str) -> None:
    """Row 5 alone has the error; all others have their completions."""
    rows = jobs.read_output(output)
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == {"5": message}
    assert {name: row["completion"] for name, row in rows.items()} == {
        str(key): None if key == 5 else jobs.expected(key) for key in range(24)
    }
