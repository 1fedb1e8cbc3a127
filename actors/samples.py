"""The samples of a row, and the row's result from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exspec.actors.answers import logprobs
from exspec.actors.answers.answers import AnswerError, Answers
from exspec.actors.engine import Completion, Request, SequenceStatistics
from exspec.actors.stop_strings import StopStrings, completion_text

SEEDS = 2**63
SAMPLES = "samples"  # the column of all samples that are kept


@dataclass(frozen=True)
class RowResult:
    """The result of one row or sample: a completion with its text, or an error."""

    completion: Completion | None
    text: str | None
    error: str | None
    prompt_tokens: int | None = None
    values: dict[str, Any] = field(default_factory=dict)  # by column, the values read from the text
    lasting: bool = False  # the row itself causes the error, so a second attempt would fail too
    cut: int = 0  # tokens that were cut off the start of the prompt


@dataclass(frozen=True)
class Draws:
    """How many samples of a row are drawn, and what is kept.

    count: samples of a row, unless its column says otherwise. best: keep so many of the likeliest, which have the
    largest sums of log-probabilities; None: keep all, in order. listed: whether the row has a list of all that are
    kept. The row's own completion is the first of them without an error.
    """

    count: int = 1
    best: int | None = None
    listed: bool = False

    def joined(self, requests: Sequence[Request], found: Sequence[RowResult]) -> RowResult:
        """The row's result. The statistics are those of all samples together."""
        order = list(range(len(found)))
        kept = order if self.best is None else sorted(order, key=lambda i: -_likelihood(found[i]))[: self.best]
        first = next((found[i] for i in kept if found[i].completion), found[kept[0]])
        if len(found) > 1 and first.completion:
            total = together([one.completion.statistics for one in found if one.completion])
            first = replace(first, completion=replace(first.completion, statistics=total))
        if not self.listed:
            return first
        samples = [_described(found[i], requests[i].sampling.seed) for i in kept]
        return replace(first, values=first.values | {SAMPLES: samples})


class Texts(dict[int, str]):
    """The text of each token, by id."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = str(self.tokenizer.decode([token]))
        return self[token]


def read(answers: Answers, texts: Texts, request: Request, completions: Sequence[Completion]) -> RowResult:
    """The result of a sample. completions: of `answers.requests`, in order."""
    stop = request.stop
    assert stop is None or isinstance(stop, StopStrings)
    try:
        completion, values = answers.joined(request, completions)
        text = completion_text(texts.tokenizer, completion, stop)
        values |= answers.read(completion, text)
        if request.logprobs is not None:
            values |= logprobs.values(completion, texts.__getitem__)
        # These objects take kilobytes per token, and the values hold what they say.
        return RowResult(replace(completion, logprobs=[], scores=[]), text, None, values=values)
    except AnswerError as invalid:  # decoding again would give the same text
        return RowResult(None, None, str(invalid), lasting=True)
    except Exception as failed:  # of the tokenizer
        return RowResult(None, None, f"{type(failed).__name__}: {failed}")


def together(done: Sequence[SequenceStatistics]) -> SequenceStatistics:
    """The statistics of sequences of one prompt, which were decoded at the same time or one after the other."""
    total = sum(done, start=SequenceStatistics())
    queued = min(one.seconds_queued for one in done)
    prefill = max(one.seconds_prefill for one in done)
    ended = max(one.seconds_queued + one.seconds_prefill + one.seconds_decode for one in done)
    return replace(
        total,
        prompt_tokens=done[0].prompt_tokens,
        seconds_queued=queued,
        seconds_prefill=prefill,
        seconds_decode=ended - queued - prefill,
    )


def sample_requests(request: Request, count: int) -> list[Request]:
    """The requests for samples of a row. Sample i has the row's seed plus i."""
    seed = request.sampling.seed
    samplings = [replace(request.sampling, seed=(seed + i) % SEEDS) for i in range(count)]
    return [replace(request, id=(request.id, i), sampling=one) for i, one in enumerate(samplings)]


def _likelihood(found: RowResult) -> float:
    if found.completion is None:
        return -math.inf
    return float(found.values["cumulative_logprob"])


def _described(found: RowResult, seed: int) -> dict[str, Any]:
    if found.completion is None:
        return {"finish_reason": "error", "error": found.error, "seed": seed}
    ended = {"completion": found.text, "finish_reason": found.completion.finish_reason, "seed": seed}
    return found.values | ended | {"completion_tokens": found.completion.statistics.completion_tokens}
