"""The state of a job after its log entries: the job, its plan, and the files that hold its rows.

The files are in a table on disk, because a job may have millions. Nothing here reads or writes the output folder.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

from exspec.pipeline.input.plan import Chunk, Plan, Shard
from exspec.pipeline.output.log import Entry

FORMAT = 1  # of an output. A change that this version could not read needs the next number.
PART = re.compile(r"part-\d{7,}-\d{12}-\d+-(\d{6,})\.parquet")
FILE = ("name", "staged", "size", "digest", "weight")
TABLES = """
CREATE TABLE file (name TEXT PRIMARY KEY, staged TEXT, size INT, digest TEXT, weight INT) WITHOUT ROWID;
CREATE TABLE chunk (shard INT, first INT, rows INT, mendable INT, start INT, file TEXT, summary TEXT, errors INT,
                    again INT DEFAULT 0, PRIMARY KEY (shard, first)) WITHOUT ROWID;
CREATE INDEX of_file ON chunk (file, start);
"""


@dataclass(frozen=True)
class Summary:
    """The counts of one chunk in a file, for progress and report.

    shard: its index in the plan. lengths: rows by completion length in tokens; JSON makes the keys strings.
    prefill_tokens, found_tokens: prompt tokens that the actor's engine computed, and cached prompt tokens, since the
    actor's chunk before. Chunks share an engine, so only sums over a job are meaningful.
    """

    shard: int
    first: int
    rows: int
    errors: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    rounds: int = 0
    forced: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    actor: str = ""
    hardware: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0
    attempt: int = 1
    reasons: list[dict[str, Any]] = field(default_factory=list)
    produced: list[float] = field(default_factory=list)  # tokens in equal pieces of the time from start to end
    prefill_tokens: int = 0
    found_tokens: int = 0

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> "Summary":
        """A summary that any version wrote. Missing counts are 0, unknown ones are dropped."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in loaded.items() if name in known})

    def shares_rows(self, other: "Summary") -> bool:
        """Whether the chunks have a row in common."""
        ends = self.first + self.rows, other.first + other.rows
        return self.shard == other.shard and max(self.first, other.first) < min(ends)


def lasting(summary: dict[str, Any]) -> int:
    """Error rows of a chunk that a retry would not help."""
    return sum(reason["rows"] for reason in summary.get("reasons", ()) if reason["lasting"])


def _decoded(summary: dict[str, Any]) -> tuple[int, int, float]:
    """What identifies one decoding of a chunk."""
    return summary["shard"], summary["first"], summary.get("ended", 0.0)


@dataclass(frozen=True)
class File:
    """A Parquet file with the rows of chunks, in order. staged: its name before it is shown.

    digest: MD5 in hex. weight: its bytes for the purpose of merging files.
    """

    name: str
    staged: str
    size: int
    digest: str
    weight: int
    chunks: list[Summary]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.chunks)

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> "File":
        return cls(**loaded | {"chunks": [Summary.from_json(s) for s in loaded["chunks"]]})


def file_name(chunks: list[Summary], entry: int) -> str:
    """The name of a file that a log entry shows. Names sort in the plan's order and are unique."""
    first, rows = chunks[0], sum(s.rows for s in chunks)
    return f"part-{first.shard:07d}-{first.first:012d}-{rows}-{entry:06d}.parquet"


def given_by(name: str) -> int | None:
    """The log entry that named a file; None if the name is not a job's."""
    match = PART.fullmatch(name)
    return int(match[1]) if match else None


class State:
    """The state after a log. job: its id, which parts carry; None before it began. began: the time, in seconds.

    taken: the entry of the present owner; None if the output is free. done: staged name of the marker of a finished
    job.
    """

    def __init__(self) -> None:
        self.job: str | None = None
        self.began = 0.0
        self.description: dict[str, Any] = {}
        self.plan = Plan([], 1)
        self.taken: Entry | None = None
        self.done: str | None = None
        self._table = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._table.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {TABLES}")

    def apply(self, entry: Entry) -> None:
        """Apply the next entry."""
        getattr(self, f"_{entry['kind']}")(entry)

    def _take(self, entry: Entry) -> None:
        self.taken = entry

    def _end(self, _: Entry) -> None:
        self.taken = None

    def _begin(self, entry: Entry) -> None:
        self.job, self.description, self.done = entry["job"], entry["description"], None
        self.description.get("shape", {}).setdefault("drafter", "model")  # older jobs have no drafter
        self.began = float(entry["at"])
        self.plan = Plan.from_json(entry["plan"])
        self._table.executescript("DELETE FROM file; DELETE FROM chunk;")

    def _extend(self, entry: Entry) -> None:
        shards = dict(enumerate(self.plan.shards)) | {number: Shard(**shard) for number, shard in entry["shards"]}
        plan = replace(self.plan, shards=[shards[n] for n in sorted(shards)], limit=entry["limit"])
        self.decode_again(plan)
        self.plan = plan
        self.done = None

    def _describe(self, entry: Entry) -> None:
        self.description |= entry["description"]
        if entry.get("again"):
            self.decode_again()
            self.done = None

    def decode_again(self, plan: Plan | None = None) -> None:
        """Mark chunks whose error rows have to be decoded again: all, or those with rows that a new plan repairs.

        A mark stays until new rows of the chunk are in a file, so a run that was killed is resumed.
        """
        mark = "UPDATE chunk SET again = 1, mendable = errors WHERE errors > 0"
        if plan is None:
            self._table.execute(mark)
            return
        for number, (old, new) in enumerate(zip(self.plan.shards, plan.shards, strict=False)):
            for row, _ in new.repairs.items() - old.repairs.items():
                self._table.execute(
                    f"{mark} AND shard = ? AND first <= ? AND first + rows > ?", (number, int(row), int(row))
                )

    def _done(self, entry: Entry) -> None:
        self.done = entry["staged"]

    def _swap(self, entry: Entry) -> None:
        self.done = None
        with self._table:
            self._table.execute("BEGIN")
            moved: set[tuple[int, int, float]] = set()  # marked chunks
            for name in entry["old"]:
                marked = self._table.execute("SELECT summary FROM chunk WHERE again AND file = ?", (name,))
                moved |= {_decoded(json.loads(summary)) for (summary,) in marked}
                self._table.execute("DELETE FROM file WHERE name = ?", (name,))
                self._table.execute("DELETE FROM chunk WHERE file = ?", (name,))
            for new in entry["new"]:
                self._add(new)
            for shard, first, _ in moved & {_decoded(s) for new in entry["new"] for s in new["chunks"]}:
                asked = "UPDATE chunk SET again = 1, mendable = errors WHERE shard = ? AND first = ?"
                self._table.execute(asked, (shard, first))

    def _add(self, file: dict[str, Any]) -> None:
        row, name = [file[key] for key in FILE], file["name"]
        self._table.execute("INSERT INTO file VALUES (?, ?, ?, ?, ?)", row)
        starts = accumulate((s["rows"] for s in file["chunks"]), initial=0)
        chunks = (
            (s["shard"], s["first"], s["rows"], s["errors"] - lasting(s), start, name, json.dumps(s), s["errors"])
            for s, start in zip(file["chunks"], starts, strict=False)
        )
        self._table.executemany("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)", chunks)

    @property
    def rows(self) -> int:
        """Rows in files."""
        return int(self._one("SELECT coalesce(sum(rows), 0) FROM chunk"))

    def failed(self, only: str) -> int:
        """Error rows that a retry may help. only: of the chunks that `chunks` yields."""
        return int(self._one(f"SELECT coalesce(sum(mendable), 0) FROM chunk WHERE {only} > 0"))

    @property
    def complete(self) -> bool:
        return self.job is not None and next(self.missing(), None) is None

    def missing(self) -> Iterator[Chunk]:
        """The chunks that are not in files, in order."""
        return self.plan.chunks(self.held())

    def held(self) -> Iterator[tuple[int, int, int]]:
        """The chunks in files, in order: index of the shard, first row, rows."""
        return iter(self._table.execute("SELECT shard, first, rows FROM chunk ORDER BY shard, first"))

    def holders(self, shard: int, first: int, rows: int) -> set[str]:
        """Names of the files with any of these rows."""
        asked = "SELECT file FROM chunk WHERE shard = ? AND first < ? AND first + rows > ?"
        return {name for (name,) in self._table.execute(asked, (shard, first + rows, first))}

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file."""
        return iter(self._table.execute("SELECT name, size FROM file"))

    def has(self, name: str) -> bool:
        """Whether the job has this file."""
        return bool(self._one("SELECT count(*) FROM file WHERE name = ?", name))

    def names(self) -> list[str]:
        """Names of the files, in the order of their rows."""
        return [name for (name,) in self._table.execute("SELECT name FROM file ORDER BY name")]

    def places(self) -> Iterator[tuple[str, str]]:
        """Name and staged name of every file."""
        return iter(self._table.execute("SELECT name, staged FROM file"))

    def digest(self, name: str) -> str:
        """The MD5 of a file in hex."""
        return str(self._one("SELECT digest FROM file WHERE name = ?", name))

    def staged(self, name: str) -> str:
        return str(self._one("SELECT staged FROM file WHERE name = ?", name))

    def file(self, name: str) -> File:
        asked = f"SELECT {', '.join(FILE)} FROM file WHERE name = ?"
        row = self._table.execute(asked, (name,)).fetchone()
        return File(**dict(zip(FILE, row, strict=True)), chunks=list(self.summaries(name)))

    def summaries(self, file: str | None = None) -> Iterator[Summary]:
        """The summaries of all chunks, or of the chunks of a file, in order."""
        where, values = ("", ()) if file is None else (" WHERE file = ?", (file,))
        order = "shard, first" if file is None else "start"
        for (summary,) in self._table.execute(f"SELECT summary FROM chunk{where} ORDER BY {order}", values):
            yield Summary.from_json(json.loads(summary))

    def chunks(self, only: Literal["", "errors", "mendable", "again"] = "") -> Iterator[tuple[Chunk, str, int]]:
        """The chunks in files, each with its file and its first row there. only: chunks with error rows, with error
        rows that a retry may help, or with error rows that have to be decoded again (see `decode_again`)."""
        where = f" WHERE {only} > 0" if only else ""
        asked = f"SELECT shard, first, rows, file, start FROM chunk{where} ORDER BY shard, first"
        for number, first, rows, file, start in self._table.execute(asked):
            yield Chunk(self.plan.shards[number], number, first, rows), file, start

    def done_shards(self) -> set[str]:
        """Names of the shards whose rows are all in files."""
        held = dict(self._table.execute("SELECT shard, sum(rows) FROM chunk GROUP BY shard"))
        again = {number for (number,) in self._table.execute("SELECT shard FROM chunk WHERE again")}
        shards = enumerate(self.plan.shards)
        return {shard.name for i, shard in shards if held.get(i) == shard.rows and i not in again}

    def _one(self, asked: str, *values: Any) -> Any:
        return self._table.execute(asked, values).fetchone()[0]
