"""Outputs whose log, folders or clocks someone or something has changed."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exspec.jobs.commands import audit
from exspec.pipeline.errors import JobError
from exspec.pipeline.output import lease
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.log import Log, entry_name
from exspec.pipeline.output.owner import Output, read_output, take
from exspec.pipeline.output.parts import FOOTER
from exspec.pipeline.storage import Folder
from tests.jobs import calls
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS = 20
Entry = dict[str, Any]


@pytest.fixture(scope="module")
def finished(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of three parts, and its input. Tests copy it."""
    place = tmp_path_factory.mktemp("finished")
    with in_process():
        assert jobs.run(pair, place, ROWS) == 0
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """The job, and a file outside of it."""
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "secret.txt").write_text("secret")
    return Path(shutil.copytree(finished, tmp_path / "job"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def entries(out: Path) -> list[Entry]:
    """The entries of a log."""
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted((out / "_log").glob("*.json.gz"))]


def append(folder: Folder, *new: Entry) -> None:
    """Add entries to a log, as anybody may who can write there."""
    log = Log(folder)
    for _ in log.read():
        pass
    assert all(log.append(entry) for entry in new)


def act(command: str, pair: jobs.Pair, place: Path) -> None:
    if command == "run":
        jobs.run(pair, place)
    elif command in ("compact", "audit", "report"):
        calls.call(command, place / "out")
    else:
        calls.call("convert", place / "out", place / command)


# Names


def swapped(key: str, name: str) -> Callable[[list[Entry]], Entry]:
    """An entry that shows a file of the log once more, in the place of all others, with one name changed."""

    def made(log: list[Entry]) -> Entry:
        files = [file for entry in log if entry["kind"] == "swap" for file in entry["new"]]
        new = files[0] | {"name": files[0]["name"].replace("-000003.", "-000099.")} | {key: name}
        return {"kind": "swap", "new": [new], "old": [file["name"] for file in files]}

    return made


def plain(**entry: Any) -> Callable[[list[Entry]], Entry]:
    return lambda _: entry


OWNER = {"kind": "take", "at": 0.0, "action": "run", "host": "h", "machine": "m", "pid": 1, "started": 0.0}
SECRET = "../../victims/secret.txt"
NAMES = {
    "a file that leads out of the output": swapped("name", SECRET),
    "a staged file that leads out of the output": swapped("staged", SECRET),
    "a staged file that leads out of _staged": swapped("staged", f"_staged/{SECRET}"),
    "a staged file with a prefix and a way out": swapped("staged", f"_staged/0000000001-a/{SECRET}"),
    "an absolute path": swapped("staged", "/etc/hostname"),
    "a URL": swapped("name", "s3://other-bucket/part.parquet"),
    "an entry of the log": swapped("staged", "_log/0000000001.json.gz"),
    "the marker": swapped("name", "_SUCCESS"),
    "a hidden file": swapped("name", ".part-0000000-000000000000-8-000099.parquet"),
    "a line break after a name": swapped("name", "part-0000000-000000000000-8-000099.parquet\n"),
    "digits of another script": swapped("name", "part-000000٠-000000000000-8-000099.parquet"),
    "an empty name": swapped("name", ""),
    "a null byte": swapped("staged", "_staged/0000000001-\0"),
    "an old file that leads out of the output": plain(kind="swap", new=[], old=[SECRET]),
    "a marker that leads out of the output": plain(kind="done", staged=SECRET),
    "a heartbeat that leads out of the output": lambda _: OWNER | {"lease": f"/../{SECRET}"},
    "a job that leads out of the output": lambda log: next(e for e in log if e["kind"] == "begin") | {"job": SECRET},
    "a method of the reader as the kind": plain(kind="_init__"),
    "the table as the kind": plain(kind="table"),
}


@pytest.mark.parametrize("attack", NAMES.values(), ids=NAMES)
def test_a_name_in_the_log_never_leads_out_of_the_output(
    pair: jobs.Pair, place: Path, attack: Callable[[list[Entry]], Entry]
) -> None:
    append(Folder(str(place / "out")), attack(entries(place / "out")))
    before = contents(place.parent)
    for command in ("run", "compact", "audit", "report", "x.jsonl"):
        with pytest.raises(JobError, match=r"_log/00000000\d\d.json.gz: not a valid log entry: ") as refused:
            act(command, pair, place)
        assert refused.value.code == 2
        assert contents(place.parent) == before


def test_a_name_in_the_log_never_leads_out_of_a_prefix(place: Path, moto: dict[str, Any]) -> None:
    """In a bucket, and to another one."""
    folder = Folder("s3://exspec-attacked/out", moto)
    folder.fs.mkdir("exspec-attacked")
    for name, content in contents(place / "out").items():
        folder.write(name, content)
    read_output(folder)
    append(folder, swapped("staged", "../victims/secret.txt")(entries(place / "out")))
    with pytest.raises(JobError, match=r"not a valid log entry: .*new.0.staged is '../victims/secret.txt'"):
        compact(folder, 1 << 20)


@pytest.mark.parametrize("command", ["run", "compact", "x.jsonl"])
@pytest.mark.parametrize("name", ["_staged", "_log"])
def test_a_link_in_the_place_of_a_folder_is_refused(pair: jobs.Pair, place: Path, name: str, command: str) -> None:
    """exspec would remove files where it leads."""
    link, victims = place / "out" / name, place.parent / "victims"
    if name == "_log":
        shutil.copytree(link, victims, dirs_exist_ok=True)
    shutil.rmtree(link)
    (victims / "0000000000-old.txt").write_text("old")
    link.symlink_to(victims)
    before = contents(place.parent)
    with pytest.raises(JobError, match=rf"out/{name}: is a link; expected a folder"):
        act(command, pair, place)
    assert contents(place.parent) == before


def test_an_audit_says_first_what_it_reads(pair: jobs.Pair, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log names the shards and the target, and anybody may have written it."""
    log = entries(place / "out")
    begin = next(entry for entry in log if entry["kind"] == "begin")
    urls = ["file:///etc/a/passwd", "file:///etc/b/c", "s3://bucket/x/y"]
    for shard, url in zip(begin["plan"]["shards"], urls, strict=True):
        shard["url"] = url
    shutil.rmtree(place / "out" / "_log")
    append(Folder(str(place / "out")), *log)
    monkeypatch.setattr(audit, "vanished", lambda *_: {"nothing was read before": print("read")})
    with monkeypatch.context() as patch:
        patch.setattr(audit, "pair_of", lambda *_, **__: sys.exit(9))
        result = calls.call("audit", place / "out")
    said, read, *_ = result.stdout.splitlines()
    assert (said, read) == (f"reading 3 shards below file:///etc, s3://bucket/x; target: {pair[0]}", "read")


# Entries


class Logged(Folder):
    """A folder that has only a log."""

    def __init__(self, found: list[bytes]) -> None:
        super().__init__("/nowhere")
        self.found = {entry_name(n): content for n, content in enumerate(found, 1)}

    def names(self, below: str = "") -> set[str]:
        return {name.removeprefix(f"{below}/") for name in self.found}

    def read(self, name: str) -> bytes:
        if name not in self.found:
            raise FileNotFoundError(name)
        return self.found[name]


def read_or_refused(found: list[bytes]) -> bool:
    """Whether a log is valid. Then its state can be used. Otherwise it is refused with code 2."""
    try:
        state = Output(Logged(found)).read().state
    except JobError as error:
        return error.code != 2
    assert state.rows + sum(chunk.rows for chunk in islice(state.missing(), 50)) >= min(state.plan.rows, 1)
    assert all(chunk.rows > 0 for chunk in islice(state.missing(), 50))
    assert state.complete in (True, False)
    assert state.failed("mendable") <= sum(s.errors for s in state.summaries())
    assert all(name in state.names() for _, name, _ in state.chunks())
    return True


def packed(entry: Any) -> bytes:
    return gzip.compress(json.dumps(entry).encode(), 1)


NESTED: Any = "deep"
for _ in range(900):
    NESTED = [NESTED]
ODD = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**12, 10**30, 1e308, float("nan"), float("inf"), "", "0", "nan",
       "../x", "x" * 300, "\ud800", "\0", [], {}, [[]], [None], {"": None}, NESTED]  # fmt: skip
BYTES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(gzip.compress),
    st.text(max_size=50).map(lambda text: gzip.compress(text.encode(errors="replace"))),
    st.sampled_from([b"[" * 200_000, b'{"kind":' * 100_000, b"1" * 10_000, b'{"a":NaN}']).map(gzip.compress),
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
                 ).map(packed),
)  # fmt: skip
FUZZ = settings(
    max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(FUZZ, max_examples=200)
@given(found=st.lists(BYTES, min_size=1, max_size=3))
def test_any_bytes_are_refused(found: list[bytes]) -> None:
    assert not read_or_refused(found)


@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_an_entry_with_changed_bytes_is_read_or_refused(finished: Path, data: st.DataObject) -> None:
    found = [path.read_bytes() for path in sorted((finished / "out" / "_log").glob("*.json.gz"))]
    number = data.draw(st.integers(0, len(found) - 1))
    content = bytearray(found[number] if data.draw(st.booleans()) else gzip.decompress(found[number]))
    packs = content[:2] != b"\x1f\x8b"
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) // 2, len(content) * 3)) :]
    found[number] = gzip.compress(bytes(content), 1) if packs else bytes(content)
    read_or_refused(found)


def change(data: st.DataObject, value: Any) -> Any:
    """The value with one place of it, chosen at random, removed, doubled or replaced."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        match data.draw(st.integers(0, 9)):
            case 0:
                del value[key]
            case 1 if isinstance(value, list):
                value.append(deepcopy(value[key]))
            case _:
                value[key] = change(data, value[key])
        return value
    return json.loads(json.dumps(data.draw(st.sampled_from(ODD))))  # a copy


@FUZZ
@given(data=st.data())
def test_a_changed_entry_is_read_or_refused(finished: Path, data: st.DataObject) -> None:
    """Types, huge and negative numbers, missing, doubled and nested values, and entries in another order."""
    log = entries(finished / "out")
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(log) - 1))
        log[number] = change(data, log[number])
    if data.draw(st.booleans()):
        log.insert(data.draw(st.integers(0, len(log))), deepcopy(log[data.draw(st.integers(0, len(log) - 1))]))
    read_or_refused([packed(entry) for entry in log])


def test_the_log_as_it_is_can_be_read(finished: Path) -> None:
    assert read_or_refused([packed(entry) for entry in entries(finished / "out")])


def test_a_missing_entry_is_named(pair: jobs.Pair, place: Path) -> None:
    (place / "out" / entry_name(2)).unlink()
    for command in ("run", "compact", "report"):
        with pytest.raises(
            JobError, match=r"_log/0000000002.json.gz: is missing, but there are later log entries; put"
        ):
            act(command, pair, place)


@pytest.mark.parametrize("command", ["run", "compact", "report", "x.jsonl"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [(10**12, "begin.plan.shards.0.rows is 1000000000000"), (10**12 - 1, "rows are missing|planned shard has changed")],
)
def test_a_shard_of_a_trillion_rows_keeps_nobody_busy(
    pair: jobs.Pair, place: Path, rows: int, message: str, command: str
) -> None:
    log = entries(place / "out")
    begin = next(entry for entry in log if entry["kind"] == "begin")
    begin["plan"]["shards"][0]["rows"] = rows
    shutil.rmtree(place / "out" / "_log")
    append(Folder(str(place / "out")), *log)
    if (command, rows) == ("report", 10**12 - 1):
        act(command, pair, place)
        return
    with pytest.raises(JobError, match=message):
        act(command, pair, place)


# Files


STRAYS = {
    "of an entry that there was not yet": "part-0000000-000000000000-8-000099.parquet",
    "of an entry that named other files": "part-0000000-000000000000-8-000003.parquet",
    "of another name": "mine.parquet",
}


@pytest.mark.parametrize("command", ["run", "compact"])
@pytest.mark.parametrize("name", STRAYS.values(), ids=STRAYS)
def test_a_stray_file_is_named_and_left_alone(pair: jobs.Pair, place: Path, name: str, command: str) -> None:
    """pandas would read its rows too."""
    shutil.copy(next((place / "out").glob("part-*")), place / "out" / name)
    before = contents(place / "out")
    with pytest.raises(JobError, match=rf"out: has {name}, which this job did not write; .* move it to another folder"):
        act(command, pair, place)
    assert contents(place / "out") == before


@pytest.mark.parametrize("command", ["run", "compact"])
def test_a_replaced_file_that_comes_back_is_removed(pair: jobs.Pair, place: Path, command: str) -> None:
    """As after restoring a backup over a finished output. The log says that it was the job's."""
    early = next((place / "out").glob("part-*"))
    content = early.read_bytes()
    act("compact", pair, place)
    early.write_bytes(content)
    act(command, pair, place)
    jobs.assert_complete(place / "out", ROWS)
    assert not early.exists()


@pytest.mark.parametrize("command", ["run", "compact"])
def test_staged_files_of_an_earlier_owner_are_swept_though_nothing_is_to_be_done(
    pair: jobs.Pair, place: Path, command: str, capsys: Any
) -> None:
    """Actors of an owner that lost the output stage files after the next owner has finished."""
    act("compact", pair, place)
    before = {name: content for name, content in contents(place / "out").items() if name.startswith("part-")}
    late = next((place / "out").glob("part-*")).read_bytes()
    for name, content in {"0000000001-late": late, "0000000001-cut": late[:99], ".0000000001-late.7": b"x"}.items():
        (place / "out" / "_staged" / name).write_bytes(content)
    act(command, pair, place)
    assert not contents(place / "out" / "_staged")
    assert {name: c for name, c in contents(place / "out").items() if name.startswith("part-")} == before
    assert (place / "out" / "_SUCCESS").exists()
    if command == "run":
        assert "nothing to do: all 20 rows" in capsys.readouterr().out
        assert Output(Folder(str(place / "out"))).read().state.taken is None


FOOTERS: dict[str, Entry] = {
    "of a shard that there is not": {"shard": 9},
    "of rows that there are not": {"first": 8},
    "of a huge number of rows": {"rows": 10**9},
    "of a row before the first": {"first": -1},
    "of no rows": {"rows": 0},
    "of another type": {"errors": "x"},
}


@pytest.mark.parametrize("changed", FOOTERS.values(), ids=FOOTERS)
def test_a_staged_file_with_a_strange_footer_is_swept(pair: jobs.Pair, place: Path, changed: Entry) -> None:
    lost = min((place / "out").glob("part-*"))
    table = pq.read_table(lost)
    told = json.loads(table.schema.metadata[FOOTER])
    told["chunks"][0] |= changed
    table = table.replace_schema_metadata({FOOTER: json.dumps(told)})
    pq.write_table(table, place / "out" / "_staged" / "0000000001-strange")
    lost.unlink()
    assert jobs.run(pair, place) == 0
    jobs.assert_complete(place / "out", ROWS)
    assert not contents(place / "out" / "_staged")


# Clocks


def taken_now() -> Entry:
    """This process's entry as an owner."""
    return {"lease": "a"} | lease.owner("run")


CLOCKS: dict[str, Callable[[float], float]] = {
    "a second later": lambda at: at + 1,
    "a second earlier": lambda at: at - 1,
    "30 days later": lambda at: at + 30 * 86400,
    "at 1970": lambda _: 0.0,
}


@pytest.mark.parametrize("moved", CLOCKS.values(), ids=CLOCKS)
def test_a_living_owner_lives_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: Callable[[float], float]
) -> None:
    """psutil computes the start of a process from the time of the boot, which moves with the clock."""
    folder, create_time = Folder(str(tmp_path)), psutil.Process.create_time
    taken = taken_now()
    assert not lease.dead(folder, taken)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: moved(create_time(self)))
    assert not lease.dead(folder, taken)


DEAD = {
    "another process has its number": {"ticks": 1},
    "another process has its number, by an older version": {"ticks": None, "started": 1.0},
    "no process has its number": {"pid": 2**22 + 7},
}


@pytest.mark.parametrize("changed", DEAD.values(), ids=DEAD)
def test_a_dead_owner_is_dead(tmp_path: Path, changed: Entry) -> None:
    assert lease.dead(Folder(str(tmp_path)), taken_now() | changed)


def test_an_owner_of_an_older_version_lives(tmp_path: Path) -> None:
    taken = taken_now()
    del taken["ticks"]
    assert not lease.dead(Folder(str(tmp_path)), taken)


def test_a_killed_owner_that_nobody_has_waited_for_is_dead(tmp_path: Path) -> None:
    """Its process still has an entry in the system's table."""
    code = f"import json, time; from {lease.__name__} import owner; print(json.dumps(owner('run')), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(99)"], stdout=subprocess.PIPE, cwd=jobs.ROOT
    ) as process:
        assert process.stdout is not None
        taken = json.loads(process.stdout.readline())
        assert not lease.dead(Folder(str(tmp_path)), taken)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lease.dead(Folder(str(tmp_path)), taken)


def test_an_owner_elsewhere_lives_though_the_clock_of_the_store_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat looks old until the next one."""
    monkeypatch.setattr(lease, "BEAT", 0.3)
    monkeypatch.setattr(lease, "_silent", lambda *_: 30 * 86400.0)
    folder = Folder(str(tmp_path))
    living = lease.Lease(folder, "a")
    elsewhere = taken_now() | {"machine": "elsewhere"}
    assert not lease.dead(folder, elsewhere)
    living.end()
    folder.write(living.name, b"7")
    assert lease.dead(folder, elsewhere)


def test_an_owner_with_an_odd_clock_can_be_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the log are shown, and never compared."""
    folder = Folder(str(place / "out"))
    monkeypatch.setattr(time, "time", lambda: -1e10)
    with take(read_output(folder), "run"), pytest.raises(JobError, match="in use by run"), take(Output(folder), "run"):
        pytest.fail("the owner lives")
