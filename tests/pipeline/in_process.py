"""Runs a whole job in the test's process instead of Ray, with the same reader and the same actor.

Values for reader and actor are pickled, as Ray would send them.
"""

import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray import cloudpickle

from exspec.actors.engine import EngineConfig
from exspec.actors.generator import Generator, Loader
from exspec.actors.ledger import Ledger
from exspec.pipeline import run
from exspec.pipeline.input.passes import read_together
from exspec.pipeline.input.plan import Task
from exspec.pipeline.input.reader import Reader
from exspec.pipeline.job.settings import Job

CALLS = 4  # concurrent chunks in the actor


@contextmanager
def in_process() -> Iterator[None]:
    """Jobs inside the block need no Ray. Tests of dying processes and cluster limits need Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "connect", lambda _: None)
        patch.setattr(run, "check_cluster", lambda _: None)
        patch.setattr(run, "actors_that_fit", lambda *_: 1)
        patch.setattr(run, "lacking", lambda *_: "nothing")
        patch.setattr(
            run, "on_a_device", lambda _, function, *arguments: handed_over(function)(*handed_over(arguments))
        )
        patch.setattr(run, "RayLedger", Ledger)
        patch.setattr(run, "results", results)
        yield


def results(
    job: Job,
    config: EngineConfig,  # noqa: ARG001
    rows_per_chunk: int,  # noqa: ARG001
    room: Any,
    tasks: Iterator[Task],
    schema: pa.Schema,
    sink: Any,
    load: Loader,
    ledger: Ledger,
) -> Iterator[dict[str, Any]]:
    """`graph.results` with one reader and one actor, which works on several chunks at once."""
    read = handed_over(Reader(job, schema, room))
    load, sampling, sink, answers, draws = handed_over((load, job.sampling, sink, job.answers, job.draws))
    meter: Any = SimpleNamespace(report=lambda *_: None)
    going: deque[Future[pa.Table]] = deque()
    with (
        closing(Generator(load, sampling, sink, ledger, meter, job.attempts, answers, draws)) as generate,
        ThreadPoolExecutor(CALLS) as pool,
    ):
        for group in read_together(tasks):
            for block in read(pa.table({"tasks": [pickle.dumps(group)]})):
                going.append(pool.submit(generate, block))
                if len(going) == CALLS:
                    yield outcome(going.popleft())
        while going:
            yield outcome(going.popleft())


def outcome(done: Future[pa.Table]) -> dict[str, Any]:
    return pickle.loads(done.result()["result"][0].as_py())  # type: ignore[no-any-return]


def handed_over(values: Any) -> Any:
    """The values as another process receives them."""
    return pickle.loads(cloudpickle.dumps(values))
