"""Choosing the shape of decoding by measurement: plain decoding or speculation, the drafter, B, W, K and bucket.

1. Probes: short runs on a sample of the requests, with each available drafter, measure how far drafts survive and how
   long completions are.
2. Prediction: for each candidate, a dry run of the scheduler with measured times of forwards predicts tokens/s.
3. Final: the best candidate of each kind runs in turn with the others, and the fastest is taken. Speculation must beat
   plain decoding by a margin.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.lookup import kind, label
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.layers import programs
from exspec.actors.engine.methods import resolve
from exspec.actors.engine.request import Request
from exspec.actors.engine.shape.candidates import (
    FREE,
    TO_COMPILED,
    TRIED,
    candidates,
    coarse,
    device_kind,
    drafter_choices,
    prefill_shapes,
    probe_shape,
)
from exspec.actors.engine.shape.costs import Clock, Costs, OutOfTimeError, Trials
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.prediction import best_threshold, predict
from exspec.actors.engine.shape.sample import Feed, MakeEngine, Sample, probe

TURNS, FIRST_TURNS = 5, 2  # turns of the final; in the first FIRST_TURNS all finalists run
COMPILE_FROM = 10.0  # seconds of measuring: with less, a job does not wait for a compiler
COMPILING = 2  # compiling counts as measuring after this many times the seconds of measuring
MARGIN = 1.02  # speculation must be this much faster than plain decoding to be taken


@dataclass
class Candidate:
    """A shape with its tokens/s: predicted by the dry run, and measured in the final (None: not run)."""

    config: EngineConfig
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Calibration:
    """config: the choice. candidates: the predicted shapes, the best first. seconds: the duration. compiled: the code
    compiled for it and the seconds of compilation; None if nothing was compiled."""

    config: EngineConfig
    candidates: list[Candidate]
    sample: Sample
    seconds: float
    compiled: str | None = None

    def table(self) -> list[dict[str, Any]]:
        """The candidates as plain values, the measured ones first, with B, W and K as they are used."""
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
    """The fastest config that differs from `config` only in the settings named in `free`.

    requests: a sample; requests that cannot be decoded are left out. seconds: the approximate duration; half of it is
    for the final. budget: bytes of memory that the config may use. engine: makes the engines that decode.

    Raises ValueError if no request of the sample can be decoded, or no candidate fits the budget.
    """
    return Calibrator(Models(target, draft, budget), config, free, seconds, engine).run(requests)


class Calibrator:
    """One calibration, with the parameters of `calibrate`. config: with kernels and prefill shape, once chosen."""

    def __init__(
        self, models: Models, config: EngineConfig, free: Sequence[str], seconds: float, make: MakeEngine
    ) -> None:
        self.models, self.free, self.seconds, self.make = models, free, seconds, make
        self.clock = Clock(COMPILING * seconds)
        self.start = self.clock.now()
        self.began, self.compiling = time.monotonic(), programs.CODE.seconds
        self.choices = drafter_choices(models, config, free)
        if self.choices:
            config = config.drafting(self.choices[0])
        elif config.drafts:
            config = replace(config, method="plain", drafter=NONE)
        self.config = replace(resolve(models.target, models.draft, config), pages=config.pages)
        smallest = replace(self.config, method="plain", drafter=NONE) if "method" in free else self.config
        models.fitted(smallest)  # raises if nothing fits

    def run(self, requests: Sequence[Request]) -> Calibration:
        """Probe, predict and run the finalists."""
        sample = self.probe(requests)
        longest = max(prompt + new for prompt, new in sample.lengths)
        self.choose_kernels_and_prefill(sample, longest)
        costs = Costs(self.models, sample.requests, longest, self.config, self.clock)
        predicted = self.predict(costs, sample)
        finalists = self.finalists(predicted)
        costs.forget()
        chosen = max(predicted, key=lambda c: c.predicted / (MARGIN if c.config.drafts else 1))
        if len(finalists) > 1:
            chosen = self.final(sample, finalists)
        costs.deadline = math.inf
        best = replace(chosen.config, threshold=best_threshold(chosen.config, costs, sample))
        compiled = str(programs.CODE) if programs.CODE.seconds > self.compiling else None
        return Calibration(best, predicted, sample, time.monotonic() - self.began, compiled)

    def probe(self, requests: Sequence[Request]) -> Sample:
        """Probe each drafter that fits. Drafters that do not fit are no longer choices."""
        engines = self._probes()
        sample = probe(engines, requests, self.seconds / 4)
        self.choices = [c for c in self.choices if label(self._probed(c)) in engines]
        return sample

    def _probes(self) -> dict[str, Callable[[], Engine]]:
        """The probes' engines, by label. Drafters that learn come last and never alone: they need completions."""
        plain = replace(self.config, method="plain", drafter=NONE, draft_length="fixed", columns=None)
        shapes = [*map(self._probed, self.choices), plain]
        engines: dict[str, Callable[[], Engine]] = {}
        for shape in shapes:
            with suppress(ValueError):  # it does not fit
                engines[label(shape)] = partial(
                    self.make, self.models.target, self.models.draft, self.models.fitted(shape)
                )
        learning = {label(s): engines.pop(label(s)) for s in shapes if kind(s).learns and label(s) in engines}
        if len(engines) > 1:
            del engines[NONE]
        return engines | learning

    def _probed(self, choice: dict[str, Any]) -> EngineConfig:
        return probe_shape(self.models, self.config, choice, self.free)

    def choose_kernels_and_prefill(self, sample: Sample, longest: int) -> None:
        """Choose the kernels and prefill shape of all candidates: the fastest that do not make the batch smaller."""
        trials = Trials(self.models, sample.requests, longest, self.clock)
        rows, config = self.models.rows, self.config
        if "kernels" in self.free:
            least = rows(replace(config, kernels="eager"))
            names = TRIED[device_kind(self.models)]
            kernels = [name for name in names if rows(replace(config, kernels=name)) >= least]
            config = trials.fastest_kernels(config, kernels)
        if "prefill" in self.free:
            shapes = [shape for shape in prefill_shapes(self.models, config) if rows(shape) >= rows(config)]
            config = trials.fastest_prefill(shapes or [config])
        if "kernels" in self.free and config.kernels in TO_COMPILED and self.seconds >= COMPILE_FROM:
            config = trials.fastest_kernels(config, [TO_COMPILED[config.kernels], config.kernels])
        self.config = config

    def predict(self, costs: Costs, sample: Sample) -> list[Candidate]:
        """Candidates that fit, the best first. B is chosen with few of the shapes; the other shapes with that B follow
        while there is time. Raises ValueError if none fits."""
        shapes = list(candidates(self.models, self.config, self.choices, self.free))
        kinds = {label(shape) for shape in shapes}
        predicted: list[Candidate] = []
        tried: set[str] = set()

        def consider(shape: EngineConfig) -> None:
            if tried == kinds and predicted:  # one of each kind is predicted, however long it takes
                costs.deadline = self.start + self.seconds / 2
            tried.add(label(shape))
            with suppress(OutOfTimeError, ValueError, torch.OutOfMemoryError):  # the last two: it does not fit
                fitted = self.models.fitted(shape)
                if fitted.batch_size == shape.batch_size:
                    predicted.append(Candidate(fitted, predict(fitted, costs, sample)))

        first = coarse(shapes)
        for shape in first:
            consider(shape)
        rows = max(predicted, key=lambda c: c.predicted).config.batch_size if predicted else None
        for shape in shapes:
            if shape not in first and rows in (shape.batch_size, None):
                consider(shape)
        if not predicted:
            raise ValueError("calibration: none of the possible shapes fits the memory")
        return sorted(predicted, key=lambda c: -c.predicted)

    def finalists(self, predicted: list[Candidate]) -> list[Candidate]:
        """The candidates that run in the final: the best of each drafter (two if there is only one drafter) and the
        best without drafts. As many as fit the memory together. predicted: candidates, the best first."""
        drafting = [c for c in predicted if c.config.drafts]
        chosen = sorted({c.config.drafter: c for c in reversed(drafting)}.values(), key=lambda c: -c.predicted)
        chosen += [c for c in drafting if c not in chosen][: max(2 - len(chosen), 0)]
        chosen += [c for c in predicted if not c.config.drafts][:1]
        while len(chosen) > 1 and not self.models.fit_together([c.config for c in chosen]):
            chosen.remove(max(chosen, key=lambda c: (c is not chosen[0], c.config.drafts)))
        return chosen

    def final(self, sample: Sample, finalists: list[Candidate]) -> Candidate:
        """Run the finalists in turn, for a slice of the time each. Returns the fastest.

        After two runs of all, the best with and without drafts are compared turn by turn: the machine's speed changes.
        """
        target, draft = self.models.target, self.models.draft
        engines = [self.make(target, draft if c.config.drafts else None, c.config) for c in finalists]
        feeds = [Feed(engine, sample) for engine in engines]
        end = max(self.start + self.seconds, self.clock.now() + self.seconds / 4)
        slice_ = max(0.05, (end - self.clock.now()) / (TURNS * len(feeds)))
        for feed in feeds:
            with self.clock.stopped():  # the first run admits sequences and records graphs
                feed.run(slice_ / 2)
        speeds: list[list[float]] = [[] for _ in feeds]
        for _ in range(FIRST_TURNS):
            for feed, measured in zip(feeds, speeds, strict=True):
                measured.append(feed.run(slice_))
        order = sorted(range(len(feeds)), key=lambda i: -median(speeds[i]))
        first = order[0]
        second = next((i for i in order if finalists[i].config.drafts != finalists[first].config.drafts), order[1])
        slice_ = max(0.05, (end - self.clock.now()) / (TURNS * 2))
        while self.clock.now() + 2 * slice_ < end:
            for i in (first, second):
                speeds[i].append(feeds[i].run(slice_))
        for candidate, measured in zip(finalists, speeds, strict=True):
            candidate.measured = median(measured)
        del engines, feeds, feed
        gc.collect()
        faster = median(a / b for a, b in zip(speeds[first], speeds[second], strict=True))
        margin = MARGIN ** (finalists[first].config.drafts - finalists[second].config.drafts)
        return finalists[first] if faster >= margin else finalists[second]
