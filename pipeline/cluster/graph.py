"""The Ray Data graph: chunks are read and rendered on CPUs, generated and staged by actors, one summary row each."""

import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import pyarrow as pa

from exspec.actors.engine import Engine, EngineConfig, Room
from exspec.actors.engine.drafters import kind
from exspec.actors.generator import Generator, Loader
from exspec.actors.models import load_part
from exspec.actors.work import WORK
from exspec.pipeline.cluster.connect import ACTOR, gpus
from exspec.pipeline.cluster.metrics import RayMeter
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import mapped, read_mapped
from exspec.pipeline.input.rows import RowError, rows
from exspec.pipeline.input.shards import Unreadable
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.columns import ID, carried_columns
from exspec.pipeline.output.contents import read_groups, read_range
from exspec.pipeline.output.parts import PartSink, Task
from exspec.pipeline.shape import pair_of
from exspec.pipeline.storage import Folder
from exspec.pipeline.weights import local_model

ROWS_PER_SLOT = 3  # rows in flight in an actor for each of its slots, or the ends of chunks would leave slots empty
MOST_ROWS, ENOUGH_ROWS = 1 << 20, 1 << 14  # that one reader goes through: of one shard, and of several
LEARNT = 1 << 16  # tokens that a drafter learns of what the job has written, as an actor starts: less than a second
LATEST = 100  # files that it may be in
READER = 0.005  # CPUs: two find room in what each actor leaves
FOREVER = 7 * 24 * 3600  # seconds; a chunk of long completions may well take an hour


def results(
    job: Job,
    slots: int,
    rows_per_chunk: int,
    room: Room,
    tasks: Iterator[Task],
    schema: pa.Schema,
    sink: PartSink,
    load: Loader,
    ledger: RayLedger,
) -> Iterator[dict[str, Any]]:
    """Run the tasks; yields for each what became of it, as its file is staged or it is set aside."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    context = DataContext.get_current()
    context.target_max_block_size = 1  # every row, which is a whole chunk, is a block of its own as soon as it is made
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    context.max_consecutive_actor_init_deaths = 3
    context.execution_no_progress_timeout_s = FOREVER
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    low, high = job.actor_range
    passes, count = [], 0
    for together in read_together(tasks):
        passes.append({"tasks": pickle.dumps(together)})
        count += len(together)
    calls = max(job.chunks_in_flight, -(-ROWS_PER_SLOT * slots // rows_per_chunk))
    calls = min(calls, -(-count // high))  # one who loads its models a little sooner does not take the others' share
    # A fixed pool balances best with one task waiting; an elastic one grows only while more are.
    waiting = calls + 1 if low == high else 2 * calls
    pool = {"size": high} if low == high else {"min_size": low, "max_size": high}
    chunks: ray.data.Dataset = ray.data.from_items(passes, override_num_blocks=len(passes))
    # Few readers: each is a process that first imports what a tokenizer needs, and one can feed several engines.
    readers = TaskPoolStrategy(size=min(high + 1, len(passes)))
    read = Reader(job, schema, room)
    chunks = chunks.map_batches(read, batch_size=None, batch_format="pyarrow", num_cpus=READER, compute=readers)
    done = chunks.map_batches(
        Generator,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_args=(load, job.sampling, sink, ledger, RayMeter(), job.attempts, job.answers),
        compute=ActorPoolStrategy(
            **pool,
            max_tasks_in_flight_per_actor=waiting,
            max_concurrent_calls_per_actor=calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=ACTOR,
        num_gpus=gpus(job),
    )
    batches: Iterator[Any] = iter(done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    for batch in batches:
        yield from (pickle.loads(result) for result in batch["result"].to_pylist())


def read_together(tasks: Iterator[Task]) -> Iterator[list[Task]]:
    """Tasks that one reader works through: a whole shard if it is not too large, for what its row groups hold is then
    decoded once, and several small shards. One that is lost is read again from its first row.
    """
    together: list[Task] = []
    rows = 0
    for task in tasks:
        other = together and task.chunk.number != together[-1].chunk.number
        if together and (rows >= MOST_ROWS or (other and rows >= ENOUGH_ROWS)):
            yield together
            together, rows = [], 0
        together.append(task)
        rows += task.chunk.rows
    if together:
        yield together


class Reader:
    """Tasks in; for each a row with the rows of its chunk, as an Arrow stream, with prompt ids or an error for each."""

    def __init__(self, job: Job, schema: pa.Schema, room: Room) -> None:
        self.job, self.schema, self.room = job, schema, room

    def __call__(self, descriptors: pa.Table) -> Iterator[pa.Table]:
        tasks: list[Task] = pickle.loads(descriptors["tasks"][0].as_py())
        for _, group in groupby(tasks, key=lambda task: task.chunk.number):
            yield from self._shard(list(group))

    def _shard(self, tasks: list[Task]) -> Iterator[pa.Table]:
        """The tasks of one shard, which is read in one pass."""
        schema = mapped(self.job, self.schema)
        prompts = _prompts(type(self.job), self.job.model_dump_json(), schema).within(self.room)
        carried, name = carried_columns(self.job, schema), self.job.id_column
        kept = {new: name for name, new in carried.items()} | ({ID: name} if name else {})
        needed = prompts.columns(schema)
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
        """Rows that have no error, and stay as they are."""
        folder = Folder(self.job.output, self.job.storage_options)
        tables = read_range(folder, str(task.file), task.start, task.chunk.rows, ["error"])
        return [error is None for table in tables for error in table["error"].to_pylist()]


def block(task: Task, rows: pa.Table | None, unreadable: str | None) -> pa.Table:
    """A chunk as one row: Ray looks at none of the columns that a user's input may have."""
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
    }
)


def _work(prompts: Prompts, chunk: Chunk, i: int, row: dict[str, Any] | RowError, skip: bool) -> dict[str, Any]:
    work: dict[str, Any] = {"_skip": skip}
    if isinstance(row, RowError):
        return work | {"_error": str(row)}
    try:
        settings = prompts.settings(row, chunk.shard, chunk.first + i)
        work |= {"_max_new_tokens": settings.max_new_tokens, "_stop": settings.stop}
        work["_sampling"] = json.dumps(settings.sampling)
        work["_prompt"], work["_cut"] = prompts.fitted(row, settings.max_new_tokens)
        return work
    except RowError as error:
        return work | {"_error": str(error)}


@lru_cache(maxsize=2)
def _prompts(kind: type[Job], job: str, schema: pa.Schema) -> Prompts:
    """One a process: a tokenizer takes a while to load."""
    from transformers import AutoTokenizer

    loaded = kind.model_validate_json(job)
    place = local_model(loaded.target, loaded.storage_options, weights=False)
    tokenizer = load_part(AutoTokenizer, place, loaded.target_revision, loaded.trust_remote_code)
    return Prompts(loaded, tokenizer, schema)


class PairLoader:
    """Loads a job's pair and makes its engine, in the actor's process. `window`: the most slots that may still fit.

    Pages go with it, below the batch too: a batch whose rows have too few of them waits, and is decoded all the same.
    parts: names of files that the job has written, from whose completions a drafter may learn.
    """

    def __init__(self, job: Job, config: EngineConfig, on: str, parts: Sequence[str] = ()) -> None:
        self.job, self.config, self.on, self.parts = job, config, on, parts
        self.window = config.window

    def __call__(self, window: int) -> tuple[Engine, Any]:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(self.job.threads)
        config = self.config
        if window < config.window:
            pages = max(config.fewest_pages, config.page_count * window // config.window)
            config = replace(config, window=max(config.batch_size, window), pages=pages)
        pair = pair_of(self.job, self.on, kind(self.config).needs_draft)
        engine = Engine(pair.target, pair.draft, config)
        if engine.drafter.learns:
            written = [t for t in self._written(pair.tokenizer) if max(t, default=0) < engine.vocabulary]
            for tokens in reversed(written):  # of what it has learned first it forgets first
                engine.drafter.learn([], tokens)
            engine.drafter.catch_up()
        return engine, pair.tokenizer

    def _written(self, tokenizer: Any) -> Iterator[list[int]]:
        """Tokens of completions that the job has written, from the last file on. A file that is not there any more is
        left out: another process may have merged it."""
        folder, count = Folder(self.job.output, self.job.storage_options), 0
        for name in reversed(self.parts):
            with suppress(JobError):
                for table in read_groups(folder, name, ["completion"]):
                    for text in filter(None, table["completion"].to_pylist()):
                        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                        count += len(tokens)
                        if count > LEARNT:
                            return
                        yield tokens
