"""The GPU actor: it decodes a chunk's rows and stages them as one file.

The caller passes a loader for engine and tokenizer, a sink that stages rows, and a ledger that counts attempts. The
actor knows no paths. It runs in a plain process as well as under Ray.
"""

import json
import logging
import os
import pickle
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import torch

from exspec.actors.answers.answers import Answers, asked
from exspec.actors.engine import (
    Completion,
    Engine,
    EngineStatistics,
    EngineThread,
    Request,
    RequestError,
    Sampling,
    shared_code,
)
from exspec.actors.engine.faults import first_line
from exspec.actors.engine.layers import experts
from exspec.actors.engine.layers.programs import CODE
from exspec.actors.hardware import hardware
from exspec.actors.ledger import Attempt, Ledger
from exspec.actors.samples import Draws, RowResult, Texts, read, sample_requests
from exspec.actors.stop_strings import StopStrings
from exspec.actors.work import WORK

KILLER = "the row ended the process that decoded it"  # the error of such a row
HEARTBEAT = 2.0  # seconds between heartbeats
OTHERS = 5.0  # seconds in which actors of other hosts begin to load
RETRY = 60.0  # seconds until an actor that could not load is started again
MOST_WAITING = 1024  # samples of a chunk that the engine has at once, unless a row has more
GROUPS = 8  # into how many groups of rows a repeated chunk is cut, to find the row that kills the process


@dataclass(frozen=True)
class Origin:
    """Where a chunk's results come from. hardware: with attention and kernels. started, ended: of the attempt, in
    seconds since 1970."""

    actor: str
    host: str
    hardware: dict[str, str]
    started: float
    ended: float
    attempt: int


class Sink(Protocol):
    """Stores the rows of a chunk."""

    def stage(self, task: Any, block: pa.Table, results: list[RowResult | None], origin: Origin) -> dict[str, Any]:
        """Stage the chunk's rows and describe the staged file; a row whose result is None stays unchanged."""
        ...


class Loader(Protocol):
    """Makes the engine, with at most `window` slots, and the tokenizer."""

    window: int  # slots of the engine when no actor has run out of memory

    def __call__(self, window: int) -> tuple[Engine, Any]: ...


class Meter(Protocol):
    def report(self, actor: str, host: str, result: dict[str, Any], engine: EngineStatistics) -> None: ...


class Generator:
    """Decodes chunks with one engine. Several threads may call it at the same time, each with one chunk.

    attempts: a chunk is set aside once this many attempts have ended in the death of their process. answers: makes the
    form of the completions, given the tokenizer and the target's end tokens. draws: what is kept of a row's samples.
    Each row has the carried columns and WORK.
    """

    def __init__(
        self,
        load: Loader,
        sampling: dict[str, Any],
        sink: Sink,
        ledger: Ledger,
        meter: Meter,
        attempts: int,
        answers: Callable[[Any, frozenset[int]], Answers],
        draws: Draws,
    ) -> None:
        self.host = os.uname().nodename
        self.window = ledger.window() or load.window
        ledger.loading(self.host)
        shared_code.fetch(ledger.known, ledger.code)
        engine, self.tokenizer = self._load(load, ledger)
        self.shape, self.answers = engine.config, answers(self.tokenizer, getattr(engine, "end_ids", frozenset()))
        self.engine = EngineThread(engine)
        self.sampling, self.sink, self.ledger, self.meter, self.attempts = sampling, sink, ledger, meter, attempts
        self.draws, self.texts = draws, Texts(self.tokenizer)
        self.name = f"{self.host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        ran: dict[str, str] = {"attention": self.shape.attention, "kernels": self.shape.kernels}
        ran |= experts.used(getattr(getattr(engine, "target", None), "model", None))
        self.hardware = hardware(getattr(engine, "device", torch.device("cpu"))) | ran
        self.turns = Turns()
        self.epoch = time.time() - time.monotonic()  # times come from the monotonic clock: the other one may jump
        self.closed = threading.Event()
        beating = (ledger, self.name, self.host, self.engine, self.closed)
        threading.Thread(target=_send_heartbeats, args=beating, daemon=True).start()
        # Ray Data deletes the generator when it ends an idle actor.
        weakref.finalize(self, ledger.leave, self.name).atexit = False

    def _load(self, load: Loader, ledger: Ledger) -> tuple[Engine, Any]:
        """Engine and tokenizer. If they do not fit, or cannot be loaded here while other hosts decode or load, this
        process ends, and Ray starts the actor again, on any host. An exception would end the job: Ray allows few."""
        try:
            loaded = load(self.window)
        except torch.OutOfMemoryError:
            ledger.shrink(max(self.window // 2, 1))
            if self.window == 1:
                raise
            os._exit(1)
        except Exception as error:
            logging.getLogger(__name__).exception("the models cannot be loaded")
            time.sleep(OTHERS)
            if not ledger.failed(self.host, first_line(error)):
                raise
            time.sleep(RETRY)
            os._exit(1)
        ledger.started(self.host)
        return loaded

    def close(self) -> None:
        """End the threads. An actor never calls this: its threads end with the process."""
        self.closed.set()
        self.engine.close()

    def __call__(self, block: pa.Table) -> pa.Table:
        """Decode one chunk. block: the task, and its rows as an Arrow stream or the reason why they cannot be read.
        Returns one row: the pickled result."""
        task = pickle.loads(block["task"][0].as_py())
        if (rows := block["rows"][0]).is_valid:
            result = self._work(task, pa.ipc.open_stream(rows.as_buffer()).read_all())
        else:
            result = self._set_aside(task, block["unreadable"][0].as_py(), "input")
        statistics = self.engine.statistics
        self.meter.report(self.name, self.host, result, statistics)
        return pa.table({"result": [pickle.dumps(result | {"engine": statistics, "actor": self.name})]})

    def _work(self, task: Any, block: pa.Table) -> dict[str, Any]:
        # An attempt begins when its turn comes, so that a waiting chunk is not blamed when another kills the process.
        with self.turns.alone() if self.ledger.begun(task.key) else self.turns.shared():
            started, attempt = self._now(), self.ledger.begin(task.key)
            # An attempt that identifies a killing row does not count. Many such rows point to another cause.
            if attempt.number > self.attempts or len(attempt.bad) > self.attempts:
                died = f"its process died in each of {self.attempts} attempts {attempt.last_error}"
                return self._set_aside(task, died, "decoding")
            results = self._survive(task, block, attempt)
        try:
            origin = Origin(self.name, self.host, self.hardware, started, self._now(), attempt.number)
            file = self.sink.stage(task, block, results, origin)
        except Exception as error:  # the storage has given up retrying, so decoding again would not help
            return self._set_aside(task, f"cannot be written: {type(error).__name__}: {error}", "output")
        return {"set_aside": "", "task": task, "file": file}

    def _now(self) -> float:
        return self.epoch + time.monotonic()

    def _set_aside(self, task: Any, reason: str, fault: str) -> dict[str, Any]:
        return {"set_aside": f"{task}: {reason}", "task": task, "fault": fault}

    def _survive(self, task: Any, block: pa.Table, attempt: Attempt) -> list[RowResult | None]:
        """Decode the rows. If the engine fails, end this process: a new actor tries again."""
        try:
            return self._generate(task, block.select(WORK).to_pylist(), attempt)
        except Exception as error:
            logging.getLogger(__name__).exception("%s: attempt %d failed", task, attempt.number)
            self.ledger.note(task.key, f"({type(error).__name__}: {error})")
            if isinstance(error, torch.OutOfMemoryError) and self._can_shrink:
                self.ledger.shrink(max(self.window // 2, 1))
                self.ledger.mark(task.key, [])  # suspect the window before any row
            os._exit(1)

    @property
    def _can_shrink(self) -> bool:
        """Whether an actor with a smaller window would hold less KV."""
        return self.shape.method != "eqspec" and self.shape.page_count > self.shape.fewest_pages

    def _generate(self, task: Any, rows: list[dict[str, Any]], attempt: Attempt) -> list[RowResult | None]:
        """The results of all rows. A repeated chunk runs in groups that are marked in the ledger, the suspected rows
        first: if two rows kill the process, the first is identified before the second runs again."""
        results: dict[int, RowResult | None] = {i: RowResult(None, None, KILLER, _tokens(rows[i])) for i in attempt.bad}
        results |= {i: None for i, row in enumerate(rows) if row["_skip"]}
        rest = [i for i in range(len(rows)) if i not in results]
        if attempt.number == 1:
            results |= dict(zip(rest, self._decode(task.key, rows, rest), strict=True))
            return [results[i] for i in range(len(rows))]
        innocent = [i for i in rest if i not in attempt.suspects]
        suspects = [i for i in rest if i in attempt.suspects]
        for group in (*_parts(suspects), *_parts(innocent)):
            self.ledger.mark(task.key, group)
            results |= dict(zip(group, self._decode(task.key, rows, group), strict=True))
            self.ledger.mark(task.key, [])
        return [results[i] for i in range(len(rows))]

    def _decode(self, part: str, rows: list[dict[str, Any]], numbers: list[int]) -> list[RowResult]:
        results: list[RowResult] = []
        waiting: deque[tuple[int, Callable[[], RowResult]]] = deque()
        for i in numbers:
            count = rows[i]["_samples"] or 1
            while waiting and count + sum(samples for samples, _ in waiting) > MOST_WAITING:
                results.append(waiting.popleft()[1]())
            waiting.append((count, self._submit((part, i), rows[i])))
        return [*results, *(result() for _, result in waiting)]

    def _submit(self, name: tuple[str, int], row: dict[str, Any]) -> Callable[[], RowResult]:
        prompt = _tokens(row)
        if row["_error"]:
            return lambda: RowResult(None, None, row["_error"], prompt, lasting=True)
        min_new_tokens = self.answers.limits.get("min_new_tokens", 0)
        stop = StopStrings(self.tokenizer, row["_stop"], min_new_tokens) if row["_stop"] else None
        try:
            sampling = Sampling(**self.sampling | json.loads(row["_sampling"]))
            own = {"stop": stop, "logprobs": row["_logprobs"], "adapter": row["_adapter"] or 0, **asked(self.answers)}
            request = Request(name, tuple(row["_prompt"]), row["_max_new_tokens"], sampling, **own)
            samples = sample_requests(request, row["_samples"])
            requests = [self.answers.requests(sample, row["_given"]) for sample in samples]
        except ValueError as error:
            message = str(error)
            return lambda: RowResult(None, None, message, prompt, lasting=True)
        futures = [[self.engine.submit(request) for request in each] for each in requests]

        def result() -> RowResult:
            found = list(map(self._read, samples, futures))
            return replace(self.draws.joined(samples, found), prompt_tokens=prompt, cut=row["_cut"])

        return result

    def _read(self, request: Request, futures: Sequence["Future[Completion]"]) -> RowResult:
        """The result of a sample."""
        error = next(filter(None, [future.exception() for future in futures]), None)
        if isinstance(error, RequestError):
            return RowResult(None, None, str(error).split(": ", 1)[-1])
        if error and not self.engine.failed:  # of the row's stop check or constraint
            return RowResult(None, None, f"{type(error).__name__}: {error}")
        return read(self.answers, self.texts, request, [future.result() for future in futures])


def _send_heartbeats(ledger: Ledger, name: str, host: str, engine: EngineThread, closed: threading.Event) -> None:
    """Send heartbeats, and compiled code when there is more. The thread has no reference to the generator, so that
    Python can delete it."""
    shared = -1
    while True:
        ledger.sign(name, host, engine.statistics.tokens)
        if (graphs := len(CODE.kept)) != shared:
            shared = graphs
            if code := shared_code.own(ledger.claim):
                ledger.share(*code)
        if closed.wait(HEARTBEAT):
            return


def _tokens(row: dict[str, Any]) -> int | None:
    return None if row["_prompt"] is None else len(row["_prompt"])


def _parts(rows: list[int]) -> Iterator[list[int]]:
    size = -(-len(rows) // GROUPS) or 1
    for i in range(0, len(rows), size):
        yield rows[i : i + size]


class Turns:
    """A lock that many threads share or one holds alone. While one waits to hold it alone, no other thread enters."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders = 0
        self._alone = 0  # threads that hold it alone, or wait to

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._alone == 0)
            self._holders += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: self._holders == 0)
            self._holders += 1
        try:
            yield
        finally:
            with self._changed:
                self._alone -= 1
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._holders -= 1
            self._changed.notify_all()
