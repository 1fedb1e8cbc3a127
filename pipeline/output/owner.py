"""A job's output folder, as its log tells it, and the one who may change it.

Every change is one entry of the log that names files to be shown and files to be removed. The files lie in `_staged`
before, under names that are used once, and the entry is followed by the removals and then by the moves. Whoever takes
the output next does again what is left of that, and so a kill anywhere loses nothing. Nobody who lost the output can
harm it either: his entry finds its number taken, what he removes is dead for good, and what he moves is there once.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from exspec.pipeline.errors import BrokenOffError, JobError, told
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output import lease as leases
from exspec.pipeline.output.log import Entry, Log, entry_name
from exspec.pipeline.output.state import FORMAT, File, State, Summary, file_name, given_by
from exspec.pipeline.storage import STAGED, Folder

SUCCESS, DESCRIPTION = "_SUCCESS", "_job.json"
REPORT, REPORT_PAGE, AUDIT, REVIEW = "_report.json", "_report.html", "_audit.json", "_review.csv"
BESIDE = (DESCRIPTION, REPORT, REPORT_PAGE, AUDIT, REVIEW)  # what lies beside the parts


class BusyError(JobError):
    """The output belongs to another who lives."""


class LostError(BrokenOffError):
    """Another has taken the output: the owner had given no sign of life for too long."""


class Output:
    """The folder of a job for those who read it. state: what the log tells, as far as it was read."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.log, self.state = folder, Log(folder), State()

    def read(self) -> "Output":
        """Catch up with the log."""
        for entry in self.log.read():
            try:
                self.state.fold(entry)
            except (LookupError, AttributeError, TypeError, ValueError, sqlite3.Error) as error:
                self._check_format()
                name, reason = entry_name(self.log.length), f"{type(error).__name__}: {error}"
                raise JobError(f"{self.folder.url}/{name}: not as exspec run writes it ({reason})") from error
            self._check_format()
        return self

    def _check_format(self) -> None:
        """Raises JobError where a newer version wrote the output in a way that this one does not know."""
        description = self.state.description
        if (found := description.get("format", 1)) > FORMAT:
            raise JobError(
                f"{self.folder.url}: is an output of exspec {description['versions']['exspec']}, in format {found}; "
                f"exspec {version('exspec')} reads up to format {FORMAT}; use the newer version"
            )

    def place(self, name: str) -> str:
        """Where a file of the job lies now: it may not have been moved yet. Raises JobError where it is nowhere."""
        found = next((n for n in (name, self.state.staged(name)) if self.folder.size(n) is not None), None)
        if found is None:
            raise JobError(f"{self.folder.url}/{name}: has vanished; run the job again")
        return found

    def check_foreign(self) -> None:
        """Raises JobError where a reader of the folder would find Parquet files that are not the job's."""
        names = self.folder.names()
        foreign = sorted(n for n in names if n.endswith(".parquet") and n[0] not in "._" and not self._given(n))
        if foreign:
            raise JobError(
                f"output {self.folder.url}: holds {foreign[0]}, which no run of this job wrote; expected an empty "
                "folder or that of this job"
            )

    def _given(self, name: str) -> bool:
        return 0 < (given_by(name) or 0) <= self.log.length


class Writer(Output):
    """The folder for its owner, as `take` gives it. epoch: the entry with which he took it."""

    def __init__(self, output: Output) -> None:
        self.folder, self.log, self.state = output.folder, output.log, output.state
        self.epoch = self.log.length
        self.lost = 0  # rows that were in files which are gone or damaged
        self._marked = True
        self._aside: Folder | None = None

    @property
    def prefix(self) -> str:
        """What names of staged files begin with, so that the next owner knows what is old."""
        return f"{self.epoch:010d}"

    def begin(self, description: dict[str, Any], plan: Plan) -> None:
        """Make this the output of a new job; what another one wrote into it is removed."""
        old, marked = self.state.names(), self._marked
        job = uuid.uuid4().hex
        self._append({"kind": "begin", "job": job, "description": description, "plan": plan.to_json()})
        if self._aside is not None and marked:
            self._copy(SUCCESS, self._aside)
        self._withdraw()
        self.folder.each(self.folder.remove, [*old, *BESIDE] if old else [])

    def set_aside(self) -> Folder:
        """Copy the job into a folder beside this one, where it can be read and resumed.

        It is this owner's alone, for one who lost the output may be copying still. Its marker follows when another job
        begins: a copy that was broken off has none.
        """
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.state.began))
        aside = Folder(f"{self.folder.url}-before-{began}-{self.epoch}", self.folder.options)
        names, there = self.state.names(), self.folder.names()
        beside = [name for name in BESIDE if name in there]
        log = [entry_name(n) for n in range(1, self.epoch)]
        self.folder.each(lambda name: self.folder.copy(name, aside), [*names, *log])
        for name in beside:
            self._copy(name, aside)
        self._aside = aside
        return aside

    def _copy(self, name: str, aside: Folder) -> None:
        with suppress(FileNotFoundError):  # one who lost the output has removed it since
            self.folder.copy(name, aside)

    def extend(self, plan: Plan) -> None:
        """Add what has come to the plan, and shards as they are found now; nothing where there is no change."""
        before = self.state.plan
        known = dict(enumerate(before.shards))
        now = enumerate(shard.published() for shard in plan.shards)
        shards = [(n, asdict(shard)) for n, shard in now if known.get(n) != shard]
        if shards or plan.limit != before.limit:
            self._append({"kind": "extend", "shards": shards, "limit": plan.limit})
            self._withdraw()

    def describe(self, description: dict[str, Any]) -> None:
        """Tell otherwise of the job what changes no token."""
        if self.state.description | description != self.state.description:
            self._append({"kind": "describe", "description": description})

    def publish(self) -> None:
        """Write down beside the parts what the log tells of the job."""
        self.folder.write(DESCRIPTION, json.dumps(self.state.description, indent=1).encode())

    def commit(self, new: Sequence[File], old: Sequence[str] = ()) -> None:
        """Put new files, which are staged, in the place of old ones."""
        number = self.log.length + 1
        named = [replace(file, name=file_name(file.chunks, number)) for file in new]
        self._refuse_twice(named, set(old))
        files = [vars(f) | {"chunks": [vars(s) for s in f.chunks]} for f in named]
        self._append({"kind": "swap", "new": files, "old": list(old)})
        self._withdraw()
        self.folder.each(self.folder.remove, old)
        self.folder.each(self._show, [f.name for f in named])

    def finish(self) -> None:
        """Mark the job as done."""
        staged = self.folder.stage(json.dumps({"job": self.state.job}).encode(), self.prefix)
        self._append({"kind": "done", "staged": staged})
        self._move(staged, SUCCESS)
        self._marked = True

    def settle(self) -> None:
        """Do what earlier owners left undone, and find out which files are gone or damaged: their rows are missing."""
        shown = self.folder.sizes()
        self._marked = SUCCESS in shown
        if self.state.done is None:
            self._withdraw()  # before anything goes that it speaks of
        dead = [n for n in shown if self._given(n) and not self.state.has(n)]
        self.folder.each(self.folder.remove, dead)
        self.folder.each(self._show, [n for n, _ in self.state.sizes() if n not in shown])
        lost = [n for n, size in self.state.sizes() if shown.get(n) != size and self.folder.size(n) != size]
        self._end_moves(shown, bool(lost))
        if lost:
            self.lost = sum(s.rows for name in lost for s in self.state.summaries(name))
            self.commit([], lost)
        elif self.state.done is not None and not self._marked:
            self._mark(self.state.done)

    def adopt(self, read: Callable[[Folder, str], tuple[str, File] | None]) -> None:
        """Take over what earlier owners' actors staged for this job and nobody committed.

        read: the job and the file that a staged file is; None where it is none, or not whole.
        """
        found: list[File] = []
        for name in self._old_staged():
            job, file = read(self.folder, name) or (None, None)
            if file and job == self.state.job and not any(self._held(s, found) for s in file.chunks):
                own = f"{STAGED}/{self.prefix}-{uuid.uuid4().hex}"  # who lost the output may be removing the old name
                with suppress(FileNotFoundError):  # he has been quicker
                    self.folder.move(name, own)
                    found.append(replace(file, staged=own))
        if found:
            self.commit(found)

    def sweep(self) -> None:
        """Remove what earlier owners staged: what is the job's was moved to its place by `settle`, or adopted."""
        self.folder.each(self.folder.remove, self._old_staged())

    def _old_staged(self) -> list[str]:
        return [f"{STAGED}/{n}" for n in sorted(self.folder.names(STAGED)) if n.split("-")[0] < self.prefix]

    def _held(self, chunk: Summary, others: Sequence[File]) -> bool:
        taken = any(chunk.shares_rows(s) for f in others for s in f.chunks)
        return taken or bool(self.state.holders(chunk.shard, chunk.first, chunk.rows))

    def _end_moves(self, shown: Container[str], lost: bool) -> None:
        """Remove what was copied and is still staged: who lost the output might copy it again when it is dead."""
        here = {f"{STAGED}/{name}" for name in self.folder.names(STAGED)}
        copied = {staged for name, staged in self.state.places() if staged in here and name in shown}
        if self._marked or lost:
            copied.add(str(self.state.done))
        self.folder.each(self.folder.remove, sorted(here & copied))

    def _mark(self, staged: str) -> None:
        self._move(staged, SUCCESS)
        self._marked = True
        if self.folder.size(SUCCESS) is None:  # one who had lost the output has removed it since
            self.finish()

    def _withdraw(self) -> None:
        """Whoever waits for the marker does not look while rows are on their way."""
        if self._marked:
            self.folder.remove(SUCCESS)
            self._marked = False

    def _show(self, name: str) -> None:
        self._move(self.state.staged(name), name)

    def _move(self, name: str, new: str) -> None:
        with suppress(FileNotFoundError):  # it is there already, or `settle` of the next owner finds that it is gone
            self.folder.move(name, new)

    def _refuse_twice(self, new: Sequence[File], old: set[str]) -> None:
        chunks = sorted(((s, f.staged) for f in new for s in f.chunks), key=lambda c: (c[0].shard, c[0].first))
        before: tuple[Summary, str] | None = None
        for s, staged in chunks:
            holders = self.state.holders(s.shard, s.first, s.rows) - old
            if before and before[0].shares_rows(s):
                holders.add(before[1])
            if holders:
                raise JobError(f"{self.folder.url}: {min(holders)} holds rows of {staged} already")
            before = s, staged

    def _append(self, entry: Entry) -> None:
        entry = {"at": time.time()} | entry
        if not self.log.append(entry):
            taken = next(copy(self.log).read(), {})  # its own log stays behind: a lost owner never finds a free number
            raise LostError(
                f"{self.folder.url}: was taken over by {taken.get('action')} on {taken.get('host')}, for this process "
                f"gave no sign of life for {leases.PATIENCE:.0f} s; what it had committed is kept"
            )
        self.state.fold(entry)


@contextmanager
def take(
    output: Output,
    action: str,
    wait: bool = False,
    lease: Callable[[Folder, str], Any] | None = None,
    dead: Callable[[Folder, Entry], bool] | None = None,
) -> Iterator[Writer]:
    """Take the output, alone, and give it back. Raises BusyError where another owner lives, unless told to wait.

    lease, dead: what shows that one lives, and tells it; those of `lease` unless given.
    """
    lease, dead = lease or leases.Lease, dead or leases.dead
    nonce = uuid.uuid4().hex
    life = lease(output.folder, nonce)
    try:
        while True:
            taken = output.read().state.taken
            if taken is not None and not dead(output.folder, taken):
                if not wait:
                    raise BusyError(busy(output.folder, taken))
                time.sleep(1)
                continue
            entry = {"kind": "take", "at": time.time(), "lease": nonce} | leases.owner(action)
            if output.log.append(entry):
                output.state.fold(entry)
                break
        writer = Writer(output)
        try:
            if taken is not None:
                life.clear(taken)
            writer.settle()
            yield writer
        finally:
            output.log.append({"kind": "end", "at": time.time()})
    finally:
        life.end()


def busy(folder: Folder, taken: Entry) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(taken["at"]))
    return (
        f"output {folder.url}: {taken['action']} is at work on it, on {taken['host']} (process {taken['pid']}) since "
        f"{since}; it was left alone. --wait waits for its end"
    )


def read_output(folder: Folder) -> Output:
    """The output of a job. Raises JobError where the folder is none."""
    with told(f"{folder.url}: cannot be read"):
        output = Output(folder).read()
    if output.state.job is None:
        raise JobError(f"{folder.url}: holds no job; expected the output of exspec run")
    return output


def settings(description: dict[str, Any], options: dict[str, Any]) -> Job:
    """The settings of the job that a description tells of, with the options of its file systems."""
    kind = LabelJob if description["kind"] == LabelJob.kind else Job
    known = {name: value for name, value in description["job"].items() if name in kind.model_fields}
    return kind(**known, storage_options=options)
