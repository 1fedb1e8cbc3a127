"""A job from its settings to `_SUCCESS`: prepare, run what is missing, check, report."""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import pyarrow as pa
import torch
from ray.exceptions import RayError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from exspec.actors.answers import AnswerError
from exspec.actors.engine.cached_model import context_length
from exspec.actors.engine.memory import fit
from exspec.actors.models import ModelError, check_config, check_vocabularies, load_part
from exspec.pipeline.compact import repair, split
from exspec.pipeline.contents import Contents
from exspec.pipeline.errors import BrokenOffError, JobError
from exspec.pipeline.graph import PairLoader, check_cluster, connect, device, on_a_device, summaries
from exspec.pipeline.job import Job, fingerprint
from exspec.pipeline.output import JOB, PLAN, SUCCESS, read_job
from exspec.pipeline.parts import PartSink, carried_columns
from exspec.pipeline.plan import Chunk, Plan, encode_schema
from exspec.pipeline.progress import Progress
from exspec.pipeline.prompts import Prompts, prompt_column
from exspec.pipeline.report import Report, write_report
from exspec.pipeline.shape import LONGEST, Settled, Shape, sample, settle, shape_of, stored_shape
from exspec.pipeline.shards import Since, find_shards
from exspec.pipeline.storage import Folder
from exspec.pipeline.weights import local_model, model_digest

COLUMNS = ("id_column", "max_new_tokens_column", "temperature_column", "seed_column", "stop_column")
PROBE = 1 << 20  # bytes that an output must have room for
T = TypeVar("T")


@dataclass
class Prepared:
    """A job that may start: everything about it has been checked."""

    job: Job
    folder: Folder
    schema: pa.Schema
    plan: Plan
    contents: Contents
    shape: Shape
    prompts: Prompts
    fingerprint: dict[str, Any]
    models: "Models"
    calibration: list[dict[str, Any]]

    @property
    def missing(self) -> list[Chunk]:
        return [chunk for chunk in self.plan.chunks() if chunk not in self.contents]


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
    names = check(lambda: _output_names(folder))
    models = check(lambda: _check_models(job))
    contents = check(lambda: Contents(folder, names or set()))
    written = check(lambda: read_job(folder)) if names and JOB in names and not restart else None
    earlier = written[1] if written else None
    settled = earlier.settled(contents.__contains__) if earlier and contents and job.since else set()
    since = Since(earlier, settled, job.newer_than) if job.since else None
    found = check(lambda: find_shards(job.input, job.storage_options, earlier, since))
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
    if problems or not (found and models and prompts and contents) or names is None or columns is None:
        raise JobError("; ".join(dict.fromkeys(problems)))

    keys = fingerprint(job, models.digests)
    if restart and JOB in names:
        _move_aside(folder)
        names, contents = set(), Contents(folder, set())
    plan = Plan(found[0], job.rows_per_chunk, job.limit, encode_schema(found[1]))
    before: dict[str, Any] = {}
    if written:
        before, stored = written
        _refuse_other(folder, before["fingerprint"], keys)
        plan = replace(stored, schema=plan.schema).extended(found[0], settled)
    elif parts := sorted(n for n in names if n.endswith(".parquet")):
        raise JobError(
            f"output {folder.url}: holds {parts[0]} but no {JOB}; expected an empty folder or that of this job"
        )
    shape = shape_of(job, models.context, plan.rows, before.get("shape"))
    calibration = before.get("calibration", [])
    return Prepared(job, folder, found[1], plan, contents, shape, prompts, keys, models, calibration)


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
            config = load_part(AutoConfig, place, revision)
            tokenizers.append(load_part(AutoTokenizer, place, revision))
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


def _output_names(folder: Folder) -> set[str]:
    """The files in the output folder, which must be one that can be written."""
    try:
        names = folder.names()
        probe = f"_probe-{time.time_ns()}"
        folder.write(probe, bytes(PROBE), replace=False)  # as parts are written
        folder.remove(probe)
    except JobError:
        raise
    except Exception as error:  # an unreachable or refusing store has many names
        raise JobError(f"output {folder.url}: cannot be written: {type(error).__name__}: {error}") from error
    return names


def _refuse_overlap(job: Job, folder: Folder) -> None:
    """Parts inside the input would be the next run's shards, and --restart would move an input inside the output."""
    own = f"{folder.path}/"
    for url in job.input:
        path = f"{Folder(url, job.storage_options).path}/"
        if own.startswith(path) or path.startswith(own):
            raise JobError(f"output {folder.url}: overlaps the input {url}; expected a folder of its own")


def _refuse_other(folder: Folder, before: dict[str, Any], keys: dict[str, Any]) -> None:
    """Raises JobError where the output's fingerprint is that of another job."""
    differing = [k for k in sorted(before | keys) if before.get(k) != keys.get(k)]
    if differing:
        changes = ", ".join(f"{k} was {before.get(k)!r} and is {keys.get(k)!r}" for k in differing)
        raise JobError(
            f"output {folder.url}: holds a job with other settings: {changes}; use another output or --restart"
        )


def _move_aside(folder: Folder) -> str:
    aside = f"{folder.path}-before-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.fs.mv(folder.path, aside, recursive=True)
    folder.fs.invalidate_cache()
    return aside


def execute(prepared: Prepared, retry_errors: bool = False, load: Any = None, quiet: bool = False) -> int:
    """Run what is missing, or the rows that failed, and finish the job. Returns the exit code.

    load: gives engine and tokenizer in an actor; default: the job's pair.
    """
    job, folder, plan = prepared.job, prepared.folder, prepared.plan
    chunks, again = prepared.missing, []
    if retry_errors and job.since:
        raise JobError(
            "since: leaves out shards that are done, and --retry-errors reads them again; give one of the two"
        )
    if retry_errors:
        present = [c for c in plan.chunks() if c in prepared.contents]
        again = [c for c, s in zip(present, prepared.contents.summaries(present), strict=True) if s.errors]
        chunks += again
    if not chunks and folder.exists(SUCCESS):
        print(f"nothing to do: all {plan.rows} rows are in {folder.url}")
        return 0
    folder.remove(SUCCESS)
    contents = repair(folder, discard=retry_errors)
    split(folder, contents, {c.part for c in again})  # a part of its own can be replaced
    connect(job)
    where = device(job)
    # Decided once: a node with a GPU that joins later must not change what actors ask for.
    job = job.model_copy(update={"device": where})
    check_cluster(job)
    settled = _settled(replace(prepared, job=job), where) if load is None else Settled(prepared.shape.config, [])
    description = {
        "kind": job.kind,
        "job": job.published(),
        "fingerprint": prepared.fingerprint,
        "shape": stored_shape(settled.config),
        "calibration": settled.candidates or prepared.calibration,
        "device": where,
        "versions": {n: version(n) for n in ("exspec", "torch", "transformers", "ray", "pyarrow")}
        | {"python": platform.python_version()},
    }
    # The plan first: an output with a job but no plan could not be resumed.
    folder.write(PLAN, plan.to_json())
    folder.write(JOB, json.dumps(description, indent=1).encode())

    carried = pa.schema([prepared.schema.field(name) for name in carried_columns(job, prepared.schema)])
    sink = PartSink(folder, carried, job.answer_columns(), job.id_column, retry_errors)
    report = Report(description, plan.rows)
    finished = sum(c.rows for c in plan.chunks()) - sum(c.rows for c in chunks)
    with Progress(plan.rows, finished, quiet) as progress:
        make = load or PairLoader(job, settled.config, where)
        run = summaries(job, settled.config.slots, chunks, prepared.schema, sink, make)
        try:
            for summary in run if chunks else ():
                report.fold(summary)
                progress.show(report)
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            broken = f"the job broke off, run it again to resume: {type(error).__name__}: {reason}"
            raise BrokenOffError(broken) from error
    return finish(prepared, report)


def _settled(prepared: Prepared, where: str) -> Settled:
    """The shape to decode in, which a device has to tell where it is to be measured or memory may be short."""
    job, shape = prepared.job, prepared.shape
    if not shape.free and job.memory_gib is None and where == "cpu":
        return Settled(shape.config, [])
    requests = sample(job, prepared.plan, prepared.prompts) if shape.free else []
    try:
        settled: Settled = on_a_device(job, settle, job, shape, requests, where)
    except ValueError as error:
        raise JobError(str(error)) from error
    except (RayError, torch.OutOfMemoryError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise JobError(f"the shape could not be measured: {type(error).__name__}: {reason}; set memory_gib") from error
    print(f"shape: {settled}")
    return settled


def finish(prepared: Prepared, report: Report) -> int:
    """Check that every planned row is in a part, write the report, and `_SUCCESS` where all are."""
    folder, chunks = prepared.folder, list(prepared.plan.chunks())
    contents = repair(folder)
    present = [c for c in chunks if c in contents]
    missing = [c for c in chunks if c not in contents]
    parts = contents.summaries(present)
    wrong = [c for c, s in zip(present, parts, strict=True) if s.rows != c.rows]
    report.complete(parts, [str(c) for c in (*missing, *wrong)], prepared.job.evaluate(contents.columns(present)))
    figures = report.figures()
    for line in report.closing_lines(figures, folder.url):
        print(line)
    try:
        write_report(report, figures, folder)
        if not (missing or wrong):
            folder.write(SUCCESS, b"")
            return 0
    except OSError as error:  # what was generated is safe in its parts
        print(f"output {folder.url}: the report cannot be written: {error}")
    return 1
