"""`exspec audit`: a sample of a finished job, decoded again by plain decoding, and compared.

In the job's own shape plain decoding must give the same tokens: anything else is a fault. In float32 the tokens of
greedy rows are compared with `generate` of transformers too, one prompt at a time; there a model that the job ran in
bfloat16 may differ by rounding, and the audit tells by how little.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from exspec.actors.answers.answers import AnswerError, Answers
from exspec.actors.engine import (
    Completion,
    Engine,
    EngineConfig,
    Request,
    RequestError,
    Room,
    Sampling,
    SequenceStatistics,
)
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.memory import MEBIBYTE
from exspec.actors.engine.shape.plan import fit
from exspec.actors.engine.tokens.constraint import tokens_of
from exspec.actors.generator import KILLER
from exspec.actors.models import Pair, forget_sampling
from exspec.actors.stop_strings import StopStrings, completion_text
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, decode_schema
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.requests import mapped, requests
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.input.snapshot import vanished
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Dtype, Job
from exspec.pipeline.output.contents import read_range
from exspec.pipeline.output.owner import AUDIT, Output, read_output
from exspec.pipeline.output.report import rewrite
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import known_shape, memory_budget, pair_of
from exspec.pipeline.storage import Folder


@dataclass(frozen=True)
class Row:
    """A row of the sample: what the job wrote, with the values it read out of the text, and what it was asked."""

    shard: str
    number: int
    id: str
    completion: str | None
    tokens: int | None
    values: dict[str, Any]
    request: Request | None


@dataclass(frozen=True)
class Difference:
    """Where a row parts from the reference: at its token `token`, whose logit leads the next best by `margin`."""

    shard: str
    row: int
    id: str
    stored: str | None
    expected: str | None
    token: int
    margin: float | None


@dataclass(frozen=True)
class Comparison:
    """against: the reference. equal of rows have its text, and its number of tokens."""

    against: str
    rows: int
    equal: int
    differences: list[Difference]


def audit(
    output: str,
    options: dict[str, Any],
    count: int,
    share: float | None,
    seed: int,
    generate: bool,
    permissions: dict[str, bool],
) -> int:
    """Audit a job; returns the exit code: 1 where plain decoding in the job's shape gives anything else.

    permissions: whether code and pickles of the model may run; what somebody else's job allowed does not count here.
    """
    folder = Folder(output, options)
    done = read_output(folder)
    description, plan = done.state.description, done.state.plan
    job = stored_job(description, options).model_copy(update=permissions)
    check_map(job, output)
    if not done.state.complete:
        print(f"{done.state.rows} of {plan.rows} rows are done: the sample is of those")
    device = str(description["device"])
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError(f"{output}: the job ran on cuda, and its shapes can only be compared there; no GPU is at hand")
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    progress = Progress(quiet=False)
    progress.stage("loading the target")
    pair = pair_of(job, device, draft=False)
    gone = vanished(plan.shards, options)
    if gone:
        print(f"{len(gone)} of {len(plan.shards)} shards are no longer in the input and are left out: {min(gone)}, ...")
    rows = list(read_rows(job, done, pair, choose(done, count, share, seed, gone)))
    progress.stage(f"decoding {len(rows)} rows again")
    shaped = _fitted(
        EngineConfig(**known_shape(description["shape"])).plain(), pair, memory_budget(job, torch.device(device))
    )
    answers = job.answers(pair.tokenizer)
    found = [compare("plain decoding in the job's shape", rows, decode(pair.target, shaped, rows), pair, answers)]
    if generate:
        greedy = [r for r in rows if r.request is None or _is_greedy(r.request)]
        progress.stage(f"decoding {len(greedy)} rows with generate of transformers, one at a time")
        model = pair_of(job.model_copy(update={"dtype": Dtype.float32}), device, draft=False).target
        forget_sampling(model)
        expected = {(r.shard, r.number): _generate(model, r.request) for r in greedy if r.request is not None}
        found.append(
            compare("generate of transformers in float32", greedy, expected, replace(pair, target=model), answers)
        )
    progress.stop()
    report = {"sample": len(rows), "seed": seed, "comparisons": [asdict(c) for c in found]}
    folder.write(AUDIT, json.dumps(report, indent=1).encode())
    rewrite(done)
    _show(found, folder)
    return int(found[0].equal < found[0].rows)


def check_map(job: Job, output: str) -> None:
    """Raises JobError where rows of the job are made by code of its own that may not run here."""
    if job.map and not job.trust_remote_code:
        raise JobError(f"{output}: the job ran code of its own, map {job.map.name}; --trust-remote-code runs it here")


@dataclass(frozen=True)
class Sample:
    """Rows of a finished chunk, by their numbers in it, and where they lie: in a file, from row `start` on."""

    chunk: Chunk
    file: str
    start: int
    numbers: list[int]


def _fitted(shape: EngineConfig, pair: Pair, budget: int) -> EngineConfig:
    """The job's shape with the pages that this machine has memory for. Raises JobError where it holds no such batch."""
    try:
        found = fit(pair.target.config, None, shape, pair.target.dtype, budget)
    except ValueError as error:
        raise JobError(str(error)) from error
    if found.batch_size < shape.batch_size:
        raise JobError(
            f"memory: {budget / MEBIBYTE:.0f} MiB are too few for the batch of {shape.batch_size} that the job ran in"
        )
    return found


def choose(
    output: Output, count: int, share: float | None, seed: int, gone: Set[str] = frozenset()
) -> Iterator[Sample]:
    """Rows of finished chunks: of every shard its share of `count`, or `share` of its rows, but one at least.

    gone: shards that cannot be read any more.
    """
    rows: Counter[str] = Counter()
    for chunk, _, _ in output.state.chunks():
        rows[chunk.shard.name] += chunk.rows * (chunk.shard.name not in gone)
    if not (total := rows.total()):
        raise JobError(f"{output.folder.url}: holds no finished rows whose shard is there")
    part = share if share is not None else min(1.0, count / total)
    for name, found in groupby(output.state.chunks(), key=lambda held: held[0].shard.name):
        if rows[name]:
            taken = random.Random(f"{seed} {name}").sample(range(rows[name]), max(1, round(part * rows[name])))
            yield from _samples(found, sorted(taken))


def _samples(chunks: Iterable[tuple[Chunk, str, int]], taken: list[int]) -> Iterator[Sample]:
    """The taken ones of the rows of some chunks, counted through all of them."""
    first = 0
    for chunk, file, start in chunks:
        numbers = [n - first for n in taken if first <= n < first + chunk.rows]
        first += chunk.rows
        if numbers:
            yield Sample(chunk, file, start, numbers)


def read_rows(job: Job, output: Output, pair: Pair, samples: Iterable[Sample]) -> Iterator[Row]:
    """What the job wrote in the rows of samples, and what it was asked."""
    schema = decode_schema(output.state.plan.schema)
    room = Room(context_length(pair.target.config), output.state.description["shape"]["capacity"])
    prompts = Prompts(job, pair.tokenizer, mapped(job, schema)).within(room)
    columns = ["id", "completion", "completion_tokens", "error", *job.value_columns]
    for sample in samples:
        chunk, place = sample.chunk, output.place(sample.file)
        found = read_range(output.folder, place, sample.start, chunk.rows, columns)
        stored = [row for table in found for row in table.to_pylist()]
        for asked in requests(chunk, job, prompts, schema, sample.numbers):
            out = stored[asked.number - chunk.first]
            if out["error"] == KILLER:
                continue  # it would end this process too
            values = {name: out[name] for name in job.value_columns}
            yield Row(
                chunk.shard.name,
                asked.number,
                out["id"],
                out["completion"],
                out["completion_tokens"],
                values,
                None if isinstance(asked.request, RowError) else asked.request,
            )


def decode(target: PreTrainedModel, config: EngineConfig, rows: list[Row]) -> dict[tuple[str, int], Completion]:
    """Completions by shard and row number; a row that the engine refuses has none."""
    engine = Engine(target, None, config)
    for row in rows:
        if row.request is not None:
            try:
                engine.submit(row.request)
            except RequestError:
                continue  # compare() expects an error row
    return {(str(c.id[0]), int(c.id[1])): c for c in engine.run()}  # type: ignore[index]


def compare(
    against: str, rows: list[Row], expected: dict[tuple[str, int], Completion], pair: Pair, answers: Answers
) -> Comparison:
    """The rows against their reference; one without a reference must be an error row, and one with it must not."""
    differences = []
    for row in rows:
        completion = expected.get((row.shard, row.number))
        text, values = None, row.values
        if completion is not None:
            assert row.request is not None
            assert row.request.stop is None or isinstance(row.request.stop, StopStrings)
            text = completion_text(pair.tokenizer, completion, row.request.stop)
            try:
                values = answers.read(completion, text)
            except AnswerError:
                completion = text = None
        count = None if completion is None else len(completion.tokens)
        if (text, count) != (row.completion, row.tokens):
            place, margin = (0, None) if completion is None else _first_other(pair, row, completion, text or "")
            differences.append(Difference(row.shard, row.number, row.id, row.completion, text, place, margin))
        elif wrong := [name for name in row.values if row.values[name] != values[name]]:
            stored, read = (json.dumps({name: v[name] for name in wrong}) for v in (row.values, values))
            differences.append(Difference(row.shard, row.number, row.id, stored, read, 0, None))
    return Comparison(against, len(rows), len(rows) - len(differences), differences)


@torch.inference_mode()
def _first_other(pair: Pair, row: Row, completion: Completion, text: str) -> tuple[int, float | None]:
    """The reference's first token whose text is not in what was stored, and its logit's lead over the next best."""
    stored, place = row.completion or "", 0
    while place < len(completion.tokens) - 1:
        begun = str(pair.tokenizer.decode(completion.tokens[: place + 1], skip_special_tokens=True))
        if not stored.startswith(begun[: len(text)].rstrip("\ufffd")):
            break
        place += 1
    assert row.request is not None
    ids = torch.tensor([[*row.request.prompt, *completion.tokens[:place]]], device=pair.target.device)
    logits = pair.target(input_ids=ids).logits[0, -1].float()
    if row.request.constraint:
        walk = row.request.constraint()
        for token in completion.tokens[:place]:
            walk.advance(token)
        logits = logits[tokens_of(walk.allowed())]
    best = logits.topk(min(2, len(logits))).values
    return place, float(best[0] - best[1]) if len(best) > 1 else None


def _is_greedy(request: Request) -> bool:
    """Whether it asks for nothing but the likeliest tokens, as `_generate` takes them."""
    sampling = Sampling(seed=request.sampling.seed, top_k=request.sampling.top_k, top_p=request.sampling.top_p,
                        min_p=request.sampling.min_p)  # fmt: skip
    free = not (request.min_new_tokens or request.ignore_end or request.bad_words)
    return free and request.sampling == sampling


def _generate(model: PreTrainedModel, request: Request) -> Completion:
    """transformers' completion of one prompt, ended as the engine ends it."""
    ids = torch.tensor([list(request.prompt)], device=model.device)
    ends = model_end_ids(model) | request.end_ids
    constraint = request.constraint

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        assert constraint is not None
        walk = constraint()
        for token in tokens[len(request.prompt) :].tolist():
            walk.advance(token)
        return tokens_of(walk.allowed())

    output = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=request.max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0
        ),
        prefix_allowed_tokens_fn=allowed if constraint else None,
    )
    tokens: list[int] = output[0, len(request.prompt) :].tolist()
    check = request.stop() if request.stop else None
    for place in range(len(tokens)):
        stopped = check(tokens[place]) if check else None
        if tokens[place] in ends or stopped is not None:
            by = tokens[place] if tokens[place] in ends else stopped
            return Completion(request.id, tokens[: place + 1], "stop", by, SequenceStatistics())
    return Completion(request.id, tokens, "length", None, SequenceStatistics())


def _show(found: list[Comparison], folder: Folder) -> None:
    console = Console()
    table = Table(title=f"audit of {anonymous(folder.url)}")
    for heading in ("against", "rows", "equal"):
        table.add_column(heading)
    for c in found:
        table.add_row(c.against, str(c.rows), f"{c.equal} ({c.equal / c.rows:.1%})" if c.rows else "-")
    console.print(table)
    for c in found:
        for d in c.differences[:3]:
            lead = "" if d.margin is None else f", where its logit leads by {d.margin:.2g}"
            place = f"{d.shard}, row {d.row} (id {d.id}): differs from {c.against} at token {d.token}{lead}"
            for line in (place, f"  stored:   {d.stored!r}", f"  expected: {d.expected!r}"):
                console.print(line, markup=False, highlight=False)
