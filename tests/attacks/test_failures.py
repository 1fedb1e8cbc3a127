"""Whatever dies or is refused: an exit code, one sentence with the cause and the next step, and no traceback."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from exspec.actors.ledger import HostSigns, Signs
from exspec.jobs import cli
from exspec.pipeline import progress, run
from exspec.pipeline.cluster import failures
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.output import owner
from exspec.pipeline.output.log import Log
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.report import Report
from exspec.pipeline.storage import Folder
from tests.jobs.calls import call
from tests.pipeline import jobs

NEVER = ("Traceback", "DataContext", "Started a local Ray")  # in no message


# Real processes, with their own Ray


@contextmanager
def driver(made: jobs.Pair, place: Path, parts: int, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A slow job in its own process that has committed some parts. Its standard error goes to `place / "err"`."""
    jobs.write_shards(place / "in", rows=400)
    jobs.write_job(made, place)
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "3", **options.pop("env", {})}
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": (place / "err").open("wb"), **options}
    with subprocess.Popen(jobs.command(place, 0.2), cwd=jobs.ROOT, env=environment, **streams) as process:
        started: list[psutil.Process] = []
        try:
            jobs.wait_for_parts(place / "out", parts, process)
            started = psutil.Process(process.pid).children(recursive=True)
            yield process
        finally:
            for left in (process, *started):
                with suppress(psutil.NoSuchProcess):
                    left.kill()


def kill(word: str, process: subprocess.Popen[Any]) -> None:
    """Kill the processes of a driver's Ray whose command line has the word."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(child.cmdline()):
                found.append(child)
    assert found, f"no process has {word!r} in its command line"
    for child in found:
        child.kill()


def send(number: int, process: subprocess.Popen[Any]) -> None:
    process.send_signal(number)


KEPT = ("committed rows are kept; run it again to resume; ", "Ray's logs: /")
DEATHS = [
    pytest.param(partial(kill, "raylet/raylet"), 1, (*KEPT, "broke off: "), id="the raylet is killed"),
    pytest.param(
        partial(kill, "gcs/gcs_server"), 1, (*KEPT, "broke off: Ray's gcs_server died"), id="the GCS is killed"
    ),
    pytest.param(partial(kill, "ray::"), 1, (*KEPT, "broke off: "), id="all workers are killed"),
    pytest.param(
        partial(kill, "ray::Ledger"),
        1,
        (*KEPT, "the process of the ledger, which", "has died"),
        id="the ledger is killed",
    ),
    pytest.param(partial(send, signal.SIGKILL), -9, (*KEPT, "its process was killed"), id="the driver is killed"),
    pytest.param(partial(send, signal.SIGTERM), 130, ("exspec: stopped; ", "run the job again"), id="it gets SIGTERM"),
    pytest.param(
        partial(send, signal.SIGHUP),
        130,
        ("exspec: stopped; ", "run the job again"),
        id="it gets SIGHUP",
        marks=pytest.mark.rare,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("happens", "code", "words"), DEATHS)
def test_one_sentence_whatever_dies(
    happens: Callable[[subprocess.Popen[Any]], None], code: int, words: tuple[str, ...], pair: jobs.Pair, tmp_path: Path
) -> None:
    with driver(pair, tmp_path, parts=2) as process:
        happens(process)
        assert process.wait(120) == code
        time.sleep(1)  # the helper speaks after the driver's end
    printed = (tmp_path / "err").read_text()
    assert [line for line in printed.splitlines() if line.startswith("exspec: ")] == [printed.splitlines()[-1]], printed
    assert [word for word in words if word not in printed] == []
    assert [word for word in NEVER if word in printed] == []


@pytest.mark.slow
def test_a_woken_owner_leaves_with_one_sentence(pair: jobs.Pair, tmp_path: Path) -> None:
    """Threads of Ray Data used to outlive Ray, and started a second one or died with a traceback."""
    with driver(pair, tmp_path, parts=2) as process:
        process.send_signal(signal.SIGSTOP)
        with owner.take(owner.Output(Folder(str(tmp_path / "out"))), "run", dead=lambda *_: True):
            process.send_signal(signal.SIGCONT)
            assert process.wait(60) == 1
    printed = (tmp_path / "err").read_text()
    assert "took it over" in printed.splitlines()[-1]
    assert [word for word in NEVER if word in printed] == []


@pytest.mark.slow
def test_a_closed_terminal_stops_a_job_and_leaves_no_process(pair: jobs.Pair, tmp_path: Path) -> None:
    """The job's output and errors go to a real pseudo-terminal, which goes away."""
    terminal, inside = pty.openpty()
    login = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    jobs.write_shards(tmp_path / "in", rows=400)
    jobs.write_job(pair, tmp_path)
    command = [sys.executable, "-c", login, *jobs.command(tmp_path, 0.2)]
    streams: dict[str, Any] = {"stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen(command, cwd=jobs.ROOT, start_new_session=True, **streams) as process:
        os.close(inside)
        jobs.wait_for_parts(tmp_path / "out", 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.close(terminal)
        assert process.wait(60) == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    *_, last = Log(Folder(str(tmp_path / "out"))).read()
    assert last["kind"] == "end"


def test_the_exit_code_does_not_depend_on_a_thread_that_waits_for_ray() -> None:
    """A thread of Ray Data that outlived Ray made Ray exit with 1; the program stands for Ray with such a thread."""
    program = (
        "import atexit, os, sys, threading, time; from exspec.jobs import cli; atexit.register(os._exit, 1); "
        "threading.Thread(target=time.sleep, args=(60,), name='StreamingExecutor-1', daemon=True).start(); "
        "sys.argv[1:] = ['check', '/dev/null']; cli.main()"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=jobs.ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr[:8]) == (2, "exspec: ")


@pytest.mark.slow
def test_a_plan_that_is_stopped_leaves_no_folder(tmp_path: Path) -> None:
    words = ["plan", "--input", "https://127.0.0.1:9/rows.jsonl", "--output", str(tmp_path / "new" / "out")]
    command = [sys.executable, "-c", "from exspec.jobs import cli; cli.main()", *words]
    with subprocess.Popen(command, cwd=jobs.ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "trying again" not in (line := process.stderr.readline()):
            assert line
        assert (tmp_path / "new").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert not (tmp_path / "new").exists()


# What Ray says


OOM = """2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 3c) was \
7.28GB used / 23.54GB limit (0.31)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
18286\t4.69\tpython /data/other.py
1462\t0.83\tpython -m pytest
Refer to the documentation"""
UDF = "ray.exceptions.UserCodeException: UDF failed\nTo change retry attempts, configure `ray.data.DataContext`"
SAYINGS = [
    pytest.param(
        OOM, "(7.28 of 23.54 GB were used); process 18286 held the most, 4.69 GB (python /data/other.py); free memory",
        id="the memory monitor names the process that held the memory",
    ),
    pytest.param(f"ray::A()\n  File x\nValueError: no\n\n{UDF}", "ValueError: no", id="a worker's error"),
    pytest.param(f"exspec.pipeline.errors.JobError: it died\n\n{UDF}", "it died", id="our own sentence"),
    pytest.param(
        "Failed to set up runtime environment.\n[Node 192.0.2.2] Traceback:\nOSError: [Errno 28] No space",
        "node 192.0.2.2 cannot start a process: OSError: [Errno 28] No space",
        id="a node without the job's package",
    ),
    pytest.param("The actor died.\n\tpid: 3", "RuntimeError: The actor died. pid: 3", id="no exception inside"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), SAYINGS)
def test_the_cause_in_what_ray_says(text: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "short_of_memory", lambda: "")
    said = failures.cause(RuntimeError(text))
    assert sentence in said
    assert "\n" not in said
    assert "DataContext" not in said


@pytest.mark.slow
def test_the_memory_monitor_kills_the_actors(pair: jobs.Pair, tmp_path: Path) -> None:
    """It kills them for ever; the job says so, and waits."""
    # Ray's memory monitor kills a process as soon as it is there.
    environment = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    with driver(pair, tmp_path, parts=0, env=environment) as process:
        deadline = time.monotonic() + 90
        while "waiting for" not in (said := (tmp_path / "err").read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
    assert "1 of 1 actors: Ray's memory monitor killed" in said
    assert "held the most" in said
    assert [word for word in NEVER if word in (tmp_path / "err").read_text()] == []


# Refused and failed jobs, in this process


def rows(place: Path, *prompts: str | None) -> Path:
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return place / "rows.jsonl"


RUN = ("--max-new-tokens", 8, "--rows-per-chunk", 2)
BAD = [
    pytest.param((None, None), (), 1, "no row has a completion, 2 of 2 have an error", id="only bad rows"),
    pytest.param(("a", None), (), 0, "", id="one bad row"),
    pytest.param(("a", None), ("--max-error-share", "0.2"), 1, "1 row with an error, more than max_error_share allows",
                 id="too many bad rows"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "options", "code", "why"), BAD)
def test_a_failed_job_says_why(
    prompts: tuple[str | None, ...], options: tuple[str, ...], code: int, why: str, tmp_path: Path
) -> None:
    source = rows(tmp_path, *prompts, *(["b"] if None not in prompts else []))
    result = call("run", "--input", source, "--output", tmp_path / "out", *RUN, *options)
    assert (result.exit_code, why in result.output) == (code, True), result.output
    assert ("the job failed" in result.output or "stopped: " in result.output) == (code == 1)


def test_a_reason_does_not_claim_one_rows_values_for_the_others() -> None:
    reasons = Reasons()
    for name in "abcd":
        reasons.add(f"url: expected /v1, not '/{name}'", 1, [name], lasting=True)
        reasons.add("the prompt is empty", 1, [name], lasting=True)
    reasons.add("seed: expected 1, not 2", 1, ["e"], lasting=True)
    assert reasons.lines() == [
        "4 rows: url: expected /v1, not '/a' (a; similar: b, c, ...)",
        "4 rows: the prompt is empty (a, b, c, ...)",
        "1 row: seed: expected 1, not 2 (e)",
    ]


def test_a_shown_completion_is_cut_without_spaces() -> None:
    assert run.cut("a: " + "\u6587" * 50, 20) == "a: " + "\u6587" * 14 + "..."
    assert run.cut("a: b", 4) == "a: b"


def test_more_new_tokens_than_the_context_are_no_error(tmp_path: Path) -> None:
    """As the page on prompts says: the completion ends with the context."""
    source = rows(tmp_path, "My red lamp arrived broken.")
    result = call("run", "--input", source, "--output", tmp_path / "out", "--max-new-tokens", 5000)
    assert result.exit_code == 0, result.output
    assert "1 of 1 rows" in result.output


REFUSALS = [
    pytest.param("run", ("--prompt-column", "none"), id="run with a column that does not exist"),
    pytest.param("plan", ("--prompt-column", "none"), id="plan with a column that does not exist"),
    pytest.param("plan", (), id="plan of a job that could start"),
    pytest.param("run", ("--target", "nowhere/at/all"), id="run with a model that does not exist"),
]


@pytest.mark.parametrize(("command", "options"), REFUSALS)
def test_a_refused_job_leaves_nothing(command: str, options: tuple[str, ...], tmp_path: Path) -> None:
    source = rows(tmp_path, "a")
    with suppress(JobError):
        call(command, "--input", source, "--output", tmp_path / "new/folder/out", *options)
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_job_that_the_cluster_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_: Any) -> None:
        raise JobError("device: an actor needs 3 GPU, but the cluster has 0")

    monkeypatch.setattr(run, "check_cluster", short)
    source = rows(tmp_path, "a")
    with pytest.raises(JobError, match="needs 3 GPU") as refused:
        call("run", "--input", source, "--output", tmp_path / "new/folder/out")
    assert refused.value.code == 2
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_part_removed_while_the_job_runs_is_a_job_that_broke_off(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that was refused before it started, which is exit code 2."""
    commit = owner.Writer.commit

    def committed(self: owner.Writer, *arguments: Any) -> None:
        commit(self, *arguments)
        for part in (tmp_path / "out").glob("part-*"):
            part.unlink()

    monkeypatch.setattr(owner.Writer, "commit", committed)
    with pytest.raises(JobError, match="has vanished; run the job again") as broken:
        jobs.run(pair, tmp_path, 20)
    assert broken.value.code == 1


# Small things


@pytest.mark.parametrize(
    ("count", "noun", "text"), [(0, "row", "0 rows"), (1, "shard", "1 shard"), (2, "process", "2 processes")]
)
def test_counts_have_the_right_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_plan_says_one_shard(tmp_path: Path) -> None:
    result = call("plan", "--input", rows(tmp_path, "a"), "--output", tmp_path / "out")
    assert "1 shard with 1 row;" in result.output


def test_lines_of_progress_have_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    report = Report({}, planned=100)
    report.now.update(rows=25)
    shown = progress.Progress(quiet=False)
    with shown.decoding(report, 0, 1, lambda: Signs({"host": HostSigns(1, 50, 0.0)}, 100.0), lambda _: ""):
        time.sleep(0.2)
    assert "25/100 rows, " in (printed := capsys.readouterr().err)
    assert ", 5 min left" in printed


def test_a_short_memory_is_named_at_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    shown = progress.Progress(quiet=False)
    with shown.decoding(Report({}, 4), 0, 2, lambda: Signs({}, 0.0), lambda long: "" if long else "no memory"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if " rows, " not in line] == ["waiting for 2 of 2 actors: no memory"]


def test_an_unexpected_exception_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("s3://KEY:SECRET@bucket/x")

    monkeypatch.setattr("exspec.jobs.demo.shards.write_shards", broken)
    monkeypatch.setattr(sys, "argv", ["exspec", "messages", "out"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    kept = Path(line.split("traceback: ")[1])
    assert (end.value.code, "SECRET" in line + kept.read_text(), "Traceback" in kept.read_text()) == (3, False, True)
    kept.unlink()
