"""Runs several processes on one store in memory, in every order of their steps, with the real code.

Between two requests to the store a process sees nothing of the others, and random names and times are replaced. So a
process is a function of the answers that it got, and its states are the nodes of a tree that branches by answers. A
moment is the content of the store and one node per process. The moments form a graph whose paths are the schedules.
Each moment is visited once, whatever the number of paths to it. To bring a process to a node, it runs from the start
with the answers on the path, so nothing has to switch between processes. It then runs on alone as far as it can: its
steps alone are a path of the graph too.

A killed process takes no further step. A process that is wrongly considered dead takes some later.
"""

import itertools
import re
import sqlite3
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar
from unittest import mock

from exspec.pipeline.output import log, owner, state
from exspec.pipeline.output.state import TABLES
from exspec.pipeline.storage import STAGED

T = TypeVar("T")
Request = tuple[Any, ...]  # the kind of request, then paths, then content
GONE, AGAIN, BROKEN = "gone", "again", "broken"  # answers: no such file; the client retries; the client gives up
FAULTS = ("lost", "lost for good", "late", "late for good", "twice")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # names of processes
CHANGES = {"create", "put", "write", "copy", "remove"}  # a rename on a local disk is not sent over a network


class Halt(BaseException):
    """The process takes no further step."""


def halt() -> None:
    """Kill the current process."""
    current.halted = True
    raise Halt


class ViolationError(AssertionError):
    """An invariant is violated. The message has the schedule to replay."""


def change(files: dict[str, bytes], request: Request) -> Any:
    """Execute a request; returns the answer of the store."""
    kind, path, *rest = request
    if kind == "sizes":
        below = path + "/"
        names = ((p[len(below) :], content) for p, content in files.items() if p.startswith(below))
        return tuple(sorted((name, len(content)) for name, content in names if "/" not in name))
    if kind == "size":
        return len(files[path]) if path in files else None
    if kind == "remove":
        return files.pop(path, None) and None
    if kind == "create" and path in files:
        return False
    if kind in {"create", "put", "write"}:
        files[path] = rest[0]
        return True
    if path not in files:
        return GONE
    if kind == "read":
        return files[path]
    files[rest[0]] = files[path] if kind == "copy" else files.pop(path)
    return True


class Process:
    """A process: a program, and the answers that it gets. letter: its name."""

    def __init__(self, letter: str, program: Callable[[], Any], ask: Callable[[Request], Any]) -> None:
        self.letter, self.program, self._ask = letter, program, ask
        self.names, self.halted = 0, False

    def ask(self, request: Request) -> Any:
        if self.halted:
            raise Halt
        try:
            return self._ask(request)
        except Halt:
            self.halted = True
            raise

    def name(self) -> str:
        """A unique name that begins with the letter."""
        self.names += 1
        return f"{self.letter}{self.names:02d}abcdef"

    def run(self) -> tuple[str, Any] | None:
        """How the program ended: ("returned", value) or (name of the exception, its text); None if it halted."""
        global current
        before, current = current, self
        Table.recycle()
        try:
            return ("returned", self.program())
        except Halt:
            return None
        except Exception as error:
            return (type(error).__name__, str(error))
        finally:
            current = before


class Table(sqlite3.Connection):
    """A table of files that is reused, because creating one takes most of the time."""

    free: ClassVar[list["Table"]] = []
    used: ClassVar[list["Table"]] = []

    @classmethod
    def connect(cls, *_: Any, **__: Any) -> "Table":
        if not cls.free:
            cls.free.append(sqlite3.connect(":memory:", isolation_level=None, factory=cls))
            cls.free[-1].executescript(TABLES)
        cls.used.append(cls.free.pop())
        return cls.used[-1]

    @classmethod
    def recycle(cls) -> None:
        """Reclaim the tables of processes that have stopped."""
        while cls.used:
            cls.free.append(cls.used.pop())
            cls.free[-1].executescript(EMPTY)

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        if TABLES in script and self in Table.used:
            return self.cursor()
        return super().executescript(script)


EMPTY = "DELETE FROM file; DELETE FROM chunk; DELETE FROM gone;"
current: Process = Process("?", lambda: None, lambda _: None)


class MemoryFolder:
    """A `Folder` whose requests are steps of the current process. It retries as `Folder` does."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url, options or {}
        self.local, self.backwards = bool(self.options.get("local")), bool(self.options.get("backwards"))

    def names(self, below: str = "") -> set[str]:
        return set(self.sizes(below))

    def sizes(self, below: str = "") -> dict[str, int]:
        return dict(self._attempt("sizes", f"{self.url}/{below}".rstrip("/")))

    def refuse_links(self, *names: str) -> None:
        """There are none."""

    def size(self, name: str) -> int | None:
        return self._attempt("size", f"{self.url}/{name}")  # type: ignore[no-any-return]

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def read(self, name: str) -> bytes:
        return self._attempt("read", f"{self.url}/{name}")  # type: ignore[no-any-return]

    def write(self, name: str, content: bytes) -> None:
        self._attempt("write", f"{self.url}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        return bool(self._attempt("create", f"{self.url}/{name}", content)) or self.read(name) == content

    def stage(self, content: bytes, prefix: str) -> str:
        while True:
            name = f"{STAGED}/{prefix}-{current.name()}"
            if self._once("put", f"{self.url}/{name}", content) != AGAIN:
                return name

    def move(self, name: str, new: str) -> None:
        here, there = f"{self.url}/{name}", f"{self.url}/{new}"
        if self.local:
            self._attempt("rename", here, there)
        else:
            self._attempt("copy", here, there)
            self.remove(name)

    def copy(self, name: str, other: "MemoryFolder") -> None:
        self._attempt("copy", f"{self.url}/{name}", f"{other.url}/{name}")

    def remove(self, name: str) -> None:
        self._attempt("remove", f"{self.url}/{name}")

    def each(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        ordered = list(names)
        if self.backwards:
            return [action(name) for name in reversed(ordered)][::-1]
        return [action(name) for name in ordered]

    def _attempt(self, *request: Any) -> Any:
        while (answer := self._once(*request)) == AGAIN:
            pass
        return answer

    def _once(self, *request: Any) -> Any:
        answer = current.ask(request)
        if answer == BROKEN:
            raise ConnectionError(f"no answer to {request[0]} {request[1]}")
        if answer == GONE:
            raise FileNotFoundError(request[1])
        return answer


@contextmanager
def imitated() -> Iterator[None]:
    """Replace names, times and owners by functions of the current process, and folders by memory."""
    clock = types.SimpleNamespace(
        time=lambda: 0.0, sleep=lambda _: None, strftime=lambda *_: "then", gmtime=lambda _: 0, localtime=lambda _: 0
    )
    names = types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=current.name()))
    plain = types.SimpleNamespace(compress=lambda content, *_, **__: content, decompress=lambda content: content)

    tables = types.SimpleNamespace(connect=Table.connect, Error=sqlite3.Error)

    def who(action: str) -> dict[str, Any]:
        return {"action": action, "host": current.letter, "machine": "", "pid": 0, "started": 0.0}

    with (
        mock.patch.object(owner, "time", clock),
        mock.patch.object(owner, "uuid", names),
        mock.patch.object(log, "uuid", names),
        mock.patch.object(log, "gzip", plain),
        mock.patch.object(state, "sqlite3", tables),
        mock.patch.object(owner, "Folder", MemoryFolder),
        mock.patch.object(owner.leases, "owner", who),
    ):
        yield


class Node:
    """The state of a process after the answers that it got: its next request, or how it ended."""

    __slots__ = ("above", "answer", "ended", "following", "letter", "request", "steps")

    def __init__(self, letter: str, above: "Node | None" = None, answer: int = -1) -> None:
        self.letter, self.above, self.answer = letter, above, answer
        self.request: Request | None = None
        self.ended: tuple[str, Any] | None = None
        self.following: dict[int, Node] = {}
        self.steps: dict[int, Step] = {}

    def child(self, answer: int) -> "Node":
        if answer not in self.following:
            self.following[answer] = Node(self.letter, self, answer)
        return self.following[answer]

    def answers(self) -> list[int]:
        found: list[int] = []
        node = self
        while node.above is not None:
            found.append(node.answer)
            node = node.above
        return found[::-1]


Store = tuple[tuple[str, bytes], ...]


class Step(NamedTuple):
    """The store and the node after a request. settled: the answer cannot change and no other process notices the
    request, so the step can be taken at once.
    """

    store: int
    node: Node
    settled: bool


class World:
    """The contents of the store, by number, the effects of requests, and the nodes of the processes.

    programs: of the processes A, B and so on.
    """

    def __init__(self, programs: Iterable[Callable[[], Any]]) -> None:
        self.programs = {LETTERS[i]: program for i, program in enumerate(programs)}
        self.stores: list[Store] = []
        self.values: list[Any] = []
        self._numbers: dict[Store, int] = {}
        self._value_numbers: dict[Any, int] = {}
        self._files: dict[tuple[str, bytes], tuple[str, bytes]] = {}
        self._effects: dict[tuple[int, Request], tuple[int, int]] = {}
        self.roots: dict[str, Node] = {}
        self.ran = 0

    def store(self, files: dict[str, bytes]) -> int:
        key = tuple(sorted(self._files.setdefault(item, item) for item in files.items()))
        if key not in self._numbers:
            self._numbers[key] = len(self.stores)
            self.stores.append(key)
        return self._numbers[key]

    def value(self, answer: Any) -> int:
        key = (type(answer), answer)
        if key not in self._value_numbers:
            self._value_numbers[key] = len(self.values)
            self.values.append(answer)
        return self._value_numbers[key]

    def effect(self, store: int, request: Request) -> tuple[int, int]:
        """The store after a request, and the number of its answer."""
        key = (store, request)
        if key not in self._effects:
            files = dict(self.stores[store])
            answer = self.value(change(files, request))
            self._effects[key] = (self.store(files) if request[0] in CHANGES | {"rename"} else store, answer)
        return self._effects[key]

    def start(self, store: int) -> tuple[Node, ...]:
        """The processes before their first steps."""
        for letter in self.programs:
            if letter not in self.roots:
                self.roots[letter] = Node(letter)
                self._execute(self.roots[letter], store)
        return tuple(self.roots.values())

    def step(self, node: Node, answer: int, store: int) -> Node:
        """The node of the process after one more answer, with the store as it is then."""
        following = node.following.get(answer)
        if following is None:
            following = node.child(answer)
            self._execute(following, store)
        return following

    def _execute(self, node: Node, store: int) -> None:
        """Bring a process to a node by the answers on its path, and let it run on alone from there."""
        self.ran += 1
        answers, at, now = node.answers(), self.roots[node.letter], store
        given = iter(answers)

        def ask(request: Request) -> Any:
            nonlocal at, now
            answer = next(given, None)
            if answer is not None:
                assert at.request == request, f"{at.letter} asks {request} where it asked {at.request}"
            else:
                if at.request is not None or request[0] == "dead":
                    at.request = request
                    raise Halt
                at.request = request
                now, answer = self.effect(now, request)
            at = at.child(answer)
            return self.values[answer]

        ended = Process(node.letter, self.programs[node.letter], ask).run()
        if ended is not None:
            at.ended = ended


def alone(letter: str, program: Callable[[], Any], files: dict[str, bytes]) -> tuple[str, Any] | None:
    """Run a program on a store from start to end, without other processes."""
    return Process(letter, program, lambda request: request[0] == "dead" or change(files, request)).run()


class Moment(NamedTuple):
    """The state of store and processes. sent: delayed requests, which may arrive at any time. last: the process that
    took the last step.

    faults, switches: how many more are allowed. A switch leaves a process that could go on. -1 means no limit, and then
    `last` does not matter.
    """

    store: int
    nodes: tuple[Node, ...]
    sent: tuple[Request, ...] = ()
    faults: int = 0
    switches: int = -1
    last: int = -1
    killed: frozenset[int] = frozenset()


class Check(Protocol):
    """The invariants. Each method raises AssertionError if one is violated."""

    def changed(self, before: Store, after: Store, letter: str) -> None:
        """A request of the process `letter` changed the store."""

    def ended(self, store: Store, letter: str, ended: tuple[str, Any]) -> None:
        """A process ended."""

    def left(self, store: Store) -> None:
        """All processes were killed now."""


Link = tuple[Any, str] | None


@dataclass
class Explorer:
    """Explores the schedules of a world. every: `left` checks one of so many contents of the store."""

    world: World
    check: Check
    honest: bool = False
    kills: bool = False
    every: int = 1
    _changes: set[tuple[int, int, str]] = field(default_factory=set)
    _left: set[int] = field(default_factory=set)

    def all(self, moment: Moment) -> int:
        """Explore every schedule from a moment on. Returns their number: of different paths from here to an end."""
        schedules = 0
        level: dict[Moment, list[Any]] = {moment: [1, None]}
        while level:
            following: dict[Moment, list[Any]] = {}
            for at, (paths, link) in level.items():
                next_steps = self.steps(at, link)
                schedules += 0 if next_steps else paths
                for name, new in next_steps:
                    if new in following:
                        following[new][0] += paths
                    else:
                        following[new] = [paths, (link, name)]
            level = following
        return schedules

    def one(self, moment: Moment, random: Random) -> None:
        """Follow a random schedule with few switches and few faults."""
        link: Link = None
        while next_steps := self.steps(moment, link):
            plain = [step for step in next_steps if step[0] in LETTERS]
            same = [step for step in plain if step[0] == link[1]] if link else []
            wrong = [step for step in next_steps if step not in plain]
            some = same if same and random.random() < 0.9 else plain
            name, moment = random.choice(some if some and (not wrong or random.random() < 0.98) else wrong)
            link = (link, name)

    def replay(self, moment: Moment, schedule: str) -> Moment:
        """Take the steps of a schedule, from the message of a violation, and print them."""
        link: Link = None
        for name in unfolded(schedule):
            next_steps = dict(self.steps(moment, link))
            if name not in next_steps:
                raise AssertionError(f"{name!r} is not a step here; expected one of {sorted(next_steps)}")
            node = moment.nodes[LETTERS.index(name[0])] if name[0].isupper() else None
            print(f"{name:8} {shortened(node.request) if node else ''}")
            link, moment = (link, name), next_steps[name]
        return moment

    def steps(self, at: Moment, link: Link = None) -> list[tuple[str, Moment]]:
        """The possible steps: their names, and the moments after them."""
        able = [i for i, node in enumerate(at.nodes) if node.ended is None and i not in at.killed]
        steps = [self._step(at, i, link) for i in able]
        for i, step in zip(able, steps, strict=True):
            if step.settled:
                return [(LETTERS[i], self._moment(at, i, step.store, step.node, at.last))]
        next_steps = []
        for i, step in zip(able, steps, strict=True):
            switched = at.last != i and at.last in able
            if switched and at.switches == 0:
                continue
            next_steps.append((LETTERS[i], self._moment(at, i, step.store, step.node, i, switched)))
            if at.faults:
                next_steps.extend(self._faults(at, i, link, switched))
        if at.sent:
            next_steps.extend(self._late(at, n, request, link) for n, request in enumerate(at.sent))
        if self.kills:
            next_steps.extend((f"kill {LETTERS[i]}", at._replace(killed=at.killed | {i})) for i in able)
        return next_steps

    def _step(self, at: Moment, i: int, link: Link) -> Step:
        node = at.nodes[i]
        assert node.request is not None
        if node.request[0] == "dead":
            return Step(
                at.store, self.world.step(node, self.world.value(self._dead(at, node.request[1])), at.store), False
            )
        step = node.steps.get(at.store)
        if step is None:
            store, answer = self.world.effect(at.store, node.request)
            new = self._follow(node, at.store, store, answer, (link, LETTERS[i]))
            step = node.steps[at.store] = Step(store, new, self._settled(node.request, answer))
        return step

    def _settled(self, request: Request, answer: int) -> bool:
        if request[0] == "read" and "/_log/" in request[1]:
            return self.world.values[answer] != GONE
        return request[0] == "create" and self.world.values[answer] is False

    def _dead(self, at: Moment, letter: str) -> bool:
        other = LETTERS.index(letter)
        alive = other < len(at.nodes) and at.nodes[other].ended is None and other not in at.killed
        return not (self.honest and alive)

    def _moment(self, at: Moment, i: int, store: int, node: Node, last: int, switched: bool = False) -> Moment:
        nodes = (*at.nodes[:i], node, *at.nodes[i + 1 :])
        if at.switches < 0:
            return Moment(store, nodes, at.sent, at.faults, -1, -1, at.killed)
        return Moment(store, nodes, at.sent, at.faults, at.switches - switched, last, at.killed)

    def _faults(self, at: Moment, i: int, link: Link, switched: bool) -> Iterator[tuple[str, Moment]]:
        node = at.nodes[i]
        request = node.request
        assert request is not None
        if request[0] not in CHANGES:
            return
        store, answer = self.world.effect(at.store, request)
        # A put has a new name at every attempt. Not covered: a put that arrives twice, the second time after the file
        # was moved, with an owner that paused between its entry and its move, and moves the file when it is obsolete.
        for fault in FAULTS if request[0] != "put" else FAULTS[:-1]:
            name = f"{LETTERS[i]} {fault}"
            received = answer if fault == "twice" else self.world.value(BROKEN if "for good" in fault else AGAIN)
            sent = at.sent if "lost" in fault else tuple(sorted([*at.sent, request]))
            after = at.store if "late" in fault else store
            new = self._follow(node, at.store, after, received, (link, name))
            yield name, self._moment(at, i, after, new, i, switched)._replace(sent=sent, faults=at.faults - 1)

    def _late(self, at: Moment, n: int, request: Request, link: Link) -> tuple[str, Moment]:
        store, _ = self.world.effect(at.store, request)
        name = f"late {n}"
        self._check_change(at.store, store, "?", (link, name))
        return name, at._replace(store=store, sent=at.sent[:n] + at.sent[n + 1 :])

    def _follow(self, node: Node, before: int, after: int, answer: int, link: Link) -> Node:
        assert node.request is not None
        self._check_change(before, after, node.letter, link)
        new = self.world.step(node, answer, after)
        if new.ended is not None:
            with self._annotated(link):
                self.check.ended(self.world.stores[after], node.letter, new.ended)
        return new

    def _check_change(self, before: int, after: int, letter: str, link: Link) -> None:
        if before == after or (before, after, letter) in self._changes:
            return
        with self._annotated(link):
            stores = self.world.stores
            self.check.changed(stores[before], stores[after], letter)
            self._changes.add((before, after, letter))
            if after not in self._left and after % self.every == 0:
                self._left.add(after)
                self.check.left(stores[after])

    @contextmanager
    def _annotated(self, link: Link) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise ViolationError(f"after {folded(link)}: {error}") from error


def folded(link: Link) -> str:
    """A schedule as text: each step with the number of times that it was taken."""
    names = []
    while link is not None:
        link, name = link
        names.append(name)
    return ", ".join(f"{name} x{len(list(same))}" for name, same in itertools.groupby(reversed(names)))


def unfolded(schedule: str) -> list[str]:
    steps = re.findall(r"([^,]+?) x(\d+)(?:, |$)", schedule)
    return [name for name, times in steps for _ in range(int(times))]


def shortened(request: Request | None) -> str:
    return " ".join(str(word)[:160] for word in request or ())
