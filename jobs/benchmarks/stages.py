"""What `exspec synthetic` measures: stages, each with a deadline, on models with random weights."""

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product, zip_longest
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.config import AttentionName
from exspec.actors.engine.graphs import Eager, Recorder
from exspec.actors.engine.layers.programs import compiler_trial
from exspec.actors.engine.methods import drafter_of, recorder_for, resolve
from exspec.actors.engine.shape.costs import Costs
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.roofline import Sizes
from exspec.actors.exactness import transformers_generate
from exspec.actors.hardware import describe_hardware
from exspec.jobs.benchmarks.decoding import Run, check_time, decode, synchronize, timed
from exspec.jobs.benchmarks.independence import RowIndependence
from exspec.jobs.benchmarks.models import build, copy_bandwidth
from exspec.jobs.benchmarks.replay import ReplayDrafter
from exspec.jobs.benchmarks.settings import SyntheticSettings
from exspec.jobs.benchmarks.shapes import pair_names

Result = dict[str, Any]
TOKENS = 100  # that prompts are made of; every shape's vocabulary is larger


class Measurement:
    """One pair of models on one device.

    The stages yield their results one by one. They raise OutOfTimeError at their deadline, a value of time.monotonic.
    """

    def __init__(self, settings: SyntheticSettings) -> None:
        self.settings = s = settings
        self.device = torch.device(s.device)
        self.target, self.draft = (build(name, getattr(torch, s.dtype), s.device) for name in pair_names(s.pair))
        rng = random.Random(0)
        lengths = [rng.randint(s.prompt_tokens // 2, s.prompt_tokens * 3 // 2) for _ in range(s.limit)]
        self.prompts = [[rng.randrange(1, TOKENS) for _ in range(n)] for n in lengths]
        self.warm_prompt = [rng.randrange(1, TOKENS) for _ in range(s.prompt_tokens // 2)]  # shares no KV with others
        self.capacity = -(-(max(lengths) + max(s.max_new_tokens, 64)) // 64) * 64

    def config(self, rows: int, drafted: int, **changes: Any) -> EngineConfig:
        shape: dict[str, Any] = {"batch_size": rows, "window": max(rows, 8), "draft_tokens": drafted}
        shape |= {"capacity": self.capacity, "bucket": self.capacity}
        shape |= {"kernels": "compiled" if self.device.type == "cuda" else "eager"}
        shape |= dict(zip(("prefill_rows", "prefill_columns"), self.settings.prefills[0], strict=True))
        return EngineConfig(**shape | changes)

    def resolved(self, rows: int, drafted: int, attentions: Sequence[AttentionName] = ("auto",)) -> list[EngineConfig]:
        """Every combination of attention and kernels that works here, once."""
        configs = [
            self.config(rows, drafted, attention=attention, kernels=kernels)
            for attention, kernels in product(attentions, self.settings.kernels)
        ]
        return list(dict.fromkeys(resolve(self.target, self.draft, config) for config in configs))

    def replaying(self, config: EngineConfig) -> tuple[Engine, ReplayDrafter]:
        """An engine whose acceptance can be set, and its drafter."""
        engine = Engine(self.target, self.draft, config, drafter=lambda context: ReplayDrafter(drafter_of(context)))
        assert isinstance(engine.drafter, ReplayDrafter)
        return engine, engine.drafter

    def requests(self, count: int | None = None, sampled: bool = False) -> list[Request]:
        """The first `count` prompts, or all."""
        new = self.settings.max_new_tokens
        return [Request(i, prompt, new, _sampling(i, sampled)) for i, prompt in enumerate(self.prompts[:count])]

    def decode(
        self,
        engine: Engine,
        count: int | None = None,
        order: int = 0,
        sampled: bool = False,
        deadline: float = math.inf,
    ) -> Run:
        """Decode the first `count` prompts, or all, in a random order."""
        self.warm(engine, sampled)
        requests = self.requests(count, sampled)
        random.Random(order).shuffle(requests)
        return decode(engine, requests, deadline)

    def warm(self, engine: Engine, sampled: bool = False) -> None:
        """Run every shape that a round can have, so that nothing is recorded inside the clock: near the end of a
        completion, drafts get shorter, down to none."""
        if engine.statistics.rounds:
            return
        for new in range(engine.config.drafted + 1, 0, -1):
            engine.submit(Request("warm", self.warm_prompt, new, _sampling(0, sampled)))
            engine.run()

    def forget(self) -> None:
        """Free the memory of engines that are gone."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def setup(self, _: float) -> Iterator[Result]:
        """The hardware, the attention and kernels that work on it, and why the others do not."""
        configs = [self.config(1, 1, kernels=kernels) for kernels in self.settings.kernels]
        chosen = [resolve(self.target, self.draft, config) for config in configs]
        try:
            not_in_place = None
            resolve(self.target, self.draft, self.config(1, 1, attention="in_place"))
        except ValueError as error:
            not_in_place = str(error)
        yield {
            "hardware": describe_hardware(self.device),
            "bandwidth_gb_per_s": round(copy_bandwidth(self.device) / 1e9, 1),
            "attention": chosen[0].attention,
            "not_in_place": not_in_place,
            "kernels": [config.kernels for config in chosen],
            "not_compiled": compiler_trial(self.device) if "compiled" in self.settings.kernels else "not asked for",
        }

    def independence(self, deadline: float) -> Iterator[Result]:
        """Whether the bits of a row's logits depend on its place in the batch, its neighbours or later tokens."""
        for rows, drafted in self.settings.shapes:
            for config in self.resolved(rows, drafted, ("auto", "gathered")):
                check_time(deadline)
                compared = RowIndependence(self.target, config).compare()
                yield {"rows": rows, "columns": drafted + 1, **_computed_by(config), **compared}
                self.forget()

    def profile(self, deadline: float) -> Iterator[Result]:
        """The kernels of one round by phase, with and without recording."""
        rows, drafted = self.settings.shapes[0]
        for config in self.resolved(rows, drafted):
            recorders: list[Recorder] = [recorder_for(self.device, config)]
            if recorders[0].records:
                recorders.append(Eager())
            for recorder in recorders:
                check_time(deadline)
                engine = Engine(self.target, self.draft, replace(config, overlap=False), recorder=recorder)
                shape = {"rows": rows, "draft_tokens": drafted, "recorded": recorder.records}
                yield {**shape, **_computed_by(config), "phases": self._round(engine)}
                del engine
                self.forget()

    def _round(self, engine: Engine) -> Result:
        """By phase: milliseconds, the median of three rounds, and the kernels of a fourth round."""
        self.warm(engine)
        for request in self.requests(engine.config.batch_size):
            engine.submit(replace(request, max_new_tokens=6 * engine.config.width))  # more than five rounds can commit
        engine.step()
        rounds = [self._phases(engine, lambda run: timed(run, self.device)) for _ in range(3)]
        kernels = self._phases(engine, self._kernels)
        return {
            phase: {"ms": round(median(seconds[phase] for seconds in rounds) * 1e3, 3), **found}
            for phase, found in kernels.items()
        }

    def _phases(self, engine: Engine, measure: Callable[[Callable[[], Any]], tuple[Any, Any]]) -> Result:
        """Run a round of an engine whose rows are admitted, and measure each phase by itself."""
        group = engine.group()
        draft, drafting = measure(lambda: engine.draft(group))
        verified, verifying = measure(lambda: engine.verify(group, draft))
        _, committing = measure(lambda: engine.commit(group, engine.wait(verified)))
        return {"draft": drafting, "verify": verifying, "commit": committing}

    def _kernels(self, run: Callable[[], Any]) -> tuple[Any, Result]:
        """The device's kernels, those that take longest first. On a CPU: operators."""
        kind = "CUDA" if self.device.type == "cuda" else "CPU"
        activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, kind)}
        with profile(activities=activities) as profiler:
            result = run()
            synchronize(self.device)
        events = profiler.key_averages()
        own = "self_device_time_total" if kind == "CUDA" else "self_cpu_time_total"  # without what an event called
        kernels = [(e.key, e.count, getattr(e, own) / 1e3) for e in events if e.device_type.name == kind]
        kernels = sorted((k for k in kernels if k[2]), key=lambda k: -k[2])
        return result, {
            "kernels": sum(count for _, count, _ in kernels),
            "kernels_ms": round(sum(ms for *_, ms in kernels), 3),
            "launches": {e.key: e.count for e in events if "Launch" in e.key and e.device_type.name == "CPU"},
            "top": [{"name": name[:120], "count": count, "ms": round(ms, 3)} for name, count, ms in kernels[:15]],
        }

    def exact(self, deadline: float) -> Iterator[Result]:
        """Speculation against plain decoding in the same shape: all tokens must be equal."""
        for rows, drafted in reversed(self.settings.shapes):
            for config, sampled in product(self.resolved(rows, drafted), (False, True)):
                yield from self._exact(config, sampled, deadline)

    def _exact(self, config: EngineConfig, sampled: bool, deadline: float) -> Iterator[Result]:
        count = max(2 * config.batch_size, 32)
        plain = Engine(self.target, None, config.plain())
        expected = self.decode(plain, count, 0, sampled, deadline).tokens
        del plain
        self.forget()
        engine, drafter = self.replaying(config)
        for order, acceptance in enumerate((1.0, 0.6, 0.0), 1):
            drafter.replay(expected, acceptance)
            outcome = self.decode(engine, count, order, sampled, deadline)
            shape = {"rows": config.batch_size, "draft_tokens": config.draft_tokens, **_computed_by(config)}
            yield {
                **shape,
                "sampled": sampled,
                "right": acceptance,
                "acceptance_rate": round(outcome.sequences.acceptance_rate, 4),
                "prompts": len(expected),
                **differences(expected, outcome.tokens),
            }

    def speed(self, deadline: float) -> Iterator[Result]:
        """Tokens/s of plain decoding and of speculation, for every B, K and acceptance, beside transformers."""
        settings = self.settings
        plain: dict[int, float] = {}
        yield from self._prefill(deadline)
        for number, drafted in enumerate(settings.numbers("draft_tokens")):
            for rows in settings.numbers("batch_sizes"):
                check_time(deadline)
                try:
                    if rows not in plain:
                        yield from self._plain(rows, plain, deadline)
                    yield from self._speculation(rows, drafted, plain[rows], deadline)
                except torch.OutOfMemoryError:
                    yield {"rows": rows, "draft_tokens": drafted, "error": "out of memory"}
                self.forget()
            if number == 0:
                yield from self._rivals(settings.rivals[:1], deadline)
        yield from self._rivals(settings.rivals[1:], deadline)

    def _plain(self, rows: int, plain: dict[int, float], deadline: float) -> Iterator[Result]:
        """Plain decoding, whose tokens/s are added to `plain`, and the costs of a round's phases."""
        _, figures = self._timed(Engine(self.target, None, self.config(rows, 1, method="plain")), 0, deadline)
        plain[rows] = figures["tokens_per_second"]
        yield {"method": "plain", "rows": rows, **figures}
        self.forget()
        drafted = self.settings.shapes[0][1]
        yield {"phases_of": rows, "draft_tokens": drafted, "phases": self._phase_costs(rows, drafted)}

    def _speculation(self, rows: int, drafted: int, plain: float, deadline: float) -> Iterator[Result]:
        config = self.config(rows, drafted)
        # Tokens may depend on the shape, so the completions to replay are decoded in this one.
        expected, figures = self._timed(Engine(self.target, None, config.plain()), 0, deadline)
        yield {"method": "plain in this shape", "rows": rows, "columns": drafted + 1, **figures}
        self.forget()
        engine, drafter = self.replaying(config)
        for acceptance in self.settings.numbers("acceptances", float):
            drafter.replay(expected, acceptance)
            tokens, figures = self._timed(engine, 1, deadline)
            ratio = round(figures["tokens_per_second"] / plain, 3)
            shape = {"method": "exspec", "rows": rows, "draft_tokens": drafted, "right": acceptance}
            yield {**shape, "ratio_to_plain": ratio, **figures, **differences(expected, tokens)}

    def _timed(self, engine: Engine, order: int, deadline: float) -> tuple[list[list[int]], Result]:
        outcome = self.decode(engine, self._prompts_for(engine.config.batch_size), order, deadline=deadline)
        return outcome.tokens, {
            **_computed_by(engine.config),
            "prompts": len(outcome.tokens),
            "tokens_per_second": round(outcome.tokens_per_second, 1),
            "mean_accepted_length": round(outcome.sequences.mean_accepted_length, 3),
            "seconds": round(outcome.seconds, 3),
            "seconds_by_phase": {name: round(spent, 3) for name, spent in outcome.engine.seconds.items()},
        }

    def _prompts_for(self, rows: int) -> int:
        return min(len(self.prompts), max(4, 2 * rows))

    def _phase_costs(self, rows: int, drafted: int) -> Result:
        """Milliseconds of each phase beside its floor, the time in which the device can read the phase's bytes."""
        config, columns, bandwidth = self.config(rows, drafted), self.capacity, copy_bandwidth(self.device)
        costs = Costs(Models(self.target, self.draft), self.requests(), columns, config)
        sizes = [Sizes.of(model.config, model.dtype) for model in (self.target, self.draft)]
        target, draft = (model.read + rows * columns * model.kv for model in sizes)
        measured = {
            "plain": (costs.verify(rows, 1, columns), target),
            "verify": (costs.verify(rows, drafted + 1, columns), target),
            "draft": (costs.propose(config, drafted, columns), drafted * draft),
            "prefill": (costs.chunk(config.plain()), sizes[0].read),
        }
        return {
            name: {
                "ms": round(seconds * 1e3, 3),
                "floor_ms": round(size / bandwidth * 1e3, 3),
                "times_floor": round(seconds / (size / bandwidth), 2),
            }
            for name, (seconds, size) in measured.items()
        }

    def _prefill(self, deadline: float) -> Iterator[Result]:
        for rows, columns in self.settings.prefills:
            check_time(deadline)
            capacity = max(self.capacity, columns)
            config = self.config(8, 1, method="plain", prefill_rows=rows, prefill_columns=columns, capacity=capacity)
            seconds = Costs(Models(self.target, None), self.requests(8), capacity, config).chunk(config)
            yield {
                "method": "prefill",
                "rows": rows,
                "columns": columns,
                "ms": round(seconds * 1e3, 3),
                "tokens_per_second": round(rows * columns / seconds, 1),
            }
            self.forget()

    def _rivals(self, names: Sequence[str], deadline: float) -> Iterator[Result]:
        """Methods of transformers. If one fails here, its result says why."""
        methods = {"generate": self._generate, "continuous batching": self._continuous_batching}
        for name, rows in product(names, self.settings.rival_batch_sizes):
            prompts = self.prompts[: self._prompts_for(rows)]
            result: Result = {}
            for _ in ("warm", "timed"):
                check_time(deadline)
                try:
                    tokens, seconds = timed(lambda m=methods[name], p=prompts, r=rows: m(p, r), self.device)  # type: ignore[misc]
                    result = {"tokens_per_second": round(tokens / seconds, 1)}
                except Exception as error:
                    result = {"tokens_per_second": None, "error": f"{type(error).__name__}: {error}"[:300]}
            yield {"method": name, "rows": rows, "prompts": len(prompts), **result}
            self.forget()

    def _generate(self, prompts: list[list[int]], rows: int) -> int:
        """Batched `generate`: how many tokens it made."""
        batches = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
        new = self.settings.max_new_tokens
        return sum(len(tokens) for batch in batches for tokens in transformers_generate(self.target, batch, new, ()))

    def _continuous_batching(self, prompts: list[list[int]], _: int) -> int:
        """`generate_batch`, which chooses its own batch sizes: how many tokens it made."""
        config = GenerationConfig(do_sample=False, max_new_tokens=self.settings.max_new_tokens, pad_token_id=0)
        outputs = self.target.generate_batch(inputs=prompts, generation_config=config)  # type: ignore[operator]
        count = sum(len(o.generated_tokens) for o in outputs.values())
        if count == 0:
            raise RuntimeError("continuous batching generated nothing")
        return count


def _sampling(seed: int, sampled: bool) -> Sampling:
    return Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=seed) if sampled else Sampling()


def _computed_by(config: EngineConfig) -> Result:
    return {"attention": config.attention, "kernels": config.kernels}


def differences(expected: list[list[int]], found: list[list[int]]) -> Result:
    """The share of equal completions, and the first token that differs. None stands for a token past the end."""
    equal = [theirs == ours for theirs, ours in zip(expected, found, strict=True)]
    first = None
    if not all(equal):
        prompt = equal.index(False)
        tokens = zip_longest(expected[prompt], found[prompt])
        position, (theirs, ours) = next((i, pair) for i, pair in enumerate(tokens) if pair[0] != pair[1])
        first = {"prompt": prompt, "position": position, "expected": theirs, "found": ours}
    return {"exact": round(sum(equal) / len(equal), 4), "first_difference": first}


Stage = Callable[[Measurement, float], Iterator[Result]]
STAGES: dict[str, tuple[Stage, float]] = {  # with shares of the time
    "independence": (Measurement.independence, 1.0),
    "profile": (Measurement.profile, 3.0),
    "exact": (Measurement.exact, 2.5),
    "speed": (Measurement.speed, 7.0),
}
