"""`exspec synthetic TARGET:DRAFT`: real compute at real shapes, with random weights and nothing to download.

The draft model runs as it would, and its proposals are then replaced by the target's own continuation, each right by
a seeded coin: acceptance is a dial. Every phase is set against its floor, the bytes that it must read over the copy
bandwidth of the device.

`python -m exspec.jobs.benchmarks.synthetic Qwen/Qwen3-8B:Qwen/Qwen3-0.6B out.json` is what to run first on a GPU:
whether a row's bits depend on its place, one round under the profiler, exactness, and speed, within `Plan.seconds`.
Every figure is in the file as soon as it is there; what is slow is cut short, what fails or hangs says why, and the
next stage goes on.

Needs torch and transformers alone, so that it runs on a machine with a GPU and little else.
"""

import argparse
import gc
import json
import math
import multiprocessing
import platform
import random
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling, SequenceStatistics
from exspec.actors.engine.config import AttentionName, KernelsName
from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.graphs import Eager, Recorder
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.kv.cached_model import kv_shape
from exspec.actors.engine.layers.fused import compiler_trial
from exspec.actors.engine.methods import drafter_of, recorder_for, settle
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.costs import Costs, OutOfTimeError
from exspec.jobs.benchmarks.bench import check_device, describe_hardware

QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
         "max_position_embeddings": 40960}  # fmt: skip
LLAMA = {"model_type": "llama", "vocab_size": 32000}
GLM4 = {"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "max_position_embeddings": 32768, "partial_rotary_factor": 0.5}  # fmt: skip
SMALL = QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
                 "tie_word_embeddings": True}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
                              "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen/Qwen3-0.6B": SMALL,
    "Vicuna-7B": LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                          "num_key_value_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096},
    "68M": LLAMA | {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12,
                    "intermediate_size": 3072, "max_position_embeddings": 2048},
    "GLM-4-9B": GLM4 | {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
                        "intermediate_size": 13696, "tie_word_embeddings": False},
    "0.6B": SMALL | {"vocab_size": 151552, "max_position_embeddings": 32768},  # Qwen3-0.6B with the vocabulary of GLM-4
    "tiny": LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 128, "max_position_embeddings": 512, "vocab_size": 128},
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """batch_sizes: every B that is run. acceptances: chances that a drafted token is right."""

    pair: str
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    acceptances: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9)
    draft_tokens: int = 5
    prompts: int = 64
    prompt_tokens: int = 200
    max_new_tokens: int = 128
    dtype: str = "bfloat16"
    device: str = "cuda"
    repeats: int = 2
    tune_seconds: float = 15.0
    assisted: int = 4  # prompts of assisted generation, which takes one at a time

    def __post_init__(self) -> None:
        target, _, draft = self.pair.partition(":")
        for name in (target, draft):
            if name not in SHAPES:
                raise ValueError(f"no shape {name!r}; expected TARGET:DRAFT of {', '.join(SHAPES)}")


def build(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of the shape with random weights, which never ends a sequence."""
    torch.manual_seed(len(name))
    settings = dict(SHAPES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Logits far apart: with nearly equal ones every rounding would decide a token, which no trained model's does.
    model.get_output_embeddings().weight.data.mul_(4)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model  # type: ignore[no-any-return]


class Replay(Drafter):
    """Runs a draft model, and replaces what it proposes by the reference, each token right with chance `right`."""

    def __init__(self, drafter: Drafter, reference: dict[tuple[int, ...], list[int]], right: float) -> None:
        self.drafter, self.reference, self.right = drafter, reference, right
        self.coins: dict[tuple[int, int], bool] = {}
        self.caches = drafter.caches

    def prefill(self, slots: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, attended: int) -> None:
        self.drafter.prefill(slots, tokens, starts, attended)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = self.drafter.propose(group, limits)
        rows, count = draft.tokens.shape
        tokens = [self._row(s, count) if s else [0] * count for s in group.sequences]
        replaced = torch.tensor(tokens, dtype=torch.long, device=draft.tokens.device).reshape(rows, count)
        return Draft(replaced, draft.lengths)

    def _row(self, sequence: Any, count: int) -> list[int]:
        prompt = tuple(sequence.request.prompt)
        done = len(sequence.tokens) - len(prompt)
        rest = [*self.reference[prompt][done : done + count], *[0] * count][:count]
        return [t if self._coin(hash(prompt), done + i) else (t + 1) % 100 for i, t in enumerate(rest)]

    def _coin(self, seed: int, place: int) -> bool:
        if (seed, place) not in self.coins:
            self.coins[seed, place] = random.Random(seed * 100_003 + place).random() < self.right
        return self.coins[seed, place]


class Bench:
    """One pair on one device."""

    def __init__(self, settings: Settings) -> None:
        self.settings = s = settings
        target, _, draft = s.pair.partition(":")
        dtype = getattr(torch, s.dtype)
        self.target, self.draft = build(target, dtype, s.device), build(draft, dtype, s.device)
        rng = random.Random(0)
        lengths = [rng.randint(s.prompt_tokens // 2, s.prompt_tokens * 3 // 2) for _ in range(s.prompts)]
        low = min(128, self.target.config.vocab_size)
        self.prompts = [[rng.randrange(1, low) for _ in range(n)] for n in lengths]
        capacity = -(-(max(lengths) + s.max_new_tokens) // 64) * 64
        self.unlike = [rng.randrange(1, low) for _ in range(s.prompt_tokens // 2)]
        kernels: KernelsName = "compiled" if s.device.startswith("cuda") else "eager"
        self.shape = EngineConfig(draft_tokens=s.draft_tokens, capacity=capacity, bucket=capacity, kernels=kernels)
        self.device = torch.device(s.device)

    def requests(self, prompts: int | None = None, sampled: bool = False) -> list[Request]:
        """Of the first `prompts`, or of all."""
        new = self.settings.max_new_tokens
        return [Request(i, p, new, self.sampling(i, sampled)) for i, p in enumerate(self.prompts[:prompts])]

    def sampling(self, seed: int, sampled: bool) -> Sampling:
        return Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=seed) if sampled else Sampling()

    def decode(
        self,
        engine: Engine,
        order: int = 0,
        prompts: int | None = None,
        sampled: bool = False,
        deadline: float = math.inf,
    ) -> tuple[dict[tuple[int, ...], list[int]], float, Any]:
        """Tokens by prompt, seconds, and the completions. What the engine records, it has recorded before.

        Raises OutOfTimeError at `deadline`, of time.monotonic.
        """
        requests = self.requests(prompts, sampled)
        random.Random(order).shuffle(requests)
        self.warm(engine, sampled)
        self.wait()
        start = time.perf_counter()
        for request in requests:
            engine.submit(request)
        while engine.busy:
            within(deadline)
            engine.step()
        self.wait()
        seconds = time.perf_counter() - start
        done = engine.take()
        return {tuple(self.prompts[int(str(c.id))]): c.tokens for c in done}, seconds, done

    def warm(self, engine: Engine, sampled: bool = False) -> None:
        """Meet every shape that the engine's rounds can have: near the end of a budget drafts get shorter, down to
        none. The prompt is like no other, so that no other finds its KV."""
        if engine.statistics.rounds:
            return
        for new in range(engine.config.drafted + 1, 0, -1):
            engine.submit(Request("warm", self.unlike, new, self.sampling(0, sampled)))
            engine.run()

    def shaped(self, **changes: Any) -> EngineConfig:
        return replace(self.shape, **{"window": max(changes.get("batch_size", 8), 8), **changes})

    def run(self) -> dict[str, Any]:
        """All figures, each B with plain decoding and every acceptance."""
        s = self.settings
        bandwidth = copy_bandwidth(self.device)
        report: dict[str, Any] = {"settings": vars(s), "hardware": describe_hardware(self.device),
                                  "torch": torch.__version__, "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
                                  "batches": []}  # fmt: skip
        for rows in s.batch_sizes:
            report["batches"].append(self.batch(rows, bandwidth))
            print(json.dumps(report["batches"][-1]), flush=True)
        return report

    def batch(self, rows: int, bandwidth: float) -> dict[str, Any]:
        s = self.settings
        reference, *_ = self.decode(Engine(self.target, None, self.shaped(batch_size=rows).plain()))
        methods: dict[str, Callable[[], dict[str, Any]]] = {
            "plain": lambda: self.timed(self.plain(rows)),
            "generate": lambda: self.outside(self.generate, rows),
            "continuous batching": lambda: self.outside(self.continuous, rows),
        }
        for right in s.acceptances:
            make = self.maker(reference, right)
            methods[f"exspec {right}"] = lambda make=make: self.timed(  # type: ignore[misc]
                make(self.target, self.draft, self.shaped(batch_size=rows)), reference
            )
            free = ("method", "draft_tokens")
            found = calibrate(
                self.target, self.draft, self.requests(), self.shaped(batch_size=rows), free, s.tune_seconds, None, make
            )
            drafted, method = found.config.drafted, found.config.method
            methods[f"auto {right} ({method}, K={drafted})"] = lambda make=make, found=found: self.timed(  # type: ignore[misc]
                make(self.target, self.draft if found.config.drafts else None, found.config)
            )
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
        for _ in range(s.repeats):
            for name, run in methods.items():
                turns[name].append(run())
        figures = {}
        for name, results in turns.items():
            ratios = [
                r["tokens_per_second"] / p["tokens_per_second"]
                for r, p in zip(results, turns["plain"], strict=True)
                if r["tokens_per_second"]
            ]
            ratio = round(statistics.median(ratios), 3) if ratios else None
            figures[name] = results[-1] | {"ratio_to_plain": ratio}
        if rows == min(s.batch_sizes):
            figures["assisted"] = self.outside(self.assisted, rows)
        return {"batch_size": rows, "phases": self.phases(rows, bandwidth), "methods": figures}

    def maker(
        self, reference: dict[tuple[int, ...], list[int]], right: float
    ) -> Callable[[PreTrainedModel, PreTrainedModel | None, EngineConfig], Engine]:
        def make(target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig) -> Engine:
            known = reference | {tuple(self.unlike): []}
            return Engine(target, draft, config, drafter=lambda given: Replay(drafter_of(given), known, right))

        return make

    def plain(self, rows: int) -> Engine:
        return Engine(self.target, None, self.shaped(method="plain", batch_size=rows))

    def timed(self, engine: Engine, reference: dict[tuple[int, ...], list[int]] | None = None) -> dict[str, Any]:
        tokens, seconds, done = self.decode(engine, order=1)
        count = sum(map(len, tokens.values()))
        total = sum((c.statistics for c in done), start=SequenceStatistics())
        places = zip(total.accepted_by_position, total.drafted_by_position, strict=False)
        found: dict[str, Any] = {
            "tokens_per_second": round(count / seconds, 1),
            "mean_accepted_length": round(total.mean_accepted_length, 3),
            "acceptance_by_place": [round(a / d, 3) for a, d in places],
        }
        if reference is not None:
            found["exact"] = sum(tokens[p] == reference[p] for p in reference)
            found["of"] = len(reference)
        return found

    def outside(self, method: Callable[[int], int], rows: int) -> dict[str, Any]:
        """A method of transformers; one that cannot run here says why."""
        self.wait()
        start = time.perf_counter()
        try:
            count = method(rows)
        except Exception as error:  # of another project's code, on a device unknown
            return {"tokens_per_second": None, "error": f"{type(error).__name__}: {error}"[:300]}
        self.wait()
        return {"tokens_per_second": round(count / (time.perf_counter() - start), 1)}

    def generate(self, rows: int, prompts: int | None = None) -> int:
        count = 0
        taken = self.prompts[:prompts]
        for i in range(0, len(taken), rows):
            batch = taken[i : i + rows]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=self.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=self.device)
            output = self.target.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, generation_config=self.generation()
            )
            count += (output.shape[1] - width) * len(batch)
        return count

    def continuous(self, _: int, prompts: int | None = None) -> int:
        """It sizes its own batches."""
        outputs = self.target.generate_batch(  # type: ignore[operator]
            inputs=self.prompts[:prompts], generation_config=self.generation()
        )
        count = sum(len(o.generated_tokens) for o in outputs.values())
        if count == 0:
            raise RuntimeError("continuous batching generated nothing")
        return count

    def assisted(self, _: int) -> int:
        """One prompt at a time; the draft has random weights, so nearly nothing of it is accepted."""
        count = 0
        for prompt in self.prompts[: self.settings.assisted]:
            ids = torch.tensor([prompt], device=self.device)
            output = self.target.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=self.draft,
                generation_config=self.generation(),
            )  # fmt: skip
            count += output.shape[1] - len(prompt)
        return count

    def generation(self) -> GenerationConfig:
        return GenerationConfig(do_sample=False, max_new_tokens=self.settings.max_new_tokens, pad_token_id=0)

    def phases(self, rows: int, bandwidth: float) -> dict[str, Any]:
        """Milliseconds of each phase and the times its floor that it takes."""
        s, config = self.settings, self.shaped(batch_size=rows)
        costs = Costs(self.target, self.draft, self.requests(), config.capacity, config)
        attended = config.capacity
        draft_bytes = model_bytes(self.draft) + rows * attended * kv_bytes(self.draft)
        target_bytes = model_bytes(self.target) + rows * attended * kv_bytes(self.target)
        measured = {
            "plain": (costs.verify(rows, 1, attended), target_bytes),
            "verify": (costs.verify(rows, s.draft_tokens + 1, attended), target_bytes),
            "draft": (costs.propose(config, s.draft_tokens, attended), s.draft_tokens * draft_bytes),
            "prefill": (costs.chunk(config.plain()), model_bytes(self.target)),
        }
        return {
            name: {
                "ms": round(seconds * 1e3, 3),
                "floor_ms": round(size / bandwidth * 1e3, 3),
                "times_floor": round(seconds / (size / bandwidth), 2),
            }
            for name, (seconds, size) in measured.items()
        }

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a forward reads: all but the embedding table, unless it is the output's too."""
    embedding: Any = model.get_input_embeddings()
    size = sum(p.nbytes for p in model.parameters())
    return size if model.config.tie_word_embeddings else size - int(embedding.weight.nbytes)


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of KV of one token."""
    layers, heads, size = kv_shape(model.config)
    return int(2 * layers * heads * size * model.dtype.itemsize)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones((1 << 30) // (1 if device.type == "cuda" else 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def run(settings: Settings, output: Path | None) -> None:
    """Measure, and write the report as JSON; the last line printed is the same. Raises ValueError without a GPU."""
    check_device(settings.device)
    report = json.dumps(Bench(settings).run())
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(report + "\n")
    print(report)


@dataclass(frozen=True)
class Plan:
    """What is measured on a GPU at first. The order of batch_sizes, drafts and acceptances is that of the runs: what
    tells most comes first, should the time not do for all.

    shapes: (B, K) of row places and exactness. drafts: every K that is timed. seconds: for everything, of which each
    stage has its share of what the stages before it left. outside: every B of transformers' own methods, which are
    the rivals: the first of them after the first K, the others when all else is done. prefills:
    rows and columns of prefill forwards, the first of which the engines use.
    """

    pair: str
    dtype: str = "bfloat16"
    device: str = "cuda"
    seconds: float = 490.0
    shapes: tuple[tuple[int, int], ...] = ((8, 5), (64, 5))
    batch_sizes: tuple[int, ...] = (8, 64, 1, 32, 256, 16, 4, 128, 2)
    drafts: tuple[int, ...] = (5, 3, 8)
    acceptances: tuple[float, ...] = (0.8, 0.6)
    outside: tuple[int, ...] = (8, 64)
    rivals: tuple[str, ...] = ("generate", "continuous batching")
    prefills: tuple[tuple[int, int], ...] = ((4, 128), (1, 128), (16, 128), (4, 32), (1, 512))
    kernels: tuple[KernelsName, ...] = ("eager", "compiled")
    prompts: int = 512
    prompt_tokens: int = 200
    max_new_tokens: int = 64

    @property
    def settings(self) -> Settings:
        return Settings(
            self.pair, batch_sizes=self.batch_sizes, acceptances=self.acceptances, draft_tokens=self.shapes[0][1],
            prompts=self.prompts, prompt_tokens=self.prompt_tokens, max_new_tokens=self.max_new_tokens,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip


Piece = dict[str, Any]
GRACE = 15.0  # seconds past its deadline after which a stage is taken to hang


def within(deadline: float) -> None:
    """Raises OutOfTimeError past a deadline of time.monotonic."""
    if time.monotonic() > deadline:
        raise OutOfTimeError


class Measurement:
    """The stages: each yields its figures piece by piece, and raises OutOfTimeError where they come to its deadline."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.bench = plan, Bench(plan.settings)
        self.target, self.draft, self.device = self.bench.target, self.bench.draft, self.bench.device

    def config(self, rows: int, drafted: int, **changes: Any) -> EngineConfig:
        prefill = dict(zip(("prefill_rows", "prefill_columns"), self.plan.prefills[0], strict=True))
        return self.bench.shaped(batch_size=rows, draft_tokens=drafted, **prefill | changes)

    def found(self) -> Piece:
        """What there is to measure on, which attention and kernels were chosen, and why not others."""
        heads = [m.config.get_text_config().num_attention_heads for m in (self.target, self.draft)]
        page = self.config(*self.plan.shapes[0]).page_size
        whys = [
            trial(m.device, m.dtype, count, *kv_shape(m.config)[1:], page)
            for m, count in zip((self.target, self.draft), heads, strict=True)
        ]
        chosen = [settle(self.target, self.draft, c) for c in self._kernels(*self.plan.shapes[0])]
        return {
            "hardware": describe_hardware(self.device),
            "bandwidth_gb_per_s": round(copy_bandwidth(self.device) / 1e9, 1),
            "attention": chosen[0].attention,
            "not_in_place": next(filter(None, whys), None),
            "kernels": [c.kernels for c in chosen],
            "not_compiled": compiler_trial(self.device) if "compiled" in self.plan.kernels else "not asked for",
        }

    def _kernels(self, rows: int, drafted: int) -> list[EngineConfig]:
        return [self.config(rows, drafted, kernels=kernels) for kernels in self.plan.kernels]

    def variants(self, rows: int, drafted: int, attentions: Sequence[AttentionName] = ("auto",)) -> list[EngineConfig]:
        """Configs that are not the same once settled, of every attention and kernels."""
        asked = [replace(c, attention=a) for a in attentions for c in self._kernels(rows, drafted)]
        return list(dict.fromkeys(settle(self.target, self.draft, c) for c in asked))

    def places(self, deadline: float) -> Iterator[Piece]:
        """Whether the bits of a row's logits depend on its place, on its neighbours, or on anything that they must not
        depend on where tokens are to be exact."""
        for rows, drafted in self.plan.shapes:
            for config in self.variants(rows, drafted, ("auto", "gathered")):
                within(deadline)
                yield {"rows": rows, "columns": drafted + 1, **_chosen(config)} | Places(self.target, config).compare()
                self.forget()

    def profile(self, deadline: float) -> Iterator[Piece]:
        """One round's kernels by phase, as recorded and as it is."""
        rows, drafted = self.plan.shapes[0]
        for config in self.variants(rows, drafted):
            recorders: list[Recorder] = [recorder_for(self.device, config)]
            recorders += [Eager()] if recorders[0].records else []
            for recorder in recorders:
                within(deadline)
                engine = Engine(self.target, self.draft, replace(config, overlap=False), recorder=recorder)
                yield {"rows": rows, "draft_tokens": drafted, "recorded": recorder.records, **_chosen(config),
                       "phases": self._round(engine)}  # fmt: skip
                del engine
                self.forget()

    def _round(self, engine: Engine) -> Piece:
        """Of draft, verify and commit: milliseconds, the median of several rounds, and the kernels of one more."""
        self.bench.warm(engine)
        for request in self.bench.requests(engine.config.batch_size):
            engine.submit(request)
        engine.step()
        timed: list[Piece] = [self._phases(engine, self._timed) for _ in range(3)]
        kernels = self._phases(engine, self._kernels_of)
        return {name: {"ms": round(statistics.median(t[name] for t in timed), 3), **kernels[name]} for name in kernels}

    def _phases(self, engine: Engine, measure: Callable[[Callable[[], Any]], tuple[Any, Any]]) -> Piece:
        """A round of an engine whose rows are admitted, each phase measured by itself."""
        group = engine._group()
        draft, drafting = measure(lambda: engine._draft(group))
        verified, verifying = measure(lambda: engine._verify(group, draft))
        _, committing = measure(lambda: engine._commit(group, engine._wait(verified)))
        return {"draft": drafting, "verify": verifying, "commit": committing}

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        self.bench.wait()
        start = time.perf_counter()
        result = run()
        self.bench.wait()
        return result, (time.perf_counter() - start) * 1e3

    def _kernels_of(self, run: Callable[[], Any]) -> tuple[Any, Piece]:
        """Kernels by the time that they take on the device; on a CPU operators take their place."""
        on_device = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_device]
        with profile(activities=activities) as profiler:
            result = run()
            self.bench.wait()
        events = profiler.key_averages()
        kind = "CUDA" if on_device else "CPU"
        kernels = [
            (e.key, e.count, _own(e, on_device)) for e in events if e.device_type.name == kind and _own(e, on_device)
        ]
        kernels.sort(key=lambda kernel: -kernel[2])
        return result, {
            "kernels": sum(count for _, count, _ in kernels),
            "kernels_ms": round(sum(spent for *_, spent in kernels) / 1e3, 3),
            "launches": {e.key: e.count for e in events if "Launch" in e.key and e.device_type.name == "CPU"},
            "top": [{"name": name[:120], "count": n, "ms": round(us / 1e3, 3)} for name, n, us in kernels[:15]],
        }

    def exact(self, deadline: float) -> Iterator[Piece]:
        """Speculation against plain decoding in the same shape: every token must be equal."""
        for rows, drafted in reversed(self.plan.shapes):
            for config in self.variants(rows, drafted):
                for sampled in (False, True):
                    yield from self._exact(config, sampled, deadline)

    def _exact(self, config: EngineConfig, sampled: bool, deadline: float) -> Iterator[Piece]:
        prompts = min(len(self.bench.prompts), max(2 * config.batch_size, 32))
        plain = Engine(self.target, None, config.plain())
        expected, *_ = self.bench.decode(plain, 0, prompts, sampled, deadline)
        del plain
        self.forget()
        engine = self.bench.maker(expected, 1.0)(self.target, self.draft, config)
        for order, right in enumerate((1.0, 0.6, 0.0), 1):
            self._accept(engine, right)
            tokens, _, done = self.bench.decode(engine, order, prompts, sampled, deadline)
            total = sum((c.statistics for c in done), start=SequenceStatistics())
            yield {"rows": config.batch_size, "draft_tokens": config.draft_tokens, **_chosen(config),
                   "sampled": sampled, "right": right, "acceptance_rate": round(total.acceptance_rate, 4),
                   "prompts": prompts, **differences(expected, tokens)}  # fmt: skip

    def _accept(self, engine: Engine, right: float) -> None:
        drafter = engine.drafter
        assert isinstance(drafter, Replay)
        drafter.right, drafter.coins = right, {}

    def speed(self, deadline: float) -> Iterator[Piece]:
        """Tokens/s of plain decoding and of speculation for every B, K and acceptance, beside transformers' own."""
        plain: dict[int, float] = {}
        yield from self._prefill(deadline)
        for place, drafted in enumerate(self.plan.drafts):
            for rows in self.plan.batch_sizes:
                within(deadline)
                try:
                    if rows not in plain:
                        yield {"method": "plain", "rows": rows} | self._plain(rows, plain, deadline)
                        yield {"phases_of": rows, "draft_tokens": self.bench.settings.draft_tokens} | self._costs(rows)
                    yield from self._speculation(rows, drafted, plain[rows], deadline)
                except torch.OutOfMemoryError:
                    yield {"rows": rows, "draft_tokens": drafted, "error": "out of memory"}
                self.forget()
            if place == 0:
                yield from self._outside(self.plan.rivals[:1], deadline)
        yield from self._outside(self.plan.rivals[1:], deadline)

    def _waves(self, rows: int) -> int:
        """Prompts that B rows decode."""
        return min(len(self.bench.prompts), max(4, 2 * rows))

    def _plain(self, rows: int, plain: dict[int, float], deadline: float) -> Piece:
        engine = Engine(self.target, None, self.config(rows, 1, method="plain"))
        figures = self._figures(engine, 0, rows, deadline)[1]
        plain[rows] = figures["tokens_per_second"]
        return figures

    def _speculation(self, rows: int, drafted: int, plain: float, deadline: float) -> Iterator[Piece]:
        config = self.config(rows, drafted)
        # Drafts are right where they are what comes of this very shape, so it is run by plain decoding first.
        expected, same_shape = self._figures(Engine(self.target, None, config.plain()), 0, rows, deadline)
        yield {"method": "plain in this shape", "rows": rows, "columns": drafted + 1} | same_shape
        self.forget()
        engine = self.bench.maker(expected, 1.0)(self.target, self.draft, config)
        for right in self.plan.acceptances:
            self._accept(engine, right)
            tokens, figures = self._figures(engine, 1, rows, deadline)
            ratio = round(figures["tokens_per_second"] / plain, 3)
            yield {"method": "exspec", "rows": rows, "draft_tokens": drafted, "right": right,
                   "ratio_to_plain": ratio, **figures, **differences(expected, tokens)}  # fmt: skip

    def _figures(
        self, engine: Engine, order: int, rows: int, deadline: float
    ) -> tuple[dict[tuple[int, ...], list[int]], Piece]:
        self.bench.warm(engine)
        before = Counter(engine.statistics.seconds)
        tokens, seconds, done = self.bench.decode(engine, order, self._waves(rows), deadline=deadline)
        total = sum((c.statistics for c in done), start=SequenceStatistics())
        spent = {name: round(s - before[name], 3) for name, s in engine.statistics.seconds.items()}
        return tokens, {
            **_chosen(engine.config),
            "prompts": len(tokens),
            "tokens_per_second": round(sum(map(len, tokens.values())) / seconds, 1),
            "mean_accepted_length": round(total.mean_accepted_length, 3),
            "seconds": round(seconds, 3),
            "seconds_by_phase": spent,
        }

    def _costs(self, rows: int) -> Piece:
        self.forget()
        return {"phases": self.bench.phases(rows, copy_bandwidth(self.device))}

    def _prefill(self, deadline: float) -> Iterator[Piece]:
        for rows, columns in self.plan.prefills:
            within(deadline)
            capacity = max(self.bench.shape.capacity, columns)
            config = self.config(8, 1, method="plain", prefill_rows=rows, prefill_columns=columns, capacity=capacity)
            seconds = Costs(self.target, None, self.bench.requests(8), capacity, config).chunk(config)
            yield {"method": "prefill", "rows": rows, "columns": columns, "ms": round(seconds * 1e3, 3),
                   "tokens_per_second": round(rows * columns / seconds, 1)}  # fmt: skip
            self.forget()

    def _outside(self, rivals: Sequence[str], deadline: float) -> Iterator[Piece]:
        known = {"generate": self.bench.generate, "continuous batching": self.bench.continuous}
        for method, rows in product(rivals, self.plan.outside):
            run, prompts = known[method], self._waves(rows)
            for _ in ("warm", "timed"):
                within(deadline)
                found = self.bench.outside(lambda b, f=run, n=prompts: f(b, n), rows)  # type: ignore[misc]
            yield {"method": method, "rows": rows, "prompts": prompts, **found}
            self.forget()

    def forget(self) -> None:
        """Give back what no engine holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _chosen(config: EngineConfig) -> Piece:
    return {"attention": config.attention, "kernels": config.kernels}


def _own(event: Any, on_device: bool) -> float:
    """Microseconds of a kernel or operator, without what it called."""
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total)


def differences(expected: dict[tuple[int, ...], list[int]], found: dict[tuple[int, ...], list[int]]) -> Piece:
    """The share of completions that are equal, and where the first that is not differs: None is past its end."""
    equal = [tokens == found[prompt] for prompt, tokens in expected.items()]
    pairs = ((tokens, found[prompt]) for prompt, tokens in expected.items())
    first = next(
        (
            {"prompt": number, "place": place, "expected": expected_one, "found": found_one}
            for number, (theirs, ours) in enumerate(pairs)
            for place, (expected_one, found_one) in enumerate(zip_longest(theirs, ours))
            if expected_one != found_one
        ),
        None,
    )
    return {"exact": round(sum(equal) / len(equal), 4), "first_difference": first}


@dataclass
class Rows:
    """A forward's rows: slots [R], tokens [R, Q], and starts [R], the place of a row's first token."""

    slots: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor

    def __getitem__(self, order: torch.Tensor) -> "Rows":
        return Rows(self.slots[order], self.tokens[order], self.starts[order])

    def where(self, kept: torch.Tensor, other: "Rows") -> "Rows":
        """These rows where `kept` [R], those of the other elsewhere."""
        return Rows(
            torch.where(kept, self.slots, other.slots),
            torch.where(kept[:, None], self.tokens, other.tokens),
            torch.where(kept, self.starts, other.starts),
        )


class Places:
    """Verify forwards of one shape over sequences with random tokens, which differ in what must not matter.

    Every slot has a sequence of its own, twice: rows whose content is changed have another slot's KV. The logits of
    what stayed are compared bit by bit.
    """

    def __init__(self, target: PreTrainedModel, config: EngineConfig) -> None:
        self.config, rows = config, config.batch_size
        twice = replace(config.plain(), batch_size=2 * rows, window=2 * rows, pages=None)
        self.engine = engine = Engine(target, None, twice)
        self.rows, self.width, self.device = rows, config.width, engine.device
        self.forward = engine.target.forward
        self.recorded = recorder_for(engine.device, config).wrap(engine.target.forward)
        self.random = torch.Generator().manual_seed(0)
        self.first, self.others = self._filled(0), self._filled(rows)

    def _filled(self, slot: int) -> Rows:
        """As many rows as a forward has, from `slot` on, with KV of everything that comes before them."""
        engine, chunk, rows = self.engine, self.config.prefill_columns, self.rows
        capacity = engine.config.capacity
        for number in range(slot, slot + rows):
            assert engine.pool.store.begin(number, [], 0, capacity) is not None, "there are pages for every slot"
        slots = torch.arange(slot, slot + rows, device=self.device)
        for start in range(0, capacity - chunk + 1, chunk):
            engine.target.fill(slots, self._tokens(chunk), torch.full_like(slots, start), capacity)
        last = capacity // chunk * chunk - 2 * self.width
        starts = torch.randint(self.width, last + 1, (rows,), generator=self.random).to(self.device)
        return Rows(slots, self._tokens(self.width), starts)

    def _tokens(self, width: int) -> torch.Tensor:
        shape = (self.rows, width)
        return torch.randint(1, self.engine.vocabulary, shape, generator=self.random).to(self.device)

    def logits(self, rows: Rows, forward: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """[R, Q, V]."""
        run = forward or self.forward
        return run(rows.slots, rows.tokens, rows.starts, self.engine.config.capacity).clone()

    def compare(self) -> Piece:
        """By what was changed: how many rows kept every bit, and the largest difference of a logit."""
        base = self.logits(self.first)
        order = torch.randperm(self.rows, generator=self.random).to(self.device)
        backward = torch.arange(self.rows - 1, -1, -1, device=self.device)
        found = {
            "again": self._same(base, self.logits(self.first)),
            "recorded": self._same(base, self.logits(self.first, self.recorded)),
            "permuted": self._same(base[order], self.logits(self.first[order])),
            "reversed": self._same(base[backward], self.logits(self.first[backward])),
            "others_changed": self._kept(base, self.others),
            "others_dead": self._kept(base, self._dead()),
            "later_tokens_changed": self._later(base),
            "column": self._column(base),
        }
        return {"equal": all(f["equal"] == f["rows"] for f in found.values()), "changed": found}

    def _same(self, expected: torch.Tensor, found: torch.Tensor) -> Piece:
        """Of logits [R, C, V]."""
        equal = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
        apart = (expected.float() - found.float()).abs()
        same_tokens = (expected.argmax(-1) == found.argmax(-1)).all(dim=1).sum()
        return {
            "rows": len(equal),
            "equal": sum(equal),
            "same_tokens": int(same_tokens),
            "largest_difference": float(apart.max()),
            "first_row": None if all(equal) else equal.index(False),
        }

    def _kept(self, base: torch.Tensor, others: Rows) -> Piece:
        """Every row beside other neighbours: the even ones first, then the odd ones."""
        even = torch.arange(self.rows, device=self.device) % 2 == 0
        found = torch.empty_like(base)
        for kept in (even, ~even):
            found[kept] = self.logits(self.first.where(kept, others))[kept]
        return self._same(base, found)

    def _dead(self) -> Rows:
        nobody = torch.full_like(self.first.slots, self.engine.pool.slots)
        return Rows(nobody, torch.zeros_like(self.first.tokens), torch.zeros_like(self.first.starts))

    def _later(self, base: torch.Tensor) -> Piece:
        """Tokens after a column, which may be drafts that are rejected."""
        kept = (self.width + 1) // 2
        tokens = torch.cat([self.first.tokens[:, :kept], self.others.tokens[:, kept:]], dim=1)
        return self._same(base[:, :kept], self.logits(replace(self.first, tokens=tokens))[:, :kept])

    def _column(self, base: torch.Tensor) -> Piece:
        """The same positions in other columns, as a round that begins later has them."""
        moved = self.width // 2
        self.logits(self.first)  # its first columns' KV is what the others come after
        tokens = torch.cat([self.first.tokens[:, moved:], self.others.tokens[:, :moved]], dim=1)
        later = Rows(self.first.slots, tokens, self.first.starts + moved)
        return self._same(base[:, moved:], self.logits(later)[:, : self.width - moved])


STAGES: dict[str, tuple[Callable[[Measurement, float], Iterator[Piece]], float]] = {  # with their shares of the time
    "places": (Measurement.places, 1.0),
    "profile": (Measurement.profile, 1.5),
    "exact": (Measurement.exact, 2.5),
    "speed": (Measurement.speed, 7.0),
}


@dataclass
class Message:
    """What a stage's process tells. piece: of the figures; None where the stage begins, or ends. deadline: of the stage
    that begins."""

    stage: str
    piece: Piece | None = None
    deadline: float | None = None
    ending: Piece = field(default_factory=dict)


def work(plan: Plan, names: Sequence[str], end: float, send: Callable[[Message], None]) -> None:
    """Run the stages until all are done or one fails; after a failure the device may be of no use to this process."""
    send(Message("setup", deadline=end))
    start = time.monotonic()
    try:
        measurement = Measurement(plan)
        found = measurement.found()
    except Exception as error:
        send(Message("setup", ending={"error": _described(error)}))
        return
    send(Message("setup", found, ending={"seconds": round(time.monotonic() - start, 1)}))
    for i, name in enumerate(names):
        shares = [STAGES[n][1] for n in names[i:]]
        start = time.monotonic()
        budget = max(end - start, 0.0) * shares[0] / sum(shares)
        send(Message(name, deadline=start + budget))
        ending: Piece = {"cut_short": False, "error": None}
        try:
            for piece in STAGES[name][0](measurement, start + budget):
                send(Message(name, piece))
        except OutOfTimeError:
            ending["cut_short"] = True
        except Exception as error:  # whatever a device that nobody has tried yet comes up with
            ending["error"] = _described(error)
        seconds = round(time.monotonic() - start, 1)
        send(Message(name, ending={"budget_seconds": round(budget, 1), "seconds": seconds, **ending}))
        if ending["error"]:
            return
        measurement.forget()


def _described(error: Exception) -> str:
    """With where it happened, innermost last."""
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-6:]]
    return f"{type(error).__name__}: {error}"[:2000] + f" ({', '.join(places)})"


def work_apart(plan: Plan, names: Sequence[str], end: float, to: Connection) -> None:
    """`work` in a process of its own."""
    work(plan, names, end, to.send)


class Report:
    """The report, in the file after every message; a stage is printed when it ends."""

    def __init__(self, plan: Plan, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output = output
        self.content: dict[str, Any] = {
            "plan": asdict(plan), "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(), "stages": {},
        }  # fmt: skip

    def take(self, message: Message) -> None:
        stage = self.content["stages"].setdefault(message.stage, {"results": []})
        stage["results"] += [message.piece] if message.piece is not None else []
        stage.update(message.ending)
        self.output.write_text(json.dumps(self.content) + "\n")
        if message.ending:
            print(json.dumps({message.stage: stage}), flush=True)


Apart = Callable[[Plan, Sequence[str], float, Connection], None]


def measure(plan: Plan, output: Path, apart: Apart = work_apart) -> dict[str, Any]:
    """Run all stages, in a process that is ended where one hangs, and replaced where one fails; returns the report."""
    end = time.monotonic() + plan.seconds
    report, names = Report(plan, output), list(STAGES)
    while names and time.monotonic() < end:
        failed = _follow(plan, names, end, report, apart)
        if failed == "setup":  # it would fail again
            break
        names = names[names.index(failed) + 1 :] if failed else []
    for name in names:
        report.take(Message(name, ending={"error": "not run"}))
    return report.content


def _follow(plan: Plan, names: Sequence[str], end: float, report: Report, apart: Apart) -> str | None:
    """Take what a process tells until it ends; the stage that failed in it, None where none did."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=apart, args=(plan, tuple(names), end, theirs))
    process.start()
    theirs.close()
    current, deadline = "setup", end
    try:
        while ours.poll(max(deadline + GRACE - time.monotonic(), 0.0)):
            message: Message = ours.recv()
            report.take(message)
            current, deadline = message.stage, message.deadline or deadline
            if message.ending.get("error"):
                return current
            if message.ending and current == names[-1]:
                return None
        why = f"it hung, and was ended {GRACE:.0f} s past its deadline"
    except EOFError:
        process.join(GRACE)
        why = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()
    report.take(Message(current, ending={"error": why}))
    return current


def parse(arguments: Sequence[str] | None = None) -> tuple[Plan, Path]:
    """The plan and the file of a command line."""
    parser = argparse.ArgumentParser(prog="python -m exspec.jobs.benchmarks.synthetic", description=measure.__doc__)
    parser.add_argument("pair", help="TARGET:DRAFT, shapes: " + ", ".join(SHAPES))
    parser.add_argument("output", type=Path, help="file for the JSON report")
    for name in ("dtype", "device", "seconds"):
        default = getattr(Plan, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    taken = vars(parser.parse_args(arguments))
    return Plan(**{name: value for name, value in taken.items() if name != "output"}), taken["output"]


if __name__ == "__main__":
    measure(*parse())
