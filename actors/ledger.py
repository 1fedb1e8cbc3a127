"""The ledger: it counts attempts at chunks, finds rows that kill their process, collects the actors' heartbeats, and
keeps compiled code.

Imports neither torch nor transformers: the process that keeps the ledger has no model.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

SILENCE = 15.0  # seconds without a heartbeat after which an actor does not count
LOADING = 900.0  # seconds that an actor may take to load its models


@dataclass(frozen=True)
class Attempt:
    """An attempt at a chunk. bad: rows that have killed a process. last_error: of the attempt before."""

    number: int
    bad: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    last_error: str = ""


@dataclass(frozen=True)
class HostSigns:
    """A host's heartbeats. actors: alive. tokens: decoded by all of them. silent: seconds since the last heartbeat; 0
    if all actors have left."""

    actors: int
    tokens: int
    silent: float


@dataclass(frozen=True)
class Signs:
    """The actors' heartbeats by host, seconds since the first chunk was begun, how many actors have left, and why hosts
    cannot decode."""

    hosts: dict[str, HostSigns]
    seconds: float
    left: int = 0
    unable: dict[str, str] = field(default_factory=dict)

    @property
    def actors(self) -> int:
        return sum(host.actors for host in self.hosts.values())

    @property
    def tokens(self) -> int:
        return sum(host.tokens for host in self.hosts.values())


@dataclass(slots=True)
class ChunkRecord:
    """What the ledger knows of a chunk. The sets are row numbers."""

    attempts: int = 0
    marked: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    error: str = ""


class Ledger:
    """The ledger in this process. part: a chunk's key. slots: the most that an actor may have; None: no limit.

    Rows that are marked when a new attempt begins may have killed the process of the last one. A node that is preempted
    kills processes of innocent rows too. So a row is bad only if it was alone at two deaths.
    """

    def __init__(self, slots: int | None = None) -> None:
        self.chunks: defaultdict[str, ChunkRecord] = defaultdict(ChunkRecord)
        self.slots = slots
        self.signed: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)  # by host and actor: see `sign`
        self.left: set[str] = set()  # actors
        self.began: dict[str, float] = {}  # by host: when an actor began to load; none has loaded since
        self.unable: dict[str, tuple[float, str]] = {}  # by host: when and why its last actor could not load
        self.first: float | None = None  # when the first chunk was begun
        self.shared: defaultdict[str, dict[str, bytes]] = defaultdict(dict)  # by kind of machine: see `claim`

    def begun(self, part: str) -> bool:
        """Whether a chunk has been attempted before."""
        return self.chunks[part].attempts > 0

    def begin(self, part: str) -> Attempt:
        """Count a new attempt at a chunk."""
        chunk = self.chunks[part]
        self.first = self.first or time.monotonic()
        chunk.attempts += 1
        if len(chunk.marked) > 1:
            chunk.suspects = chunk.marked
        elif found := chunk.marked & chunk.alone:
            chunk.attempts -= 2  # the two attempts that found the row do not count
            chunk.bad |= found
            chunk.suspects -= found
        elif chunk.marked:
            chunk.suspects |= chunk.marked
            chunk.alone |= chunk.marked
        chunk.marked = frozenset()
        return Attempt(chunk.attempts, chunk.bad, chunk.suspects, chunk.error)

    def mark(self, part: str, rows: Sequence[int]) -> None:
        """Record the rows that are decoded now: if the process dies, they are suspected."""
        self.chunks[part].marked = frozenset(rows)

    def note(self, part: str, error: str) -> None:
        """Record the error that ends this attempt."""
        self.chunks[part].error = error

    def end(self, part: str) -> None:
        """Forget a chunk: its result has reached the driver."""
        self.chunks.pop(part, None)

    def sign(self, actor: str, host: str, tokens: int) -> None:
        """Record the time of an actor's heartbeat, and the number of tokens that it has decoded."""
        self.signed[host][actor] = time.monotonic(), tokens

    def loading(self, host: str) -> None:
        """Record that an actor begins to load its models on a host."""
        self.began.setdefault(host, time.monotonic())

    def failed(self, host: str, why: str) -> bool:
        """Record why an actor cannot load on a host. Returns whether other hosts decode, or may soon do so."""
        self.unable[host] = time.monotonic(), why
        signs = self.signs()
        others = {name for name, at in self.began.items() if time.monotonic() - at < LOADING} - signs.unable.keys()
        others |= {name for name, host_signs in signs.hosts.items() if host_signs.actors}
        return bool(others - {host})

    def started(self, host: str) -> None:
        """Record that an actor has loaded its models on a host."""
        self.unable.pop(host, None)
        self.began.pop(host, None)

    def leave(self, actor: str) -> None:
        """Record that an actor has ended because it was idle."""
        self.left.add(actor)

    def signs(self) -> Signs:
        """The sums of the heartbeats."""
        now, hosts = time.monotonic(), {}
        for host, actors in self.signed.items():
            silent = [now - at for actor, (at, _) in actors.items() if actor not in self.left]
            tokens = sum(tokens for _, tokens in actors.values())
            hosts[host] = HostSigns(sum(seconds < SILENCE for seconds in silent), tokens, min(silent, default=0.0))
        seconds = 0.0 if self.first is None else now - self.first
        unable = {host: why for host, (at, why) in self.unable.items() if now - at < LOADING}
        return Signs(hosts, seconds, len(self.left), unable)

    def known(self, machine: str) -> Set[str]:
        """The files of code that actors on this kind of machine have shared."""
        # An actor that was asked for the others may have died: ask the next one.
        self.shared[machine] = {name: content for name, content in self.shared[machine].items() if content}
        return set(self.shared[machine])

    def code(self, machine: str, files: Set[str]) -> dict[str, bytes]:
        """Known files and their content."""
        return {name: self.shared[machine][name] for name in files}

    def claim(self, machine: str, files: Set[str]) -> Set[str]:
        """Which of these files the ledger wants from the caller: those that it has not asked another actor for."""
        wanted = files - self.shared[machine].keys()
        self.shared[machine].update(dict.fromkeys(wanted, b""))  # until they come
        return wanted

    def share(self, machine: str, files: Mapping[str, bytes]) -> None:
        """Keep the files of code for actors that start later."""
        self.shared[machine].update(files)

    def window(self) -> int | None:
        """The most slots that a new actor may have; None if no actor has run out of memory."""
        return self.slots

    def shrink(self, window: int) -> None:
        """Limit the slots of actors that start from now on, after one has run out of memory."""
        self.slots = min(window, self.slots or window)
