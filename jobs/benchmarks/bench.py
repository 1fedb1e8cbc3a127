"""`exspec bench`: the engine's methods beside transformers' own, on the same prompts, in one run.

All methods are run in turn, several times over; a ratio is the median of the ratios within each turn, so that a
machine that slows down slows all of them. Tokens are counted up to and with the end token, for everyone.
"""

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from exspec.actors.engine import Engine, EngineConfig, EngineStatistics, Request, SequenceStatistics
from exspec.actors.engine.drafters import NONE, at_hand, kind, label
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.layers import fused
from exspec.actors.engine.methods import settle
from exspec.actors.engine.shape.calibration import (
    Calibration,
    calibrate,
    fastest_kernels,
    fastest_prefill,
    prefill_shapes,
)
from exspec.actors.engine.statistics import EngineCounters
from exspec.actors.models import Pair, forget_sampling, load_draft, load_model, load_pair
from exspec.jobs.benchmarks.settings import RIVALS, SHAPE, VARIANT, BenchSettings
from exspec.jobs.demo import DRAFT, TARGET
from exspec.jobs.demo.messages import examples

# B is the bench's own, for all methods.
CHOSEN_BY_AUTO = (
    "method",
    "drafter",
    "window",
    "draft_tokens",
    "bucket",
    "prefill",
)
RUNNER = ("kernels", "page", "prefill_rows", "prefill_columns")  # measured for all methods alike
DEMO_SEED = 5  # messages that neither training nor its evaluation saw


@dataclass
class Outcome:
    """One run of one method: the completions by prompt, how long it took, and what an engine counted."""

    tokens: list[list[int]]
    seconds: float = 0.0
    sequences: SequenceStatistics = field(default_factory=SequenceStatistics)
    engine: EngineStatistics = field(default_factory=EngineStatistics)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Bench:
    """Runs methods over one list of prompts with one pair. others: drafts for drafters that cannot use the pair's."""

    def __init__(
        self, pair: Pair, prompts: list[list[int]], settings: BenchSettings, others: Sequence[PreTrainedModel] = ()
    ) -> None:
        self.pair, self.others, self.prompts, self.settings = pair, others, prompts, settings
        self.end_ids = model_end_ids(pair.target)
        for model in (pair.target, pair.draft, *others):
            if isinstance(model, GenerationMixin):
                forget_sampling(model)
        self.capacity = max(map(len, prompts)) + settings.max_new_tokens
        rows = settings.shape.get("batch_size", EngineConfig.batch_size)
        window = max(rows, settings.shape.get("window", EngineConfig.window))
        self.shape = {n: getattr(EngineConfig, n) for n in SHAPE} | settings.shape | {"window": window}
        self.calibration: Calibration | None = None
        self.engines: dict[EngineConfig, Engine] = {}
        self.drafters = at_hand(
            pair.target.config, pair.draft.config if pair.draft else None, EngineConfig(capacity=self.capacity)
        )
        self.runner = EngineConfig() if settings.kernels == "auto" else EngineConfig(kernels=settings.kernels)  # type: ignore[arg-type]

    def run(self, method: str, count: int | None = None) -> Outcome:
        """Decode the prompts, or the first `count`, with the clock running."""
        prompts = self.prompts[:count]
        runner: Callable[[list[list[int]]], Outcome] = {
            "generate": self.generate,
            "assisted": self.assisted,
        }.get(method, lambda rows: self.engine(self.config(method), rows))
        self.synchronize()
        start = time.perf_counter()
        outcome = runner(prompts)
        self.synchronize()
        outcome.seconds = time.perf_counter() - start
        return outcome

    def config(self, method: str) -> EngineConfig:
        """The shape of a method: `exspec@suffix+implicit:3` is exspec with that drafter and draft length, and K = 3."""
        if method == "auto":
            assert self.calibration is not None, "tune() comes before auto"
            return self.calibration.config
        options = self.shape | {name: getattr(self.runner, name) for name in RUNNER}
        options |= {"method": method, "drafter": self.drafter, "capacity": self.capacity}
        if variant := VARIANT.fullmatch(method):
            name, drafter, policy, drafted = variant.groups()
            options |= {"method": name, "drafter": drafter or self.drafter}
            options |= {"draft_length": policy} if policy else {}
            options |= {"draft_tokens": int(drafted)} if drafted else {}
        return EngineConfig(**options)

    def draft_for(self, config: EngineConfig) -> PreTrainedModel | None:
        """The first draft that the drafter of a config can use."""
        drafts = [draft for draft in (self.pair.draft, *self.others) if draft is not None]
        usable = (d for d in drafts if kind(config).refusal(self.pair.target.config, d.config, config) is None)
        return next(usable, self.pair.draft)

    @property
    def drafter(self) -> str:
        """Who drafts where a method does not say."""
        return self.drafters[0] if self.settings.drafter == "auto" else self.settings.drafter

    def settle(self) -> None:
        """Find what runs the layers fastest here, and how prompts are prefilled fastest, for all methods alike."""
        requests = [Request(i, p, max_new_tokens=self.settings.max_new_tokens) for i, p in enumerate(self.prompts)]
        asked, usual = self.settings.kernels, "plain" if self.drafter == NONE else "exspec"
        options = self.pair.target, self.draft_for(self.config(usual)), requests, self.capacity
        if asked not in ("auto", settle(self.pair.target, self.pair.draft, self.config("plain")).kernels):
            raise ValueError(f"--kernels: {asked} does not work here; expected auto, or eager")
        if asked == "auto":
            self.runner = fastest_kernels(*options, self.config(usual))
        shapes = prefill_shapes(self.config(usual), self.pair.target.device.type)
        self.runner = fastest_prefill(*options, shapes)

    def tune(self) -> Calibration:
        """Choose the shape of `auto` on the bench's own prompts."""
        requests = [Request(i, p, max_new_tokens=self.settings.max_new_tokens) for i, p in enumerate(self.prompts)]
        config, seconds = self.config("plain" if self.drafter == NONE else "exspec"), self.settings.tune_seconds
        free: tuple[str, ...] = (*CHOSEN_BY_AUTO, "kernels") if self.settings.kernels == "auto" else CHOSEN_BY_AUTO
        if self.settings.drafter != "auto":
            fixed = ("drafter", "method") if self.drafter == NONE else ("drafter",)
            free = tuple(name for name in free if name not in fixed)
        self.calibration = calibrate(self.pair.target, self.draft_for(config), requests, config, free, seconds)
        return self.calibration

    def plain_in_shape_of(self, config: EngineConfig) -> list[list[int]]:
        """Plain decoding in the method's own shape, in another order of admission."""
        order = list(range(len(self.prompts)))
        random.Random(0).shuffle(order)
        outcome = self.engine(config.plain(), [self.prompts[i] for i in order])
        by_prompt = dict(zip(order, outcome.tokens, strict=True))
        return [by_prompt[i] for i in range(len(order))]

    def engine(self, config: EngineConfig, prompts: list[list[int]]) -> Outcome:
        if config not in self.engines:
            self.engines[config] = Engine(self.pair.target, self.draft_for(config), config)
        engine = self.engines[config]
        engine.forget()  # what a run before has cached of these prompts
        engine.counters = EngineCounters()
        for i, prompt in enumerate(prompts):
            engine.submit(Request(i, prompt, max_new_tokens=self.settings.max_new_tokens))
        completions = sorted(engine.run(), key=lambda c: int(str(c.id)))
        total = sum((c.statistics for c in completions), start=SequenceStatistics())
        return Outcome([c.tokens for c in completions], sequences=total, engine=engine.statistics)

    def generate(self, prompts: list[list[int]]) -> Outcome:
        """transformers' batched `generate`: batches of B in the order given, padded on the left."""
        size = self.shape["batch_size"]
        return Outcome([row for i in range(0, len(prompts), size) for row in self._generate(prompts[i : i + size])])

    def assisted(self, prompts: list[list[int]]) -> Outcome:
        """transformers' assisted generation, which takes one prompt at a time, with the same K."""
        return Outcome([row for prompt in prompts for row in self._generate([prompt], assistant_model=self.pair.draft)])

    def oracle(self, dtype: torch.dtype) -> list[list[int]]:
        """transformers' `generate` on one prompt at a time."""
        model: Any = self.pair.target
        if dtype != model.dtype:
            model = load_model(model.name_or_path, dtype, model.device)
            forget_sampling(model)
        return [self._generate([prompt], model)[0] for prompt in self.prompts]

    def _generate(
        self, prompts: list[list[int]], model: PreTrainedModel | None = None, **options: Any
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.pair.target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=ids.device)
        output = (model or self.pair.target).generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=self.settings.max_new_tokens,
                eos_token_id=sorted(self.end_ids) or None,
                pad_token_id=min(self.end_ids, default=0),
                num_assistant_tokens=self.shape["draft_tokens"],
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            ),
            **options,
        )
        return [self._until_end(row[width:]) for row in output.tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), len(tokens))
        return tokens[:end]

    def synchronize(self) -> None:
        if self.pair.target.device.type == "cuda":
            torch.cuda.synchronize()


def run(settings: BenchSettings) -> None:
    """Load, time, compare, print."""
    from rich.console import Console
    from rich.progress import Progress

    from exspec.jobs.commands.tables import bench_tables, candidates_table
    from exspec.pipeline.progress import Progress as Stages

    console = Console()
    disable_progress_bar()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    check_device(settings.device)
    set_verbosity_error()
    stages = Stages(quiet=False)
    stages.stage("loading the models")
    target, drafts = settings.target or str(TARGET), settings.draft if settings.target else (str(DRAFT),)
    pair = load_pair(target, drafts[0] if drafts else None, getattr(torch, settings.dtype), settings.device)
    others = [load_draft(pair, name, target) for name in drafts[1:]]
    if "assisted" in settings.names and pair.draft and not isinstance(pair.draft, GenerationMixin):
        raise ValueError("--methods: assisted needs a draft model, and --draft is a head; name the others")
    prompts = [pair.tokenizer(text)["input_ids"] for text in islice(_texts(settings, pair.tokenizer), settings.limit)]
    room = context_length(pair.target.config) - settings.max_new_tokens
    fitting = [p for p in prompts if 0 < len(p) <= room]
    if len(fitting) < len(prompts):
        console.print(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts left out: empty, or longer than {room} tokens"
        )
    if not fitting:
        raise ValueError(f"no prompt is left that fits the model's context with {settings.max_new_tokens} new tokens")
    bench = Bench(pair, fitting, settings, others)
    stages.stage("measuring what runs the layers fastest")
    bench.settle()
    if "auto" in settings.names:
        stages.stage(f"measuring the shape of auto, about {settings.tune_seconds:.0f} s")
        found = bench.tune()
        console.print(candidates_table(found.table(), found.seconds))
    stages.stage(f"timing {', '.join(settings.names)}, {settings.repeats} times in turn")
    stages.stop()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warm-up", total=len(settings.names) * (settings.repeats + 1) + 1)
        for method in settings.names:
            bench.run(method, count=bench.shape["batch_size"])
            progress.advance(task)
        turns: list[dict[str, Outcome]] = []
        for turn in range(settings.repeats):
            turns.append({})
            for method in settings.names:
                progress.update(task, description=f"{method}, run {turn + 1}")
                turns[-1][method] = bench.run(method)
                progress.advance(task)
        progress.update(task, description="comparing tokens")
        rows = compare(bench, turns)

    hardware = describe_hardware(pair.target.device)
    title = (
        f"{len(fitting)} prompts, B={bench.shape['batch_size']}, W={bench.shape['window']}, "
        f"K={bench.shape['draft_tokens']}, "
        f"at most {settings.max_new_tokens} tokens, {settings.dtype}, layers {bench.runner.kernels}, {hardware}"
    )
    for table in bench_tables(rows, title):
        console.print(table)
    compiled = str(fused.CODE) if fused.CODE.kept else None
    if compiled:
        console.print(compiled, highlight=False)
    print(
        json.dumps(
            {
                "settings": asdict(settings) | bench.shape | {"prompts": settings.prompts and str(settings.prompts)},
                "hardware": hardware,
                "kernels": bench.runner.kernels,
                "compiled": compiled,
                "prompts": len(fitting),
                "methods": rows,
            }
        )
    )


def compare(bench: Bench, turns: list[dict[str, Outcome]]) -> list[dict[str, Any]]:
    """One row of figures for each method."""
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
                "tokens_per_second": round(statistics.median(speeds), 1),
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


def _ratio(turns: list[dict[str, Outcome]], method: str, base: str) -> float | None:
    if base not in turns[0]:
        return None
    ratios = [turn[method].tokens_per_second / turn[base].tokens_per_second for turn in turns]
    return round(statistics.median(ratios), 3)


def _share_equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours), 4)


def check_device(device: str) -> None:
    """Raise ValueError where a benchmark asks for a GPU on a machine without one."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device: {device} is not at hand, this machine has no GPU that torch can use")


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _texts(settings: BenchSettings, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The prompts as texts: rendered demo messages, or a column of a file as it stands."""
    if settings.prompts is None:
        for example in examples(DEMO_SEED):
            messages = [{"role": "user", "content": example.message}]
            yield str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        yield from read_column(settings.prompts, settings.prompt_column)


def read_column(path: Path, column: str) -> Iterator[str]:
    """Texts of a Parquet or JSONL column; `name[2]` takes the third item of a list.

    Raises ValueError naming file, row and column where there is no such text.
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
