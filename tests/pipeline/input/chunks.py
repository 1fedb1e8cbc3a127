"""Reads single chunks."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.input.reading import Unreadable, read_ranges


def read_chunk(
    chunk: Chunk, options: dict[str, Any], columns: Sequence[str] | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    (rows,) = read_ranges(chunk.shard, [(chunk.first, chunk.rows)], columns, options, schema)
    assert not isinstance(rows, Unreadable), rows
    return rows
