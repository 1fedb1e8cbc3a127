"""`exspec audit`: decodes a sample of a finished job again by plain decoding, and compares the completions.

In the job's own shape plain decoding must give the same tokens; a difference is a bug. Greedy rows are also compared
with `generate` of transformers in float32, one prompt at a time. There a job that ran in bfloat16 may differ by
rounding, and the audit reports by how much.
"""

import json
import math
from collections import defaultdict
from collections.abc import Set
from dataclasses import asdict, replace
from itertools import chain
from posixpath import commonpath, dirname
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from exspec.actors.engine import Completion, EngineConfig
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.models import Pair, forget_sampling
from exspec.actors.samples import SAMPLES, RowResult, Texts, read, sample_requests
from exspec.jobs.commands.reference import decode, fitted, generated, is_greedy, margin, mean_logprob, pooled
from exspec.jobs.finished import FinishedRow, check_map, choose, read_rows
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.snapshot import vanished
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Dtype, Job
from exspec.pipeline.output.owner import AUDIT, Output, read_output
from exspec.pipeline.output.report import Audit, Comparison, Difference, rewrite
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import known_shape, memory_budget, pair_of
from exspec.pipeline.storage import Folder

Expected = dict[tuple[str, int], RowResult]  # by shard and row number
# Between mean log-probabilities: the largest difference that rounding explains.
CLOSE = {Dtype.float32: 1e-3, Dtype.bfloat16: 0.05, Dtype.float16: 0.01}
SHOWN = 3  # differences that are printed per comparison


def audit(
    output: str,
    options: dict[str, Any],
    count: int,
    share: float | None,
    seed: int,
    generate: bool,
    permissions: dict[str, bool],
) -> int:
    """Audit a job. Returns 1 if plain decoding in the job's shape differs, else 0.

    permissions: whether the model's code and pickles may run. The permissions that the job itself had are ignored.
    """
    folder = Folder(output, options)
    done = read_output(folder)
    job = stored_job(done.state.description, options).model_copy(update=permissions)
    check_map(job, output)
    device = str(done.state.description["device"])
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError(f"{output}: the job ran on cuda, so the audit needs a GPU; this machine has none")
    missing = _missing_shards(done)
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    with Progress(quiet=False) as progress:
        progress.stage("loading the target")
        pair = pair_of(job, device, draft=False)
        rows = list(read_rows(job, done, pair, choose(done, count, share, seed, missing)))
        progress.stage(f"decoding {counted(len(rows), 'row')} again")
        comparisons = [_against_plain(rows, job, done, pair, device)]
        if generate and job.reads:
            progress.stage(f"computing {counted(len(rows), 'row')} with transformers")
            comparisons.append((_embedded if job.embeds else _against_forward)(rows, job, device))
        elif generate:
            greedy = [row for row in rows if row.request is None or is_greedy(row.request)]
            progress.stage(f"decoding {counted(len(greedy), 'row')} with generate of transformers, one at a time")
            comparisons.append(_against_generate(greedy, job, pair, device))
    folder.write(AUDIT, json.dumps(asdict(Audit(len(rows), seed, comparisons)), indent=1).encode())
    rewrite(done)
    _show(comparisons, folder)
    return int(comparisons[0].equal < comparisons[0].rows)


def _missing_shards(done: Output) -> Set[str]:
    """Names of planned shards that are no longer in the input. Prints a note on them and on rows that are not done.

    First it prints what the audit reads: the log names it, and anybody may have written the log.
    """
    state = done.state
    job, shards = state.description["job"], counted(len(state.plan.shards), "shard")
    print(f"reading {shards} below {', '.join(_places(state.plan.shards))}; target: {job['target']}")
    if not state.complete:
        print(f"{state.rows} of {state.plan.rows} rows are done; the sample is taken from these")
    missing = vanished(state.plan.shards, done.folder.options)
    if missing:
        print(
            f"{len(missing)} of {len(state.plan.shards)} shards are no longer in the input and are skipped: "
            f"{min(missing)}, ..."
        )
    return missing


def _places(shards: list[Shard]) -> list[str]:
    """The folder above all shards, for every file system."""
    folders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for shard in shards:
        scheme, _, path = anonymous(shard.url).rpartition("://")
        folders[scheme, path.split("/")[0]].append(dirname(path))
    return [f"{scheme}://{commonpath(below)}" for (scheme, _), below in folders.items()]


def _against_plain(rows: list[FinishedRow], job: Job, done: Output, pair: Pair, device: str) -> Comparison:
    shape = EngineConfig(**known_shape(done.state.description["shape"])).plain()
    config = fitted(shape, pair, memory_budget(job, torch.device(device)))
    answers, texts = job.answers(pair.tokenizer, model_end_ids(pair.target)), Texts(pair.tokenizer)
    samples = {row.key: sample_requests(row.request, row.count) for row in rows if row.request is not None}
    asked = {row.key: [answers.requests(s, row.given) for s in samples.get(row.key, [])] for row in rows}
    decoded = decode(pair.target, config, chain(*chain(*asked.values())))
    expected: Expected = {}
    for key, each in samples.items():
        if all(request.id in decoded for request in chain(*asked[key])):
            made = [[decoded[request.id] for request in requests] for requests in asked[key]]
            found = [read(answers, texts, *one) for one in zip(each, made, strict=True)]
            expected[key] = job.draws.joined(each, found)
    return _compare("plain decoding in the job's shape", rows, expected, pair)


def _against_generate(rows: list[FinishedRow], job: Job, pair: Pair, device: str) -> Comparison:
    model = pair_of(job.model_copy(update={"dtype": Dtype.float32}), device, draft=False).target
    forget_sampling(model)
    answers, texts = job.answers(pair.tokenizer, model_end_ids(model)), Texts(pair.tokenizer)
    expected: Expected = {}
    for row in rows:
        if row.request is not None:
            (request,) = answers.requests(row.request, row.given)
            expected[row.key] = read(answers, texts, row.request, [generated(model, request)])
    return _compare("generate of transformers in float32", rows, expected, replace(pair, target=model))


def _against_forward(rows: list[FinishedRow], job: Job, device: str) -> Comparison:
    """Mean log-probabilities of chosen completions, which rounding alone may change."""
    model, differences = pair_of(job.model_copy(update={"dtype": Dtype.float32}), device, draft=False).target, []
    scored = [row for row in rows if row.completion is not None]
    for row in scored:
        if row.request is None or row.given is None:
            expected = None
        else:
            expected = mean_logprob(model, row.request, row.given[row.values.get("choice", 0)])
        if expected is None or abs(row.values["mean_logprob"] - expected) > CLOSE[job.dtype]:
            given = str(row.values["mean_logprob"]), None if expected is None else str(expected)
            differences.append(Difference(row.shard, row.number, row.id, *given, 0, None))
    equal = len(scored) - len(differences)
    return Comparison("a forward of transformers in float32", len(scored), equal, differences)


def _embedded(rows: list[FinishedRow], job: Job, device: str) -> Comparison:
    """Embeddings, which rounding alone may change: by how much, relative to their lengths."""
    pair, differences = pair_of(job.model_copy(update={"dtype": Dtype.float32}), device, draft=False), []
    answers, embedded = job.answers(pair.tokenizer), [row for row in rows if row.completion is not None]
    for row in embedded:
        expected = None
        if row.request is not None:
            (asked,) = answers.requests(row.request, row.given)
            expected = answers.joined(row.request, [pooled(pair.target, asked)])[1]["embedding"]
        if expected is None or math.dist(row.values["embedding"], expected) > CLOSE[job.dtype] * math.hypot(*expected):
            shown = str(row.values["embedding"]), None if expected is None else str(expected)
            differences.append(Difference(row.shard, row.number, row.id, *shown, 0, None))
    equal = len(embedded) - len(differences)
    return Comparison("a forward of transformers in float32", len(embedded), equal, differences)


def _compare(against: str, rows: list[FinishedRow], expected: Expected, pair: Pair) -> Comparison:
    found = [_difference(row, expected.get(row.key), pair) for row in rows]
    differences = [difference for difference in found if difference is not None]
    return Comparison(against, len(rows), len(rows) - len(differences), differences)


def _difference(row: FinishedRow, expected: RowResult | None, pair: Pair) -> Difference | None:
    """How a row differs from its reference, if it does. A row without a reference must be an error row."""
    made = expected.completion if expected else None
    if expected is None or made is None:
        if row.completion is None:
            return None
        return Difference(row.shard, row.number, row.id, row.completion, None, 0, None)
    if (expected.text, made.statistics.completion_tokens) != (row.completion, row.tokens):
        thinks = "thinking" in expected.values  # its tokens are not among those of the completion
        token, lead = (0, None) if thinks else _first_difference(pair, row, made, expected.text or "")
        return Difference(row.shard, row.number, row.id, row.completion, expected.text, token, lead)
    stored, again = dict(row.values), {name: expected.values[name] for name in row.values}
    if row.samples is not None and SAMPLES in expected.values:
        stored[SAMPLES] = row.samples
        again[SAMPLES] = [sample.get("completion") for sample in expected.values[SAMPLES]]
    wrong = [name for name in stored if stored[name] != again[name]]
    if not wrong:
        return None
    shown = [json.dumps({name: given[name] for name in wrong}) for given in (stored, again)]
    return Difference(row.shard, row.number, row.id, shown[0], shown[1], 0, None)


def _first_difference(pair: Pair, row: FinishedRow, expected: Completion, text: str) -> tuple[int, float | None]:
    """Index of the reference's first token whose text is not in the stored completion, and its margin."""
    assert row.request is not None
    stored, token = row.completion or "", 0
    while token < len(expected.tokens) - 1:
        begun = str(pair.tokenizer.decode(expected.tokens[: token + 1], skip_special_tokens=True))
        if not stored.startswith(begun[: len(text)].rstrip("\ufffd")):
            break
        token += 1
    return token, margin(pair.target, row.request, expected.tokens[:token])


def _show(comparisons: list[Comparison], folder: Folder) -> None:
    console = Console()
    table = Table(title=f"audit of {anonymous(folder.url)}")
    for heading in ("against", "rows", "equal"):
        table.add_column(heading)
    for c in comparisons:
        table.add_row(c.against, str(c.rows), f"{c.equal} ({c.equal / c.rows:.1%})" if c.rows else "-")
    console.print(table)
    for c in comparisons:
        for d in c.differences[:SHOWN]:
            lead = "" if d.margin is None else f", where its logit leads by {d.margin:.2g}"
            where = f"{d.shard}, row {d.row} (id {d.id}): differs from {c.against} at token {d.token}{lead}"
            for line in (where, f"  stored:   {d.stored!r}", f"  expected: {d.expected!r}"):
                console.print(line, markup=False, highlight=False)
