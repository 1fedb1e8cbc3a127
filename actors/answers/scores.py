"""Given completions: how a row's scores are asked for, and what they say."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from exspec.actors.answers.answers import Answers
from exspec.actors.engine.request import Completion, Request
from exspec.actors.samples import together


class Scores(Answers):
    """The likelihood of a row's completion, or of several, of which the likeliest is chosen.

    by: what is compared: the sum of a completion's log-probabilities, or their mean. choices: whether rows have several
    completions. prompt: whether the tokens of prompts have log-probabilities too. Then rounds compute the prompt
    except its first token.
    """

    def __init__(self, by: Literal["sum", "mean"] = "sum", choices: bool = False, prompt: bool = False) -> None:
        self.by, self.choices, self.prompt = by, choices, prompt

    def requests(self, request: Request, given: Sequence[Sequence[int]] | None) -> list[Request]:
        assert given is not None, "every row of a scoring job has completions"
        if self.prompt:
            (tokens,) = given
            start, whole = request.prompt[:1], [*request.prompt[1:], *tokens]
            return [replace(request, id=(request.id, 0), prompt=start, given=whole)]
        return [replace(request, id=(request.id, i), given=tokens) for i, tokens in enumerate(given)]

    def joined(self, request: Request, completions: Sequence[Completion]) -> tuple[Completion, dict[str, Any]]:
        if self.prompt:
            (whole,) = completions
            count = len(request.prompt) - 1
            before, logprobs = whole.logprobs[:count], whole.logprobs[count:]
            statistics = replace(whole.statistics, prompt_tokens=len(request.prompt), completion_tokens=len(logprobs))
            done = replace(whole, id=request.id, tokens=whole.tokens[count:], logprobs=logprobs, statistics=statistics)
            return done, {"prompt_logprobs": [None, *(found.chosen.target for found in before)]}
        sums = [math.fsum(found.chosen.target for found in c.logprobs) for c in completions]
        compared = [s / len(c.tokens) for s, c in zip(sums, completions, strict=True)] if self.by == "mean" else sums
        best = max(range(len(sums)), key=compared.__getitem__)
        done = replace(completions[best], id=request.id)
        if not self.choices:
            return done, {}
        total = together([c.statistics for c in completions])
        done = replace(done, statistics=replace(total, completion_tokens=len(done.tokens)))
        chance = 1 / math.fsum(math.exp(other - compared[best]) for other in compared)
        return done, {"choice": best, "choice_logprobs": sums, "choice_probability": chance}

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        mean = math.fsum(found.chosen.target for found in completion.logprobs) / len(completion.tokens)
        perplexity = math.exp(min(-mean, 700.0))  # beyond that it is no float
        return {"mean_logprob": mean, "perplexity": perplexity, "ranks": [found.rank for found in completion.logprobs]}
