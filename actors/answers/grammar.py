"""A grammar as a constraint of the engine, computed by llguidance."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor

from exspec.actors.answers.answers import AnswerError
from exspec.actors.engine.tokens.constraint import BITS, Constraint, Few, Words, mask_of


class Grammar(Constraint):
    """A constraint computed by an llguidance matcher. Forced text is written in the tokenizer's own tokens.

    A rollback only moves `position`. The matcher keeps the later tokens, since those of a draft mostly come again.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end: int) -> None:
        if matcher.is_error():
            raise AnswerError(f"json_schema: {matcher.get_error()}")
        self.matcher, self.vocabulary, self.end = matcher, vocabulary, end
        self.words = -(-vocabulary // BITS)
        self.tokens: list[int] = []  # consumed by the matcher; not the end token, which it could not roll back
        self.runs: list[list[Few]] = []  # by position in `tokens`: the tokens that must come next, the last one first
        self.position = 0  # how many of `tokens` count

    def allowed(self) -> Tensor:
        if (few := self.kept()) is not None:
            return mask_of(few.tokens)
        mask = np.zeros((1, self.words), dtype=np.int32)
        self.compute([(self, 0)], mask)
        return torch.from_numpy(mask[0])

    def kept(self) -> Few | None:
        if self.position == len(self.runs):
            self.runs.append(self._run())
        run = self.runs[self.position]
        return run[-1] if run else None

    @classmethod
    def compute(cls, rows: Sequence[tuple["Grammar", int]], masks: Words) -> None:
        for words in {grammar.words for grammar, _ in rows}:
            matchers = [(grammar._rewound(), row) for grammar, row in rows if grammar.words == words]
            # The library only fills rows of the tokenizer's length, and a model's vocabulary may be padded.
            fits = masks.shape[1] == words
            filled = masks if fits else np.empty((len(masks), words), dtype=np.int32)
            fill_next_token_bitmask_par(_executor(), matchers, filled)
            if not fits:
                numbers, width = [row for _, row in matchers], min(words, masks.shape[1])
                masks[numbers, width:] = 0
                masks[numbers, :width] = filled[numbers, :width]

    def accepts(self, token: int) -> bool:
        if (few := self.kept()) is not None:
            return token in few.tokens
        if self.position < len(self.tokens) and self.tokens[self.position] == token:
            return True
        # A model's vocabulary may be padded, and a token that the matcher does not know makes it fail for good.
        return token < self.vocabulary and bool(self._rewound().validate_tokens([token]))

    def advance(self, token: int) -> None:
        few = self.kept()
        if self.position == len(self.tokens) or self.tokens[self.position] != token:
            self._rewound()
            if token != self.end and not self.matcher.consume_token(token):
                raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
            self.tokens.append(token)
            run = self.runs[self.position]
            if few is not None and len(run) > 1 and few.only == token:
                self.runs.append(run[:-1])
        self.position += 1

    def rollback(self, count: int) -> None:
        self.position -= count

    def _rewound(self) -> LLMatcher:
        """The matcher, rolled back to `position`."""
        if self.position == len(self.tokens):
            return self.matcher
        count = sum(token != self.end for token in self.tokens[self.position :])
        if count and not self.matcher.rollback(count):
            raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
        del self.tokens[self.position :], self.runs[self.position + 1 :]
        return self.matcher

    def _run(self) -> list[Few]:
        """The tokens that must come after `tokens`, the last one first."""
        if self.tokens and self.tokens[-1] == self.end:
            return [Few.of([])]
        if must := self.matcher.compute_ff_tokens():
            return [_single(token) for token in reversed(must)]
        return [_single(self.end)] if self.matcher.is_stopped() else []


@cache
def _single(token: int) -> Few:
    return Few.of([token])


@cache
def _executor() -> LLExecutor:
    """The threads that compute masks, one for each core."""
    return LLExecutor()
