"""What a job that learns does on a device: decide whether a training pays, train, and try the new drafter."""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError
from exspec.actors.engine.learners.learner import Learner
from exspec.actors.engine.shape.calibration import Candidate, decided, race
from exspec.actors.engine.shape.candidates import UNCOMPILED
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.sample import Feed, Sample
from exspec.actors.models import Pair, load_draft
from exspec.jobs.training import law
from exspec.jobs.training.examples import Example, Lessons, TargetStates
from exspec.jobs.training.prospect import Prospect, chance_of, length_of, loaded, side_by_side, tidy
from exspec.jobs.training.run import MADE, Training, accept_length, measure, use_cores
from exspec.jobs.training.settings import TrainSettings
from exspec.jobs.training.trainer import Trainer
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import DRAFTERS
from exspec.pipeline.output.page import duration
from exspec.pipeline.storage import Folder

T = TypeVar("T")
U = TypeVar("U")
MODEL = "model"
CHANGED = ("method", "drafter", "draft_tokens", "pages")  # settings of a shape that a swap changes
SMALL, LONG = 900.0, 1_800.0  # seconds; a shorter job never trains, and only a longer one tries new heads
PILOT, HOPE = 0.02, 2.0  # the share of the time that pilots take; of their right drafts, a training has so many times
DECODED, ROUNDS = 0.005, 32  # the share of the time in which a job decodes rows for it, and its rounds at least
TIMED, LEAST = 0.01, 4.0  # the share of the time in which a drafter is timed, and seconds at least
SHARE = 0.05  # of the time left that a training takes
SHORTEST, LONGEST = 20.0, 3600.0  # seconds of a training
BEST = 0.95  # the highest chance of a drafted token to be right
EARLY = 0.3  # the share of a training after which it is judged
MARGIN = 1.5  # a training must be expected to save so many times its cost
TRIAL = 20.0  # seconds of two drafters in turns, at most
BESIDE = 50.0  # seconds that a pause takes beside the training: trials, and loading models again


class Foreseen(NamedTuple):
    """drafter: to train; None: none. reason: one line. config: of the job, whose forwards have columns for drafts.
    seconds: of the job without learning."""

    drafter: str | None
    reason: str
    config: EngineConfig | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Taught:
    """What came of a training. reason: one line. config: None if the job goes on as before. figures: for the log."""

    reason: str
    config: EngineConfig | None
    figures: dict[str, Any]


@dataclass(frozen=True)
class Given:
    """job, config: how the job decodes. choices: drafters that may be trained. name: of the folder of the new drafter.
    seconds: that the rest of the job would take as it is. alone: how the job would decode if it did not learn; None:
    like `config`."""

    job: Job
    config: EngineConfig
    choices: tuple[str, ...]
    name: str
    seconds: float
    alone: EngineConfig | None = None


def budget(seconds: float) -> float:
    """Seconds of a training for a job with so many seconds left."""
    return min(max(SHARE * seconds, SHORTEST), LONGEST)


def cost(seconds: float) -> float:
    """Seconds of the whole pause."""
    return budget(seconds) + BESIDE


class Option:
    """A drafter that may be trained, and what it would save.

    models, config: how the job decodes now. sample: of its requests; with them the drafter is timed as it is.
    seconds: of the job. Raises ValueError if the drafter does not fit.
    """

    def __init__(
        self, training: Training, learner: Learner, pair: Pair, models: Models, config: EngineConfig, sample: Sample,
        seconds: float,
    ) -> None:  # fmt: skip
        self.name, self.training, self.learner = training.settings.drafter, training, learner
        self.models, self.before, self.sample, self.seconds = models, config, sample, seconds
        self.drafts, folder = learner.count, training.work / "grown"
        training.save(learner, pair, folder)
        shape = {"method": "exspec", "drafter": self.name, "draft_tokens": self.drafts}
        self.config = config.drafting(shape | {"columns": config.width if config.width > 1 else self.drafts + 1})
        (_, now), (_, other) = self.feeds(self.before, load_draft(pair, str(folder), "the target"))
        self.prospect = Prospect(now, other, max(LEAST, TIMED * seconds))
        del now, other
        tidy()

    def feeds(self, before: EngineConfig, draft: PreTrainedModel) -> list[tuple[Candidate, Feed]]:
        """The old drafter, with the config `before`, and the new one, ready to decode the sample. Raises ValueError if
        the job's batches do not fit with the new one."""
        new = same_rows(replace(self.models, draft=draft), self.config)
        given = [(before, self.models.draft), (new, draft)]
        feeds = side_by_side(self.models.target, self.sample, given)
        return [(Candidate(config, 0.0), feed) for (config, _), feed in zip(given, feeds, strict=True)]

    def saves(self, chance: float) -> float:
        """Seconds that the job is shorter if a drafted token is right with this chance."""
        return self.seconds * (1 - 1 / self.prospect.ratio(length_of(min(chance, BEST), self.drafts)))


def same_rows(models: Models, config: EngineConfig) -> EngineConfig:
    """The config with as many pages as fit. Raises ValueError if its batch and window do not."""
    fitted = models.fitted(config)
    if (fitted.batch_size, fitted.window) != (config.batch_size, config.window):
        raise ValueError(f"memory: {config.drafter} does not fit beside a batch of {config.batch_size} rows")
    return fitted


def possible(given: Iterable[T], make: Callable[[T], U]) -> list[U]:
    """What can be made of these. Raises ValueError if nothing can."""
    made, refused = list[U](), list[str]()
    for one in given:
        try:
            made.append(make(one))
        except ValueError as error:
            refused.append(str(error))
    if not made:
        raise ValueError(refused[0])
    return made


def foresee(
    job: Job, config: EngineConfig, choices: Sequence[str], rows: float, whole: float | None, requests: list[Request]
) -> Foreseen:
    """Whether to train, and what, before a job begins. Pilots tell it: drafters that learn for some seconds.

    rows, whole: of the job, by device, and the seconds that they take if known. Raises ValueError if none of the
    choices is for this target.
    """
    began = time.monotonic()
    use_cores(1)
    pair, models = loaded(job, config)
    sample, examples, speed = decoded(pair, config, requests, DECODED * (whole or SMALL))
    tidy()
    whole = whole or rows * mean(new for _, new in sample.lengths) / speed
    if whole < SMALL:
        return Foreseen(None, f"off: the job takes {duration(whole)}")
    if whole < LONG and MODEL in choices:
        choices = (MODEL,)  # it begins with layers of the target; a new head would learn too slowly
    with tempfile.TemporaryDirectory() as work:
        pilots = possible(choices, lambda name: Pilot(name, job, pair, config, examples, Path(work) / name))
        for pilot in pilots:
            pilot.run((PILOT * whole - (time.monotonic() - began)) / len(pilots))
        said = f"accept length after a moment of training: {', '.join(map(str, pilots))}"
        longest = max(length_of(pilot.chance, pilot.learner.count) for pilot in pilots)
        if whole * (1 - 1 / longest) < MARGIN * cost(whole):  # even if drafts took no time
            return Foreseen(None, f"off: {said}, which promises too little")
        torch.set_num_threads(job.threads)

        def timed(pilot: Pilot) -> tuple[float, Option]:
            option = Option(pilot.training, pilot.learner, pair, models, config, sample, whole)
            return option.saves(pilot.chance), option

        saved, option = max(possible(pilots, timed), key=lambda found: found[0])
    saves = f"{said}; {option.name} should save {saved:.0f} s of {whole:.0f} s"
    if saved < MARGIN * cost(whole):
        return Foreseen(None, f"off: {saves}, and its training costs {cost(whole):.0f} s")
    config = same_rows(models, replace(config, columns=option.config.columns))
    return Foreseen(option.name, saves, config, whole)


def decoded(
    pair: Pair, config: EngineConfig, requests: list[Request], seconds: float
) -> tuple[Sample, list[Example], float]:
    """Decode requests for so many seconds, with kernels that need no compiler. Returns those that can be decoded, what
    was decoded, and tokens/s. Raises ValueError if no request can be decoded."""
    plain = replace(config.plain(), kernels=UNCOMPILED.get(config.kernels, config.kernels))
    engine, usable = Engine(pair.target, None, plain), {}
    for request in requests:
        with suppress(RequestError):
            engine.submit(request)
            usable[request.id] = request
    engine.step()  # it also prepares the engine
    began, before = time.monotonic(), engine.statistics.tokens
    while engine.busy and (time.monotonic() < began + seconds or engine.statistics.rounds < ROUNDS):
        engine.step()
    speed = (engine.statistics.tokens - before) / (time.monotonic() - began)
    done = [(usable[c.id].prompt, c.tokens) for c in engine.take()]
    rows = done + [(running.request.prompt, running.committed) for running in engine.pool.running]
    if not (examples := [(list(prompt), list(tokens)) for prompt, tokens in rows if len(tokens) > 1]):
        raise ValueError("no request of the sample can be decoded")
    lengths = [(len(prompt), len(tokens)) for prompt, tokens in done or examples]
    return Sample(list(usable.values()), lengths), examples, speed


class Pilot:
    """A drafter that learns for some seconds before a job begins, to tell whether the job can be learned.

    config: how the job decodes. Raises ValueError if the drafter cannot be made for the target.
    """

    def __init__(
        self, name: str, job: Job, pair: Pair, config: EngineConfig, examples: list[Example], work: Path
    ) -> None:
        drafts = config.width - 1 if config.width > 1 else None
        settings = TrainSettings(drafter=name, draft_tokens=drafts)  # type: ignore[arg-type]
        self.training = Training(job.output, job.storage_options, settings, work)
        self.target, self.accept_length = pair.target, 1.0
        self.held = examples[:: max(2, min(8, len(examples) // 4))]
        self.learned = [example for example in examples if example not in self.held]
        self.learner = self.training.learner(pair, self.learned)

    def run(self, seconds: float) -> None:
        """Train, and note the accept length on examples that were held out."""
        if seconds <= 0 or not self.learned:
            return
        longest = max(len(prompt) + len(completion) for prompt, completion in (*self.learned, *self.held))
        states = TargetStates(self.target, self.learner.layers, longest)
        learned, held = (
            Lessons(part, states, self.training.work / "pilot", 0, self.target.device)
            for part in (self.learned, self.held)
        )
        Trainer(self.learner, lambda step, _: learned.at(step), seconds / 60, 10**6).run(lambda _: None)
        self.accept_length = accept_length(self.learner, held)

    @property
    def chance(self) -> float:
        """Of a drafted token to be right, after a whole training."""
        return min(chance_of(1 + HOPE * (self.accept_length - 1), self.learner.count), BEST)

    def __str__(self) -> str:
        return f"{self.training.settings.drafter} {self.accept_length:.2f}"


def teach(given: Given) -> Taught:
    """Train a drafter on the rows that the job has finished, and try it. Runs on a device that no actor uses."""
    with tempfile.TemporaryDirectory() as work:
        try:
            return Teacher(given, Path(work)).taught()
        except (JobError, ValueError) as error:  # too few rows, or a target that these drafters are not for
            return Taught(f"no training: {error}", None, {})


class Teacher:
    """One training and its trial."""

    def __init__(self, given: Given, work: Path) -> None:
        self.given = given
        job, config = given.job, given.config
        torch.set_num_threads(job.threads)
        self.target, models = loaded(job, config)
        self.seconds = budget(given.seconds)
        minutes, drafts = self.seconds / 60, config.width - 1

        def training(name: str) -> Training:
            settings = TrainSettings(drafter=name, draft_tokens=drafts, minutes=minutes)  # type: ignore[arg-type]
            return Training(job.output, job.storage_options, settings, work / name)

        self.rows = training(given.choices[0]).rows(job, self.target)
        self.held = [request for request, _ in self.rows.held]
        sample = Sample(self.held, [(len(prompt), len(completion)) for _, (prompt, completion) in self.rows.held])

        def make(name: str) -> Option:
            further = deepcopy(models.draft) if config.drafter == name else None
            made = training(name)
            learner = made.learner(replace(self.target, draft=further), self.rows.learned)
            return Option(made, learner, self.target, models, config, sample, given.seconds)

        self.option = max(possible(given.choices, make), key=lambda option: option.saves(BEST))
        tidy()
        self.points: list[law.Point] = []
        self.ended = ""

    def taught(self) -> Taught:
        """Train and try, as long as that is expected to pay."""
        job, option, best = self.given.job, self.option, self.option.saves(BEST)
        if best < MARGIN * (costs := cost(self.given.seconds)):
            return Taught(f"no training: it saves {best:.0f} s at best and costs {costs:.0f} s", None, {})
        training = option.training
        use_cores(1)
        if not training.run(option.learner, self.target, self.rows, print, self._pays):
            return Taught(self.ended, None, {})
        torch.set_num_threads(job.threads)
        pair, drafts, _ = training.made(self.target, job)
        assert pair.draft is not None
        gates = {"draft_from": option.config.draft_from, "draft_length": option.config.draft_length}
        length = measure(pair, self.held, option.name, drafts, **gates).mean_accepted_length
        config, speedup, reason = self._tried(pair.draft)
        if config is None:
            return Taught(f"not used: {reason}", None, {})
        place = Folder(f"{job.output}/{DRAFTERS}/{self.given.name}", job.storage_options)
        for file in sorted((training.work / MADE).iterdir(), key=lambda file: file.name == "config.json"):
            place.write(file.name, file.read_bytes())
        figures = {
            "name": self.given.name,
            "drafter": option.name,
            "accept_length": round(length, 3),
            "rows": len(self.rows.learned),
            "speedup": round(speedup, 3),
            "reason": reason,
            "shape": {name: getattr(config, name) for name in CHANGED},
        }
        gain = f"the job is {speedup:.2f} times as fast as without learning" if self.given.alone else reason
        said = f"{gain}; {option.name} learned {len(self.rows.learned):,} rows, accept length {length:.2f}"
        return Taught(said, config, figures)

    def _pays(self, trainer: Trainer, accept_length: Callable[[], float]) -> bool:
        """Whether to train on: as the accept length grows so far on rows held out, it promises to save more than the
        rest of the training costs."""
        if trainer.share < EARLY or (self.points and trainer.step < 1.5 * self.points[-1].tokens):
            return True
        self.points.append(law.Point(trainer.step, 1, accept_length()))  # every step has about as many tokens
        if len(self.points) < 3:
            return True
        expected, within = law.fit(self.points, self.option.drafts).at(trainer.step / trainer.share, 1)
        length = min(expected + within, self.option.drafts + 1.0)
        saves = self.option.saves(chance_of(length, self.option.drafts))
        if saves >= MARGIN * self.seconds * (1 - trainer.share):
            return True
        self.ended = f"training ended early: with the expected accept length of {expected:.2f} it saves {saves:.0f} s"
        return False

    def _tried(self, draft: PreTrainedModel) -> tuple[EngineConfig | None, float, str]:
        """The new config, if the new drafter is faster than the old one on the job's prompts, how many times as fast it
        is as the job would be without learning, and why it is used."""
        old, other = self._raced(self.option.before, draft)
        chosen, reason = decided([old, other])
        if chosen is not other:
            return None, 1.0, reason
        if self.given.alone:
            old, other = self._raced(self.given.alone, draft)
        return other.config, median(other.ratios(old)), reason

    def _raced(self, before: EngineConfig, draft: PreTrainedModel) -> tuple[Candidate, Candidate]:
        """The old drafter, with the config `before`, and the new one, after they have decoded in turns. Each has half
        of its pages."""
        tidy()  # what was decoded before
        racing = self.option.feeds(before, draft)
        for _, feed in racing:
            feed.run(0.1)  # the first rounds admit sequences, compile, and record graphs
        race(racing, time.monotonic() + min(TRIAL, SHARE * self.given.seconds))
        (old, _), (other, _) = racing
        return old, other
