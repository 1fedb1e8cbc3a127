"""Trains small drafters over a grid of layers and training tokens, measures them on rows held out, and times them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.sample import Sample
from exspec.actors.models import load_draft
from exspec.jobs.training.examples import batched
from exspec.jobs.training.law import Fit, Point, fit
from exspec.jobs.training.prospect import Prospect, Rounds, loaded, side_by_side, tidy
from exspec.jobs.training.run import MADE, Training, measure, use_cores
from exspec.jobs.training.settings import ScaleSettings, TrainSettings
from exspec.jobs.training.unfinished import write
from exspec.pipeline.errors import JobError
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.shape import known_shape
from exspec.pipeline.storage import Folder

MEASURED = "measured.json"
ENDLESS = 1e9  # minutes


@dataclass(frozen=True)
class Measured:
    """A drafter that was trained. tokens: of completions that it has learned, every epoch counted. seconds: of its
    training. survival: the share of rounds on held-out rows in which the first i + 1 tokens of its draft were right.
    bonus: the share of rounds with a bonus token; those that end a completion may have none."""

    drafter: str
    layers: int
    tokens: int
    seconds: float
    survival: tuple[float, ...]
    bonus: float

    @property
    def drafts(self) -> int:
        """K."""
        return len(self.survival)

    def length(self, drafts: int) -> float:
        """The accept length of drafts of so many tokens."""
        return self.bonus + sum(self.survival[:drafts])


@dataclass(frozen=True)
class Timed:
    """Rounds of B rows without drafts, and with K drafted tokens."""

    drafter: str
    layers: int
    batch_size: int
    draft_tokens: int
    plain: Rounds
    drafting: Rounds


class Scale:
    """One experiment. work: a folder for what it needs to go on after it was stopped. Raises JobError or ValueError if
    the job has too few rows, a drafter of the grid cannot be made, or no batch fits into memory."""

    def __init__(self, output: str, options: dict[str, Any], settings: ScaleSettings, work: Path) -> None:
        self.output, self.options, self.settings, self.work = output, options, settings, work
        longest = max((self._training(name) for name in settings.kinds), key=lambda training: training.drafts)
        self.job = longest.stored()
        done = read_output(Folder(output, options))
        shape = EngineConfig(**known_shape(done.state.description["shape"]))
        self.plain = replace(shape.plain(), columns=None, draft_from=0)
        self.pair, self.models = loaded(self.job, self.plain)
        self.rows = longest.rows(self.job, self.pair)
        learned = self.rows.learned
        self.planned = done.state.plan.rows
        self.row_tokens = mean(len(completion) for _, completion in learned)
        self.step_tokens = sum(len(completion) for _, completion in learned) / len(batched(learned))
        steps = [self._of(settings.kinds[0], 1, tokens).settings.steps for tokens in self._tokens]
        if len(set(steps)) < len(steps):
            raise JobError(
                f"--tokens: a step learns {self.step_tokens:,.0f} tokens; expected numbers that are that far apart, "
                f"not {settings.tokens!r}"
            )
        fewest = min(settings.numbers("batch_sizes"))
        if self.models.rows(self._sized(self.plain, fewest)) < fewest:
            raise JobError(f"--batch-sizes: a batch of {fewest} rows does not fit into memory")
        for name in settings.kinds:  # the largest drafters of the grid must be possible
            self._of(name, self._layers[0], 1).learner(self.pair, learned)
        tidy()

    def measured(self, say: Callable[[str], None]) -> Iterator[Measured]:
        """Train and measure all drafters."""
        grid = [(name, n, tokens) for name in self.settings.kinds for n in self._layers for tokens in self._tokens]
        for name, layers, tokens in grid:
            yield self._measured(name, layers, tokens, say)

    @property
    def _layers(self) -> list[int]:
        return sorted(self.settings.numbers("layers"), reverse=True)

    @property
    def _tokens(self) -> list[int]:
        return sorted(self.settings.numbers("tokens"), reverse=True)

    def _training(self, drafter: str) -> Training:
        own = self.settings
        permissions = {"trust_remote_code": own.trust_remote_code, "allow_pickle": own.allow_pickle}
        asked: Any = {"drafter": drafter, "rows": own.rows, "draft_tokens": own.draft_tokens} | permissions
        settings = TrainSettings(**asked)
        return Training(self.output, self.options, settings, self.work)

    def _of(self, drafter: str, layers: int, tokens: int) -> Training:
        """The training of one drafter. A step learns all of its tokens, so their number is not exact."""
        general, steps = self._training(drafter), max(1, round(tokens / self.step_tokens))
        settings = replace(general.settings, layers=layers, steps=steps, minutes=ENDLESS)
        return replace(general, settings=settings, work=self.work / f"{drafter}-{layers}-{tokens}")

    def _measured(self, drafter: str, layers: int, tokens: int, say: Callable[[str], None]) -> Measured:
        training = self._of(drafter, layers, tokens)
        file = training.work / MEASURED
        if file.exists():
            found = json.loads(file.read_text())
            return Measured(**found | {"survival": tuple(found["survival"])})
        use_cores(1)
        say(f"training {drafter} of {layers} layers on {tokens:,} tokens")
        learner = training.learner(self.pair, self.rows.learned)
        training.run(learner, self.pair, self.rows, lambda _: None)
        del learner
        tidy()
        pair, drafts, records = training.made(self.pair, self.job)
        decoded = measure(pair, [request for request, _ in self.rows.held], drafter, drafts)
        tidy()
        shares = [count / decoded.rounds for count in decoded.accepted_by_position]
        survival = (*shares, *[0.0] * (drafts - len(shares)))
        bonus = (decoded.completion_tokens - decoded.accepted) / decoded.rounds
        learned = round(training.settings.steps * self.step_tokens)
        made = Measured(drafter, layers, learned, records[-1].seconds, survival, bonus)
        write(file, asdict(made))
        training.forget()
        return made

    def timed(self, say: Callable[[str], None]) -> Iterator[Timed]:
        """Time rounds of every drafter's shape, for every B that fits into memory, and K with its halves."""
        held = self.rows.held
        lengths = [(len(prompt), len(completion)) for _, (prompt, completion) in held]
        sample = Sample([request for request, _ in held], lengths)
        torch.set_num_threads(self.job.threads)
        for name in self.settings.kinds:
            for layers in self._layers:
                say(f"timing {name} of {layers} layers")
                draft = load_draft(self.pair, str(self._of(name, layers, self._tokens[0]).work / MADE), self.job.target)
                models = replace(self.models, draft=draft)
                for config in self._shapes(name, models, say):
                    plain = replace(config.plain(), columns=None)
                    now, other = side_by_side(models.target, sample, [(plain, None), (config, draft)])
                    found = Prospect(now, other, self.settings.seconds)
                    del now, other
                    tidy()
                    yield Timed(name, layers, config.batch_size, config.drafted, found.now, found.other)

    def _shapes(self, drafter: str, models: Models, say: Callable[[str], None]) -> Iterator[EngineConfig]:
        for rows in sorted(self.settings.numbers("batch_sizes")):
            for drafts in halves(self._training(drafter).drafts):
                shape = {"method": "exspec", "drafter": drafter, "draft_tokens": drafts}
                wanted = self._sized(self.plain.drafting(shape), rows)
                if models.rows(wanted) == rows:
                    yield models.fitted(wanted)
                else:
                    say(f"{drafter}, K={drafts}: a batch of {rows} rows does not fit into memory")

    def _sized(self, config: EngineConfig, rows: int) -> EngineConfig:
        return replace(config, batch_size=rows, window=3 * rows, pages=None)


def halves(drafts: int) -> list[int]:
    """K, half of it, and so on."""
    return [drafts >> i for i in range(drafts.bit_length())]


def fits(measured: list[Measured]) -> dict[tuple[str, int], Fit]:
    """The law of each kind of drafter, by drafter and K."""
    found = {}
    for name in dict.fromkeys(m.drafter for m in measured):
        own = [m for m in measured if m.drafter == name]
        for drafts in halves(own[0].drafts):
            found[name, drafts] = fit([Point(m.tokens, m.layers, m.length(drafts)) for m in own], drafts)
    return found
