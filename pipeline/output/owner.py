"""The output folder of a job, as described by its log, and its owner, the process that may change it.

Every change is one log entry that names files to show and files to remove. New files are in `_staged` at first, under
names that are used once. After the entry is written, old files are removed, and then new files are moved. The next
owner repeats what was left undone, so a kill at any point loses nothing. A process that lost the output cannot harm it:
the number of its entry is taken, the files that it removes are obsolete, and a staged file can be moved only once.
"""

import json
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from exspec.pipeline.errors import BrokenOffError, JobError, counted, job_errors
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.output import lease as leases
from exspec.pipeline.output.log import LOG, Entry, Log, entry_name
from exspec.pipeline.output.state import FORMAT, File, State, Summary, checked, file_name
from exspec.pipeline.storage import STAGED, Folder

SUCCESS, DESCRIPTION = "_SUCCESS", "_job.json"
REPORT, REPORT_PAGE, AUDIT, REVIEW = "_report.json", "_report.html", "_audit.json", "_review.csv"
DRAFTERS = "_drafters"  # folder of the drafters that the job has trained
BESIDE = (DESCRIPTION, REPORT, REPORT_PAGE, AUDIT, REVIEW)  # files next to the parts


class BusyError(JobError):
    """Another live process owns the output."""


class LostError(BrokenOffError):
    """Another process has taken the output, because this one had no heartbeat for too long."""


class Output:
    """The output folder for readers. state: after the log entries that were read."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.log, self.state = folder, Log(folder), State()

    def read(self) -> "Output":
        """Read new log entries. Raises JobError if one is not valid, or if a folder of the output is a link."""
        self.folder.refuse_links(LOG, STAGED, DRAFTERS)
        for entry in self.log.read():
            with job_errors(f"{self.folder.url}/{entry_name(self.log.length)}: not a valid log entry"):
                self._check_format(entry.get("description", {}))
                self.state.apply(entry)
        return self

    def _check_format(self, description: dict[str, Any]) -> None:
        """Raises JobError if a newer version wrote the output in an unknown format."""
        if (found := description.get("format", 1)) > FORMAT:
            raise JobError(
                f"{self.folder.url}: is an output of exspec {description['versions']['exspec']}, in format {found}; "
                f"exspec {version('exspec')} reads up to format {FORMAT}; use the newer version"
            )

    def place(self, name: str) -> str:
        """The present path of a file, which may not have been moved yet. Raises JobError if it is missing."""
        found = next((n for n in (name, self.state.staged(name)) if self.folder.size(n) is not None), None)
        if found is None:
            raise JobError(f"{self.folder.url}/{name}: has vanished; run the job again")
        return found

    def refuse_waiting(self) -> None:
        """Raises JobError if error rows have to be decoded again: a repair, or a run with other settings, broke off."""
        if count := self.state.failed("again"):
            rows = counted(count, "row")
            raise JobError(f"{self.folder.url}: {rows} with an error must be decoded again; run the job again first")

    def check_foreign(self) -> None:
        """Raises JobError if the folder has Parquet files that are not the job's. Reads new log entries."""
        if foreign := self.foreign():
            raise JobError(
                f"output {self.folder.url}: has {foreign[0]}, which this job did not write; readers of the folder "
                "would read its rows too; move it to another folder, or use another output"
            )

    def foreign(self) -> list[str]:
        """Parquet files that the log never showed, though readers of the folder read them. Reads new log entries."""
        names = self.folder.names()
        others = names.difference(self.read().state.names())  # read last: an owner may add files now
        return sorted(n for n in others if n.endswith(".parquet") and n[0] not in "._" and not self.state.had(n))


class Writer(Output):
    """The output folder for its owner, from `take`. epoch: the entry that took it."""

    def __init__(self, output: Output) -> None:
        self.folder, self.log, self.state = output.folder, output.log, output.state
        self.epoch = self.log.length
        self.lost = 0  # rows in files that are gone or damaged
        self._marked = True
        self._aside: Folder | None = None

    @property
    def prefix(self) -> str:
        """The prefix of staged files, by which the next owner knows that they are old."""
        return f"{self.epoch:010d}"

    def begin(self, description: dict[str, Any], plan: Plan) -> None:
        """Start a new job in this output; remove the files of an old one."""
        old, marked = [*self.state.names(), *self._drafters()], self._marked
        job = uuid.uuid4().hex
        self._append({"kind": "begin", "job": job, "description": description, "plan": plan.to_json()})
        if self._aside is not None and marked:
            self._copy(SUCCESS, self._aside)
        self._withdraw()
        self.folder.each(self.folder.remove, [*old, *BESIDE] if old else [])

    def keep_old(self) -> Folder:
        """Copy the job to a folder next to this one, where it can be read and resumed.

        Only this owner writes to that folder: one that lost the output may still be copying. The marker follows when
        the new job begins, so that an interrupted copy has none.
        """
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.state.began))
        aside = Folder(f"{self.folder.url}-before-{began}-{self.epoch}", self.folder.options)
        names, there = self.state.names(), self.folder.names()
        beside = [name for name in BESIDE if name in there]
        log = [entry_name(n) for n in range(1, self.epoch)]
        self.folder.each(lambda name: self.folder.copy(name, aside), [*names, *log])
        for name in [*beside, *self._drafters()]:
            self._copy(name, aside)
        self._aside = aside
        return aside

    def _drafters(self) -> list[str]:
        """The files of the drafters that the job has trained."""
        made = [f"{DRAFTERS}/{made['name']}" for made in self.state.description.get("drafters", [])]
        return [f"{folder}/{name}" for folder in made for name in sorted(self.folder.names(folder))]

    def _copy(self, name: str, aside: Folder) -> None:
        with suppress(FileNotFoundError):  # a process that lost the output removed it
            self.folder.copy(name, aside)

    def extend(self, plan: Plan) -> None:
        """Update the plan with new and changed shards, if there are any."""
        before = self.state.plan
        known = dict(enumerate(before.shards))
        now = enumerate(shard.published() for shard in plan.shards)
        shards = [(n, shard.to_json()) for n, shard in now if known.get(n) != shard]
        if shards or plan.limit != before.limit:
            self._append({"kind": "extend", "shards": shards, "limit": plan.limit})
            self._withdraw()

    def describe(self, description: dict[str, Any], again: bool = False) -> None:
        """Update the description of the job, in what changes no token. again: it changes those of error rows, so these
        are decoded again."""
        if self.state.description | description != self.state.description:
            self._append({"kind": "describe", "description": description} | ({"again": True} if again else {}))
            if again:
                self._withdraw()

    def publish(self) -> None:
        """Write the description of the job next to the parts."""
        self.folder.write(DESCRIPTION, json.dumps(self.state.description, indent=1).encode())

    def commit(self, new: Sequence[File], old: Sequence[str] = ()) -> None:
        """Replace old files by new ones, which are staged."""
        number = self.log.length + 1
        named = [replace(file, name=file_name(file.chunks, number)) for file in new]
        self._refuse_twice(named, set(old))
        files = [vars(f) | {"chunks": [vars(s) for s in f.chunks]} for f in named]
        self._append({"kind": "swap", "new": files, "old": list(old)})
        self._withdraw()
        self.folder.each(self.folder.remove, old)
        self.folder.each(self._show, [f.name for f in named])

    def finish(self) -> None:
        """Mark the job as finished."""
        staged = self.folder.stage(json.dumps({"job": self.state.job}).encode(), self.prefix)
        self._append({"kind": "done", "staged": staged})
        self._move(staged, SUCCESS)
        self._marked = True

    def settle(self) -> None:
        """Do what earlier owners left undone. Files that are gone or damaged leave the job: their rows are missing."""
        shown = self.folder.sizes()
        self._marked = SUCCESS in shown
        if self.state.done is None:
            self._withdraw()  # before removing files that it covers
        dead = [n for n in shown if self.state.had(n) and not self.state.has(n)]
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
        """Commit what actors of earlier owners staged for this job.

        read: returns the job and the record of a staged file; None if it is invalid or incomplete.
        """
        found: list[File] = []
        for name in self._old_staged():
            job, file = read(self.folder, name) or (None, None)
            if file and job == self.state.job and not any(self._held(s, found) for s in file.chunks):
                own = f"{STAGED}/{self.prefix}-{uuid.uuid4().hex}"  # a lost owner may remove the old name
                with suppress(FileNotFoundError):  # it already has
                    self.folder.move(name, own)
                    found.append(replace(file, staged=own))
        if found:
            self.commit(found)

    def sweep(self) -> None:
        """Remove what earlier owners staged, after `settle` and `adopt` have used what belongs to the job."""
        self.folder.each(self.folder.remove, self._old_staged())

    def _old_staged(self) -> list[str]:
        return [f"{STAGED}/{n}" for n in sorted(self.folder.names(STAGED)) if n.split("-")[0] < self.prefix]

    def _held(self, chunk: Summary, others: Sequence[File]) -> bool:
        taken = any(chunk.shares_rows(s) for f in others for s in f.chunks) or not self.state.planned(chunk)
        return taken or bool(self.state.holders(chunk.shard, chunk.first, chunk.rows))

    def _end_moves(self, shown: Container[str], lost: bool) -> None:
        """Remove staged files that are copied already: an owner that lost the output might copy them again later."""
        here = {f"{STAGED}/{name}" for name in self.folder.names(STAGED)}
        copied = {staged for name, staged in self.state.places() if staged in here and name in shown}
        if self._marked or lost:
            copied.add(str(self.state.done))
        self.folder.each(self.folder.remove, sorted(here & copied))

    def _mark(self, staged: str) -> None:
        self._move(staged, SUCCESS)
        self._marked = True
        if self.folder.size(SUCCESS) is None:  # a process that lost the output removed it
            self.finish()

    def _withdraw(self) -> None:
        """Remove the marker, so that readers that wait for it do not read while rows are moved."""
        if self._marked:
            self.folder.remove(SUCCESS)
            self._marked = False

    def _show(self, name: str) -> None:
        self._move(self.state.staged(name), name)

    def _move(self, name: str, new: str) -> None:
        with suppress(FileNotFoundError):  # it was moved, or the next owner's `settle` finds it gone
            self.folder.move(name, new)

    def _refuse_twice(self, new: Sequence[File], old: set[str]) -> None:
        chunks = sorted(((s, f.staged) for f in new for s in f.chunks), key=lambda c: (c[0].shard, c[0].first))
        before: tuple[Summary, str] | None = None
        for s, staged in chunks:
            holders = self.state.holders(s.shard, s.first, s.rows) - old
            if before and before[0].shares_rows(s):
                holders.add(before[1])
            if holders:
                raise JobError(f"{self.folder.url}: {min(holders)} already has rows of {staged}")
            before = s, staged

    def _append(self, entry: Entry) -> None:
        entry = {"at": time.time()} | entry
        checked(entry)
        if not self.log.append(entry):
            raise self.lost_to(self.successor() or {})
        self.state.apply(entry)

    def successor(self) -> Entry | None:
        """The entry of the process that took the output over; None if there is none."""
        return next(copy(self.log).read(), None)  # self.log stays behind: a lost owner never gets a free number

    def lost_to(self, taken: Entry) -> LostError:
        return LostError(
            f"{self.folder.url}: {taken.get('action')} on {taken.get('host')} took it over, because this process "
            f"had no heartbeat for {leases.PATIENCE:.0f} s; what it committed is kept"
        )


@contextmanager
def take(
    output: Output,
    action: str,
    wait: bool = False,
    lease: Callable[[Folder, str], Any] | None = None,
    dead: Callable[[Folder, Entry], bool] | None = None,
) -> Iterator[Writer]:
    """Own the output for the duration of the block. Raises BusyError if another owner is alive, unless `wait`.

    lease: starts the heartbeat. dead: whether an owner is dead. Default: those of the module `lease`.
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
                output.state.apply(entry)
                break
        writer = Writer(output)
        try:
            if taken is not None:
                life.clear(taken)
            writer.settle()
            yield writer
        except (JobError, FileNotFoundError) as error:
            if successor := writer.successor():  # it may have replaced the file that this process missed
                raise writer.lost_to(successor) from error
            raise
        finally:
            output.log.append({"kind": "end", "at": time.time()})
    finally:
        life.end()


def busy(folder: Folder, taken: Entry) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(taken["at"]))
    return (
        f"output {folder.url}: in use by {taken['action']} on {taken['host']} (process {taken['pid']}) since {since}; "
        "nothing was changed. --wait waits for it"
    )


def read_output(folder: Folder) -> Output:
    """The output of a job. Raises JobError if the folder is not an output."""
    with job_errors(f"{folder.url}: cannot be read"):
        output = Output(folder).read()
    if output.state.job is None:
        raise JobError(f"{folder.url}: has no job; expected the output of exspec run")
    return output
