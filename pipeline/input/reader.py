"""The reader of Ray Data's graph: a chunk's rows with the ids of their prompts. It imports no models: each of its
processes would take seconds for that."""

import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import pyarrow as pa
from transformers import AutoTokenizer

from exspec.actors.engine import Room
from exspec.actors.source import Source, load_part
from exspec.actors.work import WORK
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, Task
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.reading import Unreadable
from exspec.pipeline.input.requests import mapped, read_mapped
from exspec.pipeline.input.rows import Row, RowError, attempted, rows
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import ID, carried_columns
from exspec.pipeline.output.contents import read_range
from exspec.pipeline.storage import Folder
from exspec.pipeline.versions import check_versions, versions
from exspec.pipeline.weights import local_model

RETRY = 1.0  # seconds that a reader waits on a host with other versions


class Reader:
    """Maps tasks to rows that each contain a chunk: its rows as an Arrow stream, with prompt ids or errors."""

    def __init__(self, job: Job, schema: pa.Schema, room: Room) -> None:
        self.job, self.schema, self.room, self.versions = job, schema, room, versions()

    def __call__(self, descriptors: pa.Table) -> Iterator[pa.Table]:
        try:
            check_versions(self.versions)
        except JobError:  # the host's actor says so
            logging.getLogger(__name__).exception("no prompts can be rendered here")
            time.sleep(RETRY)
            os._exit(1)  # Ray then runs the task again, on any host
        tasks: list[Task] = pickle.loads(descriptors["tasks"][0].as_py())
        for _, group in groupby(tasks, key=lambda task: task.chunk.number):
            yield from self._shard(list(group))

    def _shard(self, tasks: list[Task]) -> Iterator[pa.Table]:
        """Read the tasks of one shard in one pass."""
        schema = mapped(self.job, self.schema)
        prompts = _prompts(type(self.job), self.job.model_dump_json(), schema).within(self.room)
        carried, name = carried_columns(self.job, schema), self.job.id_column
        kept = {new: name for name, new in carried.items()} | ({ID: name} if name else {})
        needed = list(dict.fromkeys([*prompts.columns(schema), *([name] if name else [])]))
        columns = list(dict.fromkeys([*kept.values(), *needed]))
        ranges = [(task.chunk.first, task.chunk.rows) for task in tasks]
        found = read_mapped(self.job, tasks[0].chunk.shard, ranges, columns, self.schema)
        for task, table in zip(tasks, found, strict=True):
            if isinstance(table, Unreadable):
                yield block(task, None, table.reason)
                continue
            skip = self._fine(task) if task.file else [False] * task.chunk.rows
            given = enumerate(rows(table, needed))
            work = [_work(prompts, task.chunk, i, row, skip[i]) for i, row in given]
            generated = pa.Table.from_pylist(work, schema=WORK_SCHEMA)
            carried_rows = {new: table[name] for new, name in kept.items()}
            yield block(task, pa.table(carried_rows | {name: generated[name] for name in WORK}), None)

    def _fine(self, task: Task) -> list[bool]:
        """Whether each row has no error, and stays as it is."""
        folder = Folder(self.job.output, self.job.storage_options)
        tables = read_range(folder, str(task.file), task.start, task.chunk.rows, ["error"])
        return [error is None for table in tables for error in table["error"].to_pylist()]


def block(task: Task, rows: pa.Table | None, unreadable: str | None) -> pa.Table:
    """A chunk as one row, so that Ray does not see the columns of the user's input."""
    shard = replace(task.chunk.shard, repairs={})  # they are in the rows
    task = replace(task, chunk=replace(task.chunk, shard=shard))
    stream = None
    if rows is not None:
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, rows.schema) as writer:
            writer.write_table(rows)
        stream = buffer.getvalue().to_pybytes()
    values = {"task": [pickle.dumps(task)], "rows": [stream], "unreadable": [unreadable]}
    return pa.table(values, schema=BLOCK)


BLOCK = pa.schema({"task": pa.binary(), "rows": pa.large_binary(), "unreadable": pa.string()})
WORK_SCHEMA = pa.schema(
    {
        "_prompt": pa.list_(pa.int32()),
        "_cut": pa.int32(),
        "_error": pa.string(),
        "_skip": pa.bool_(),
        "_max_new_tokens": pa.int32(),
        "_sampling": pa.string(),
        "_stop": pa.list_(pa.string()),
        "_logprobs": pa.int32(),
        "_given": pa.list_(pa.list_(pa.int32())),
        "_samples": pa.int32(),
        "_adapter": pa.int32(),
    }
)


def _work(prompts: Prompts, chunk: Chunk, i: int, row: Row, skip: bool) -> dict[str, Any]:
    asked = attempted(partial(_asked, prompts, chunk, i, row))
    return {"_skip": skip} | ({"_error": str(asked)} if isinstance(asked, RowError) else asked)


def _asked(prompts: Prompts, chunk: Chunk, i: int, row: Row) -> dict[str, Any]:
    settings = prompts.settings(row, chunk.shard, chunk.first + i)
    tokens, cut = prompts.fitted(row, settings.max_new_tokens)
    work = {"_prompt": tokens, "_cut": cut, "_max_new_tokens": settings.max_new_tokens, "_stop": settings.stop}
    work |= {"_sampling": json.dumps(settings.sampling), "_logprobs": settings.logprobs}
    return work | {"_given": settings.given, "_samples": settings.samples, "_adapter": settings.adapter}


@lru_cache(maxsize=2)
def _prompts(kind: type[Job], job: str, schema: pa.Schema) -> Prompts:
    """Cached per process, because a tokenizer takes a while to load."""
    loaded = kind.model_validate_json(job)
    place = local_model(loaded.target, loaded.storage_options, weights=False)
    tokenizer = load_part(AutoTokenizer, Source(place, loaded.target_revision, loaded.trust_remote_code))
    return Prompts(loaded, tokenizer, schema)
