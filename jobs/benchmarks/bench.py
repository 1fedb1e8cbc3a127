"""`exspec bench`: the engine's methods beside transformers' own, on the same prompts, in one run.

The methods run in turns. A ratio is the median of the ratios within each turn, so that a machine that slows down does
not favour a method. Tokens are counted up to the end token, which counts too, for every method.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.drafters.lookup import available, kind, label
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.layers import programs
from exspec.actors.engine.methods import resolve
from exspec.actors.engine.shape.calibration import Calibration, calibrate
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.trials import Trials
from exspec.actors.exactness import transformers_generate
from exspec.actors.hardware import describe_hardware, hardware
from exspec.actors.models import Pair, forget_sampling, load_draft, load_model, load_pair
from exspec.actors.source import Source
from exspec.jobs.benchmarks.decoding import Run, check_device, decode, timed
from exspec.jobs.benchmarks.settings import RIVALS, SHAPE, VARIANT, BenchSettings
from exspec.jobs.demo import DRAFT, TARGET
from exspec.jobs.demo.messages import examples
from exspec.pipeline.errors import counted

if TYPE_CHECKING:
    from exspec.pipeline.progress import Progress

# The rest is the same for all methods.
CHOSEN_BY_AUTO = ("method", "drafter", "window", "draft_tokens", "draft_from", "bucket")
DEMO_SEED = 5  # messages that neither training nor its evaluation saw


class Bench:
    """Runs methods on one list of prompts with one pair. others: drafts for the drafters that cannot use the pair's.

    kept: measurements of earlier runs. base: the shape of decoding that all methods share, but for what a method's name
    changes.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: list[list[int]],
        settings: BenchSettings,
        others: Sequence[PreTrainedModel] = (),
        kept: Kept | None = None,
    ) -> None:
        self.pair, self.prompts, self.settings = pair, prompts, settings
        self.device = pair.target.device
        self.drafts = [draft for draft in (pair.draft, *others) if draft is not None]
        self.end_ids = model_end_ids(pair.target)
        for model in (pair.target, *self.drafts):
            if isinstance(model, GenerationMixin):
                forget_sampling(model)
        capacity = max(map(len, prompts)) + settings.max_new_tokens
        drafter = settings.drafter
        if drafter == "auto":
            drafter = available(
                pair.target.config, pair.draft.config if pair.draft else None, EngineConfig(capacity=capacity)
            )[0]
        self.usual = "plain" if drafter == NONE else "exspec"
        shape = {"batch_size": EngineConfig.batch_size, "window": EngineConfig.window, **settings.shape}
        shape["window"] = max(shape["batch_size"], shape["window"])
        kernels: Any = "eager" if settings.kernels == "auto" else settings.kernels
        self.base = EngineConfig(method="plain", drafter=drafter, capacity=capacity, kernels=kernels, **shape)
        self.kept = kept
        self.calibration: Calibration | None = None
        self.engines: dict[EngineConfig, Engine] = {}

    @property
    def shape(self) -> dict[str, Any]:
        """The engine's settings that all methods share, by name."""
        return {name: getattr(self.base, name) for name in SHAPE}

    def config(self, method: str) -> EngineConfig:
        """The config of a method: `exspec@suffix+implicit:3` has that drafter, that draft length and K = 3."""
        if method == "auto":
            assert self.calibration is not None, "tune() comes before auto"
            return self.calibration.config
        changes: dict[str, Any] = {"method": method}
        if variant := VARIANT.fullmatch(method):
            name, drafter, draft_length, drafted = variant.groups()
            changes = {
                "method": name,
                "drafter": drafter or self.base.drafter,
                "draft_length": draft_length or self.base.draft_length,
                "draft_tokens": int(drafted or self.base.draft_tokens),
            }
        return replace(self.base, **changes)

    def draft_for(self, config: EngineConfig) -> PreTrainedModel | None:
        """The first draft that the config's drafter can use."""
        target = self.pair.target.config
        usable = (d for d in self.drafts if kind(config).refusal(target, d.config, config) is None)
        return next(usable, self.pair.draft)

    def requests(self, prompts: list[list[int]] | None = None) -> list[Request]:
        new = self.settings.max_new_tokens
        return [Request(i, p, max_new_tokens=new) for i, p in enumerate(prompts or self.prompts)]

    def choose_kernels_and_prefill(self) -> None:
        """Choose the fastest kernels and the fastest prefill for all methods, in at most `tune_seconds`."""
        asked, usual = self.settings.kernels, self.config(self.usual)
        if asked not in ("auto", resolve(self.pair.target, self.pair.draft, self.base).kernels):
            raise ValueError(f"--kernels: {asked} does not work here; expected auto, or eager")
        models = Models(self.pair.target, self.draft_for(usual))
        deadline = time.monotonic() + self.settings.tune_seconds
        trials = Trials(models, self.requests(), self.base.capacity, self.kept, deadline)
        found = trials.choose(usual, ("kernels", "prefill") if asked == "auto" else ("prefill",))
        if asked == "auto":
            found = trials.compiled(found)
        prefill: dict[str, Any] = {"prefill_rows": found.prefill_rows, "prefill_columns": found.prefill_columns}
        self.base = replace(self.base, kernels=found.kernels, **prefill)

    def tune(self) -> Calibration:
        """Choose the shape of `auto` on the bench's own prompts, with the kernels and the prefill of all methods."""
        fixed: set[str] = set()
        if self.settings.drafter != "auto":
            fixed = {"drafter", "method"} if self.base.drafter == NONE else {"drafter"}
        free = [name for name in CHOSEN_BY_AUTO if name not in fixed]
        config = self.config(self.usual)
        draft, seconds = self.draft_for(config), self.settings.tune_seconds
        self.calibration = calibrate(self.pair.target, draft, self.requests(), config, free, seconds, kept=self.kept)
        return self.calibration

    def run(self, method: str, count: int | None = None) -> Run:
        """Decode the prompts, or the first `count`, against the clock."""
        prompts = self.prompts[:count]
        if method not in RIVALS:
            return self.decode(self.config(method), prompts)
        generate = self.generate if method == "generate" else self.assisted
        return Run(*timed(lambda: generate(prompts), self.device))

    def decode(self, config: EngineConfig, prompts: list[list[int]]) -> Run:
        if config not in self.engines:
            self.engines[config] = Engine(self.pair.target, self.draft_for(config), config)
        engine = self.engines[config]
        engine.forget()  # the prompts' KV that an earlier run has cached
        return decode(engine, self.requests(prompts))

    def plain_in_shape_of(self, config: EngineConfig) -> list[list[int]]:
        """The tokens of plain decoding in the method's shape, with another order of admission."""
        order = list(range(len(self.prompts)))
        random.Random(0).shuffle(order)
        outcome = self.decode(config.plain(), [self.prompts[i] for i in order])
        by_prompt = dict(zip(order, outcome.tokens, strict=True))
        return [by_prompt[i] for i in range(len(order))]

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """transformers' batched `generate`: batches of B in the order given."""
        size = self.base.batch_size
        return [row for i in range(0, len(prompts), size) for row in self._generate(prompts[i : i + size])]

    def assisted(self, prompts: list[list[int]]) -> list[list[int]]:
        """transformers' assisted generation with the same K. It takes one prompt at a time."""
        assistant = {
            "num_assistant_tokens": self.base.draft_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        draft = self.pair.draft
        return [self._generate([prompt], settings=assistant, assistant_model=draft)[0] for prompt in prompts]

    def oracle(self, dtype: torch.dtype) -> list[list[int]]:
        """transformers' `generate` on one prompt at a time."""
        model: Any = self.pair.target
        if dtype != model.dtype:
            model = load_model(Source(model.name_or_path), dtype, model.device)
            forget_sampling(model)
        return [self._generate([prompt], model)[0] for prompt in self.prompts]

    def _generate(
        self, prompts: list[list[int]], model: PreTrainedModel | None = None, **options: Any
    ) -> list[list[int]]:
        new = self.settings.max_new_tokens
        return transformers_generate(model or self.pair.target, prompts, new, self.end_ids, **options)


def run(settings: BenchSettings, progress: "Progress") -> None:
    """Load the models, time the methods, compare their tokens, and print tables and one JSON object."""
    from rich.console import Console

    from exspec.jobs.commands.tables import bench_tables, candidates_table

    console = Console()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    check_device(settings.device)
    progress.stage("loading the models")
    bench = load(settings)
    progress.stage(f"choosing kernels and prefill, at most {settings.tune_seconds:.0f} s")
    bench.choose_kernels_and_prefill()
    if "auto" in settings.names:
        progress.stage(f"choosing the shape of auto, at most {settings.tune_seconds:.0f} s")
        found = bench.tune()
        console.print(candidates_table(found.table(), found.seconds))
        console.print(f"auto: {found.reason}", highlight=False)
    names, times = ", ".join(settings.names), counted(settings.repeats, "time")
    progress.stage(f"running {names} once to compile them, then {times} in turn")
    progress.stop()
    rows = time_and_compare(bench, console)
    for table in bench_tables(rows, _title(bench)):
        console.print(table)
    report = {
        "settings": asdict(settings) | bench.shape | {"prompts": settings.prompts and str(settings.prompts)},
        "hardware": describe_hardware(bench.device),
        "kernels": bench.base.kernels,
        "compiled": str(programs.CODE) if programs.CODE.kept else None,
        "prompts": len(bench.prompts),
        "methods": rows,
    }
    if report["compiled"]:
        console.print(report["compiled"], highlight=False)
    print(json.dumps(report))


def load(settings: BenchSettings) -> Bench:
    """The models, and those prompts that fit them. Raises ValueError if none fits."""
    from exspec.pipeline.weights import model_digest

    disable_progress_bar()
    set_verbosity_error()
    target, drafts = settings.target or str(TARGET), settings.draft if settings.target else (str(DRAFT),)
    pair = load_pair(target, drafts[0] if drafts else None, getattr(torch, settings.dtype), settings.device)
    others = [load_draft(pair, name, target) for name in drafts[1:]]
    if "assisted" in settings.names and pair.draft and not isinstance(pair.draft, GenerationMixin):
        raise ValueError("--methods: assisted needs a draft model, and --draft is a head; name the others")
    prompts = [pair.tokenizer(text)["input_ids"] for text in islice(_texts(settings, pair.tokenizer), settings.limit)]
    room = context_length(pair.target.config) - settings.max_new_tokens
    fitting = [p for p in prompts if 0 < len(p) <= room]
    if left := len(prompts) - len(fitting):
        print(f"{left} of {len(prompts)} prompts left out: empty, or longer than {room} tokens")
    if not fitting:
        raise ValueError(f"no prompt is left that fits the model's context with {settings.max_new_tokens} new tokens")
    names = {"target": target} | {f"draft {i}" if i else "draft": draft for i, draft in enumerate(drafts)}
    digests = {role: model_digest(name, None, {}) for role, name in names.items()}
    kept = Kept.of(digests, settings.dtype, hardware(pair.target.device), torch.get_num_threads())
    return Bench(pair, fitting, settings, others, kept)


def time_and_compare(bench: Bench, console: Any) -> list[dict[str, Any]]:
    """Run every method once to warm up, then in turns, behind a progress bar. Returns a row of figures per method."""
    from rich.progress import Progress as Bar

    names, repeats = bench.settings.names, bench.settings.repeats
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("warm-up", total=len(names) * (repeats + 1) + 1)
        for method in names:
            bench.run(method, count=bench.base.batch_size)
            bar.advance(task)
        turns: list[dict[str, Run]] = [{} for _ in range(repeats)]
        for number, turn in enumerate(turns, 1):
            for method in names:
                bar.update(task, description=f"{method}, run {number}")
                turn[method] = bench.run(method)
                bar.advance(task)
        bar.update(task, description="comparing tokens")
        return compare(bench, turns)


def _title(bench: Bench) -> str:
    base, settings = bench.base, bench.settings
    return (
        f"{len(bench.prompts)} prompts, B={base.batch_size}, W={base.window}, K={base.draft_tokens}, "
        f"at most {settings.max_new_tokens} tokens, {settings.dtype}, layers {base.kernels}, "
        f"{describe_hardware(bench.device)}"
    )


def compare(bench: Bench, turns: list[dict[str, Run]]) -> list[dict[str, Any]]:
    """A row of figures for each method. The tokens are those of the last turn."""
    same_dtype = bench.oracle(bench.pair.target.dtype)
    float32 = same_dtype if bench.pair.target.dtype == torch.float32 else bench.oracle(torch.float32)
    shaped: dict[EngineConfig, list[list[int]]] = {}
    rows = []
    for method, last in turns[-1].items():
        shape = bench.config("plain" if method in RIVALS else method).plain()
        if shape not in shaped:
            shaped[shape] = bench.plain_in_shape_of(shape)
        speeds = [turn[method].tokens_per_second for turn in turns]
        engine, sequences = last.engine, last.sequences
        rows.append(
            {
                "method": method,
                "drafter": None if method in RIVALS else label(bench.config(method)),
                "tokens_per_second": round(median(speeds), 1),
                "tokens_per_second_range": [round(min(speeds), 1), round(max(speeds), 1)],
                "ratio_to_generate": _ratio(turns, method, "generate"),
                "ratio_to_plain": _ratio(turns, method, "plain"),
                "exact_vs_generate": _share_equal(last.tokens, same_dtype),
                "exact_vs_float32": _share_equal(last.tokens, float32),
                "exact_vs_plain": _share_equal(last.tokens, shaped[shape]),
                "drafted": sequences.drafted,
                "wasted": sequences.drafted - sequences.accepted,
                "early_acceptance_rate": round(sequences.early_acceptance_rate, 4) if sequences.early_drafted else None,
                "acceptance_rate": round(sequences.acceptance_rate, 4) if sequences.drafted else None,
                "tokens_per_round": round(sequences.mean_accepted_length, 3) if engine.rounds else None,
                "occupancy": round(engine.occupancy, 4) if engine.rounds else None,
                "rounds": engine.rounds or None,
                "ragged_rounds": engine.ragged_rounds if engine.rounds else None,
                "dead_columns": round(engine.dead_columns / engine.columns, 4) if engine.rounds else None,
                "tokens": sum(map(len, last.tokens)),
                "seconds": {k: round(v, 3) for k, v in engine.seconds.items()},
            }
        )
    return rows


def _ratio(turns: list[dict[str, Run]], method: str, base: str) -> float | None:
    if base not in turns[0]:
        return None
    ratios = [turn[method].tokens_per_second / turn[base].tokens_per_second for turn in turns]
    return round(median(ratios), 3)


def _share_equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours), 4)


def _texts(settings: BenchSettings, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The texts of the prompts: a column of a file, or demo messages in the chat template."""
    if settings.prompts is None:
        for example in examples(DEMO_SEED):
            messages = [{"role": "user", "content": example.message}]
            yield str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        yield from read_column(settings.prompts, settings.prompt_column)


def read_column(path: Path, column: str) -> Iterator[str]:
    """Texts of a Parquet or JSONL column. `name[2]` takes the third item of a list.

    Raises ValueError with the file, row and column if there is no such text.
    """
    name, _, index = column.partition("[")
    for number, row in enumerate(_rows(path)):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: expected a JSON object, not {type(row).__name__}")
        try:
            value = row[name]
            text = value[int(index.rstrip("]"))] if index else value
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: no column {column!r}, found {', '.join(sorted(row))}") from error
        if not isinstance(text, str):
            raise ValueError(f"{path}, row {number}, column {column!r}: expected text, not {type(text).__name__}")
        yield text


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        with path.open("rb") as file:
            try:
                batches = pq.ParquetFile(file).iter_batches()
            except pa.ArrowInvalid as error:
                raise ValueError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error
            for batch in batches:
                yield from batch.to_pylist()
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            try:
                yield json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number + 1}: expected UTF-8 text") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number + 1}: expected a JSON object ({error.msg})") from error
