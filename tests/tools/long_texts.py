"""Drafters on long texts that refer back: trains a target and a draft model for them, measures, and draws.

    python -m tests.tools.long_texts train FOLDER [--minutes 20]
    python -m tests.tools.long_texts measure FOLDER FIGURES.jsonl [--lengths 500,2000,8000]
    python -m tests.tools.long_texts draw FIGURES.jsonl PICTURE.png

A text defines 64 slots: a definition is one token, which stands for a slot and its value. The rest is filler, in which
each word predicts the next, and recitals: eight slots in a row, each followed by its value.
"""

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, SequenceStatistics
from exspec.actors.engine.config import Method
from exspec.actors.engine.drafters.lookup import kind
from exspec.actors.engine.drafters.sparse import window_of
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.window import Reads, chosen_pages
from exspec.actors.engine.layers.programs import CODE
from exspec.actors.engine.shape.calibration import Candidate, calibrate

BLOCKS, EACH, VALUES, WORDS = 8, 8, 8, 128
SLOTS = BLOCKS * EACH
DEFINITION = 1  # the first token of each kind; 0 begins a text
SLOT = DEFINITION + SLOTS * VALUES
VALUE = SLOT + SLOTS
WORD = VALUE + VALUES
VOCABULARY = WORD + WORDS
STEPS = 10  # words of a run of filler, at most
CONTEXT = 16896
SIZES = {"target": (6, 256, 4, 28), "draft": (2, 128, 2, 24)}  # layers, width, heads, dimensions of a slot's code
ROWS, NEW, DRAFTED = 8, 256, 4
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft model": {"drafter": "model"},
    "draft model, window": {"drafter": "model", "draft_window": 512},
    "sparse, window": {"drafter": "sparse"},
    "sparse, chosen": {"drafter": "sparse", "draft_chosen": 0},  # 0: as many as the window
    "sparse, random": {"drafter": "sparse", "draft_chosen": 0},
}
LATER = {"sparse, chosen, from 2,048": {"drafter": "sparse", "draft_chosen": 0, "draft_from": 2048}}  # for mixed texts
AUTO = {"auto": True, "auto without draft": False}  # what calibration chooses, with the draft model or without
app = typer.Typer(add_completion=False)


class Filler:
    """Words come nearer to the end of a run with every step. The last word tells which block is recited."""

    def __init__(self) -> None:
        rng = random.Random(7)
        self.steps = {word: word * STEPS // WORDS for word in range(WORDS)}  # to the end of the run
        at: dict[int, list[int]] = {n: [w for w, steps in self.steps.items() if steps == n] for n in range(STEPS)}
        self.usual = {w: rng.choice(at[n - 1]) for w, n in self.steps.items() if n}
        self.other = {w: rng.choice(at[max(n - 2, 0)]) for w, n in self.steps.items()}
        self.block = {word: i % BLOCKS for i, word in enumerate(at[0])}

    def run(self, rng: random.Random, text: list[int]) -> int:
        """Append a run; returns the block that follows."""
        word = rng.randrange(WORDS)
        text.append(WORD + word)
        while self.steps[word]:
            word = self.usual[word] if rng.random() > 0.12 else self.other[word]
            text.append(WORD + word)
        return self.block[word]


FILLER = Filler()


def text_of(length: int, early: int, rng: random.Random, first: int = 33) -> list[int]:
    """A text whose definitions lie between the tokens `first` and about `early`; those of a block are together."""
    values = [rng.randrange(VALUES) for _ in range(SLOTS)]
    text = [0]
    while len(text) < first:
        FILLER.run(rng, text)
    room = max((early - first - SLOTS) // BLOCKS, 0)
    for block in rng.sample(range(BLOCKS), BLOCKS):
        until = len(text) + (rng.randint(0, 2 * room) if room else 0)
        while len(text) < until:
            FILLER.run(rng, text)
        text += [DEFINITION + slot * VALUES + values[slot] for slot in slots_of(block)]
    while len(text) < length:
        for slot in slots_of(FILLER.run(rng, text)):
            text += [SLOT + slot, VALUE + values[slot]]
    return text[:length]


def slots_of(block: int) -> range:
    return range(block * EACH, (block + 1) * EACH)


@torch.no_grad()
def untrained(role: str) -> PreTrainedModel:
    """A model with one head that recalls values: its query is the slot's code, its keys are those of the definitions,
    in dimensions that hardly rotate. From random weights alone, none formed in ten minutes on a CPU."""
    layers, width, heads, n = SIZES[role]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, head_dim=64, max_position_embeddings=CONTEXT,
            rope_theta=1e8, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    slots, values = torch.randn(SLOTS, n).sign(), torch.randn(VALUES, n).sign()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.copy_(torch.randn_like(embedding) * 0.3)
    embedding[1:, : 4 * n] = 0
    defined, of_value, asked, found = (slice(i * n, (i + 1) * n) for i in range(4))
    embedding[DEFINITION:SLOT, defined] = slots.repeat_interleave(VALUES, 0)
    embedding[DEFINITION:SLOT, of_value] = values.repeat(SLOTS, 1)
    embedding[SLOT:VALUE, asked] = slots
    head[VALUE:WORD, found] += 0.3 * values
    attention = model.model.layers[1].self_attn
    slow = torch.tensor([*range(32 - n // 2, 32), *range(64 - n // 2, 64)])
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:64] = 0
    attention.q_proj.weight[slow, asked] = 1.2 * torch.eye(n)
    attention.k_proj.weight[slow, defined] = 1.2 * torch.eye(n)
    attention.v_proj.weight[:n, of_value] = torch.eye(n)
    attention.o_proj.weight[found, :n] = 0.5 * torch.eye(n)
    return model  # type: ignore[no-any-return]


def batch_of(rng: random.Random, done: float) -> Tensor:
    """Texts [B, L], longer ones as training goes on. done: the share of its time."""
    length, rows = (257, 12) if done < 0.5 else (1025, 3) if done < 0.8 else (rng.choice([2049, 4097, 8193]), 1)
    return torch.tensor([text_of(length, rng.randint(64, length // 2), rng) for _ in range(rows)])


@app.command()
def train(folder: Path, minutes: float = 20.0) -> None:
    """Train the target for so many minutes, and the draft model for a third of them."""
    for role, share in (("target", 1.0), ("draft", 1 / 3)):
        model: Any = untrained(role)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        rng, start = random.Random(1), time.monotonic()
        while (done := (time.monotonic() - start) / (60 * minutes * share)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * max(0.05, 1 - done)
            texts = batch_of(rng, done)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=texts[:, :-1]).logits
            loss = cross_entropy(logits.float().flatten(0, 1), texts[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        typer.echo(f"{role}: loss {loss.item():.3f}")
        model.save_pretrained(folder / role)


def prompts_of(lengths: str) -> list[list[int]]:
    """ROWS texts of each length: 500 or 500+8000. 500*4 gives four times as many texts; 8000! puts definitions into the
    last 200 tokens, not into the first half."""
    rng, found = random.Random(lengths), []
    for part in lengths.split("+"):
        name, _, times = part.partition("*")
        length = int(name.rstrip("!"))
        early, first = (length - 60, length - 200) if "!" in name else (length // 2, 33)
        found += [text_of(length, early, rng, first) for _ in range(ROWS * int(times or 1))]
    rng.shuffle(found)
    return found


def random_pages(self: PagedModel, slots: Tensor, latest: Tensor, recent: int, chosen: int) -> Reads:
    """As `few_pages`, but with pages that have nothing to do with attention, beside the first and the last two."""
    table = self.pages.on_device[slots]
    steps = table + latest[:, None] + 37 * torch.arange(len(self.keys))[:, None, None]
    return chosen_pages(table, steps * 0.754877666 % 1, latest, 2, recent - 2 + chosen, self.pages.size)


def config_of(name: str, length: int, kernels: Any = "compiled_packed") -> EngineConfig:
    """B = 8. sparse reads a twentieth of the text, at least 256 tokens, and as many chosen ones."""
    settings = dict((DRAFTERS | LATER)[name])
    if settings.get("drafter") == "sparse":
        settings["draft_window"] = window_of(EngineConfig(capacity=length))
        if "draft_chosen" in settings:
            settings["draft_chosen"] = settings["draft_window"]
    method: Method = "exspec" if settings else "plain"
    return EngineConfig(
        method=method, batch_size=ROWS, window=3 * ROWS, draft_tokens=DRAFTED, capacity=length + NEW + 64,
        kernels=kernels, prefill_columns=128, **settings,
    )  # fmt: skip


def chosen(target: Any, draft: Any, prompts: list[list[int]], kernels: Any, seconds: float) -> EngineConfig:
    """What calibration chooses at B = 8, with this draft model or none."""
    base = config_of("draft model" if draft else "sparse, window", max(map(len, prompts)), kernels)
    requests = [Request(number, prompt, NEW, ignore_end=True) for number, prompt in enumerate(prompts)]
    free = ("method", "drafter", "draft_tokens", "draft_from")
    found = calibrate(target, draft, requests, base, free, seconds)
    typer.echo(found.reason)
    return found.config


def decode(
    target: Any, draft: Any, name: str, settings: EngineConfig, prompts: list[list[int]]
) -> tuple[float, Any, Any]:
    """Tokens/s of the rounds, the statistics, and the tokens by row. Prefill and compiling do not count."""
    pages = random_pages if name.endswith("random") else PagedModel.few_pages
    with patch.object(PagedModel, "few_pages", pages):
        engine = Engine(target, draft if kind(settings).needs_draft else None, settings)
        engine.submit(Request("first", prompts[0][:64], 2 * settings.draft_tokens + 4))
        engine.run()
        before, compiling = dict(engine.statistics.seconds), CODE.seconds
        for number, prompt in enumerate(prompts):
            engine.submit(Request(number, prompt, NEW, ignore_end=True))
        done = engine.run()
    spent = sum(seconds - before[phase] for phase, seconds in engine.statistics.seconds.items() if phase != "admit")
    spent -= CODE.seconds - compiling
    total = sum((c.statistics for c in done), start=SequenceStatistics())
    return total.completion_tokens / spent, total, {c.id: c.tokens for c in done}


@app.command()
def measure(
    folder: Path,
    figures: Path,
    lengths: str = "500,2000,8000",
    turns: int = 3,
    drafters: str = ";".join(DRAFTERS),
    kernels: str = "compiled_packed",
    threads: int = 2,
    tune_seconds: float = 120.0,
) -> None:
    """Decode texts of each length, or of mixed lengths (`prompts_of`), with each drafter, in turns, and append the
    figures as lines of JSON. drafters may also name entries of LATER and AUTO."""
    torch.set_num_threads(threads)
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / role).eval() for role in SIZES)
    for length in lengths.split(","):
        prompts = prompts_of(length)
        speeds: dict[str, list[float]] = {name: [] for name in drafters.split(";")}
        drafts = {name: draft if AUTO.get(name, True) else None for name in speeds}
        configs = {name: config_of(name, max(map(len, prompts)), kernels) for name in speeds if name not in AUTO}
        for name in speeds.keys() & AUTO.keys():
            configs[name] = chosen(target, drafts[name], prompts, kernels, tune_seconds)
        totals: dict[str, Any] = {}
        expected = None
        for _ in range(turns):
            for name, found in speeds.items():
                speed, totals[name], tokens = decode(target, drafts[name], name, configs[name], prompts)
                expected = expected or tokens
                assert tokens == expected, f"{name} gives other tokens"
                found.append(speed)
        for name, found in speeds.items():
            line: dict[str, Any] = {"length": int(length) if length.isdecimal() else length}
            line |= {"drafter": name, "tokens_per_s": round(median(found), 1)}
            if name in AUTO:
                line |= {"chosen": str(Candidate(configs[name], 0.0))}
            if configs[name].drafts:
                line |= {"acceptance": round(totals[name].acceptance_rate, 3)}
            if "plain" in speeds:
                ratios = [a / b for a, b in zip(found, speeds["plain"], strict=True)]
                line |= {"times_plain": round(median(ratios), 3)}
            typer.echo(json.dumps(line))
            with figures.open("a") as file:
                file.write(json.dumps(line) + "\n")


@app.command()
def draw(figures: Path, picture: Path) -> None:
    """Times plain over the length of the text, by drafter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    lines = [line for line in lines if isinstance(line["length"], int)]
    figure, axes = pyplot.subplots(figsize=(8.5, 4.2))
    for name in dict.fromkeys(line["drafter"] for line in lines):
        points = sorted((x["length"], x["times_plain"]) for x in lines if x["drafter"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens of the prompt", ylabel="tokens/s relative to plain", ylim=(0, None))
    axes.set_xticks(ticks := sorted({x["length"] for x in lines}), [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    app()
