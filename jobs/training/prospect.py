"""What a drafter could save whatever it has learned: it decodes for a moment, and its accept length is assumed.

Scaling laws for speculative decoding (Scylla, arXiv:2505.07858), T1.3, with the seconds of rounds of B rows:

    T_SD / T_AR = (T_draft(B) + T_verify(B, K)) / (accept length * T_plain(B))

Here the seconds of prefill, which no draft shortens, are counted beside it.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters.lookup import kind
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.shape.sample import Feed, Sample
from exspec.actors.engine.statistics import EngineStatistics
from exspec.actors.models import Pair
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.shape import device_here, memory_budget, pair_of

TURNS = 3


@dataclass(frozen=True)
class Rounds:
    """What decoding takes. speed: tokens/s. prefill: seconds per token. draft, verify, rest: seconds of a round, by
    phase of the host. On a GPU the host does not wait for a draft, whose time is then part of `verify`. rows: of a
    round."""

    speed: float
    prefill: float
    draft: float
    verify: float
    rest: float
    rows: float

    @classmethod
    def between(cls, before: EngineStatistics, after: EngineStatistics, speed: float) -> "Rounds":
        """Of the rounds between two moments of an engine that made so many tokens/s."""
        spent = {phase: after.seconds[phase] - before.seconds.get(phase, 0.0) for phase in after.seconds}
        tokens, rounds = after.tokens - before.tokens, after.rounds - before.rounds
        scale = tokens / speed / sum(spent.values())  # what is between the phases, too
        prefill, draft, verify = spent.pop("admit"), spent.pop("draft", 0.0), spent.pop("verify") + spent.pop("wait")
        by_round = scale / rounds
        return cls(
            speed=speed,
            prefill=scale * prefill / tokens,
            draft=by_round * draft,
            verify=by_round * verify,
            rest=by_round * sum(spent.values()),
            rows=(after.busy_rows - before.busy_rows) / rounds,
        )

    @property
    def seconds(self) -> float:
        """Of a round."""
        return self.draft + self.verify + self.rest

    def at(self, accept_length: float) -> float:
        """Tokens/s with so many tokens per row and round."""
        return 1 / (self.prefill + self.seconds / self.rows / accept_length)


class Prospect:
    """Compares two engines, which decode in turns for so many seconds in all. now: as the job decodes. other: with
    another drafter."""

    def __init__(self, now: Feed, other: Feed, seconds: float) -> None:
        feeds = now, other
        for feed in feeds:
            feed.run(0.1)  # the first rounds admit sequences, compile, and record graphs
        before = [feed.engine.statistics for feed in feeds]
        speeds = [[feed.run(seconds / 2 / TURNS) for feed in feeds] for _ in range(TURNS)]
        self.now, self.other = (
            Rounds.between(start, feed.engine.statistics, mean(turn[i] for turn in speeds))
            for i, (start, feed) in enumerate(zip(before, feeds, strict=True))
        )

    def ratio(self, accept_length: float) -> float:
        """How many times as fast the job would be with so many tokens per round."""
        return self.other.at(accept_length) / self.now.speed


def length_of(chance: float, drafts: int) -> float:
    """Tokens per round, the bonus included, if a drafted token is right with this chance."""
    return sum(chance**i for i in range(drafts + 1))


def chance_of(accept_length: float, drafts: int) -> float:
    """The chance with which drafts have this accept length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if length_of(middle, drafts) < accept_length else (low, middle)
    return low


def loaded(job: Job, config: EngineConfig) -> tuple[Pair, Models]:
    """The job's target on this device, and the models with which the job decodes."""
    if (job.num_gpus or 0) > 1:
        raise JobError(f"num_gpus is {job.num_gpus:g}; a drafter is trained beside a target on one GPU")
    device = device_here(job)
    budget = memory_budget(job, torch.device(device))  # before the weights are loaded
    pair = pair_of(job, device, kind(config).needs_draft)
    pair.target.requires_grad_(False)
    return replace(pair, draft=None), Models(pair.target, pair.draft, budget)


def side_by_side(
    target: PreTrainedModel, sample: Sample, given: Sequence[tuple[EngineConfig, PreTrainedModel | None]]
) -> list[Feed]:
    """Two engines, given their configs and drafts, ready to decode the sample. Each has a part of its pages, so that
    both fit."""
    made = []
    for config, draft in given:
        part = config.page_count // (2 if config.pages is None else 3)  # with None, all of them take little memory
        less = replace(config, pages=max(config.fewest_pages, part))
        made.append(Feed(Engine(target, draft, less), sample))
    return made


def tidy() -> None:
    """Free the memory of engines and learners that are gone; engines refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
