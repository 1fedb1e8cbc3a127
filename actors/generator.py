"""The actor beside a GPU: rows in, one staged file out.

It is handed what it works with: a loader of engine and tokenizer, a sink that stages them, a ledger that
counts attempts. It knows no paths, and it runs in a plain process as well as under Ray.
"""

import json
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa
import torch

from exspec.actors.answers.answers import AnswerError, Answers, asked
from exspec.actors.engine import Completion, Engine, EngineStatistics, EngineThread, Request, RequestError, Sampling
from exspec.actors.engine.layers import experts
from exspec.actors.hardware import hardware
from exspec.actors.ledger import Attempt, Ledger
from exspec.actors.stop_strings import StopStrings, completion_text
from exspec.actors.work import WORK

KILLER = "the row ended the process that decoded it"  # the error of such a row
SIGN = 2.0  # seconds between two signs of life
GROUPS = 8  # how many parts a suspect chunk is cut into to find the row that kills the process


@dataclass(frozen=True)
class RowResult:
    """What became of one row: a completion with its text, or an error."""

    completion: Completion | None
    text: str | None
    error: str | None
    prompt_tokens: int | None = None
    values: dict[str, Any] = field(default_factory=dict)  # by column, what the text was read as
    lasting: bool = False  # the error is the row's own, and no second try would help
    cut: int = 0  # tokens that the prompt had before those that were decoded


@dataclass(frozen=True)
class Origin:
    """Where a chunk's results come from: actor, hardware and what ran on it, when the attempt began, and which one it
    was."""

    actor: str
    hardware: dict[str, str]
    started: float
    attempt: int


class Sink(Protocol):
    """Where an actor leaves the rows of a chunk."""

    def stage(self, task: Any, block: pa.Table, results: list[RowResult | None], origin: Origin) -> dict[str, Any]:
        """Stage the chunk's rows and return the file that they are; a result of None leaves the row as it was."""
        ...


class Loader(Protocol):
    """Gives the engine, with at most so many slots, and the tokenizer."""

    window: int  # slots that the engine has where none ran out of memory

    def __call__(self, window: int) -> tuple[Engine, Any]: ...


class Meter(Protocol):
    def report(self, actor: str, result: dict[str, Any], engine: EngineStatistics) -> None: ...


class Generator:
    """Calls run at once, from several threads, each with one chunk; all of them feed one engine.

    attempts: after so many that ended in the process's death a chunk is set aside. answers: what completions are to be,
    from the tokenizer. A chunk's rows have the carried columns and WORK: prompt ids or an error for every row, and its
    settings.
    """

    def __init__(
        self,
        load: Loader,
        sampling: dict[str, Any],
        sink: Sink,
        ledger: Ledger,
        meter: Meter,
        attempts: int,
        answers: Callable[[Any], Answers],
    ) -> None:
        self.window = ledger.window() or load.window
        try:
            engine, self.tokenizer = load(self.window)
        except torch.OutOfMemoryError:
            ledger.shrink(max(self.window // 2, 1))
            raise
        self.shape, self.answers = engine.config, answers(self.tokenizer)
        self.engine = EngineThread(engine)
        self.sampling, self.sink, self.ledger, self.meter, self.attempts = sampling, sink, ledger, meter, attempts
        self.name = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        ran: dict[str, str] = {"attention": self.shape.attention, "kernels": self.shape.kernels}
        ran |= experts.used(getattr(getattr(engine, "target", None), "model", None))
        self.hardware = hardware(getattr(engine, "device", torch.device("cpu"))) | ran
        self.turns = Turns()
        self.closed = threading.Event()
        threading.Thread(target=self._sign, daemon=True).start()

    def _sign(self) -> None:
        while True:
            self.ledger.sign(self.name, self.engine.statistics.tokens)
            if self.closed.wait(SIGN):
                return

    def close(self) -> None:
        """End its threads. An actor never calls this: its threads end with its process."""
        self.closed.set()
        self.engine.close()

    def __call__(self, block: pa.Table) -> pa.Table:
        """One chunk in, one row out. block: the task, its rows as an Arrow stream, or why they cannot be read."""
        task = pickle.loads(block["task"][0].as_py())
        if (rows := block["rows"][0]).is_valid:
            result = self._work(task, pa.ipc.open_stream(rows.as_buffer()).read_all())
        else:
            result = self._set_aside(task, block["unreadable"][0].as_py(), "input")
        statistics = self.engine.statistics
        self.meter.report(self.name, result, statistics)
        return pa.table({"result": [pickle.dumps(result | {"engine": statistics, "actor": self.name})]})

    def _work(self, task: Any, block: pa.Table) -> dict[str, Any]:
        # An attempt begins when its turn has come: one who waits is not blamed for another's death.
        with self.turns.alone() if self.ledger.begun(task.key) else self.turns.shared():
            started, attempt = time.time(), self.ledger.begin(task.key)
            # An attempt that finds a row that kills is free; many such rows mean that something else is wrong.
            if attempt.number > self.attempts or len(attempt.bad) > self.attempts:
                died = f"its process died in each of {self.attempts} attempts {attempt.last_error}"
                return self._set_aside(task, died, "decoding")
            results = self._survive(task, block, attempt)
        try:
            origin = Origin(self.name, self.hardware, started, attempt.number)
            file = self.sink.stage(task, block, results, origin)
        except Exception as error:  # storage that refuses for good would refuse a second decoding too
            return self._set_aside(task, f"cannot be written: {type(error).__name__}: {error}", "output")
        return {"set_aside": "", "task": task, "file": file}

    def _set_aside(self, task: Any, reason: str, fault: str) -> dict[str, Any]:
        return {"set_aside": f"{task}: {reason}", "task": task, "fault": fault}

    def _survive(self, task: Any, block: pa.Table, attempt: Attempt) -> list[RowResult | None]:
        """The results, or the end of this process: an engine that failed serves nobody, and a new one tries again."""
        try:
            return self._generate(task, block.select(WORK).to_pylist(), attempt)
        except Exception as error:
            logging.getLogger(__name__).exception("%s: attempt %d failed", task, attempt.number)
            self.ledger.note(task.key, f"({type(error).__name__}: {error})")
            if isinstance(error, torch.OutOfMemoryError) and self._can_shrink:
                self.ledger.shrink(max(self.window // 2, 1))
                self.ledger.mark(task.key, [])  # the window is to blame before any row is
            os._exit(1)

    @property
    def _can_shrink(self) -> bool:
        """Whether an actor with a smaller window would hold less KV."""
        return self.shape.method != "eqspec" and self.shape.page_count > self.shape.fewest_pages

    def _generate(self, task: Any, rows: list[dict[str, Any]], attempt: Attempt) -> list[RowResult | None]:
        """The results of all rows. A repeated chunk runs in groups that the ledger knows of, the suspects first:
        where two rows kill, one is found before the other is met again."""
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
        waiting = [self._submit((part, i), rows[i]) for i in numbers]
        return [result() for result in waiting]

    def _submit(self, name: tuple[str, int], row: dict[str, Any]) -> Callable[[], RowResult]:
        """Hand a row to the engine; what is returned waits for its result."""
        prompt = _tokens(row)
        if row["_error"]:
            return lambda: RowResult(None, None, row["_error"], prompt, lasting=True)
        least = self.answers.limits.get("min_new_tokens", 0)
        stop = StopStrings(self.tokenizer, row["_stop"], least) if row["_stop"] else None
        try:
            sampling = Sampling(**self.sampling | json.loads(row["_sampling"]))
        except ValueError as error:
            refused = str(error)
            return lambda: RowResult(None, None, refused, prompt, lasting=True)
        request = Request(name, row["_prompt"], row["_max_new_tokens"], sampling, stop=stop)
        future = self.engine.submit(replace(request, **asked(self.answers)))

        def result() -> RowResult:
            error = future.exception()
            if isinstance(error, RequestError):
                return RowResult(None, None, str(error).split(": ", 1)[-1], prompt)
            completion = future.result()
            text = completion_text(self.tokenizer, completion, stop)
            try:
                values = self.answers.read(completion, text)
                return RowResult(completion, text, None, prompt, values, cut=row["_cut"])
            except AnswerError as unread:  # and would be again
                return RowResult(None, None, str(unread), prompt, lasting=True)

        return result


def _tokens(row: dict[str, Any]) -> int | None:
    return None if row["_prompt"] is None else len(row["_prompt"])


def _parts(rows: list[int]) -> Iterator[list[int]]:
    size = -(-len(rows) // GROUPS) or 1
    for i in range(0, len(rows), size):
        yield rows[i : i + size]


class Turns:
    """Many may go at once, or one alone. One who waits to be alone lets nobody new in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = 0  # waiting or inside

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._alone == 0)
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: self._inside == 0)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._alone -= 1
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
