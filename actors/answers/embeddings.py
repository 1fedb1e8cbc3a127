"""Embeddings: how a row's is asked for, and how it is made from hidden states."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from exspec.actors.answers.answers import Answers
from exspec.actors.engine.request import Completion, Request


class Embeddings(Answers):
    """The embedding of a row's prompt, from hidden states after the last norm.

    pooling: of the prompt's last token, or the mean over all its tokens. normalize: to a length of 1. dimensions: how
    many numbers to keep, before that; None: all.
    """

    longest = 1  # a prompt leaves room for one token, which is not read

    def __init__(
        self, pooling: Literal["last", "mean"] = "last", normalize: bool = True, dimensions: int | None = None
    ) -> None:
        self.pooling, self.normalize, self.dimensions = pooling, normalize, dimensions

    def requests(self, request: Request, given: Sequence[Sequence[int]] | None) -> list[Request]:  # noqa: ARG002
        first = 1 if self.pooling == "mean" else len(request.prompt)  # tokens up to the first state that counts
        prompt, rest = request.prompt[:first], request.prompt[first:]
        return [replace(request, id=(request.id, 0), prompt=prompt, given=[*rest, 0])]

    def joined(self, request: Request, completions: Sequence[Completion]) -> tuple[Completion, dict[str, Any]]:
        (done,) = completions
        kept = done.state[: self.dimensions].astype(np.float64) / len(done.tokens)
        if self.normalize:
            kept /= math.sqrt(math.fsum(kept * kept)) or 1.0
        statistics = replace(done.statistics, prompt_tokens=len(request.prompt), completion_tokens=0)
        done = replace(done, id=request.id, tokens=[], statistics=statistics, state=None)
        return done, {"embedding": kept.astype(np.float32).tolist()}

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        return {}
