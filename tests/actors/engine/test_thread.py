"""An engine in its own thread serves many callers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from exspec.actors.engine import EngineThread, Request, RequestError, Sampling
from tests import tiny
from tests.tiny import ArithmeticModel


def engine(**config: Any) -> Any:
    return tiny.engine(ArithmeticModel(), method="plain", capacity=64, **config)


def test_many_callers_each_get_their_own_completions() -> None:
    rows = tiny.prompts(60, longest=30)
    with EngineThread(engine()) as thread, ThreadPoolExecutor(8) as callers:

        def call(i: int) -> list[int]:
            return thread.submit(Request(i, rows[i], max_new_tokens=10)).result(timeout=60).tokens

        assert list(callers.map(call, range(60))) == [ArithmeticModel.continuation(row, 10) for row in rows]
    assert thread.statistics.tokens == sum(len(ArithmeticModel.continuation(row, 10)) for row in rows)


def test_closing_finishes_what_was_submitted() -> None:
    thread = EngineThread(engine())
    futures = [thread.submit(Request(i, [1 + i], max_new_tokens=9)) for i in range(30)]
    thread.close()
    assert all(future.done() and future.exception() is None for future in futures)


EXTREMES: list[dict[str, Any]] = [
    {"sampling": Sampling(temperature=1e-6, seed=2**80)},
    {"sampling": Sampling(temperature=1e6, top_k=2**31 - 1, top_p=5e-324)},
    {"sampling": Sampling(temperature=1.0, repetition_penalty=1e-6, seed=-1)},
    {"prompt": [1.0]},
    {"prompt": ["a"]},
    {"prompt": [2**70]},
    {"max_new_tokens": 2**70},
    {"max_new_tokens": 2.5},
    {"sampling": {"top_k": 2**63}},
    {"sampling": {"temperature": 1e-39}},
]


def outcome(thread: EngineThread, extreme: dict[str, Any]) -> BaseException | None:
    """The error of an extreme request, when it is made or decoded; None if there is none."""
    sampling = extreme.get("sampling", Sampling())
    given = {"id": "extreme", "prompt": [1], "max_new_tokens": 3} | extreme
    try:
        made = sampling if isinstance(sampling, Sampling) else Sampling(**sampling)
        return thread.submit(Request(**given | {"sampling": made})).exception(timeout=60)
    except ValueError as error:
        return error


@pytest.mark.parametrize("extreme", EXTREMES)
def test_no_request_stops_the_engine_for_others(extreme: dict[str, Any]) -> None:
    with EngineThread(engine()) as thread:
        good = [thread.submit(Request(i, [1 + i], max_new_tokens=9)) for i in range(3)]
        error = outcome(thread, extreme)
        assert error is None or isinstance(error, ValueError), "neither decoded nor refused with a reason"
        later = thread.submit(Request("later", [5], max_new_tokens=9))
        for row, future in (*((1 + i, f) for i, f in enumerate(good)), (5, later)):
            assert future.result(timeout=60).tokens == ArithmeticModel.continuation([row], 9)


def test_a_refused_request_fails_alone() -> None:
    with EngineThread(engine()) as thread:
        bad, good = thread.submit(Request("bad", [])), thread.submit(Request("good", [1], max_new_tokens=3))
        with pytest.raises(RequestError, match="'bad': the prompt is empty"):
            bad.result(timeout=60)
        assert good.result(timeout=60).tokens == ArithmeticModel.continuation([1], 3)


def test_a_failing_engine_fails_every_waiting_caller() -> None:
    broken = engine()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    broken.target.forward = fail
    with EngineThread(broken) as thread:
        futures = [thread.submit(Request(i, [1, 2], max_new_tokens=3)) for i in range(3)]
        for future in [*futures, thread.submit(Request("late", [1]))]:
            with pytest.raises(RuntimeError, match="the device is gone"):
                future.result(timeout=60)
