"""`exspec plan --estimate`: decodes some of a job's rows on this machine, and estimates the whole job from them."""

import os
import time
from dataclasses import dataclass

import torch

from exspec.actors.engine import Completion, Engine, Request, SequenceStatistics
from exspec.actors.engine.drafters.lookup import kind
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.output.page import duration
from exspec.pipeline.prepare import Prepared
from exspec.pipeline.shape import Settled, device_here, pair_of, sample, settle

ROWS = 32  # decoded at most
SECONDS = 60.0  # after which no further round starts


@dataclass(frozen=True)
class Estimate:
    """An estimate of a whole job.

    decoded: rows that were decoded to their end. rows: rows of the job that can be decoded; tokens: in the completions
    of these rows; prompts: tokens in their prompts. speed: tokens/s of an actor. gpus: per actor.
    """

    shape: Settled
    decoded: int
    rows: int
    tokens: float
    prompts: float
    speed: float
    actors: int
    gpus: float

    @property
    def seconds(self) -> float:
        return self.tokens / (self.speed * self.actors)

    def lines(self, price: float | None) -> list[str]:
        """The lines to print. price: of one GPU for an hour."""
        decoded, rows = counted(self.decoded, "row"), counted(self.rows, "row")
        lines = [
            f"estimate from {decoded} decoded here, {self.shape}: {self.speed:.0f} tokens/s per actor",
            f"{rows}: about {self.prompts:,.0f} prompt tokens and {self.tokens:,.0f} completion tokens",
            f"{duration(self.seconds)} with {counted(self.actors, 'such actor')}",
        ]
        if price is not None:
            cost = self.seconds / 3600 * self.actors * self.gpus * price
            lines[-1] += f", {cost:.2f} at {price:g} per GPU hour" if self.gpus else "; no cost, because no GPU is used"
        return lines


def estimate(prepared: Prepared, share: float) -> Estimate:
    """Decode some rows of a job in its shape, after measuring its auto settings. share: of rows that can be decoded.

    Raises JobError if this machine lacks the job's device or has too little memory.
    """
    job = prepared.job
    device = device_here(job)
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError("device: this machine has no GPU that torch can use; run the estimate where the job will run")
    requests = sample(job, prepared.plan, prepared.prompts.within(prepared.room(prepared.shape.config)))
    if not requests:
        raise JobError("estimate: no row of the sample can be decoded")
    try:
        settled = settle(job, prepared.shape, requests, device, prepared.models.digests)
    except ValueError as error:
        raise JobError(str(error)) from error
    pair = pair_of(job, device, kind(settled.config).needs_draft)
    engine = Engine(pair.target, pair.draft, settled.config)
    warm, *others = requests[: ROWS + 1] if len(requests) > 1 else requests * 2
    engine.submit(warm)
    engine.run()
    done, tokens, seconds = _decode(engine, others)
    counted = sum((c.statistics for c in done), start=SequenceStatistics())
    each = counted.completion_tokens / len(done) if done else float(job.max_new_tokens)
    each *= job.draws.count
    cards = torch.cuda.device_count() if device == "cuda" else 0
    gpus = (job.num_gpus or 1.0) if cards else 0.0
    actors = job.actor_range[1]
    if job.actors == "auto" or not cards:  # more actors than CPU cores are not faster
        actors = max(1, int(cards / gpus) if cards else min(actors, (os.cpu_count() or 1) // job.threads))
    rows = round(prepared.plan.rows * share)
    prompts = sum(len(r.prompt) for r in requests) / len(requests)
    return Estimate(settled, len(done), rows, rows * each, rows * prompts, tokens / seconds, actors, gpus)


def _decode(engine: Engine, requests: list[Request]) -> tuple[list[Completion], int, float]:
    """Decode for SECONDS at most. Returns finished completions, the tokens of all rows, and the seconds it took."""
    for request in requests:
        engine.submit(request)
    before, began, done = engine.statistics.tokens, time.perf_counter(), []
    while engine.busy and time.perf_counter() - began < SECONDS:
        engine.step()
        done += engine.take()
    return done, engine.statistics.tokens - before, time.perf_counter() - began
