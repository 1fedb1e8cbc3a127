"""The Ray Data graph: chunks are read and rendered on CPUs, generated and committed by actors, one summary row each."""

import io
import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from secrets import token_hex
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.generator import WORK, Generator
from exspec.actors.models import load_pair
from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.ledger import RayLedger
from exspec.pipeline.metrics import RayMeter
from exspec.pipeline.parts import PartSink, carried_columns
from exspec.pipeline.plan import Chunk
from exspec.pipeline.prompts import Prompts, RowError
from exspec.pipeline.shards import read_chunk
from exspec.pipeline.storage import Folder
from exspec.pipeline.weights import local_model

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ROWS_PER_SLOT = 3  # rows in flight in an actor for each of its slots, or the ends of chunks would leave slots empty
JOINING = 300  # seconds that nodes of a cluster may take to join: a head that was lost comes back before its workers
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
        with _private() if address == "local" else nullcontext():
            ray.init(address=address, **quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise JobError(f"ray_address {address}: no cluster can be joined there: {error}") from error


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


def summaries(
    job: Job,
    slots: int,
    chunks: list[Chunk],
    schema: pa.Schema,
    sink: PartSink,
    load: Callable[[int | None], tuple[Engine, Any]],
) -> Iterator[dict[str, Any]]:
    """Run the chunks; yields one summary a chunk as they are committed or set aside."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    context = DataContext.get_current()
    context.target_max_block_size = None  # a chunk stays one block, whatever its bytes
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    context.max_consecutive_actor_init_deaths = 3
    context.execution_no_progress_timeout_s = FOREVER
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    low, high = job.actor_range
    calls = max(job.chunks_in_flight, -(-ROWS_PER_SLOT * slots // job.rows_per_chunk))
    # A fixed pool balances best with one task waiting; an elastic one grows only while more are.
    waiting = calls + 1 if low == high else 2 * calls
    pool = {"size": high} if low == high else {"min_size": low, "max_size": high}
    sampling = {"top_k": job.top_k, "top_p": job.top_p, "repetition_penalty": job.repetition_penalty}
    read = Reader(job, schema, retry=sink.retry)
    descriptors = [{"chunk": pickle.dumps(chunk)} for chunk in chunks]
    rows: ray.data.Dataset = ray.data.from_items(descriptors, override_num_blocks=len(chunks))
    # Few readers: each is a process that first imports what a tokenizer needs, and one can feed several engines.
    readers = TaskPoolStrategy(size=min(high + 1, len(chunks)))
    rows = rows.map_batches(read, batch_size=None, batch_format="pyarrow", num_cpus=0.5, compute=readers)
    rows = rows.map_batches(
        Generator,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_args=(load, sampling, sink, RayLedger(), RayMeter(), job.attempts, job.answers),
        compute=ActorPoolStrategy(
            **pool,
            max_tasks_in_flight_per_actor=waiting,
            max_concurrent_calls_per_actor=calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=1,
        num_gpus=gpus(job),
    )
    batches: Iterator[Any] = iter(rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    for batch in batches:
        yield from batch.to_pylist()


def on_a_device(job: Job, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function once where an actor would run, and return what it returns."""
    import ray
    from ray.exceptions import RayTaskError

    remote = ray.remote(num_cpus=1, num_gpus=gpus(job), max_retries=0)(function)
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

    needs = {"CPU": 1.5, "GPU": gpus(job)}
    if not (lacking := _lacking(needs)):
        return
    if _address(job) != "local":
        print(f"waiting for nodes, {JOINING} s at most: {lacking}", flush=True)
        request_resources(bundles=[{name: count for name, count in needs.items() if count}])  # where it can grow
        until = time.monotonic() + JOINING
        while lacking and time.monotonic() < until:
            time.sleep(1)
            lacking = _lacking(needs)
        request_resources(bundles=[])  # from here on the actors speak for themselves
    if lacking:
        raise JobError(f"device: {lacking}")


def _lacking(needs: dict[str, float]) -> str:
    """What the cluster has too little of, in words; empty where it has enough."""
    import ray

    have = ray.cluster_resources()
    for name, count in needs.items():
        if have.get(name, 0) < count:
            return f"an actor needs {count:g} {name}, and the cluster has {have.get(name, 0):g}"
    return ""


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
    """A chunk's descriptor in, its rows out, with prompt ids or an error for each."""

    def __init__(self, job: Job, schema: pa.Schema, retry: bool) -> None:
        self.job, self.schema, self.retry = job, schema, retry

    def __call__(self, block: pa.Table) -> pa.Table:
        descriptor = block["chunk"][0].as_py()
        chunk: Chunk = pickle.loads(descriptor)
        rows = read_chunk(chunk, self.job.storage_options)
        prompts = _prompts(type(self.job), self.job.model_dump_json(), self.schema)
        skip = self._fine(chunk) if self.retry else [False] * chunk.rows
        work = [_work(prompts, chunk, i, row, descriptor, skip[i]) for i, row in enumerate(rows.to_pylist())]
        kept = [*carried_columns(self.job, self.schema), *([self.job.id_column] if self.job.id_column else [])]
        table = rows.select(list(dict.fromkeys(kept)))
        generated = pa.Table.from_pylist(work, schema=WORK_SCHEMA)
        for name in WORK:
            table = table.append_column(name, generated[name])
        return table

    def _fine(self, chunk: Chunk) -> list[bool]:
        folder = Folder(self.job.output, self.job.storage_options)
        try:
            content = folder.read(chunk.part)
        except FileNotFoundError:  # a chunk that is missing altogether runs whole
            return [False] * chunk.rows
        errors = pq.read_table(io.BytesIO(content), columns=["error"])["error"]
        return [error is None for error in errors.to_pylist()]


WORK_SCHEMA = pa.schema(
    {
        "_chunk": pa.binary(),
        "_prompt": pa.list_(pa.int32()),
        "_error": pa.string(),
        "_skip": pa.bool_(),
        "_max_new_tokens": pa.int32(),
        "_temperature": pa.float64(),
        "_seed": pa.int64(),
        "_stop": pa.list_(pa.string()),
    }
)


def _work(prompts: Prompts, chunk: Chunk, i: int, row: dict[str, Any], descriptor: bytes, skip: bool) -> dict[str, Any]:
    work: dict[str, Any] = {"_chunk": descriptor if i == 0 else b"", "_skip": skip}
    try:
        settings = prompts.settings(row, chunk.shard, chunk.first + i)
        work |= {f"_{name}": value for name, value in vars(settings).items()}
        return work | {"_prompt": prompts.tokens(row)}
    except RowError as error:
        return work | {"_error": str(error)}


@lru_cache(maxsize=2)
def _prompts(kind: type[Job], job: str, schema: pa.Schema) -> Prompts:
    """One a process: a tokenizer takes a while to load."""
    from transformers import AutoTokenizer

    loaded = kind.model_validate_json(job)
    place = local_model(loaded.target, loaded.storage_options, weights=False)
    return Prompts(loaded, AutoTokenizer.from_pretrained(place, revision=loaded.target_revision), schema)


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
        options = self.job.storage_options
        draft = local_model(self.job.draft, options) if self.job.draft and self.config.drafts else None
        pair = load_pair(
            local_model(self.job.target, options),
            draft,
            getattr(torch, self.job.dtype),
            self.on,
            self.job.target_revision,
            self.job.draft_revision,
        )
        return Engine(pair.target, pair.draft, config), pair.tokenizer
