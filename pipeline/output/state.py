"""The state of a job after its log entries: the job, its plan, and the files that hold its rows.

Every entry is checked here before it is applied, so names of files cannot lead out of the output folder. The files are
in a table on disk, because a job may have millions. Nothing here reads or writes the output folder.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from textwrap import shorten
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from exspec.pipeline.input.plan import Chunk, Count, Plan, Rows, Shard, decode_row, decode_schema
from exspec.pipeline.output.log import Entry
from exspec.pipeline.output.reasons import Reason

FORMAT = 2  # the highest that this version reads. 2: with repaired rows, or error rows to decode again
PART = re.compile(r"part-[0-9]{7,15}-[0-9]{12}-[0-9]{1,15}-[0-9]{6,15}\.parquet")
PartName = Annotated[str, Field(pattern=f"^{PART.pattern}$")]
StagedName = Annotated[str, Field(pattern="^_staged/[0-9]{10,15}-[0-9A-Za-z-]{1,64}$")]
Word = Annotated[str, Field(pattern="^[0-9A-Za-z]{1,64}$")]
Time = Annotated[float, Field(ge=-1e11, le=1e11)]  # seconds since 1970
Amount = Annotated[float, Field(ge=0, lt=1e15)]
ReasonJson = Annotated[dict[str, Any], AfterValidator(lambda given: asdict(TypeAdapter(Reason).validate_python(given)))]
FILE = ("name", "staged", "size", "digest", "weight")
TABLES = """
CREATE TABLE file (name TEXT PRIMARY KEY, staged TEXT, size INT, digest TEXT, weight INT) WITHOUT ROWID;
CREATE TABLE chunk (shard INT, first INT, rows INT, mendable INT, start INT, file TEXT, summary TEXT, errors INT,
                    again INT DEFAULT 0, PRIMARY KEY (shard, first)) WITHOUT ROWID;
CREATE INDEX of_file ON chunk (file, start);
CREATE TABLE gone (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TRIGGER once BEFORE INSERT ON chunk WHEN new.first < (SELECT first + rows FROM chunk
    WHERE shard = new.shard AND first < new.first + new.rows ORDER BY first DESC LIMIT 1)
    BEGIN SELECT RAISE(ABORT, 'a row is there twice'); END;
"""


@dataclass(frozen=True)
class Summary:
    """The counts of one chunk in a file, for progress and report.

    shard: its index in the plan. lengths: rows by completion length in tokens; JSON makes the keys strings.
    prefill_tokens, found_tokens: prompt tokens that the actor's engine computed, and cached prompt tokens, since the
    actor's chunk before. Chunks share an engine, so only sums over a job are meaningful.
    """

    shard: Count
    first: Rows
    rows: Annotated[Rows, Field(ge=1)]
    errors: Rows
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    drafted_by_position: list[Count] = field(default_factory=list)
    accepted_by_position: list[Count] = field(default_factory=list)
    rounds: Count = 0
    forced: Count = 0
    lengths: dict[Annotated[str, Field(pattern="^[0-9]{1,15}$")], Count] = field(default_factory=dict)
    actor: str = ""
    hardware: dict[str, str] = field(default_factory=dict)
    started: Time = 0.0
    ended: Time = 0.0
    attempt: Count = 1
    reasons: list[ReasonJson] = field(default_factory=list)
    produced: list[Amount] = field(default_factory=list)  # tokens in equal pieces of the time from start to end
    prefill_tokens: Count = 0
    found_tokens: Count = 0
    host: str = ""  # empty: an older version did not write it

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> "Summary":
        """A summary that any version wrote. Missing counts are 0, unknown ones are dropped. Raises ValueError."""
        return SUMMARY.validate_python(loaded)

    def shares_rows(self, other: "Summary") -> bool:
        """Whether the chunks have a row in common."""
        ends = self.first + self.rows, other.first + other.rows
        return self.shard == other.shard and max(self.first, other.first) < min(ends)

    @property
    def mendable(self) -> int:
        """Error rows that a retry may help."""
        return max(0, self.errors - sum(int(reason["rows"]) for reason in self.reasons if reason["lasting"]))


SUMMARY = TypeAdapter(Summary)


def _decoded(chunk: Summary) -> tuple[int, int, float]:
    """What identifies one decoding of a chunk."""
    return chunk.shard, chunk.first, chunk.ended


@dataclass(frozen=True)
class File:
    """A Parquet file with the rows of chunks, in order. staged: its name before it is shown.

    digest: MD5 in hex. weight: its bytes for the purpose of merging files.
    """

    name: PartName
    staged: StagedName
    size: Count
    digest: str
    weight: Count
    chunks: list[Summary]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.chunks)

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> "File":
        return cls(**loaded | {"chunks": [Summary.from_json(s) for s in loaded["chunks"]]})


class Take(BaseModel):
    """A process takes the output. ticks: see the module `lease`; older versions did not write it."""

    kind: Literal["take"]
    at: Time
    lease: Word
    action: str
    host: str
    machine: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    started: Time
    ticks: int | None = None


class End(BaseModel):
    """The owner gives the output back."""

    kind: Literal["end"]


class Begin(BaseModel):
    """A new job, in place of any other."""

    kind: Literal["begin"]
    at: Time
    job: Word
    description: dict[str, Any]
    plan: Plan


class Extend(BaseModel):
    """New and changed shards, with their indices in the plan."""

    kind: Literal["extend"]
    shards: list[tuple[Count, Shard]]
    limit: Count | None


class Describe(BaseModel):
    """Changes to the description. again: error rows have to be decoded again; see `State.decode_again`."""

    kind: Literal["describe"]
    description: dict[str, Any]
    again: bool = False


class Done(BaseModel):
    """All rows are in files. staged: the marker."""

    kind: Literal["done"]
    staged: StagedName


class Swap(BaseModel):
    """Files come in place of old ones."""

    kind: Literal["swap"]
    new: list[File]
    old: list[PartName]


AnyEntry = Take | End | Begin | Extend | Describe | Done | Swap
ENTRY: TypeAdapter[AnyEntry] = TypeAdapter(Annotated[AnyEntry, Field(discriminator="kind")])
DESCRIBED = {"kind": str, "job": dict, "fingerprint": dict, "shape": dict, "device": str}


def checked(entry: Any) -> AnyEntry:
    """The entry, whose names are below the output folder. Raises ValueError naming what is wrong."""
    try:
        return ENTRY.validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, found = ".".join(map(str, first["loc"])), shorten(repr(first["input"]), 80)
        why = "exspec gives no such name" if first["type"] == "string_pattern_mismatch" else first["msg"]
        raise ValueError(f"{where or 'entry'} is {found}: {why}") from error


def file_name(chunks: list[Summary], entry: int) -> str:
    """The name of a file that a log entry shows. Names sort in the plan's order and are unique."""
    first, rows = chunks[0], sum(s.rows for s in chunks)
    return f"part-{first.shard:07d}-{first.first:012d}-{rows}-{entry:06d}.parquet"


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
        """Check and apply the next entry. Raises an exception if it is not valid."""
        valid = checked(entry)
        getattr(self, f"_{valid.kind}")(valid)

    def _take(self, entry: Take) -> None:
        self.taken = entry.model_dump()

    def _end(self, _: End) -> None:
        self.taken = None

    def _begin(self, entry: Begin) -> None:
        self.job, self.began, self.description = entry.job, entry.at, {}
        self._describe(entry)
        self.description["shape"] = {"drafter": "model"} | self.description["shape"]  # older jobs have no drafter
        self._set_plan(entry.plan)
        self._table.executescript(
            "INSERT OR IGNORE INTO gone SELECT name FROM file; DELETE FROM file; DELETE FROM chunk;"
        )

    def _extend(self, entry: Extend) -> None:
        shards = dict(enumerate(self.plan.shards)) | dict(entry.shards)
        plan = replace(self.plan, shards=[shards[n] for n in range(len(shards))], limit=entry.limit)
        self.decode_again(plan)
        self._set_plan(plan)

    def _set_plan(self, plan: Plan) -> None:
        self.plan, self.done = plan, None
        if plan.schema:
            decode_schema(plan.schema)
        for values in {v for shard in plan.shards for v in (shard.values, *shard.repairs.values()) if v}:
            decode_row(values)

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

    def _describe(self, entry: Begin | Describe) -> None:
        self.description |= entry.description
        if isinstance(entry, Describe) and entry.again:
            self.decode_again()
            self.done = None
        if wrong := [key for key, kind in DESCRIBED.items() if not isinstance(self.description.get(key), kind)]:
            raise ValueError(f"description.{wrong[0]} is {self.description.get(wrong[0])!r}")

    def _done(self, entry: Done) -> None:
        self.done = entry.staged

    def _swap(self, entry: Swap) -> None:
        self.done = None
        with self._table:
            self._table.execute("BEGIN")
            moved: set[tuple[int, int, float]] = set()  # marked chunks
            for name in entry.old:
                self._table.execute("INSERT OR IGNORE INTO gone SELECT name FROM file WHERE name = ?", (name,))
                marked = self._table.execute("SELECT summary FROM chunk WHERE again AND file = ?", (name,))
                moved |= {_decoded(Summary.from_json(json.loads(summary))) for (summary,) in marked}
                self._table.execute("DELETE FROM file WHERE name = ?", (name,))
                self._table.execute("DELETE FROM chunk WHERE file = ?", (name,))
            for new in entry.new:
                self._add(new)
            for shard, first, _ in moved & {_decoded(s) for new in entry.new for s in new.chunks}:
                asked = "UPDATE chunk SET again = 1, mendable = errors WHERE shard = ? AND first = ?"
                self._table.execute(asked, (shard, first))

    def _add(self, file: File) -> None:
        if strange := next((s for s in file.chunks if not self.planned(s)), None):
            raise ValueError(f"{file.name}: the plan has no row {strange.first + strange.rows - 1} of {strange.shard}")
        self._table.execute("INSERT INTO file VALUES (?, ?, ?, ?, ?)", [getattr(file, key) for key in FILE])
        starts = accumulate((s.rows for s in file.chunks), initial=0)
        chunks = (
            (s.shard, s.first, s.rows, s.mendable, start, file.name, json.dumps(vars(s)), s.errors)
            for s, start in zip(file.chunks, starts, strict=False)
        )
        self._table.executemany("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)", chunks)

    def planned(self, s: Summary) -> bool:
        """Whether the rows of a chunk are in the plan."""
        return s.shard < len(self.plan.shards) and s.first + s.rows <= self.plan.shards[s.shard].rows

    @property
    def rows(self) -> int:
        """Rows in files."""
        return int(self._one("SELECT coalesce(sum(rows), 0) FROM chunk"))

    @property
    def errors(self) -> int:
        """Rows with an error in files."""
        return int(self._one("SELECT coalesce(sum(errors), 0) FROM chunk"))

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

    def had(self, name: str) -> bool:
        """Whether the output had this file before it was replaced."""
        return bool(self._one("SELECT count(*) FROM gone WHERE name = ?", name))

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
            yield Summary(**json.loads(summary))

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
