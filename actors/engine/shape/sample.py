"""A sample of a job's requests, decoded for a short time to measure drafters and engines."""

import gc
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.lookup import kind, label
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.layers.programs import running
from exspec.actors.engine.request import Request, RequestError
from exspec.actors.engine.statistics import SequenceStatistics

MakeEngine = Callable[[PreTrainedModel, PreTrainedModel | None, EngineConfig], Engine]
LEAST = 8  # rounds of a probe, however long they take


@dataclass
class Sample:
    """The results of the probes.

    requests: the sample's requests that can be decoded; the probes used the first `taken`. lengths: tokens of prompt
    and completion, by request. survival: by label of the drafter, the share of all rounds that committed the first
    i + 1 tokens of a draft; rounds without drafts count too. overhead: by label of the drafter, seconds of bookkeeping
    per row of a round. cached: the share of the prompts' tokens that other sequences had cached, in the last
    probe. completed: prompts and completions.
    """

    requests: list[Request]
    lengths: list[tuple[int, int]] = field(default_factory=list)
    survival: dict[str, tuple[float, ...]] = field(default_factory=dict)
    overhead: dict[str, float] = field(default_factory=dict)
    cached: float = 0.0
    completed: list[tuple[Sequence[int], list[int]]] = field(default_factory=list)
    taken: int = 0

    def gain(self, config: EngineConfig) -> float:
        """The mean number of tokens that a row commits in a round."""
        return 1 + sum(self.survival[label(config)][: config.drafted])


def probe(engines: dict[str, Callable[[], Engine]], requests: Sequence[Request], seconds: float) -> Sample:
    """Decode requests with each engine, for at most `seconds` in total. engines: makes an engine, by label of drafter.

    If there are enough requests, each engine has its own and some are left over for the final: a drafter that learns
    receives the completions so far, and must not know later ones. Raises ValueError if no request can be decoded.
    """
    sample = Sample([])
    for name, make in engines.items():
        engine = make()
        if not sample.requests:
            sample.requests += _usable(engine, requests)
        share = len(sample.requests) // (len(engines) + 1)
        own = sample.requests[sample.taken : sample.taken + share]
        for prompt, completion in sample.completed if own else []:
            engine.drafter.learn(prompt, completion)
        engine.drafter.catch_up()
        engine.learning = bool(own)
        _decode(engine, own or sample.requests, seconds / len(engines))
        sample.taken += len(own)
        _record(sample, name, engine)
        del engine
        gc.collect()  # an engine refers to itself, and its KV must be freed before the next one
    return sample


def _decode(engine: Engine, requests: list[Request], seconds: float) -> None:
    for request in requests:
        engine.submit(request)
    end = time.monotonic() + seconds
    while engine.busy and (time.monotonic() < end or engine.statistics.rounds < LEAST):
        engine.step()


def _usable(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    usable: dict[Hashable, Request] = {}
    refused = []
    for request in requests:
        try:
            engine.check_request(request)
            usable.setdefault(request.id, request)
        except RequestError as error:
            refused.append(str(error))
    if not usable:
        raise ValueError(f"calibration: no request of the sample can be decoded; the first: {(refused or ['none'])[0]}")
    return list(usable.values())


def _record(sample: Sample, name: str, engine: Engine) -> None:
    done, running = engine.take(), engine.pool.running
    total = sum([*(c.statistics for c in done), *(s.statistics for s in running)], start=SequenceStatistics())
    survival = [accepted / total.rounds for accepted in total.accepted_by_position]
    draft = engine.drafter_context.draft
    lengths = kind(engine.config).lengths_with(None if draft is None else draft.config)
    sample.survival[name] = _extrapolated(survival, max(lengths))
    spent, rows = engine.statistics.seconds, max(engine.statistics.busy_rows, 1)
    sample.overhead[name] = (spent["group"] + spent["commit"]) / rows
    given = engine.statistics.cached_tokens + engine.statistics.prefill_tokens
    sample.cached = engine.statistics.cached_tokens / max(given, 1)
    prompts = {request.id: request.prompt for request in sample.requests}
    sample.completed += [(prompts[c.id], c.tokens) for c in done]
    sample.lengths += [(c.statistics.prompt_tokens, len(c.tokens)) for c in done]
    # One in so many tokens ended its sequence, so a running sequence is taken to go on for as many.
    usual = (sum(len(c.tokens) for c in done) + sum(len(s.committed) for s in running)) / max(len(done), 0.1)
    sample.lengths += [
        (len(s.request.prompt), min(round(len(s.committed) + usual), s.request.max_new_tokens)) for s in running
    ]


def _extrapolated(survival: list[float], longest: int) -> tuple[float, ...]:
    """Survival up to the longest K to try, extrapolated by the last measured ratio."""
    while survival and len(survival) < longest:
        last = survival[-1] / survival[-2] if len(survival) > 1 and survival[-2] else survival[-1]
        survival.append(survival[-1] * min(last, 1.0))
    return tuple(survival)


class Feed:
    """An engine that always has waiting requests. The first ones end at random times, as in the middle of a long job.

    Its drafter has learned the probes' completions. It does not learn from its own requests, which repeat. A request
    that repeats has another token where prompts begin to differ: its KV must not be cached.
    """

    def __init__(self, engine: Engine, sample: Sample) -> None:
        self.engine, self.count = engine, 0
        others = sample.requests[sample.taken :] if sample.taken else []
        self.requests = others or sample.requests
        first, second = sample.requests[0].prompt, sample.requests[-1].prompt
        self.differ = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        self.random, self.usual = random.Random(0), round(mean(n for _, n in sample.lengths))
        engine.learning = False
        for prompt, completion in sample.completed if others else []:
            engine.drafter.learn(prompt, completion)
        engine.drafter.catch_up()

    def _next(self) -> Request:
        turn, number = divmod(self.count, len(self.requests))
        request = self.requests[number]
        prompt, at = list(request.prompt), min(self.differ, len(request.prompt) - 1)
        prompt[at] = (prompt[at] + turn) % self.engine.vocabulary
        self.count += 1
        return replace(request, id=self.count, prompt=prompt)

    def run(self, seconds: float) -> float:
        """Run rounds for so long, at least one; returns tokens/s. Compiling does not count."""
        start, before = running(), self.engine.statistics.tokens
        while self.engine.statistics.tokens == before or running() < start + seconds:
            while len(self.engine.pool.waiting) < self.engine.pool.slots:
                request = self._next()
                if self.count <= self.engine.pool.slots:
                    left = self.random.randint(1, max(self.usual, 1))
                    request = replace(request, max_new_tokens=min(left, request.max_new_tokens))
                self.engine.submit(request)
            self.engine.step()
            self.engine.take()
        return (self.engine.statistics.tokens - before) / (running() - start)
