"""The plan of a job: its shards in a fixed order, cut into chunks."""

import base64
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import ConfigDict, Field

from exspec.pipeline.errors import JobError
from exspec.pipeline.secrets import anonymous

Count = Annotated[int, Field(ge=0, lt=10**15)]
Rows = Annotated[int, Field(ge=0, lt=10**12)]  # of a shard: names of parts have twelve digits for a row
KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Shard:
    """One input file.

    name: the path below the input folder. etag: identifies the content: a digest, or the store's etag.
    stamp: of a local file; if it is the same, the file need not be read again.
    version: URL@VERSION of the table that the file belongs to; empty if there is none.
    values: of table columns that are not in the file: one row, as serialized Arrow in base64; or empty.
    repairs: rows that replace those of the file, encoded like `values`, by row number. Not part of `content`.
    """

    name: str
    url: str
    rows: Rows
    size: Count
    etag: str
    stamp: str = ""
    version: str = ""
    values: str = ""
    repairs: dict[Annotated[str, Field(pattern="^[0-9]{1,12}$")], str] = field(default_factory=dict)
    __pydantic_config__: ClassVar = KNOWN

    def published(self) -> "Shard":
        """The shard without secrets in its URL."""
        return replace(self, url=anonymous(self.url))

    def to_json(self) -> dict[str, Any]:
        """The shard as JSON. Without repairs it has no such key, so that older versions can read it."""
        return {name: value for name, value in asdict(self).items() if value or name != "repairs"}

    @property
    def content(self) -> tuple[str, int, int, str]:
        """What stays the same as long as the rows do."""
        return self.name, self.rows, self.size, self.etag


@dataclass(frozen=True)
class Chunk:
    """A range of a shard's rows: the unit of dispatch, commit and resume. number: the shard's index in the plan."""

    shard: Shard
    number: int
    first: int
    rows: int

    def __str__(self) -> str:
        return f"{anonymous(self.shard.url)}, rows {self.first} to {self.first + self.rows - 1}"


@dataclass(frozen=True)
class Task:
    """A chunk to decode. file: which has the chunk's rows from row `start` on; its error rows are decoded again."""

    chunk: Chunk
    file: str | None = None
    start: int = 0

    @property
    def key(self) -> str:
        return f"{self.chunk.number}:{self.chunk.first}"

    def __str__(self) -> str:
        return str(self.chunk)


@dataclass(frozen=True)
class Plan:
    """The shards of a job in a fixed order, and the size of chunks. limit: only the first rows."""

    shards: list[Shard]
    rows_per_chunk: Annotated[int, Field(ge=1)]
    limit: Count | None = None
    schema: str = ""  # of all shards, as serialized Arrow in base64
    __pydantic_config__: ClassVar = KNOWN

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON, without secrets in URLs."""
        return vars(self) | {"shards": [shard.published().to_json() for shard in self.shards]}

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> "Plan":
        return cls(**loaded | {"shards": [Shard(**shard) for shard in loaded["shards"]]})

    def same(self, other: "Plan") -> bool:
        """Whether both have the same rows, even if their shards have moved."""
        contents = ([shard.content for shard in plan.shards] for plan in (self, other))
        return self.limit == other.limit and next(contents) == next(contents)

    @property
    def rows(self) -> int:
        total = sum(shard.rows for shard in self.shards)
        return total if self.limit is None else min(total, self.limit)

    def chunks(self, done: Iterable[tuple[int, int, int]] = ()) -> Iterator[Chunk]:
        """The chunks in order, without those that are done: (number of the shard, first row, rows), in order."""
        held = iter(done)
        ready, left = next(held, None), self.rows
        for number, shard in enumerate(self.shards):
            end, first = min(shard.rows, left), 0
            left -= end
            while first < end:
                if ready is not None and ready[:2] == (number, first):
                    first, ready = first + ready[2], next(held, None)
                    continue
                last = min(end, first - first % self.rows_per_chunk + self.rows_per_chunk)
                if ready is not None and ready[0] == number:
                    last = min(last, ready[1])
                yield Chunk(shard, number, first, last - first)
                first = last

    def extended(
        self,
        found: list[Shard],
        settled: Set[str] = frozenset(),
        grew: Callable[[Shard, Shard], bool] = lambda _planned, _now: False,
    ) -> "Plan":
        """This plan plus new shards, and new rows of shards that grew. Planned shards keep their repairs.

        found: the shards now. settled: shards that need not be found. grew: whether a changed shard, as planned and
        now, only has more rows at its end. Raises JobError naming a planned shard that has changed or vanished.
        """
        now = {shard.name: shard for shard in found}
        for shard in self.shards:
            other = now.pop(shard.name, shard if shard.name in settled else None)
            if other is None:
                raise JobError(f"{shard.url}: planned shard has vanished; put it back, or start over with --restart")
            if other.content != shard.content and not grew(shard, other):
                then, found_now = (f"{s.rows} rows and {s.size} bytes" for s in (shard, other))
                what = f"{then} then, {found_now} now" if then != found_now else f"{then}, but other content"
                raise JobError(
                    f"{shard.url}: planned shard has changed ({what}); put it back, or start over with --restart"
                )
        # If the whole input was moved, it is read from its new location.
        current = {shard.name: shard for shard in found}
        kept = [replace(current.get(shard.name, shard), repairs=shard.repairs) for shard in self.shards]
        return replace(self, shards=[*kept, *(s for s in found if s.name in now)])


def encode_row(row: pa.RecordBatch) -> str:
    """One row of values with types, for `Shard.values`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return base64.b64encode(sink.getvalue()).decode()


def decode_row(text: str) -> pa.Table:
    return pa.ipc.open_stream(base64.b64decode(text)).read_all()


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
