"""What a job is to do: the shards in a fixed order, and the chunks that they are cut into."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from exspec.pipeline.errors import JobError


@dataclass(frozen=True)
class Shard:
    """One input Parquet file.

    name: its path below the input folder. etag: what tells its content: a digest, or what its store has for one.
    stamp: of a local file, by which it need not be read again to be known as unchanged.
    version: of the table that the file was listed by, behind the table's URL and an @; empty where there is none.
    values: of the table's columns that are not in the file: one row, as Arrow serializes it, in base64; or empty.
    """

    name: str
    url: str
    rows: int
    size: int
    etag: str
    stamp: str = ""
    version: str = ""
    values: str = ""


@dataclass(frozen=True)
class Chunk:
    """A range of a shard's rows: the unit of dispatch, commit and resume."""

    shard: Shard
    first: int
    rows: int

    @property
    def part(self) -> str:
        """Name of the output file that holds this chunk and nothing else."""
        digest = hashlib.sha256(self.shard.name.encode()).hexdigest()[:8]
        stem = self.shard.name.rsplit("/", 1)[-1].removesuffix(".parquet")
        return f"part-{stem}-{digest}-{self.first:010d}-{self.rows}.parquet"

    def __str__(self) -> str:
        return f"{self.shard.url}, rows {self.first} to {self.first + self.rows - 1}"


@dataclass(frozen=True)
class Plan:
    """The shards of a job in a fixed order, and how they are cut. `limit` takes the first rows only."""

    shards: list[Shard]
    rows_per_chunk: int
    limit: int | None = None
    schema: str = ""  # that the shards share, as Arrow serializes it, in base64

    @property
    def rows(self) -> int:
        total = sum(shard.rows for shard in self.shards)
        return total if self.limit is None else min(total, self.limit)

    def chunks(self) -> Iterator[Chunk]:
        left = self.rows
        for shard in self.shards:
            for first in range(0, shard.rows, self.rows_per_chunk):
                rows = min(self.rows_per_chunk, shard.rows - first, left)
                if rows <= 0:
                    return
                left -= rows
                yield Chunk(shard, first, rows)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Plan":
        loaded = json.loads(content)
        return cls(**loaded | {"shards": [Shard(**s) for s in loaded["shards"]]})

    def settled(self, done: Callable[[Chunk], bool]) -> set[str]:
        """Names of the shards all of whose chunks are done."""
        missing = {chunk.shard.name for chunk in self.chunks() if not done(chunk)}
        return {shard.name for shard in self.shards} - missing

    def extended(self, found: list[Shard], settled: Set[str] = frozenset()) -> "Plan":
        """This plan with the shards that have arrived since appended. Those that are settled need not be found.

        Raises JobError naming a planned shard that has changed or vanished.
        """
        now = {shard.name: shard for shard in found}
        for shard in self.shards:
            other = now.pop(shard.name, shard if shard.name in settled else None)
            if other is None:
                raise JobError(f"{shard.url}: planned shard has vanished; put it back, or start over with --restart")
            if (other.rows, other.size, other.etag) != (shard.rows, shard.size, shard.etag):
                then, found_now = (f"{s.rows} rows and {s.size} bytes" for s in (shard, other))
                what = f"{then} then, {found_now} now" if then != found_now else f"{then}, but others than then"
                raise JobError(
                    f"{shard.url}: planned shard has changed ({what}); put it back, or start over with --restart"
                )
        # As found now: an input that was moved as a whole is read from where it is.
        current = {shard.name: shard for shard in found}
        kept = [current.get(shard.name, shard) for shard in self.shards]
        return replace(self, shards=[*kept, *(s for s in found if s.name in now)])


def encode_row(row: pa.RecordBatch) -> str:
    """One row of values with their types, as `Shard.values` holds it."""
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
