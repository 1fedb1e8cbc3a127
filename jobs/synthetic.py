"""`exspec bench --synthetic TARGET:DRAFT`: real compute at real shapes, with random weights and nothing to download.

The draft model runs as it would, and its proposals are then replaced by the target's own continuation, each right by
a seeded coin: acceptance is a dial. Every phase is set against its floor, the bytes that it must read over the copy
bandwidth of the device.

Needs torch and transformers alone, so that it runs on a machine with a GPU and little else:
`python -m exspec.jobs.synthetic Qwen/Qwen3-8B:Qwen/Qwen3-0.6B out.json`.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, SequenceStatistics
from exspec.actors.engine.cached_model import kv_shape
from exspec.actors.engine.calibration import calibrate
from exspec.actors.engine.costs import Costs
from exspec.actors.engine.drafting import Draft, Drafter
from exspec.actors.engine.group import Group
from exspec.jobs.bench import describe_hardware

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
                raise ValueError(f"--synthetic: no shape {name!r}; expected TARGET:DRAFT of {', '.join(SHAPES)}")


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


class Replay:
    """Runs a drafter, and replaces what it proposes by the reference, each token right with chance `right`."""

    def __init__(self, drafter: Drafter, reference: dict[tuple[int, ...], list[int]], right: float) -> None:
        self.drafter, self.reference, self.right = drafter, reference, right
        self.coins: dict[tuple[int, int], bool] = {}

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
        self.shape = EngineConfig(draft_tokens=s.draft_tokens, capacity=capacity, bucket=capacity)
        self.device = torch.device(s.device)

    def requests(self) -> list[Request]:
        return [Request(i, p, max_new_tokens=self.settings.max_new_tokens) for i, p in enumerate(self.prompts)]

    def decode(self, engine: Engine, order: int = 0) -> tuple[dict[tuple[int, ...], list[int]], float, Any]:
        """Tokens by prompt, seconds, and the completions. A first request pays for the engine's recordings."""
        requests = self.requests()
        random.Random(order).shuffle(requests)
        warm = Request("warm", self.prompts[0], max_new_tokens=2 * (self.settings.draft_tokens + 1))
        engine.submit(warm)
        engine.run()
        self.wait()
        start = time.perf_counter()
        for request in requests:
            engine.submit(request)
        done = engine.run()
        self.wait()
        seconds = time.perf_counter() - start
        return {tuple(self.prompts[int(str(c.id))]): c.tokens for c in done}, seconds, done

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
            engine = Engine(target, draft, config)
            if config.drafts:
                engine.drafter = Replay(engine.drafter, reference, right)
            return engine

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

    def generate(self, rows: int) -> int:
        count = 0
        for i in range(0, len(self.prompts), rows):
            batch = self.prompts[i : i + rows]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=self.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=self.device)
            output = self.target.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, generation_config=self.generation()
            )
            count += (output.shape[1] - width) * len(batch)
        return count

    def continuous(self, _: int) -> int:
        """It sizes its own batches."""
        outputs = self.target.generate_batch(  # type: ignore[operator]
            inputs=self.prompts, generation_config=self.generation()
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
            "draft": (costs.propose(rows, s.draft_tokens, attended), s.draft_tokens * draft_bytes),
            "prefill": (costs.chunk(False), model_bytes(self.target)),
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
    """Measure, and write the report as JSON; the last line printed is the same."""
    report = json.dumps(Bench(settings).run())
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    run(Settings(sys.argv[1]), Path(sys.argv[2]))
