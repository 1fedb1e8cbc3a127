"""Real processes that are stopped or killed while they own an output or write a file."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.output import lease
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.owner import BusyError, Output
from exspec.pipeline.storage import Folder
from tests.jobs import calls
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

pytestmark = pytest.mark.slow

ROWS, REFUSED = 60, 5
HOOK = """
import json, os, signal, sys
from pathlib import Path
left = {count}
def watch(event, values):
    global left
    text = " ".join(os.fsdecode(v) for v in values if isinstance(v, str | bytes | os.PathLike))
    if event == {event!r} and {text!r} in text:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.{signal})
"""
OWNER = """
from exspec.pipeline.errors import JobError
from tests.attacks.test_owners import act
from tests.pipeline.in_process import in_process
sys.addaudithook(watch)
try:
    with in_process():
        sys.exit(act(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])))
except JobError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
"""
CONVERT = """
from exspec.jobs import cli
sys.addaudithook(watch)
cli.main()
"""


@pytest.fixture(scope="module")
def begun(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Jobs: new, finished with a row that has an error, and finished."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("new", "flawed", "finished")}
    jobs.write_shards(places["new"] / "in", ROWS)
    with in_process():
        jobs.run(pair, places["flawed"], ROWS, jobs.RefusingLoader(jobs.prompt(REFUSED)))
        jobs.run(pair, places["finished"], ROWS)
    return places


def act(action: str, pair: jobs.Pair, place: Path) -> int:
    """Run, retry, restart or compact a job."""
    if action == "compact":
        compact(Folder(str(place / "out")), 1 << 20)
        return 0
    return jobs.run(pair, place, restart=action == "restart", retry_errors=action == "retry")


def started(code: str, when: tuple[str, str, int], what: str, *words: str) -> subprocess.Popen[str]:
    """A process that sends itself a signal at the n-th event whose paths hold a text."""
    event, text, count = when
    hook = HOOK.format(event=event, text=text, count=count, signal=what)
    return subprocess.Popen([sys.executable, "-c", hook + code, *words], cwd=jobs.ROOT, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


@contextmanager
def stopped(action: str, when: tuple[str, str, int], pair: jobs.Pair, place: Path) -> Iterator[subprocess.Popen[str]]:
    """An owner that has stopped. It never outlives the block."""
    process = started(OWNER, when, "SIGSTOP", action, json.dumps(pair), str(place))
    try:
        deadline = time.monotonic() + 120
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert process.poll() is None, f"it ended before it stopped: {process.communicate()[1]}"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def parts(place: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(place / "out").items() if name.startswith("part-")}


ENTRY, SHOWN, REMOVED, ASIDE = ("os.link", "_log/0"), ("os.rename", "_staged/"), ("os.remove", "part-"), "-before-"
STOPS: dict[str, tuple[str, str, tuple[str, str, int]]] = {
    "a run before it takes the output": ("new", "run", (*ENTRY, 1)),
    "a run before its job begins": ("new", "run", (*ENTRY, 2)),
    "a run before its second commit": ("new", "run", (*ENTRY, 4)),
    "a run before it shows a part": ("new", "run", (*SHOWN, 1)),
    "a retry before its commit": ("flawed", "retry", (*ENTRY, 4)),
    "a retry before it removes the old part": ("flawed", "retry", (*REMOVED, 1)),
    "a retry before it shows the new part": ("flawed", "retry", (*SHOWN, 1)),
    "a compaction before its commit": ("finished", "compact", (*ENTRY, 2)),
    "a compaction before it removes the parts": ("finished", "compact", (*REMOVED, 3)),
    "a compaction before it shows the file": ("finished", "compact", (*SHOWN, 1)),
    "a restart while it copies the old output": ("finished", "restart", ("open", ASIDE, 6)),
    "a restart before its job begins": ("finished", "restart", (*ENTRY, 2)),
    "a restart before it removes the old parts": ("finished", "restart", (*REMOVED, 1)),
}
OTHERS = ("run", "restart", "retry", "compact")
CASES = [(name, OTHERS[n % len(OTHERS)]) for n, name in enumerate(STOPS)]


@pytest.mark.parametrize(("stop", "other"), CASES, ids=[f"{stop}, then {other}" for stop, other in CASES])
def test_an_owner_that_stops_and_wakes_after_another_took_the_output_changes_nothing(
    pair: jobs.Pair, begun: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, other: str
) -> None:
    """On this machine it counts as alive. On another one it counts as dead after a minute. Then a run repairs all."""
    start, action, when = STOPS[stop]
    place = Path(shutil.copytree(begun[start], tmp_path / "job"))
    with stopped(action, when, pair, place) as owner:
        before = parts(place)
        log = Output(Folder(str(place / "out"))).read()
        owned, length = log.state.taken is not None, log.log.length
        for refused in ("restart", "retry", "compact") if owned and start != "new" else ():
            with pytest.raises(BusyError, match=rf"in use by {action} on .* \(process {owner.pid}\)"):
                act(refused, pair, place)
        assert parts(place) == before
        monkeypatch.setattr(lease, "dead", lambda *_: True)
        with suppress(JobError):  # a compaction of what is not finished is refused
            act(other, pair, place)
        lost = owned and log.read().log.length > length
        before = parts(place)
        owner.send_signal(signal.SIGCONT)
        said = owner.communicate(timeout=120)[1]
    if lost:
        assert (owner.returncode, "took it over" in said) == (1, True), said
        assert parts(place) == before
    assert act("run", pair, place) == 0
    assert act("retry", pair, place) == 0
    jobs.assert_complete(place / "out", ROWS)
    assert not contents(place / "out" / "_staged")
    assert not [name for name in contents(place / "out" / "_log") if name.startswith("alive-")]


@pytest.mark.parametrize("stop", list(STOPS)[::5])
def test_an_owner_that_stops_and_wakes_goes_on(
    pair: jobs.Pair, begun: dict[str, Path], tmp_path: Path, stop: str
) -> None:
    """Others have left it alone."""
    start, action, when = STOPS[stop]
    place = Path(shutil.copytree(begun[start], tmp_path / "job"))
    with stopped(action, when, pair, place) as owner:
        owner.send_signal(signal.SIGCONT)
        assert owner.wait(timeout=120) == 0
    jobs.assert_complete(place / "out", ROWS)


KILLS = {
    "a line file before it is opened": ("x.jsonl", ("open", "/.x.jsonl.", 1)),
    "a line file when it is whole": ("x.jsonl", ("os.rename", "/.x.jsonl.", 1)),
    "a packed table when it is whole": ("x.csv.gz", ("os.rename", "/.x.csv.gz.", 1)),
    "folders before the first": ("by", ("os.mkdir", "by", 1)),
    "folders before a file": ("by", ("open", ".parquet", 12)),
    "folders before the marker": ("by", ("open", "_SUCCESS", 1)),
    "folders when they are whole": ("by", ("os.rename", "/.by.", 1)),
}


@pytest.mark.parametrize(("name", "when"), KILLS.values(), ids=KILLS)
def test_a_convert_that_is_killed_leaves_no_target(
    begun: dict[str, Path], tmp_path: Path, name: str, when: tuple[str, str, int]
) -> None:
    """And a second one works."""
    out, target = begun["finished"] / "out", tmp_path / name
    words = ["convert", str(out), str(target)] + (["--partition-by", "finish_reason"] if name == "by" else [])
    process = started(CONVERT, when, "SIGKILL", *words)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGKILL, said
    assert not target.exists()
    calls.succeed(*words)
    if name == "by":
        assert ds.dataset(target, partitioning="hive").count_rows() == ROWS
        assert (target / "_SUCCESS").exists()
    elif name.endswith(".jsonl"):
        assert len([json.loads(line) for line in target.read_text().splitlines()]) == ROWS


def test_folders_that_lack_their_marker_are_refused_with_the_reason(begun: dict[str, Path]) -> None:
    """A store that cannot rename folders has them after a kill."""
    target = Folder("memory://attacked/by")
    target.write("finish_reason=stop/part-0.parquet", b"")
    with pytest.raises(
        JobError, match="by: already exists without _SUCCESS: a convert was interrupted; expected a new"
    ):
        calls.call("convert", begun["finished"] / "out", target.url, "--partition-by", "finish_reason")
    assert not target.exists("_SUCCESS")
