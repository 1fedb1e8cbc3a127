"""Choosing the shape of decoding by measurement: plain decoding or speculation, the drafter, B, W, K and bucket.

1. Probes: short runs on a sample of the requests, with each available drafter, measure how far drafts survive and how
   long completions are.
2. Prediction: for each candidate, a dry run of the scheduler with measured times of forwards predicts tokens/s. B is
   chosen first, with kernels that need no compiler; then the rest, with compiled kernels if these are faster.
3. Final: the best candidates run in turns, and the fastest is taken: the plainest, unless another one is faster in
   nearly all turns.
4. Where rows are of different lengths, a shape that drafts for long rows only replaces it if it should be much faster.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.lookup import kind, label
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.kv.split import layer_counts, spread
from exspec.actors.engine.layers.programs import CODE, OutOfTimeError
from exspec.actors.engine.methods import resolve
from exspec.actors.engine.request import Request
from exspec.actors.engine.shape.candidates import (
    DRAFT_FROM,
    FREE,
    UNCOMPILED,
    candidates,
    coarse,
    drafter_choices,
    probe_shape,
)
from exspec.actors.engine.shape.costs import Costs
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.prediction import best_threshold, predict
from exspec.actors.engine.shape.sample import Feed, MakeEngine, Sample, probe
from exspec.actors.engine.shape.trials import Trials

SECONDS = 120.0  # of a calibration, at most
PROBES, FINAL = 1 / 24, 1 / 6  # the shares of this time for probes and final
PREDICTED, WARM = 0.6, 0.75  # by these shares of it, prediction ends and the finalists are compiled
COMPILE_FROM = 40.0  # seconds: with less, there is no time for a compiler, and the choice is not kept for other jobs
TURNS, FIRST_TURNS, FEWEST_TURNS = 8, 3, 2  # of the final; after the first ones, finalists far behind leave
BEHIND = 0.9  # of the fastest one's speed
MARGIN = 1.1  # a shape that was only predicted must be this much faster than a plainer one
SURE = 0.25  # of the turns may contradict that the less plain of two shapes is faster


@dataclass
class Candidate:
    """A shape with its tokens/s: predicted by the dry run, and measured in each turn of the final. memory: bytes that
    rows like those of the sample need."""

    config: EngineConfig
    predicted: float
    turns: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def measured(self) -> float | None:
        return median(self.turns) if self.turns else None

    def __str__(self) -> str:
        since = f" from {self.config.draft_from:,} tokens" if self.config.draft_from else ""
        return f"{label(self.config)}, K={self.config.drafted}{since}" if self.config.drafts else "plain"

    def ratios(self, other: "Candidate") -> list[float]:
        """How many times as fast it was as the other, by turn."""
        return [a / b for a, b in zip(self.turns, other.turns, strict=False)]


@dataclass(frozen=True)
class Calibration:
    """config: the choice. reason: why, in a few words. candidates: the predicted shapes, the best first. seconds: the
    duration. compiled: the code compiled for it and the seconds of compilation; None if nothing was compiled."""

    config: EngineConfig
    reason: str
    candidates: list[Candidate]
    sample: Sample
    seconds: float
    compiled: str | None = None

    @property
    def row_seconds(self) -> float:
        """Seconds of a request of the sample."""
        chosen = next(c for c in self.candidates if self._chose(c))
        return mean(new for _, new in self.sample.lengths) / (chosen.measured or chosen.predicted)

    def _chose(self, candidate: Candidate) -> bool:
        return replace(candidate.config, threshold=self.config.threshold) == self.config

    def table(self) -> list[dict[str, Any]]:
        """The candidates as plain values, the measured ones first, with B, W and K as they are used."""
        return [
            {
                "method": c.config.method,
                "drafter": label(c.config),
                "batch_size": c.config.batch_size,
                "window": c.config.slots,
                "draft_tokens": c.config.drafted,
                "draft_from": c.config.draft_from,
                "bucket": c.config.bucket,
                "kernels": c.config.kernels,
                "memory_mib": c.memory >> 20,
                "predicted": round(c.predicted, 1),
                "measured": None if c.measured is None else round(c.measured, 1),
                "turns": [round(speed, 1) for speed in c.turns],
                "chosen": self._chose(c),
            }
            for c in sorted(self.candidates, key=lambda c: (c.measured is None, -(c.measured or c.predicted)))
        ]


def calibrate(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    requests: Sequence[Request],
    config: EngineConfig,
    free: Sequence[str] = FREE,
    seconds: float = SECONDS,
    budget: int | None = None,
    engine: MakeEngine = Engine,
    kept: Kept | None = None,
) -> Calibration:
    """The fastest config that differs from `config` only in the settings named in `free`.

    requests: a sample; requests that cannot be decoded are left out. seconds: the longest duration; a forward that has
    begun is not stopped, and a few forwards with each drafter are timed in any case. budget: bytes of memory that the
    config may use. engine: makes the engines that decode. kept: measurements to start with and to add to.

    Raises ValueError if no request of the sample can be decoded, or no candidate fits the budget.
    """
    if layer_counts(target.config):  # its layers run eagerly
        config, free = spread(target.config, config), [name for name in free if name != "kernels"]
    longest = max((min(len(r.prompt) + r.max_new_tokens, config.capacity) for r in requests), default=0)
    return Calibrator(Models(target, draft, budget), config, free, seconds, engine, kept, longest).run(requests)


class Calibrator:
    """One calibration, with the parameters of `calibrate`.

    config: with kernels and prefill shape, once chosen; until then its kernels need no compiler. kernels: None if they
    are free. longest: tokens of the longest request.
    """

    def __init__(
        self,
        models: Models,
        config: EngineConfig,
        free: Sequence[str],
        seconds: float,
        make: MakeEngine,
        kept: Kept | None,
        longest: int,
    ) -> None:
        self.models, self.free, self.seconds, self.make, self.kept = models, free, seconds, make, kept
        self.start, self.compiling = time.monotonic(), CODE.seconds
        self.choices = drafter_choices(models, config, free, longest)
        if self.choices:
            config = config.drafting(self.choices[0])
        elif config.drafts:
            config = replace(config, method="plain", drafter=NONE)
        config = replace(resolve(models.target, models.draft, config), pages=config.pages)
        self.kernels = None if "kernels" in free else config.kernels
        self.config = replace(config, kernels=UNCOMPILED.get(config.kernels, config.kernels))
        smallest = replace(self.config, method="plain", drafter=NONE) if "method" in free else self.config
        models.fitted(smallest)  # raises if nothing fits

    def at(self, share: float) -> float:
        """The moment, a value of time.monotonic, when this share of the time is over."""
        return self.start + share * self.seconds

    def run(self, requests: Sequence[Request]) -> Calibration:
        """Probe, predict and run the finalists."""
        sample = self.probe(requests)
        longest = max(prompt + new for prompt, new in sample.lengths)
        predicted, costs = self.predict(sample, longest)
        current = self._current(predicted)
        finalists = self.finalists([c for c in current if c.config.draft_from == self.config.draft_from])
        self.final(sample, finalists)
        gc.collect()  # the engines refer to themselves
        chosen, reason = later(*decided(finalists), finalists, current)
        threshold = chosen.config.threshold
        costs.deadline = self.at(1)
        with suppress(OutOfTimeError), CODE.until(costs.deadline):
            threshold = best_threshold(chosen.config, costs, sample)
        costs.forget()
        best = replace(chosen.config, threshold=threshold)
        whole = {"method", "batch_size"} & set(self.free)  # else it is no shape for other jobs
        if self.kept and whole and self.seconds >= COMPILE_FROM:
            self.kept.keep_shape(best)
        compiled = str(CODE) if CODE.seconds > self.compiling else None
        return Calibration(best, reason, predicted, sample, time.monotonic() - self.start, compiled)

    def probe(self, requests: Sequence[Request]) -> Sample:
        """Probe each drafter that fits. Drafters that do not fit are no longer choices."""
        engines = self._probes()
        sample = probe(engines, requests, self.seconds * PROBES)
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

    def predict(self, sample: Sample, longest: int) -> tuple[list[Candidate], Costs]:
        """Candidates that fit, the best first, and the costs of their forwards. Raises ValueError if none fits."""
        given, until = (self.models, sample.requests, longest), self.at(PREDICTED)
        trials = Trials(*given, self.kept, until)
        self.config = trials.choose(self.config, self.free)
        costs = Costs(*given, self.config, self.kept)
        shapes = list(candidates(self.models, self.config, self.choices, self.free))
        predicted = self._predicted(coarse(shapes), costs, sample)
        costs.forget()
        if not predicted:
            raise ValueError("calibration: none of the possible shapes fits the memory")
        best = max(predicted, key=lambda c: c.predicted).config
        likely = {c.config.drafter: label(c.config) for c in sorted(predicted, key=lambda c: c.predicted)}
        shapes = [s for s in shapes if s.batch_size == best.batch_size and label(s) in likely.values()]
        kernels = self.kernels or best.kernels
        if "kernels" in self.free and self.seconds >= COMPILE_FROM:
            kernels = trials.compiled(best).kernels
        with CODE.until(until):
            if kernels != best.kernels:
                compiled = [replace(shape, kernels=kernels) for shape in shapes]
                faster = Costs(*given, replace(self.config, kernels=kernels), self.kept, until)
                again = self._predicted(coarse(compiled), faster, sample)
                late = {label(shape) for shape in compiled} - {label(c.config) for c in again}
                if self.kernels:  # they stay, and what was not timed is predicted as without a compiler
                    untimed = [
                        c for c in predicted if c.config.batch_size == best.batch_size and label(c.config) in late
                    ]
                    again += [replace(c, config=replace(c.config, kernels=kernels)) for c in untimed]
                leads = max(predicted + again, key=lambda c: c.predicted).config.kernels == kernels
                if self.kernels or not late or leads:
                    predicted, costs, shapes, self.config = predicted + again, faster, compiled, faster.config
            costs.deadline = until
            predicted += self._predicted([s for s in shapes if s not in coarse(shapes)], costs, sample)
            if "draft_from" in self.free:
                predicted += self._predicted(partly(self._current(predicted), sample), costs, sample)
        costs.forget()
        return sorted(predicted, key=lambda c: -c.predicted), costs

    def _current(self, predicted: list[Candidate]) -> list[Candidate]:
        """Those with the kernels that were chosen."""
        return [c for c in predicted if c.config.kernels == self.config.kernels]

    def _predicted(self, shapes: list[EngineConfig], costs: Costs, sample: Sample) -> list[Candidate]:
        """Those of the shapes that fit, as far as there is time; one of each drafter, however long it takes, unless the
        costs have a deadline."""
        found: list[Candidate] = []
        for shape in shapes:
            if {label(s) for s in shapes} == {label(c.config) for c in found}:
                costs.deadline = min(costs.deadline, self.at(PREDICTED))
            with suppress(OutOfTimeError, ValueError, torch.OutOfMemoryError):  # the last two: it does not fit
                fitted = self.models.fitted(shape)
                if fitted.batch_size == shape.batch_size:
                    memory = self.models.memory(fitted, max(map(sum, sample.lengths)))
                    found.append(Candidate(fitted, predict(fitted, costs, sample), memory=memory))
        return found

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

    def final(self, sample: Sample, finalists: list[Candidate]) -> None:
        """Run the finalists in turns, for a slice of the time each, and note their tokens/s. One that is not compiled
        in time does not run. Turns are compared with each other, because the machine's speed changes."""
        racing: list[tuple[Candidate, Feed]] = []
        for candidate in finalists if len(finalists) > 1 else []:
            draft = self.models.draft if candidate.config.drafts else None
            with suppress(OutOfTimeError), CODE.until(self.at(WARM)):
                feed = Feed(self.make(self.models.target, draft, candidate.config), sample)
                feed.run(0.1)  # the first rounds admit sequences, compile, and record graphs
                racing.append((candidate, feed))
        race(racing, max(min(time.monotonic() + self.seconds * FINAL, self.at(1)), time.monotonic() + 0.1))


def race(racing: list[tuple[Candidate, Feed]], end: float) -> None:
    """Run the candidates in turns and note their tokens/s. end: a value of time.monotonic."""
    for turn in range(TURNS if len(racing) > 1 else 0):
        if turn == FIRST_TURNS:
            racing = in_reach(racing)
        left = end - time.monotonic()
        if left <= 0 and turn >= FEWEST_TURNS:
            break
        for candidate, feed in racing:
            candidate.turns.append(feed.run(left / ((TURNS - turn) * len(racing))))


def partly(predicted: list[Candidate], sample: Sample) -> list[EngineConfig]:
    """The best shape of each drafter, with each `draft_from` that only some rows of the sample reach."""
    best = {c.config.drafter: c.config for c in sorted(predicted, key=lambda c: c.predicted)}
    shortest, longest = min(prompt for prompt, _ in sample.lengths), max(map(sum, sample.lengths))
    lengths = [n for n in DRAFT_FROM if shortest < n < longest]
    return [replace(c, draft_from=n) for c in best.values() if c.method == "exspec" for n in lengths]


def in_reach(racing: Sequence[tuple[Candidate, Feed]]) -> list[tuple[Candidate, Feed]]:
    """Those that may still be the fastest, and the best with and without drafts."""
    order = sorted(racing, key=lambda pair: -(pair[0].measured or 0.0))
    best = [next((c for c, _ in order if c.config.drafts == drafts), None) for drafts in (True, False)]
    least = BEHIND * (order[0][0].measured or 0.0) if order else 0.0
    return [(c, feed) for c, feed in racing if c in best or (c.measured or 0.0) >= least]


def decided(finalists: list[Candidate]) -> tuple[Candidate, str]:
    """The fastest finalist, and why. finalists: the best predicted one first."""
    ran = sorted((c for c in finalists if c.turns), key=lambda c: c.config.drafted)
    if len(ran) < 2:
        chosen = max(finalists, key=lambda c: c.predicted / (MARGIN if c.config.drafts else 1))
        late = "is predicted to be the fastest; there was no time to compare it"
        return chosen, f"{chosen} {late if len(finalists) > 1 else 'alone fits memory and time'}"
    chosen = ran[0]
    for other in ran[1:]:
        if _for_sure(other.ratios(chosen)) > 1:
            chosen = other
    others = [c for c in ran if c.config.drafts != chosen.config.drafts] or [c for c in ran if c is not chosen]
    other = max(others, key=lambda c: c.measured or 0.0)
    ratios = chosen.ratios(other)
    within = ", within the spread of the turns" if _for_sure(ratios) <= 1 else ""
    return chosen, (
        f"{chosen} is {median(ratios):.2f} times as fast as {other}{within} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} turns)"
    )


def later(
    chosen: Candidate, reason: str, finalists: list[Candidate], predicted: list[Candidate]
) -> tuple[Candidate, str]:
    """The choice and its reason; or a shape that drafts for long rows only, if it should be faster by a margin: as
    predicted, times what the final found of its drafter's prediction. In a final of its own, it would mostly decode one
    kind of row while the other gathers."""
    found = {c.config.drafter: c.measured / c.predicted for c in finalists if c.measured}
    known = [c for c in predicted if c.config.draft_from > chosen.config.draft_from and c.config.drafter in found]
    if not chosen.measured or not known:
        return chosen, reason
    ratios = {c.predicted * found[c.config.drafter] / chosen.measured: c for c in known}
    if (ratio := max(ratios)) <= MARGIN:
        return chosen, reason
    return ratios[ratio], f"{ratios[ratio]} should be {ratio:.2f} times as fast as {chosen}, by prediction"


def _for_sure(ratios: list[float]) -> float:
    """A ratio that all but a share SURE of the turns reach."""
    return sorted(ratios)[int(SURE * len(ratios))]
