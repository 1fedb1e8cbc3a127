"""The actor without Ray: its attempts in the ledger, row errors, and chunks that run alone."""

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import torch

from exspec.actors import generator
from exspec.actors.answers.answers import FreeText
from exspec.actors.engine import faults, shared_code
from exspec.actors.generator import Generator, Turns
from exspec.actors.ledger import LOADING, Ledger
from exspec.actors.samples import Draws
from exspec.pipeline.input.plan import Chunk, Shard, Task
from exspec.pipeline.input.reader import WORK_SCHEMA, block
from tests.pipeline import jobs


def test_the_ledger_finds_the_row_that_kills_the_process() -> None:
    """Rows are marked before they run. A row that was marked alone twice is bad."""
    ledger = Ledger()
    assert (ledger.begin("p").number, ledger.begin("p").number) == (1, 2)
    ledger.mark("p", [8, 9, 10])
    third = ledger.begin("p")
    assert (third.number, third.suspects, third.bad) == (3, {8, 9, 10}, set())
    ledger.mark("p", [9])
    fourth = ledger.begin("p")
    assert (fourth.number, fourth.suspects, fourth.bad) == (4, {8, 9, 10}, set())
    ledger.mark("p", [9])
    fifth = ledger.begin("p")
    assert (fifth.number, fifth.suspects, fifth.bad) == (3, {8, 10}, {9})  # the attempts that found their row are free
    ledger.mark("p", [1])
    ledger.mark("p", [])
    assert ledger.begin("p").bad == {9}
    assert ledger.begin("other").number == 1


def test_an_actor_that_runs_out_of_memory_tries_half_its_window_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, until no smaller window is left."""

    class Full(jobs.ArithmeticLoader):
        def __call__(self, window: int) -> Any:
            tried.append(window)
            raise torch.OutOfMemoryError

    tried: list[int] = []
    monkeypatch.setattr(generator.os, "_exit", Mock(side_effect=SystemExit))
    ledger, unused = Ledger(), SimpleNamespace()
    for slots in (24, 12, 6, 3, 1, 1):
        with pytest.raises(torch.OutOfMemoryError if slots == 1 else SystemExit):
            Generator(Full(window=24), {}, unused, ledger, unused, 3, lambda *_: FreeText(), Draws())  # type: ignore[arg-type]
        assert tried.pop() == slots


@pytest.mark.parametrize(
    "others", ["decode", "load", "load for too long", "cannot load", "have loaded and died", "are on this host", ""]
)
def test_a_host_that_cannot_load_the_models_is_named_and_tries_again_while_others_may_decode(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """It ends its process: a new one may be on another host, or find other versions. Else it raises."""
    full = OSError("[Errno 28] No space left on device")

    class Full(jobs.ArithmeticLoader):
        def __call__(self, _: int) -> Any:
            raise full

    monkeypatch.setattr(generator, "RETRY", 0.0)
    monkeypatch.setattr(generator, "OTHERS", 0.0)
    monkeypatch.setattr(generator.os, "_exit", Mock(side_effect=SystemExit))
    ledger, unused, host = Ledger(), SimpleNamespace(), os.uname().nodename
    if others in ("load", "load for too long", "cannot load", "have loaded and died"):
        ledger.loading("other")
    if others == "load for too long":
        ledger.began["other"] -= LOADING
        ledger.loading("other")
    if others == "cannot load":
        assert ledger.failed("other", "no GPU") is False
    if others == "have loaded and died":
        ledger.started("other")
    if others in ("decode", "are on this host"):
        ledger.sign("a", "other" if others == "decode" else host, 0)
    with pytest.raises(SystemExit if others in ("decode", "load") else OSError):
        Generator(Full(), {}, unused, ledger, unused, 3, lambda *_: FreeText(), Draws())  # type: ignore[arg-type]
    assert ledger.signs().unable[host] == str(full)
    made = Generator(jobs.ArithmeticLoader(), {}, unused, ledger, unused, 3, lambda *_: FreeText(), Draws())  # type: ignore[arg-type]
    made.close()
    assert host not in ledger.signs().unable


TASK = Task(Chunk(Shard("s", "file:///s", 4, 1, ""), 0, 0, 4))


@pytest.mark.parametrize("damaged", [False, True])
def test_an_actor_takes_what_others_have_compiled_and_shares_what_is_more(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails over neither."""
    faults.warn_once.cache_clear()
    taken: list[Any] = []
    compiled = {"known"}
    monkeypatch.setattr(generator, "HEARTBEAT", 0.01)
    monkeypatch.setattr(shared_code, "machine", lambda: "m")
    monkeypatch.setattr(shared_code, "names", compiled.copy)
    monkeypatch.setattr(shared_code, "_place", lambda name: tmp_path / name)
    (tmp_path / "here").touch()
    monkeypatch.setattr(shared_code, "read", lambda names: {name: name.encode() for name in names})
    monkeypatch.setattr(shared_code, "keep", Mock(side_effect=OSError("disk full")) if damaged else taken.append)
    monkeypatch.setattr(generator, "CODE", code := SimpleNamespace(kept=[]))
    ledger, unused = Ledger(), SimpleNamespace()
    ledger.share("m", {"known": b"code", "here": b"more"})
    ledger.share("other", {"other": b"other code"})

    made = Generator(jobs.ArithmeticLoader(), {}, unused, ledger, unused, 3, lambda *_: FreeText(), Draws())  # type: ignore[arg-type]
    assert taken == ([] if damaged else [{"known": b"code"}])
    assert ("other actors cannot be used: disk full" in caplog.text) == damaged, "and the actor starts"

    def compile_more(*new: str, until: Callable[[], bool]) -> None:
        compiled.update(new)
        code.kept.append(new)
        while not until():
            time.sleep(0.01)

    compile_more("new", until=lambda: "new" in ledger.known("m"))
    assert ledger.code("m", {"new"}) == {"new": b"new"}
    assert ledger.claim("m", {"new", "later"}) == {"later"}
    given = ledger.shared["m"]
    compile_more("later", "last", until=lambda: bool(given.get("last")))
    assert not given["later"], "another actor was asked for it"
    assert ledger.known("m") == {"known", "here", "new", "last"}
    compile_more("more", until=lambda: bool(ledger.shared["m"].get("more")))
    assert "later" in ledger.known("m"), "that actor may have died"
    monkeypatch.setattr(shared_code, "names", Mock(side_effect=RuntimeError("no home")))
    compile_more("lost", until=lambda: "compiled code is not shared: no home" in caplog.text)
    assert ledger.shared["other"] == {"other": b"other code"}
    made.close()


def test_an_actor_signs_with_its_host_and_leaves_when_it_is_deleted() -> None:
    """Ray Data deletes the generator of an idle actor. Its threads must not keep it alive."""
    ledger, unused = Ledger(), SimpleNamespace()
    made = Generator(jobs.ArithmeticLoader(), {}, unused, ledger, unused, 3, lambda *_: FreeText(), Draws())  # type: ignore[arg-type]
    name, threads = made.name, (made.engine, made.closed)
    while not ledger.signs().actors:
        time.sleep(0.01)
    assert (ledger.left, list(ledger.signs().hosts)) == (set(), [os.uname().nodename])
    del made
    gc.collect()
    assert ledger.left == {name}
    threads[1].set()
    threads[0].close()


def test_a_row_with_impossible_settings_fails_alone() -> None:
    """The fault: it ended the process, until its whole chunk was set aside."""
    kept: list[Any] = []

    def stage(_: Any, __: Any, results: list[Any], *___: Any) -> dict[str, Any]:
        kept.extend(results)
        return {}

    keep: Any = SimpleNamespace(stage=stage)
    quiet: Any = SimpleNamespace(report=lambda *_: None)
    made = Generator(jobs.ArithmeticLoader(), {}, keep, Ledger(), quiet, 3, lambda *_: FreeText(), Draws())
    work = {"_prompt": [1], "_cut": 0, "_skip": False, "_max_new_tokens": 4, "_stop": [], "_samples": 1}
    rows = [work | {"_sampling": json.dumps({"temperature": t, "seed": 0})} for t in (0.0, 1e-39, float("inf"), 0.0)]
    made(block(TASK, pa.Table.from_pylist(rows, schema=WORK_SCHEMA), None))
    first, cold, hot, last = kept
    assert [r.error for r in (first, last)] == [None, None]
    assert first.completion.tokens == last.completion.tokens
    assert cold.error == "temperature: expected 0 (greedy), or 1e-6 to 1e6, not 1e-39"
    assert hot.error == "temperature: expected 0 (greedy), or 1e-6 to 1e6, not inf"


def test_a_task_that_runs_alone_waits_for_all_others_and_keeps_new_ones_out() -> None:
    turns, log = Turns(), []
    entered = threading.Event()

    def enter(name: str, turn: Any, seconds: float) -> None:
        with turn():
            entered.set()
            log.append(f"{name} in")
            time.sleep(seconds)
            log.append(f"{name} out")

    threads = [
        threading.Thread(target=enter, args=arguments)
        for arguments in (("first", turns.shared, 0.2), ("alone", turns.alone, 0.05), ("late", turns.shared, 0))
    ]
    threads[0].start()
    entered.wait()
    threads[1].start()
    time.sleep(0.05)
    threads[2].start()
    for thread in threads:
        thread.join()
    assert log == ["first in", "first out", "alone in", "alone out", "late in", "late out"]
