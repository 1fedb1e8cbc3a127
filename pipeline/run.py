"""A job from its settings to `_SUCCESS`: prepare, run what is missing, check, report."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
import torch
from ray.exceptions import RayError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from exspec.actors.answers import AnswerError
from exspec.actors.engine import EngineConfig, Room
from exspec.actors.engine.cached_model import context_length
from exspec.actors.engine.memory import fit
from exspec.actors.models import ModelError, check_config, check_vocabularies, load_part
from exspec.pipeline.errors import BrokenOffError, JobError, told
from exspec.pipeline.graph import PairLoader, check_cluster, connect, device, on_a_device, results
from exspec.pipeline.input.plan import Chunk, Plan, Shard, encode_schema
from exspec.pipeline.input.prompts import Prompts, prompt_column
from exspec.pipeline.input.shards import Since, changed, find_shards
from exspec.pipeline.job import Job, differences, fingerprint
from exspec.pipeline.output.collect import Collector, StopError, collect
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import SUCCESS, Output, Writer, take
from exspec.pipeline.output.parts import PartSink, Task, carried_columns, read_staged
from exspec.pipeline.output.report import Report, write_report
from exspec.pipeline.output.state import State
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import LONGEST, Settled, Shape, sample, settle, shape_of, stored_shape
from exspec.pipeline.storage import PROBE, Folder
from exspec.pipeline.weights import local_model, model_digest, resolved

COLUMNS = ("id_column", "max_new_tokens_column", "temperature_column", "seed_column", "stop_column")
ROOM = 1 << 20  # bytes that an output must have room for
T = TypeVar("T")


@dataclass
class Prepared:
    """A job that may start: everything about it has been checked. found: the input's shards as they are now."""

    job: Job
    output: Output
    restart: bool
    schema: pa.Schema
    found: list[Shard]
    settled: set[str]
    plan: Plan
    shape: Shape
    prompts: Prompts
    models: "Models"

    @property
    def folder(self) -> Folder:
        return self.output.folder

    @property
    def missing(self) -> Iterator[Chunk]:
        """The chunks that are to run, as far as is known before the output is taken."""
        state = self.output.state
        return self.plan.chunks() if self.restart or state.job is None else self.plan.chunks(state.held())

    def room(self, config: EngineConfig) -> Room:
        """Tokens that a row may have in such a shape."""
        return Room(self.models.context, config.capacity)


def prepare(job: Job, restart: bool = False) -> Prepared:
    """Check everything about a job, without starting it. Raises JobError with all that is wrong at once."""
    problems: list[str] = []

    def check(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (JobError, ModelError, AnswerError) as error:
            problems.append(str(error))
            return None

    folder = Folder(job.output, job.storage_options)
    check(lambda: _refuse_overlap(job, folder))
    output = check(lambda: _open(folder))
    job = resolved(job)
    models = check(lambda: _check_models(job))
    earlier = output.state if output and output.state.job and not restart else None
    settled = earlier.done_shards() if earlier and job.since else set()
    since = Since(earlier.plan if earlier else None, settled, job.newer_than) if job.since else None
    found = check(lambda: find_shards(job.input, job.storage_options, earlier.plan if earlier else None, since))
    if found and job.id_column is None and "id" in found[1].names:
        job = job.model_copy(update={"id_column": "id"})
    columns = prompts = None
    if found:
        columns = check(lambda: _check_columns(job, found[1]))
        if models:
            prompts = check(lambda: Prompts(job, models.tokenizer, found[1]))
            if prompts and prompts.answers.constraint:
                check(prompts.answers.constraint)
    if models:
        check(lambda: _check_memory(job, models))
    if problems or not (found and models and prompts and output) or columns is None:
        raise JobError("; ".join(dict.fromkeys(problems)))
    plan = Plan(found[0], job.rows_per_chunk, job.limit, encode_schema(found[1]))
    stored = None
    if earlier:
        _refuse_other(folder, earlier.description, _keys(job, models, earlier.description["device"]))
        plan, stored = _planned(earlier, plan, settled), earlier.description["shape"]
    shape = shape_of(job, models.context, plan.rows, stored)
    return Prepared(job, output, restart, found[1], found[0], settled, plan, shape, prompts, models)


def _keys(job: Job, models: "Models", stored: str) -> dict[str, Any]:
    """The job's fingerprint. Where it takes what device is there, which is not known yet, that is the stored one."""
    return fingerprint(job, models.digests, stored if job.device == "auto" else job.device)


def _planned(state: State, plan: Plan, settled: set[str]) -> Plan:
    """The stored plan with what has come since; raises JobError where a planned shard is another now."""
    return replace(state.plan, limit=plan.limit, schema=plan.schema).extended(plan.shards, settled)


def _open(folder: Folder) -> Output:
    """The output, which must be one that can be written, and where two runs can be kept apart."""
    with told(f"output {folder.url}: cannot be written"):
        output = Output(folder).read()
        output.check_foreign()
        _probe(folder)
    return output


def _probe(folder: Folder) -> None:
    probe = f"{PROBE}-{time.time_ns()}"
    folder.write(probe, bytes(ROOM))  # as large as a part may be
    folder.remove(probe)
    folder.check_create()


@dataclass
class Models:
    """What is known of a job's models without loading their weights."""

    tokenizer: Any
    context: int
    digests: dict[str, str]
    configs: list[PretrainedConfig]


def _check_models(job: Job) -> Models:
    tokenizers, contexts, digests, configs = [], [], {}, []
    pairs = [("target", job.target, job.target_revision)]
    if job.draft is not None and job.method != "plain":
        pairs.append(("draft", job.draft, job.draft_revision))
    for role, name, revision in pairs:
        try:
            place = local_model(name, job.storage_options, weights=False)
            config = load_part(AutoConfig, place, revision, job.trust_remote_code)
            tokenizers.append(load_part(AutoTokenizer, place, revision, job.trust_remote_code))
            digests[role] = model_digest(name, revision, job.storage_options)
        except (JobError, ModelError) as error:
            raise JobError(f"{role} {error}") from error
        check_config(config, name)
        contexts.append(context_length(config))
        configs.append(config)
    if len(tokenizers) == 2:
        check_vocabularies(tokenizers[0], tokenizers[1], job.target, str(job.draft))
    if len(contexts) == 2 and contexts[1] < (capacity := min(job.capacity or LONGEST, contexts[0])):
        raise JobError(
            f"draft {job.draft}: its context of {contexts[1]} tokens is shorter than the capacity of {capacity}; "
            "set capacity, or take a draft with a longer context"
        )
    return Models(tokenizers[0], contexts[0], digests, configs)


def _check_memory(job: Job, models: Models) -> None:
    """The settings of the shape, and that one sequence fits the job's memory, as far as that can be told from here."""
    config = shape_of(job, models.context, 0, None).config
    if job.memory_gib is not None:
        draft = models.configs[1] if len(models.configs) > 1 else None
        try:
            fit(models.configs[0], draft, config, getattr(torch, job.dtype), False, int(job.memory_gib * 2**30))
        except ValueError as error:
            raise JobError(str(error)) from error


def _check_columns(job: Job, schema: pa.Schema) -> list[str]:
    named = {key: [getattr(job, key)] for key in COLUMNS if getattr(job, key) is not None} | job.kept_columns
    for key, columns in named.items():
        for column in columns:
            if column not in schema.names:
                raise JobError(f"{key}: {column!r} is not in the input, which has {', '.join(schema.names)}")
    if job.prompt_template is None:
        prompt_column(job, schema)
    carried = carried_columns(job, schema)
    for key, columns in job.kept_columns.items():
        if left := [column for column in columns if column not in carried]:
            raise JobError(f"{key}: {left[0]!r} does not come into the output; add it to carry")
    return carried


def _refuse_overlap(job: Job, folder: Folder) -> None:
    """Parts inside the input would be the next run's shards, and --restart would move an input inside the output."""
    own = f"{folder.path}/"
    for url in job.input:
        path = f"{Folder(url, job.storage_options).path}/"
        if own.startswith(path) or path.startswith(own) or fnmatch(f"{own}part-0.parquet", path.rstrip("/")):
            raise JobError(f"output {folder.url}: overlaps the input {url}; expected a folder of its own")


def _refuse_other(folder: Folder, description: dict[str, Any], keys: dict[str, Any]) -> None:
    """Raises JobError where the output's fingerprint is that of another job."""
    if changes := differences(description["fingerprint"], keys):
        raise JobError(
            f"output {folder.url}: holds a job with other settings: {', '.join(changes)}; use another output or "
            "--restart"
        )


def execute(prepared: Prepared, retry_errors: bool = False, load: Any = None, quiet: bool = False) -> int:
    """Run what is missing, or the rows that failed, and finish the job. Returns the exit code.

    load: gives engine and tokenizer in an actor; default: the job's pair. Raises BusyError where another is at work on
    the output, BrokenOffError where the job did not come to its end.
    """
    if retry_errors and prepared.job.since:
        raise JobError(
            "since: leaves out shards that are done, and --retry-errors reads them again; give one of the two"
        )
    output, plan = prepared.output, prepared.plan
    if not (prepared.restart or retry_errors) and finished(output, plan):
        print(f"nothing to do: all {plan.rows} rows are in {anonymous(prepared.folder.url)}")
        return 0
    action = "restart" if prepared.restart else "retry" if retry_errors else "run"
    try:
        with take(output, action, prepared.job.wait) as writer:
            return _Run(prepared, writer, load, quiet).run(retry_errors)
    except OSError as error:
        raise BrokenOffError(
            f"output {prepared.folder.url}: {type(error).__name__}: {error}; what is committed is kept, run it again"
        ) from error


def finished(output: Output, plan: Plan) -> bool:
    """Whether the output holds the plan's rows, in files that are as they were written, and says that it is done."""
    if output.state.done is None or not output.state.plan.same(plan):
        return False
    sizes = output.folder.sizes()
    return SUCCESS in sizes and all(sizes.get(name) == size for name, size in output.state.sizes())


class _Run:
    """One run on an output that was taken."""

    def __init__(self, prepared: Prepared, writer: Writer, load: Any, quiet: bool) -> None:
        self.prepared, self.writer, self.load, self.quiet = prepared, writer, load, quiet
        self.job, self.folder, self.plan = prepared.job, prepared.folder, prepared.plan

    def run(self, retry_errors: bool) -> int:
        fresh = self.prepared.restart or self.writer.state.job is None
        if not fresh:  # another may have begun or extended the job since this one was prepared
            state, keys = self.writer.state, partial(_keys, self.job, self.prepared.models)
            _refuse_other(self.folder, state.description, keys(state.description["device"]))
            found = Plan(self.prepared.found, self.plan.rows_per_chunk, self.job.limit, self.plan.schema)
            self.plan = _planned(state, found, self.prepared.settled)
            self.writer.adopt(read_staged)
        self.writer.sweep()
        tasks, again = self._tasks(fresh, retry_errors)
        first = next(tasks, None)
        if first is not None:
            self._connect()
        else:
            self.writer.extend(self.plan)
        if self.writer.lost:
            print(f"{self.writer.lost} rows were in files that are gone or damaged; they are decoded again")
        config = None if first is None else self._begin(fresh)
        self.writer.publish()
        report = Report(self.writer.state.description, self.plan.rows)
        stopped = None
        if first is not None and config is not None:
            stopped = self._decode(chain([first], tasks), again, config, report)
        return self._finish(report, stopped)

    def _tasks(self, fresh: bool, retry_errors: bool) -> tuple[Iterator[Task], Counter[str]]:
        """What is to be done: missing chunks, and with `retry_errors` those with errors; and the latter by file."""
        if fresh:
            return (Task(chunk) for chunk in self.plan.chunks()), Counter()
        missing = (Task(chunk) for chunk in self.plan.chunks(self.writer.state.held()))
        found = self.writer.state.chunks(errors=True) if retry_errors else ()
        # The log's URLs hold no secrets; those that were found do.
        failed = [Task(replace(c, shard=self.plan.shards[c.number]), file, start) for c, file, start in found]
        return chain(missing, failed), Counter(str(task.file) for task in failed)

    def _connect(self) -> None:
        connect(self.job)
        # Decided once: a node with a GPU that joins later must not change what actors ask for.
        self.job = self.job.model_copy(update={"device": device(self.job)})
        check_cluster(self.job)

    def _begin(self, fresh: bool) -> EngineConfig:
        """Begin the job, or take it up again, in the log; returns the shape that it decodes in."""
        job, prepared = self.job, self.prepared
        keys = fingerprint(job, prepared.models.digests, job.device)
        if not fresh:
            _refuse_other(self.folder, self.writer.state.description, keys)
        stored = None if fresh else self.writer.state.description["shape"]
        shape = shape_of(job, prepared.models.context, self.plan.rows, stored)
        settled = self._settle(shape) if self.load is None else Settled(shape.config, [])
        if not fresh:
            self.writer.describe({"job": job.published()})
            self.writer.extend(self.plan)
            return settled.config
        description = {
            "kind": job.kind,
            "job": job.published(),
            "fingerprint": keys,
            "shape": stored_shape(settled.config),
            "calibration": settled.candidates,
            "device": job.device,
            "versions": {n: version(n) for n in ("exspec", "torch", "transformers", "ray", "pyarrow")}
            | {"python": platform.python_version()},
        }
        if self.prepared.restart and self.writer.state.job is not None:
            print(f"the output as it was is in {anonymous(self.writer.set_aside().url)}")
        self.writer.begin(description, self.plan)
        return settled.config

    def _settle(self, shape: Shape) -> Settled:
        """The shape to decode in, which a device has to tell where it is to be measured or memory may be short."""
        job = self.job
        if not shape.free and job.memory_gib is None and job.device == "cpu":
            return Settled(shape.config, [])
        prompts = self.prepared.prompts.within(self.prepared.room(shape.config))
        requests = sample(job, self.plan, prompts) if shape.free else []
        try:
            settled: Settled = on_a_device(job, settle, job, shape, requests, job.device)
        except ValueError as error:
            raise JobError(str(error)) from error
        except (RayError, torch.OutOfMemoryError) as error:
            raise JobError(f"the shape could not be measured: {_last_line(error)}; set memory_gib") from error
        print(f"shape: {settled}")
        return settled

    def _decode(self, tasks: Iterator[Task], again: Counter[str], config: EngineConfig, report: Report) -> str | None:
        """Run the tasks and commit what they give; returns why it was stopped early, if it was."""
        job, schema, writer = self.job, self.prepared.schema, self.writer
        carried = pa.schema([schema.field(name) for name in carried_columns(job, schema)])
        sink = PartSink(self.folder, str(writer.state.job), writer.prefix, carried, job.answer_columns(), job.id_column)
        make = self.load or PairLoader(job, config, job.device)
        found = results(job, config.slots, self.prepared.room(config), tasks, schema, sink, make)
        with Progress(self.plan.rows, writer.state.rows, self.quiet) as progress:
            try:
                for _ in collect(job, found, report, Collector(writer, again)):
                    progress.show(report)
            except RayError as error:
                raise BrokenOffError(f"the job broke off, run it again to resume: {_last_line(error)}") from error
            except StopError as error:
                return str(error)
        return None

    def _finish(self, report: Report, stopped: str | None) -> int:
        """Check that every planned row is in a file, write the report, and `_SUCCESS` where all is well."""
        state = self.writer.state
        report.set_aside += [f"{name}: {why}" for name, why in changed(self._read(), self.job.storage_options).items()]
        if stopped:
            report.set_aside.append(stopped)
        report.complete(state, self.job.evaluate(partial(tables, self.writer)))
        figures = report.figures()
        for line in report.closing_lines(figures, anonymous(self.folder.url)):
            print(line)
        whole = state.complete and not report.set_aside and not _too_many(figures, self.job)
        try:
            write_report(report, figures, self.folder)
            if whole and state.done is None:
                self.writer.finish()
        except OSError as error:  # what was generated is safe in its files
            print(f"output {self.folder.url}: the report cannot be written: {error}")
            return 1
        return int(not whole)

    def _read(self) -> list[Shard]:
        """The shards that this run may have read: all but those that were done before and need not be there."""
        return [shard for shard in self.plan.shards if shard.name not in self.prepared.settled]


def _last_line(error: Exception) -> str:
    """What an error of a worker says, below the traceback that Ray puts into its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def _too_many(figures: dict[str, Any], job: Job) -> bool:
    """Whether so many rows have an error that the job is none."""
    share = 1 - 1e-9 if job.max_error_share is None else job.max_error_share
    return bool(figures["errors"] > share * figures["rows"])
