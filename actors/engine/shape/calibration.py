"""Choosing the shape of decoding by measurement: plain decoding or speculation, by whom, B, W, K and bucket.

Three steps. Short runs on a sample of the requests, with each drafter that is at hand, tell how far its drafts
survive, and how long completions are. A dry
run of the scheduler for each candidate, with a clock that adds up measured times of its forwards, predicts its
tokens/s. The best of each kind are then run in turn, and the fastest of them is taken: plain decoding unless
speculation is faster.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import mean, median
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import KERNELS, EngineConfig, KernelsName, Method
from exspec.actors.engine.drafters import NONE, at_hand, drafter_class, kind, label
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.kv.pages import Boundless
from exspec.actors.engine.layers import fused
from exspec.actors.engine.methods import settle
from exspec.actors.engine.request import Request
from exspec.actors.engine.scheduling.grouping import grouping_of
from exspec.actors.engine.scheduling.pool import Pool
from exspec.actors.engine.scheduling.pool import Sequence as Decoded
from exspec.actors.engine.shape.costs import Clock, Costs, OutOfTimeError
from exspec.actors.engine.shape.plan import fit, plan_memory
from exspec.actors.engine.shape.sample import Feed, MakeEngine, Sample, look

Way = dict[str, Any]  # a drafter: its name, and settings of its own
FREE = ("method", "drafter", "batch_size", "window", "draft_tokens", "bucket", "kernels", "prefill")
ROWS = {"cuda": (8, 16, 32, 64, 128, 256, 4, 2, 1), "cpu": (8, 16, 4, 2, 1)}  # B that are tried, the likeliest first
# Kernels that are predicted with. On a CPU compiled ones are made for the finalists alone: each shape takes seconds.
PREDICTED: dict[str, tuple[KernelsName, ...]] = {"cuda": ("compiled", "eager"), "cpu": ("eager", "packed")}
PREFILLS = {"cuda": ((1, 128), (4, 128), (16, 128)), "cpu": ((4, 32), (8, 16), (1, 128))}  # rows and columns
ROUNDS = 100  # of a dry run
USUAL = 5  # K that B is chosen with
TURNS, FIRST_TURNS = 5, 2  # that the time of the final is cut into, and those that all finalists take part in
COMPILE_FROM = 10.0  # seconds of measuring: who gives less does not want to wait for a compiler
MARGIN = 1.02  # speculation must be this much faster than plain decoding to be taken


@dataclass
class Candidate:
    """A shape, with its tokens/s as predicted by the dry run and as measured in the final; None: not run."""

    config: EngineConfig
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Calibration:
    """config: the choice. candidates: all that were predicted, the best first. seconds: what it took. compiled: what
    of that a compiler took; None where none was asked."""

    config: EngineConfig
    candidates: list[Candidate]
    sample: Sample
    seconds: float
    compiled: str | None = None

    def table(self) -> list[dict[str, Any]]:
        """The candidates as plain values, those that were run first. B, W and K as they are used."""
        return [
            {
                "method": c.config.method,
                "drafter": label(c.config),
                "batch_size": c.config.batch_size,
                "window": c.config.slots,
                "draft_tokens": c.config.drafted,
                "bucket": c.config.bucket,
                "kernels": c.config.kernels,
                "predicted": round(c.predicted, 1),
                "measured": None if c.measured is None else round(c.measured, 1),
                "chosen": replace(c.config, threshold=self.config.threshold) == self.config,
            }
            for c in sorted(self.candidates, key=lambda c: (c.measured is None, -(c.measured or c.predicted)))
        ]


def calibrate(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    requests: Sequence[Request],
    config: EngineConfig,
    free: Sequence[str] = FREE,
    seconds: float = 20.0,
    budget: int | None = None,
    engine: MakeEngine = Engine,
) -> Calibration:
    """The fastest config that differs from `config` in the settings named in `free` alone.

    requests: a sample; those of it that cannot be decoded are left out. seconds: about how long to take; half of it
    goes to the final. budget: bytes of memory that the config may plan to use. engine: makes the engines that decode.

    Raises ValueError where no request of the sample can be decoded, or no candidate fits the budget.
    """
    clock, compiling = Clock(), fused.CODE.seconds
    start, began = clock.now(), time.monotonic()
    ways = _ways(target, draft, config, free)
    if ways:
        config = config.drafting(ways[0])
    elif config.drafts:
        config = replace(config, method="plain", drafter=NONE)
    config = replace(settle(target, draft, config), pages=config.pages)
    if budget is not None:  # or nothing would fit
        _fitted(target, draft, replace(config, method="plain", drafter=NONE) if "method" in free else config, budget)
    looks = _looks(engine, target, draft, config, ways, free, budget)
    ways = [way for way in ways if _label(config, way) in looks]
    sample = look(looks, requests, seconds / 4)
    longest = max(p + n for p, n in sample.lengths)
    device = "cuda" if target.device.type == "cuda" else "cpu"
    held = partial(_held, target, draft, budget=budget)
    if "kernels" in free:
        least = held(replace(config, kernels="eager"))
        kernels = [name for name in PREDICTED[device] if held(replace(config, kernels=name)) >= least]
        config = fastest_kernels(target, draft, sample.requests, longest, config, kernels, clock)
    if "prefill" in free:
        fitting = [shape for shape in prefill_shapes(config, device) if held(shape) >= held(config)]
        config = fastest_prefill(target, draft, sample.requests, longest, fitting or [config], clock)
    costs = Costs(target, draft, sample.requests, longest, config, clock)
    made: list[Candidate] = []
    tried: set[str] = set()

    def consider(shape: EngineConfig) -> None:
        if tried == kinds and made:
            costs.deadline = start + seconds / 2  # one of each kind is predicted whatever it takes
        tried.add(label(shape))
        with suppress(OutOfTimeError, ValueError, torch.OutOfMemoryError):  # but for the first: it does not fit
            fitted = shape if budget is None else _fitted(target, draft, shape, budget)
            if fitted.batch_size == shape.batch_size:
                made.append(Candidate(fitted, predict(fitted, costs, sample)))

    shapes = list(_candidates(config, free, ways, device, _config(draft)))
    kinds = {label(shape) for shape in shapes}
    widths = sorted({s.bucket for s in shapes})
    usual = [s for s in shapes if s.bucket == widths[len(widths) // 2]]
    coarse = [s for s in usual if s.drafted == _usual(s, usual)]
    for shape in coarse:
        consider(shape)
    rows = max(made, key=lambda c: c.predicted).config.batch_size if made else None
    for shape in shapes:
        if shape not in coarse and rows in (shape.batch_size, None):
            consider(shape)
    if not made:
        raise ValueError("calibration: no shape of those that may be chosen fits the memory")
    made.sort(key=lambda c: -c.predicted)
    finalists = _finalists(made)
    if "kernels" in free and seconds >= COMPILE_FROM:
        finalists += _compiled(target, draft, finalists)
        made += [c for c in finalists if c not in made]
    costs.forget()
    if budget is not None:  # all finalists hold their KV at once
        while len(finalists) > 1 and _together(target, draft, finalists) > budget:
            finalists.remove(max(finalists, key=lambda c: (c is not finalists[0], c.config.drafts)))
    chosen = (
        _final(engine, target, draft, sample, finalists, clock, start + seconds)
        if len(finalists) > 1
        else max(made, key=lambda c: c.predicted / (MARGIN if c.config.drafts else 1))
    )
    costs.deadline = math.inf
    best = replace(chosen.config, threshold=_threshold(chosen.config, costs, sample))
    compiled = str(fused.CODE) if fused.CODE.seconds > compiling else None
    return Calibration(best, made, sample, time.monotonic() - began, compiled)


def predict(config: EngineConfig, costs: Costs, sample: Sample) -> float:
    """Tokens/s of a long job: the scheduler's own rounds, on sequences that are only lengths."""
    rng = random.Random(0)
    pool, grouping = Pool(config.slots, Boundless(), config.width), grouping_of(config)
    source = cycle(sample.lengths)
    # Without drafts nothing was looked at, where there is who drafts.
    name = label(config) if label(config) in sample.overhead else next(iter(sample.overhead))
    survival = sample.survival[name]
    seconds, tokens = 0.0, 0
    for number in range(ROUNDS):
        for _ in range(len(pool.free)):
            prompt, completion = next(source)
            sequence = Decoded(Request(number, [0] * prompt, max_new_tokens=max(completion, 1)), config.capacity)
            if number == 0:  # a long job is met in its midst
                sequence.tokens += [0] * rng.randrange(sequence.budget or 1)
            else:
                seconds += costs.prefill(config, prompt)
            pool.waiting.append(sequence)
        pool.admit(len(pool.free))
        rows = grouping.select(pool.running)
        for sequence in pool.running:
            sequence.waited = 0 if sequence in rows else sequence.waited + 1
        attended = _attended(config, [s.length + 1 for s in rows])
        device, host = costs.round(config, attended), sample.overhead[name] * len(rows)
        seconds += max(device, host) if config.overlap else device + host
        for sequence in rows:
            chance, kept = rng.random(), 1
            kept += sum(chance < s for s in survival[: config.drafted])
            kept = min(kept, sequence.budget, max(attended - sequence.length, 1))
            sequence.tokens += [0] * kept
            tokens += kept
            if sequence.budget <= 0:
                pool.end(sequence, "length", None)
    return tokens / seconds


def fastest_kernels(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    requests: Sequence[Request],
    longest: int,
    config: EngineConfig,
    kernels: Sequence[KernelsName] = KERNELS,
    clock: Clock | None = None,
) -> EngineConfig:
    """The config with those of the kernels that take the fewest seconds for a round.

    requests: whose tokens are chosen. longest: tokens of the longest sequence expected.
    """
    shapes = [replace(config, kernels=name) for name in kernels]
    return _fastest(target, draft, requests, longest, shapes, clock, lambda c: c.round(c.config, longest // 2 + 1))


def prefill_shapes(config: EngineConfig, device: str) -> list[EngineConfig]:
    """The config with each of the prefill shapes that are tried on a kind of device, and that its pages allow."""
    shapes = []
    for rows, columns in PREFILLS[device]:
        with suppress(ValueError):
            shapes.append(replace(config, prefill_rows=rows, prefill_columns=columns))
    return shapes


def fastest_prefill(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    requests: Sequence[Request],
    longest: int,
    shapes: list[EngineConfig],
    clock: Clock | None = None,
) -> EngineConfig:
    """The one of the shapes that takes in the prompts of the requests in the fewest seconds."""
    lengths = [len(r.prompt) for r in requests]

    def seconds(costs: Costs) -> float:
        return sum(costs.prefill(costs.config, length) for length in lengths)

    return _fastest(target, draft, requests, longest, shapes, clock, seconds)


def _fastest(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    requests: Sequence[Request],
    longest: int,
    shapes: list[EngineConfig],
    clock: Clock | None,
    seconds: Callable[[Costs], float],
) -> EngineConfig:
    """Of the shapes that work here, the one that takes the fewest seconds. Each is timed twice, the second time in the
    opposite order: a machine may be faster now than a little later."""
    found: list[tuple[float, EngineConfig]] = []
    working = [shape for shape in shapes if settle(target, draft, shape).kernels == shape.kernels]
    for shape in [*working, *reversed(working)] if len(working) > 1 else []:
        costs = Costs(target, draft, requests, longest, shape, clock)
        with suppress(torch.OutOfMemoryError):
            found.append((seconds(costs), shape))
        costs.forget()
    return min(found, key=lambda pair: pair[0])[1] if found else [*working, *shapes][0]


def _compiled(target: PreTrainedModel, draft: PreTrainedModel | None, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates with compiled layers, where those work here and are not what was predicted."""
    made = [replace(c, config=replace(c.config, kernels="compiled")) for c in candidates]
    works = [settle(target, draft, c.config).kernels == "compiled" for c in made[:1]]
    return [m for m, c in zip(made, candidates, strict=True) if works[0] and c.config.kernels != "compiled"]


def _attended(config: EngineConfig, lengths: list[int]) -> int:
    """KV columns that a round of rows of these lengths attends, a row."""
    if config.attention == "in_place":
        return min(round(mean(lengths)) + config.drafted, config.capacity)
    return config.round_shape(len(lengths), max(lengths))[1]


def _threshold(config: EngineConfig, costs: Costs, sample: Sample) -> float:
    """The chance of acceptance below which one more draft step costs more than it brings.

    A step takes D seconds for R rows; a committed token is worth the round's time T over the R * E tokens that it
    commits. So place i of a row's draft pays while its chance is at least (D / R) / (T / (R * E)) = D * E / T.
    """
    if not config.drafts:
        return config.threshold
    attended = _attended(config, [round(mean(p + n / 2 for p, n in sample.lengths))])
    ratio = costs.draft_step(config, attended) * sample.gain(config) / costs.round(config, attended)
    return min(max(ratio, 0.01), 0.9)


def _ways(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: EngineConfig, free: Sequence[str]
) -> list[Way]:
    """Who may draft, and how, the likeliest first: all that are at hand, or the one of the config; nobody where plain
    decoding is asked for.

    Raises ValueError where drafts are asked for, and nobody can make them.
    """
    if not config.drafts and "method" not in free:
        return []
    names = at_hand(target.config, _config(draft), config)
    found = names if "drafter" in free else [name for name in names if name == config.drafter]
    found.sort(key=lambda name: name != config.drafter)
    made = [{"drafter": n, **way} for n in found for way in drafter_class(n).variants(target.config, config)]
    told = [drafter_class(way["drafter"]).trial(target, config.drafting(way)) for way in made]
    ways = [way for way, why in zip(made, told, strict=True) if why is None]
    if not ways and "method" not in free:
        why = f" ({told[0]})" if told else ""
        raise ValueError(
            f"calibration: method {config.method} has no drafter at hand{why}; expected one, or method plain"
        )
    return ways


def _config(model: PreTrainedModel | None) -> PretrainedConfig | None:
    return None if model is None else model.config


def _label(config: EngineConfig, way: Way) -> str:
    return label(replace(config.drafting(way), method=config.method if config.drafts else "exspec"))


def _looks(
    make: MakeEngine,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: EngineConfig,
    ways: list[Way],
    free: Sequence[str],
    budget: int | None,
) -> dict[str, Callable[[], Engine]]:
    """What makes the engines that the drafters are looked at in, of those that fit, by label. Who learns comes last,
    and never alone: it needs completions."""
    shapes = [_looked_at(config, way, free, _config(draft)) for way in ways]
    shapes.append(replace(config, method="plain", drafter=NONE, draft_length="fixed", columns=None))
    found: dict[str, Callable[[], Engine]] = {}
    for shape in shapes:
        with suppress(ValueError):
            fitted = shape if budget is None else _fitted(target, draft, shape, budget)
            found[label(shape)] = partial(make, target, draft, fitted)
    learning = {label(s): found.pop(label(s)) for s in shapes if kind(s).learns and label(s) in found}
    if len(found) > 1:
        del found[NONE]
    return found | learning


def _looked_at(config: EngineConfig, way: Way, free: Sequence[str], draft: PretrainedConfig | None) -> EngineConfig:
    """The shape in which a drafter is looked at."""
    method = config.method if config.drafts else "exspec"
    drafter = drafter_class(way["drafter"])
    looked_at = min(drafter.looked_at, max(drafter.lengths_with(draft)))
    drafted = looked_at if "draft_tokens" in free or not config.drafts else config.draft_tokens
    if config.exact:
        drafted = max(min(drafted, config.bucket - 1), 1)
    return replace(config.drafting(way), method=method, draft_tokens=drafted, draft_length="fixed", columns=None)


def _usual(shape: EngineConfig, shapes: list[EngineConfig]) -> int:
    """Of the K that are tried with a shape's drafter, the one that B is chosen with."""
    lengths = {s.drafted for s in shapes if label(s) == label(shape)}
    return min(lengths, key=lambda k: abs(k - USUAL))


def _candidates(
    config: EngineConfig, free: Sequence[str], ways: list[Way], device: str, draft: PretrainedConfig | None
) -> Iterator[EngineConfig]:
    """Shapes that differ from `config` in what is free, the likeliest first. ways: who may draft, and how."""

    def options(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return values if name in free else (getattr(config, name),)

    sizes = options("batch_size", ROWS[device])
    widths = (128, 256, 512, 1024, config.capacity) if config.attention == "gathered" else (config.capacity,)
    buckets = options("bucket", sorted({min(b, config.capacity) for b in widths}))
    speculating: Method = config.method if config.drafts else "exspec"
    plain = {"method": "plain", "drafter": NONE, "draft_tokens": config.draft_tokens or 1}
    methods: list[dict[str, Any]] = [plain] if "method" in free or not ways else []
    for way in ways:
        lengths = options("draft_tokens", drafter_class(way["drafter"]).lengths_with(draft))
        methods += [{"method": speculating, **way, "draft_tokens": k} for k in lengths]
    for rows in sizes:
        if "window" not in free and rows > config.window:
            continue
        for bucket in buckets:
            window = (2 if config.overlap else 1) * rows if bucket >= config.capacity else 3 * rows
            windows = options("window", (window,))
            for method in methods:
                with suppress(ValueError):  # a bucket narrower than a verify forward, say
                    yield replace(config.drafting(method), batch_size=rows, window=windows[0], bucket=bucket)


def _finalists(made: list[Candidate]) -> list[Candidate]:
    """Of candidates, the best first, those that are run: the best without drafts and the best of each drafter, two of
    one that is alone."""
    drafting = [c for c in made if c.config.drafts]
    chosen = sorted({c.config.drafter: c for c in reversed(drafting)}.values(), key=lambda c: -c.predicted)
    chosen += [c for c in drafting if c not in chosen][: max(2 - len(chosen), 0)]
    return chosen + [c for c in made if not c.config.drafts][:1]


def _fitted(target: PreTrainedModel, draft: PreTrainedModel | None, shape: EngineConfig, budget: int) -> EngineConfig:
    """The shape with a window and a batch that fit. Raises ValueError with the smallest budget that would do."""
    return fit(target.config, _config(draft), shape, target.dtype, budget)


def _held(target: PreTrainedModel, draft: PreTrainedModel | None, shape: EngineConfig, budget: int | None) -> int:
    """Rows of the largest batch of the shape, at most its own, that the budget holds."""
    if budget is None:
        return shape.batch_size
    try:
        return _fitted(target, draft, shape, budget).batch_size
    except ValueError:
        return 0


def _together(target: PreTrainedModel, draft: PreTrainedModel | None, candidates: list[Candidate]) -> int:
    """Bytes of all candidates' engines. They share the weights, but for those that each packs for itself."""
    other = draft.config if draft is not None else None
    plans = [plan_memory(target.config, other, c.config, target.dtype) for c in candidates]
    own = [p.weights for c, p in zip(candidates, plans, strict=True) if c.config.kernels == "packed"]
    shared = sum(p.weights for p in plans) - max(sum(own), max(p.weights for p in plans))
    return sum(p.total for p in plans) - shared


def _final(
    make: MakeEngine,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    sample: Sample,
    finalists: list[Candidate],
    clock: Clock,
    end: float,
) -> Candidate:
    """Run the finalists in turn, a slice of the time each, on pools that are never drained; returns the fastest.

    All of them twice; then the best of each kind alone, which are compared turn by turn, for a machine may be faster
    in one than in the next.
    """
    engines = [make(target, draft if c.config.drafts else None, c.config) for c in finalists]
    feeds = [Feed(engine, sample) for engine in engines]
    slice_ = max(0.05, (end - clock.now()) / (TURNS * len(feeds)))
    for feed in feeds:
        with clock.stopped():  # admits, and records what a device records
            feed.run(time.monotonic() + slice_ / 2)
    speeds: list[list[float]] = [[] for _ in feeds]
    for _ in range(FIRST_TURNS):
        for feed, its in zip(feeds, speeds, strict=True):
            its.append(feed.run(time.monotonic() + slice_))
    order = sorted(range(len(feeds)), key=lambda i: -median(speeds[i]))
    first = order[0]
    second = next((i for i in order if finalists[i].config.drafts != finalists[first].config.drafts), order[1])
    slice_ = max(0.05, (end - clock.now()) / (TURNS * 2))
    while clock.now() + 2 * slice_ < end:
        for i in (first, second):
            speeds[i].append(feeds[i].run(time.monotonic() + slice_))
    for candidate, measured in zip(finalists, speeds, strict=True):
        candidate.measured = median(measured)
    del engines, feeds, feed
    gc.collect()
    faster = median(a / b for a, b in zip(speeds[first], speeds[second], strict=True))
    margin = MARGIN ** (finalists[first].config.drafts - finalists[second].config.drafts)
    return finalists[first] if faster >= margin else finalists[second]
