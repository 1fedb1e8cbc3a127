"""The Ray Data graph: chunks are read and rendered on CPUs, generated and staged by actors, one summary row each."""

import json
import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from secrets import token_hex
from typing import Any

import psutil
import pyarrow as pa

from exspec.actors.engine import Engine, EngineConfig, Room
from exspec.actors.generator import Generator
from exspec.actors.models import load_part
from exspec.actors.work import WORK
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.rows import RowError, rows
from exspec.pipeline.input.shards import Unreadable, read_ranges
from exspec.pipeline.job import Job
from exspec.pipeline.ledger import RayLedger
from exspec.pipeline.metrics import RayMeter
from exspec.pipeline.output.columns import ID, carried_columns
from exspec.pipeline.output.contents import read_range
from exspec.pipeline.output.parts import PartSink, Task
from exspec.pipeline.shape import pair_of
from exspec.pipeline.storage import Folder
from exspec.pipeline.weights import local_model

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ROWS_PER_SLOT = 3  # rows in flight in an actor for each of its slots, or the ends of chunks would leave slots empty
MOST_ROWS, ENOUGH_ROWS = 1 << 20, 1 << 14  # that one reader goes through: of one shard, and of several
JOINING = 300  # seconds that nodes of a cluster may take to join: a head that was lost comes back before its workers
ACTOR, READER = 0.99, 0.005  # CPUs: where actors take all that there are, each leaves enough for two readers
FOREVER = 7 * 24 * 3600  # seconds; a chunk of long completions may well take an hour


def connect(job: Job) -> None:
    """Join the cluster of the job, or start a local Ray with logical CPUs enough for every stage. Idempotent.

    Without an address of its own a job joins the cluster that RAY_ADDRESS names, as Ray sets it for a submitted job;
    where that is the address of a dashboard, it is meant for `exspec submit`. A local Ray is for this process and its
    children alone.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = _address(job)
    if address == "local":
        quiet |= {"num_cpus": 4 + job.actor_range[1], "include_dashboard": False, "object_store_memory": 200 * 2**20}
        quiet["_node_ip_address"] = "127.0.0.1"
    try:
        if place := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray itself would try for many minutes
            socket.create_connection((place[1], int(place[2])), timeout=20).close()
        if address == "local":
            _start(quiet)
        else:
            ray.init(address=address, **quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise JobError(f"ray_address {address}: no cluster can be joined there: {error}") from error


def _start(settings: dict[str, Any]) -> None:
    """Start a local Ray, with one more try: on a busy machine its processes may not find each other in time."""
    import ray

    for tries_left in (1, 0):
        before = set(psutil.Process().children(recursive=True))
        try:
            with _private():
                ray.init(address="local", **settings)
            return
        except Exception as error:  # Ray has no name of its own for it
            left = set(psutil.Process().children(recursive=True)) - before
            for process in left:  # else the interpreter would wait for them when it ends
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
            ray.shutdown()
            if not tries_left:
                reason = " ".join(str(error).split())
                raise JobError(
                    f"a local Ray did not start, in two tries ({type(error).__name__}: {reason}); try again when the "
                    "machine is less busy, or give ray_address"
                ) from None


@contextmanager
def _private() -> Iterator[None]:
    """A Ray that is started inside listens on loopback, and answers nobody without a random token.

    Whoever may connect to a Ray may run code in it. On Linux Ray turns 127.0.0.1 into an address that other machines
    reach, and its servers then listen on all interfaces, unless it is told what holds elsewhere, that it makes no
    clusters. Its ports are open to other users of this machine all the same: the token protects them, and would protect
    all where a later Ray takes no notice of that flag. Ray's processes inherit the token; the driver, which has read it
    too, gets its environment back, for the token is of no use to other clusters.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)  # without a mode of its own a local Ray asks for the token
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def results(
    job: Job,
    slots: int,
    rows_per_chunk: int,
    room: Room,
    tasks: Iterator[Task],
    schema: pa.Schema,
    sink: PartSink,
    load: Callable[[int | None], tuple[Engine, Any]],
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
    calls = max(job.chunks_in_flight, -(-ROWS_PER_SLOT * slots // rows_per_chunk))
    # A fixed pool balances best with one task waiting; an elastic one grows only while more are.
    waiting = calls + 1 if low == high else 2 * calls
    pool = {"size": high} if low == high else {"min_size": low, "max_size": high}
    passes = [{"tasks": pickle.dumps(together)} for together in read_together(tasks)]
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


def on_a_device(job: Job, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function once where an actor would run, and return what it returns."""
    import ray
    from ray.exceptions import RayTaskError

    remote = ray.remote(num_cpus=ACTOR, num_gpus=gpus(job), max_retries=0)(function)
    try:
        return ray.get(remote.remote(*arguments))
    except RayTaskError as error:
        raise error.cause from None


def _address(job: Job) -> str:
    around = os.environ.get("RAY_ADDRESS", "")
    return job.ray_address or ("" if around.startswith("http") else around) or "local"


def check_cluster(job: Job) -> None:
    """Wait until the cluster has room for an actor, and refuse the job where it never has: Ray would wait for ever."""
    from ray.autoscaler.sdk import request_resources

    if not (short := _short(job)):
        return
    if _address(job) != "local":
        print(f"waiting for nodes, {JOINING} s at most: {short}", flush=True)
        request_resources(bundles=[{name: count for name, count in _needs(job).items() if count}])  # where it can grow
        until = time.monotonic() + JOINING
        while short and time.monotonic() < until:
            time.sleep(1)
            short = _short(job)
        request_resources(bundles=[])  # from here on the actors speak for themselves
    if short:
        raise JobError(f"device: {short}")


def actors_that_fit(job: Job, memory: int) -> int:
    """How many actors of so many bytes the cluster carries; one at least. A local Ray has this machine's cores."""
    import ray

    have = ray.cluster_resources()
    if gpus(job):
        return max(1, int(have.get("GPU", 0) / gpus(job)))
    cores = job.actor_range[1] if _address(job) == "local" else int(have.get("CPU", 1)) // job.threads
    return max(1, min(cores, int(have.get("memory", memory)) // memory))


def _needs(job: Job) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": gpus(job)}


def _short(job: Job) -> str:
    """What the cluster has too little of for one actor, in words; empty where it has enough."""
    import ray

    have = ray.cluster_resources()
    for name, count in _needs(job).items():
        if have.get(name, 0) < count:
            return f"an actor needs {count:g} {name}, and the cluster has {have.get(name, 0):g}"
    return ""


def lacking(job: Job) -> str:
    """What actors wait for that are not there, in words."""
    import ray

    have, free = ray.cluster_resources(), ray.available_resources()
    told = [f"{count:g} {name}" for name, count in _needs(job).items() if count]
    found = [f"{free.get(name, 0):.3g} of {have.get(name, 0):g} {name}" for name, n in _needs(job).items() if n]
    return (
        f"each needs {' and '.join(told)}, and the cluster has {' and '.join(found)} free; the job goes on with those "
        "that are there, set actors to as many or add nodes"
    )


def gpus(job: Job) -> float:
    if job.num_gpus is not None:
        return job.num_gpus
    return 1.0 if device(job) == "cuda" else 0.0


def device(job: Job) -> str:
    """The job's device; `auto` asks the cluster whether it has GPUs."""
    if job.device != "auto":
        return job.device
    import ray

    return "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


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
        prompts = _prompts(type(self.job), self.job.model_dump_json(), self.schema).within(self.room)
        carried, name = carried_columns(self.job, self.schema), self.job.id_column
        kept = {new: name for name, new in carried.items()} | ({ID: name} if name else {})
        needed = prompts.columns(self.schema)
        columns = list(dict.fromkeys([*kept.values(), *needed]))
        ranges = [(task.chunk.first, task.chunk.rows) for task in tasks]
        found = read_ranges(tasks[0].chunk.shard, ranges, columns, self.job.storage_options, self.schema)
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
    """Loads a job's pair and makes its engine, in the actor's process. `window`: the most slots that may still fit."""

    def __init__(self, job: Job, config: EngineConfig, on: str) -> None:
        self.job, self.config, self.on = job, config, on

    def __call__(self, window: int | None) -> tuple[Engine, Any]:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(self.job.threads)
        config = self.config
        if window is not None:
            config = replace(config, window=max(config.batch_size, min(config.window, window)))
        pair = pair_of(self.job, self.on, self.config.drafts)
        return Engine(pair.target, pair.draft, config), pair.tokenizer
