"""The Ray Data graph: readers on CPUs read chunks and render prompts; actors decode them and stage the results."""

import logging
import pickle
from collections.abc import Generator as Yields
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from exspec.actors.engine import Engine, EngineConfig, Room
from exspec.actors.engine.drafters.lookup import kind
from exspec.actors.generator import Generator, Loader
from exspec.pipeline.cluster.connect import ACTOR, gpus
from exspec.pipeline.cluster.metrics import RayMeter
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.passes import dispatch
from exspec.pipeline.input.plan import Task
from exspec.pipeline.input.reader import Reader
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.contents import read_groups
from exspec.pipeline.output.parts import PartSink
from exspec.pipeline.shape import pair_of
from exspec.pipeline.storage import Folder
from exspec.pipeline.versions import check_versions, versions

LEARNT = 1 << 16  # tokens of earlier completions that a drafter learns when an actor starts: less than a second
LATEST = 100  # number of files that they are read from
READER = 0.005  # CPUs of a reader: two fit into what each actor leaves
FOREVER = 7 * 24 * 3600  # seconds; a chunk of long completions may take an hour


def results(
    job: Job,
    config: EngineConfig,
    rows_per_chunk: int,
    room: Room,
    tasks: Iterator[Task],
    schema: pa.Schema,
    sink: PartSink,
    load: Loader,
    ledger: RayLedger,
) -> Yields[dict[str, Any], None, None]:
    """Run the tasks; yields a result for each when its file is staged or it is set aside."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    context = DataContext.get_current()
    context.target_max_block_size = 1  # each row is a whole chunk, and becomes a block as soon as it is ready
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0  # an elastic pool grows while all are busy
    context.max_consecutive_actor_init_deaths = 3
    context.execution_no_progress_timeout_s = FOREVER
    to_file = logging.getLogger("ray.data")  # in Ray's logs; its errors reach the driver as exceptions
    to_file.handlers = [h for h in to_file.handlers if not isinstance(h, logging.StreamHandler)]

    low, high = job.actor_range
    samples, calls = job.draws.count, job.chunks_in_flight
    work = dispatch(tasks, rows_per_chunk, (low, high), config.batch_size, config.slots, samples, calls)
    pool = {"size": high} if low == high else {"min_size": low, "max_size": high}
    items = [{"tasks": tasks} for tasks in work.passes]
    chunks: ray.data.Dataset = ray.data.from_items(items, override_num_blocks=len(items))
    # Few readers: each process has to import the tokenizer first, and one can feed several engines.
    readers = TaskPoolStrategy(size=min(high + 1, len(items)))
    read = Reader(job, schema, room)
    chunks = chunks.map_batches(read, batch_size=None, batch_format="pyarrow", num_cpus=READER, compute=readers)
    done = chunks.map_batches(
        Generator,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_args=(load, job.sampling, sink, ledger, RayMeter(), job.attempts, job.answers, job.draws),
        compute=ActorPoolStrategy(
            **pool,
            max_tasks_in_flight_per_actor=work.held,
            max_concurrent_calls_per_actor=work.calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=ACTOR,
        num_gpus=gpus(job),
    )
    found: Any = iter(done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    with closing(found) as batches:  # ends the threads of Ray Data, which would outlive Ray
        for batch in batches:
            yield from (pickle.loads(result) for result in batch["result"].to_pylist())


class PairLoader:
    """Loads a job's models and makes the engine, in the actor's process. parts: files from which a drafter may learn.

    Called with the number of slots that may fit into memory. Pages shrink in proportion, even below the batch: rows
    without pages wait.
    """

    def __init__(self, job: Job, config: EngineConfig, on: str, parts: Sequence[str] = ()) -> None:
        self.job, self.config, self.on, self.parts = job, config, on, parts
        self.window, self.versions = config.window, versions()

    def __call__(self, window: int) -> tuple[Engine, Any]:
        import torch
        from transformers.utils.logging import disable_progress_bar

        check_versions(self.versions)
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
            for tokens in reversed(written):  # it forgets in the order that it learns in
                engine.drafter.learn([], tokens)
            engine.drafter.catch_up()
        return engine, pair.tokenizer

    def _written(self, tokenizer: Any) -> Iterator[list[int]]:
        """Tokens of the job's earlier completions, newest file first. Missing files are skipped: another process may
        have merged them."""
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
