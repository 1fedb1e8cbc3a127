"""Processes that work on one output at the same time, in any order, with kills and pauses. A reader of the folder never
sees a row twice, rows of two jobs, or a marker while rows are missing. The next run completes the job.
"""

import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement
from random import Random
from types import FunctionType
from typing import Any
from unittest import mock

import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, Plan, Shard
from exspec.pipeline.output.log import Log
from exspec.pipeline.output.owner import DESCRIPTION, SUCCESS, Output, Writer, read_output, take
from exspec.pipeline.output.state import File, Summary
from exspec.pipeline.storage import STAGED, Folder
from tests.pipeline import jobs
from tests.pipeline.output import simulation
from tests.pipeline.output.simulation import Explorer, MemoryFolder, Moment, Store, ViolationError, World

SHARDS = [Shard(f"{n}.parquet", f"in/{n}.parquet", rows, 1, "") for n, rows in enumerate((4, 2, 2))]
PLAN, EXTENDED = Plan(SHARDS[:2], 2), Plan(SHARDS, 2)
Rows = frozenset[tuple[int, int]]  # shard and row


class RefusedError(JobError):
    """This process may not work on the output."""


class NoLease:
    """A heartbeat that is never checked."""

    def __init__(self, folder: Folder, nonce: str) -> None:
        pass

    def clear(self, dead: dict[str, Any]) -> None:
        pass

    def end(self) -> None:
        pass


def dead(honest: bool) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda _, taken: not honest or bool(simulation.current.ask(("dead", taken["lease"][0])))


@dataclass(frozen=True)
class Place:
    """Where programs run. honest: a live process is never considered dead."""

    local: bool = False
    backwards: bool = False
    honest: bool = False

    def take(self, output: Output, action: str) -> Any:
        return take(output, action, lease=NoLease, dead=dead(self.honest))

    @property
    def folder(self) -> Any:
        return MemoryFolder("out", {"local": self.local, "backwards": self.backwards})


def encoded(job: str, settings: str, chunks: list[Chunk], errors: bool) -> tuple[bytes, list[Summary]]:
    """The bytes of a file of chunks, and the summaries. errors: the very first row has an error."""
    rows = [(c.number, c.first + i) for c in chunks for i in range(c.rows)]
    values = [[n, row, f"{settings}:{n}:{row}", errors and (n, row) == (0, 0)] for n, row in rows]
    return json.dumps({"job": job, "rows": values}).encode(), [summary(c, errors) for c in chunks]


def summary(chunk: Chunk, errors: bool) -> Summary:
    wrong = int(errors and (chunk.number, chunk.first) == (0, 0))
    return Summary(chunk.number, chunk.first, chunk.rows, wrong, 0, 0, [], [], 0, 0, {}, "", {}, 0.0, 0.0, 1)


def stage(writer: Writer, chunks: list[Chunk], errors: bool) -> File:
    settings = writer.state.description["settings"]
    content, summaries = encoded(str(writer.state.job), settings, chunks, errors)
    return File("", writer.folder.stage(content, writer.prefix), len(content), "", 1, summaries)


def read_staged(folder: Folder, name: str) -> tuple[str, File] | None:
    try:
        content = folder.read(name)
        loaded = json.loads(content)
        rows = loaded["rows"]
    except (FileNotFoundError, KeyError):
        return None
    firsts = [(n, row, wrong) for n, row, _, wrong in rows if row % 2 == 0]
    chunks = [summary(Chunk(SHARDS[n], n, row, 2), wrong) for n, row, wrong in firsts]
    return loaded["job"], File("", name, len(content), "", 1, chunks)


def run(
    place: Place,
    settings: str = "one",
    plan: Plan = PLAN,
    errors: bool = False,
    restart: bool = False,
    retry: bool = False,
    broken: bool = False,
    hasty: bool = False,
) -> str:
    """errors: a row cannot be decoded. broken: is killed after parts are staged and one is committed. hasty: does not
    remove what others staged.
    """
    output = Output(place.folder).read()
    if not (restart or retry) and finished(output, plan):
        return "complete"
    with place.take(output, "run") as writer:
        state = writer.state
        fresh = restart or state.job is None
        if not fresh:
            if state.description["settings"] != settings:
                raise RefusedError("the job has other settings")
            plan = max(plan, state.plan, key=lambda p: len(p.shards))
            writer.adopt(read_staged)
        if not hasty:
            writer.sweep()
        missing = list(plan.chunks() if fresh else plan.chunks(state.held()))
        if restart and state.job is not None:
            writer.keep_old()
        if fresh:
            writer.begin(jobs.DESCRIBED | {"settings": settings}, plan)
        else:
            writer.extend(plan)
        writer.folder.write(DESCRIPTION, settings.encode())
        parts = [stage(writer, [chunk], errors) for chunk in missing[:2]]
        try:
            flush(writer, parts, 1)
            if broken:
                simulation.halt()
            parts += [stage(writer, [chunk], errors) for chunk in missing[2:]]
        finally:  # like the collector
            flush(writer, parts, 3)
        if retry:
            mend(writer)
        return finish(writer)


def flush(writer: Writer, parts: list[File], most: int) -> None:
    if parts:
        writer.commit(parts[:most])
        del parts[:most]


def finished(output: Output, plan: Plan) -> bool:
    state = output.state
    if state.done is None or len(plan.shards) > len(state.plan.shards):
        return False
    sizes = output.folder.sizes()
    shown = {name: size for name, size in sizes.items() if name[0] != "_"}
    return SUCCESS in sizes and shown == dict(state.sizes()) and not output.folder.names(STAGED)


def mend(writer: Writer) -> None:
    for chunk, name, _ in list(writer.state.chunks("mendable")):
        part, file = stage(writer, [chunk], False), writer.state.file(name)
        if len(file.chunks) == 1:
            writer.commit([part], [name])
        else:
            read_whole(writer, name)
            whole = stage(writer, [chunk_of(s) for s in file.chunks], False)
            writer.commit([whole], [name])
            writer.folder.each(writer.folder.remove, [part.staged])


def chunk_of(s: Summary) -> Chunk:
    return Chunk(SHARDS[s.shard], s.shard, s.first, s.rows)


def read_whole(writer: Writer, name: str) -> bytes:
    content = writer.folder.read(name)
    assert len(content) == writer.state.file(name).size
    return content


def finish(writer: Writer) -> str:
    if not writer.state.complete:
        return "left"
    if writer.state.done is None:
        writer.finish()
    return "complete"


def compact(place: Place) -> str:
    with place.take(read_output(place.folder), "compact") as writer:
        if not writer.state.complete:
            raise RefusedError("rows are missing")
        writer.sweep()
        names = writer.state.names()
        if len(names) > 1:
            contents = [json.loads(read_whole(writer, name)) for name in names]
            rows = [row for content in contents for row in content["rows"]]
            content = json.dumps({"job": writer.state.job, "rows": rows}).encode()
            staged = writer.folder.stage(content, writer.prefix)
            writer.commit([File("", staged, len(content), "", 1, list(writer.state.summaries()))], names)
        return finish(writer)


def late_actor(place: Place) -> str:
    """An actor that stages a part after its owner has died. It read the job's id when it began."""
    output = Output(place.folder).read()
    if output.state.job is None or output.state.taken is None:
        return "left"
    chunk = Chunk(SHARDS[0], 0, 2, 2)
    content, _ = encoded(output.state.job, output.state.description["settings"], [chunk], False)
    place.folder.stage(content, f"{output.log.length:010d}")
    return "left"


PROGRAMS: dict[str, Callable[[Place], str]] = {
    "run": run,
    "other": partial(run, settings="two"),
    "flaky": partial(run, errors=True),
    "extended": partial(run, plan=EXTENDED),
    "retry": partial(run, retry=True),
    "restart": partial(run, settings="two", restart=True),
    "again": partial(run, restart=True),
    "hasty": partial(run, settings="two", restart=True, hasty=True),
    "compact": compact,
    "actor": late_actor,
    "broken": partial(run, broken=True),
}
STARTS: dict[str, tuple[str, ...]] = {
    "empty": (),
    "half": ("broken",),
    "complete": ("flaky",),
    "compacted": ("flaky", "compact"),
}


def started(start: str, place: Place) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for n, name in enumerate(STARTS[start]):
        simulation.alone("PQ"[n], partial(PROGRAMS[name], place), files)
    return files


@dataclass(frozen=True)
class LogState:
    """The state after a log, implemented independently. shown: staged name and rows of every file. plan: all rows.

    marked: job and rows at the last entry `done`. clean: chunks that were decoded without an error.
    """

    job: str = ""
    settings: str = "one"
    plan: Rows = frozenset()
    shown: dict[str, tuple[str, Rows]] = field(default_factory=dict)
    done: str = ""
    marked: tuple[str, Rows] | None = None
    owner: str = ""
    clean: frozenset[tuple[int, int]] = frozenset()

    @property
    def rows(self) -> Rows:
        return frozenset().union(*(rows for _, rows in self.shown.values()))

    @property
    def complete(self) -> bool:
        return bool(self.job) and self.rows == self.plan

    def then(self, entry: dict[str, Any]) -> "LogState":
        author, kind = entry["nonce"][0], entry["kind"]
        if kind == "take":
            return replace(self, owner=author)
        assert author == self.owner, f"an entry ({kind}) of {author}, while the owner is {self.owner or 'nobody'}"
        if kind == "end":
            return replace(self, owner="")
        if kind == "begin":
            plan = rows_of(entry["plan"]["shards"])
            return LogState(entry["job"], entry["description"]["settings"], plan, marked=self.marked, owner=author)
        if kind == "extend":
            return replace(self, plan=self.plan | rows_of([s for _, s in entry["shards"]]), done="")
        if kind == "done":
            assert self.complete, "done, while rows are missing"
            return replace(self, done=entry["staged"], marked=(self.job, self.plan))
        assert kind == "swap"
        return self._swapped(entry)

    def _swapped(self, entry: dict[str, Any]) -> "LogState":
        shown, clean = dict(self.shown), set(self.clean)
        for name in entry["old"]:
            del shown[name]
        for new in entry["new"]:
            for s in new["chunks"]:
                place = (s["shard"], s["first"])
                assert not (s["errors"] and place in clean), f"{place} has an error again"
                clean |= set() if s["errors"] else {place}
            rows = frozenset((s["shard"], s["first"] + i) for s in new["chunks"] for i in range(s["rows"]))
            assert not any(rows & other for _, other in shown.values()), f"rows of {new['name']} are shown twice"
            shown[new["name"]] = (new["staged"], rows)
        return replace(self, shown=shown, clean=frozenset(clean), done="")


def rows_of(shards: list[dict[str, Any]]) -> Rows:
    return frozenset((int(s["name"][0]), row) for s in shards for row in range(s["rows"]))


class Invariants:
    """Invariants of the store, of every change, and of processes that end. faulty: the store may fail."""

    def __init__(self, place: Place, faulty: bool) -> None:
        self.place, self.faulty = place, faulty
        self.mended = 0
        self._states: dict[tuple[bytes, ...], LogState] = {(): LogState()}
        self._files: dict[bytes, tuple[str, list[list[Any]]]] = {}
        self._asides: set[Store] = set()

    def state(self, entries: tuple[bytes, ...]) -> LogState:
        if entries not in self._states:
            self._states[entries] = self.state(entries[:-1]).then(json.loads(entries[-1]))
        return self._states[entries]

    def file(self, content: bytes) -> tuple[str, list[list[Any]]]:
        if content not in self._files:
            loaded = json.loads(content)
            self._files[content] = (loaded["job"], loaded["rows"])
        return self._files[content]

    def changed(self, before: Store, after: Store, letter: str) -> None:
        """Files appear only if the log shows them, and disappear only if it does not. Then check the readers."""
        now = self.state(entries(after))
        there, here = dict(before), dict(after)
        for path in sorted(there.keys() ^ here.keys()):
            folder, _, name = path.partition("/")
            if folder != "out" or "/" in name:
                continue
            if name == SUCCESS:
                assert path in there or now.done, "the marker appears, but the log has no done"
                owner = letter == now.owner
                assert path in here or not now.done or not owner, "the owner removes the marker of a finished job"
            elif name[0] == "_":
                continue
            elif path in here:
                assert name in now.shown, f"{name} appears, but the log does not show it"
            else:
                assert name not in now.shown, f"{name} disappears, but the log shows it"
        for name, (staged, _) in now.shown.items():
            assert f"out/{name}" in here or f"out/{staged}" in here, f"{name} is nowhere"
        for folder in {path.partition("/")[0] for path in here}:
            self.read(after, folder)

    def read(self, store: Store, folder: str) -> list[list[Any]]:
        """The rows that a reader of a folder sees."""
        files = {p[len(folder) + 1 :]: content for p, content in store if p.startswith(f"{folder}/")}
        found = [self.file(content) for name, content in sorted(files.items()) if name[0] not in "_."]
        rows = [row for _, rows in found for row in rows]
        places = [(shard, row) for shard, row, _, _ in rows]
        assert len(set(places)) == len(places), f"{folder}: rows twice"
        jobs = {job for job, _ in found}
        assert len(jobs) < 2, f"{folder}: rows of jobs {jobs}"
        if SUCCESS in files:
            marked = self.state(entries(store, folder)).marked
            assert marked is not None, f"{folder}: a marker, but the log has no done"
            assert marked == (min(jobs, default=""), frozenset(places)), f"{folder}: a marker, but rows are missing"
        return rows

    def ended(self, store: Store, letter: str, ended: tuple[str, Any]) -> None:
        """A process returns complete only if it is, and loses the output only if another process took it."""
        log = entries(store)
        kinds = [(json.loads(e)["kind"], json.loads(e)["nonce"][0]) for e in log]
        took = kinds.index(("take", letter)) if ("take", letter) in kinds else len(log)
        lost = next((n for n in range(took + 1, len(log)) if kinds[n][0] == "take"), len(log))
        how, what = ended
        if how == "returned":
            ends = [lost] if took < lost else range(len(log) + 1)  # it found the job complete and did not take it
            then = [self.state(log[:end]) for end in ends]
            assert what == "left" or any(t.done and t.complete for t in then), (
                f"{letter}: complete, but rows were missing"
            )
            if what == "complete" and "begin" in {kind for kind, _ in kinds[took:lost]}:
                self.check_aside(store, f"-{took + 1}/")
        elif self.faulty:
            assert how in ("ConnectionError", "FileNotFoundError", "JobError", "RefusedError", "LostError"), (
                f"{how}: {what}"
            )
        elif how == "LostError":
            assert lost < len(log), f"{letter} lost the output, but no process took it: {what}"
            assert not self.place.honest, f"{letter} is alive, but lost the output"
        elif how not in ("RefusedError", "BusyError") and "has no job" not in what:
            assert lost < len(log), f"{letter}, the owner, ended with {how}: {what}"

    def check_aside(self, store: Store, end: str) -> None:
        """A job that was set aside is complete and can be resumed."""
        for folder in {path.partition("/")[0] for path, _ in store if end in path}:
            files = {f"out{p[len(folder) :]}": content for p, content in store if p.startswith(f"{folder}/")}
            aside = tuple(sorted(files.items()))
            if aside not in self._asides:
                self._asides.add(aside)
                self.left(aside)

    def left(self, store: Store) -> None:
        """From any state, one more run completes the job and leaves no staged files, and a compaction works."""
        self.mended += 1
        before, files = self.state(entries(store)), dict(store)
        ended = simulation.alone("X", partial(run, self.place, before.settings), files)
        assert ended == ("returned", "complete"), f"the next run: {ended}"
        self.check_whole(files, before)
        staged = [path for path in files if path.startswith(f"out/{STAGED}/")]
        assert not staged, f"left behind: {staged}"
        ended = simulation.alone("Y", partial(compact, self.place), files)
        assert ended == ("returned", "complete"), f"the next compaction: {ended}"
        self.check_whole(files, before)

    def check_whole(self, files: dict[str, bytes], before: LogState) -> None:
        store = tuple(sorted(files.items()))
        now, rows = self.state(entries(store)), self.read(store, "out")
        assert f"out/{SUCCESS}" in files, "no marker after the next run"
        assert now.job == before.job or not before.job, "the next run began another job"
        assert {(shard, row) for shard, row, _, _ in rows} == now.plan >= before.plan
        assert all(value == f"{before.settings}:{shard}:{row}" for shard, row, value, _ in rows), "wrong values"
        wrong = {(shard, row - row % 2) for shard, row, _, error in rows if error}
        assert not wrong & before.clean, f"an error came back over {wrong}"


def entries(store: Store, folder: str = "out") -> tuple[bytes, ...]:
    below = f"{folder}/_log/"
    return tuple(content for path, content in store if path.startswith(below))


@dataclass(frozen=True)
class Case:
    """Programs that start together from what others have left. every: see `Explorer`."""

    start: str
    programs: tuple[str, ...]
    place: Place = Place()
    switches: int = -1
    faults: int = 0
    kills: bool = False
    every: int = 10

    def began(self) -> tuple[Explorer, Moment]:
        world = World([partial(PROGRAMS[name], self.place) for name in self.programs])
        store = world.store(started(self.start, self.place))
        explorer = Explorer(world, Invariants(self.place, self.faults > 0), self.place.honest, self.kills, self.every)
        return explorer, Moment(store, world.start(store), (), self.faults, self.switches)

    def explore(self) -> int:
        """Explore every schedule; returns their number. `replay` takes the message of a violation."""
        with simulation.imitated(), self.annotated():
            explorer, moment = self.began()
            return explorer.all(moment)

    def walk(self, seed: int, walks: int) -> None:
        """Follow random schedules."""
        with simulation.imitated(), self.annotated():
            explorer, moment = self.began()
            for n in range(walks):
                explorer.one(moment, Random(f"{seed}, {n}"))

    @contextmanager
    def annotated(self) -> Iterator[None]:
        try:
            yield
        except ViolationError as error:
            raise ViolationError(f"{self!r} {error}") from error


def replay(case: Case, schedule: str) -> None:
    """Print the steps of a violation's schedule."""
    with simulation.imitated():
        explorer, moment = replace(case, every=1).began()
        explorer.replay(moment, schedule)


DISK, OBJECTS = Place(local=True), Place()
NAMES = ("run", "other", "extended", "retry", "restart", "compact")
PAIRS = list(combinations_with_replacement(NAMES, 2))


def explored(*cases: Case) -> int:
    """The number of schedules of all cases, which is printed too."""
    found = sum(case.explore() for case in cases)
    print(f"{found:,} schedules")
    return found


@pytest.mark.fast("half-objects", slow=2)
@pytest.mark.parametrize("place", [DISK, OBJECTS], ids=["disk", "objects"])
@pytest.mark.parametrize("start", STARTS)
def test_two_at_once_with_two_switches(start: str, place: Place) -> None:
    """Each process may pause or be killed once anywhere; then the next run."""
    assert explored(*(Case(start, pair, place, switches=2, every=20) for pair in PAIRS)) > 9000


ORDERS = [  # and the number of schedules, at least
    (Case("half", ("run", "run"), DISK, every=50), 500_000),
    (Case("complete", ("retry", "compact"), DISK, every=50), 500_000),
    (Case("complete", ("extended", "run"), OBJECTS, every=50), 500_000),
    (Case("complete", ("compact", "compact"), OBJECTS, every=50), 500_000),
    (Case("half", ("run", "run", "compact"), OBJECTS, switches=2, every=50), 5000),
    (Case("complete", ("compact", "run", "extended"), OBJECTS, switches=2, every=50), 5000),
    (Case("complete", ("retry", "retry", "restart"), OBJECTS, switches=2, every=50), 5000),
    (Case("half", ("run", "actor", "extended"), OBJECTS, switches=2, every=50), 5000),
]


@pytest.mark.fast("half-run-run")
@pytest.mark.parametrize(("case", "least"), ORDERS, ids=[f"{c.start}-{'-'.join(c.programs)}" for c, _ in ORDERS])
def test_every_order_of_two_and_two_switches_of_three(case: Case, least: int) -> None:
    assert explored(case) > least


@pytest.mark.fast("half")
@pytest.mark.parametrize("start", STARTS)
def test_a_store_that_fails_once(start: str) -> None:
    """Anywhere, an answer is lost, or a request arrives late or twice, while another process works."""
    pairs = [("extended", "run"), ("retry", "compact")]
    assert explored(*(Case(start, pair, switches=1, faults=1, every=50) for pair in pairs)) > 20_000


@pytest.mark.fast("complete")
@pytest.mark.parametrize("start", STARTS)
def test_a_live_process_never_loses_an_output(start: str) -> None:
    """If a live process is never considered dead. Processes are killed anywhere."""
    pairs = [("run", "run"), ("extended", "compact"), ("retry", "restart")]
    place = Place(honest=True)
    assert explored(*(Case(start, pair, place, switches=1, kills=True, every=50) for pair in pairs)) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_at_random(seed: int) -> None:
    """Three or four processes, with kills, pauses and a store that fails."""
    random = Random(seed)
    names = [*NAMES, "actor", "flaky", "again"]
    for n in range(10):
        programs = tuple(random.choices(names, k=random.choice([3, 4])))
        place = Place(random.random() < 0.3, random.random() < 0.5)
        case = Case(random.choice(list(STARTS)), programs, place, faults=0 if place.local else 2, kills=True)
        case.walk(1000 * seed + n, 20)


RUNS = Case("half", ("run", "run"), DISK, switches=2, every=1)
RETRY = Case("complete", ("retry", "run"), DISK, switches=2, every=1)
RESTART = Case("complete", ("restart", "run"), DISK, switches=2, every=1)
ADOPTED = Case("half", ("restart", "run"), DISK, switches=2, every=1)
TWICE = Case("complete", ("again", "compact", "again"), DISK, switches=1, every=1)
LONGER = Case("half", ("run", "extended"), DISK, switches=2, every=100)
HASTY = Case("complete", ("retry", "run", "hasty"), switches=2, every=100)
OTHER = Case("half", ("restart", "actor", "other"), DISK, switches=1, every=1)


@dataclass(frozen=True)
class Sabotage:
    """A replacement in the source of a function, and the case in which it must cause a violation."""

    where: Any
    name: str
    before: str
    after: str
    case: Case

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(self.before.split())[:40]}"

    @contextmanager
    def done(self) -> Iterator[None]:
        there, function = {}, getattr(self.where, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.before) == 1, f"{self.name} has changed; rewrite the sabotage"
        exec("from __future__ import annotations\n" + source.replace(self.before, self.after), there)
        code, module = there[self.name].__code__, vars(inspect.getmodule(function))
        with mock.patch.object(self.where, self.name, FunctionType(code, module, self.name, function.__defaults__)):
            yield


ENTRY = 'self._append({"kind": "swap", "new": files, "old": list(old)})'
REMOVED = "self.folder.each(self.folder.remove, old)"
SHOWN = "self.folder.each(self._show, [f.name for f in named])"
WRITTEN = "self.folder.remove(staged); self.folder.write(SUCCESS, b'')"
SABOTAGES = [
    Sabotage(Writer, "commit", ENTRY, f"[self.folder.move(f.staged, f.name) for f in named]; {ENTRY}", RUNS),
    Sabotage(Writer, "commit", f"{REMOVED}\n    {SHOWN}", f"{SHOWN}\n    {REMOVED}", RETRY),
    Sabotage(Writer, "commit", "self._withdraw()", "pass", RETRY),
    Sabotage(Writer, "commit", "file_name(file.chunks, number)", "file_name(file.chunks, 1)", RETRY),
    Sabotage(Writer, "begin", "[*old, *BESIDE] if old else []", "BESIDE", RESTART),
    Sabotage(Writer, "begin", "self._withdraw()", "pass", RESTART),
    Sabotage(Writer, "keep_old", "-{self.epoch}", "", TWICE),
    Sabotage(Writer, "keep_old", "[*names, *log]", "names", RESTART),
    Sabotage(Writer, "finish", "self._move(staged, SUCCESS)", WRITTEN, LONGER),
    Sabotage(Writer, "settle", "self.state.had(n) and", "n[0] != '_' and", RUNS),
    Sabotage(Writer, "settle", "self.folder.each(self.folder.remove, dead)", "pass", RETRY),
    Sabotage(Writer, "settle", "self.folder.each(self._show,", "list(", RUNS),
    Sabotage(Writer, "settle", "self._withdraw()", "pass", RETRY),
    Sabotage(Writer, "settle", "self._end_moves(shown, bool(lost))", "pass", HASTY),
    Sabotage(Writer, "_mark", "self.finish()", "pass", RUNS),
    Sabotage(Writer, "adopt", "self.folder.move(name, own)", "own = name", ADOPTED),
    Sabotage(Writer, "adopt", "suppress(FileNotFoundError)", "suppress()", ADOPTED),
    Sabotage(Writer, "adopt", "job == self.state.job and", "", OTHER),
    Sabotage(Writer, "_held", "bool(self.state.holders(chunk.shard, chunk.first, chunk.rows))", "False", RUNS),
    Sabotage(Writer, "_old_staged", 'if n.split("-")[0] < self.prefix', "", RUNS),
    Sabotage(Writer, "successor", "copy(self.log).read()", "self.log.read()", RUNS),
    Sabotage(Log, "append", "if not self.folder.create(", "if self.folder.write(", RUNS),
]


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=str)
def test_a_sabotage_is_detected(sabotage: Sabotage) -> None:
    """Without each precaution of the protocol, the invariants are violated. So the invariants check something."""
    with sabotage.done(), pytest.raises(ViolationError) as seen:
        sabotage.case.explore()
    print(str(seen.value)[:400])
