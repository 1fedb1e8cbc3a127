"""A grammar as a constraint of the engine, by llguidance."""

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
    """A constraint that llguidance knows. Text that must come next is written in the tokens that are usual for it.

    What a rollback takes back is forgotten when other tokens come: those of a draft mostly come again.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end: int) -> None:
        if matcher.is_error():
            raise AnswerError(f"json_schema: {matcher.get_error()}")
        self.matcher, self.vocabulary, self.end = matcher, vocabulary, end
        self.words = -(-vocabulary // BITS)
        self.way: list[int] = []  # tokens that the matcher stands behind; it could not come back from an end token
        self.runs: list[list[Few]] = []  # of the places on the way: the tokens that must come, the last one first
        self.place = 0  # on the way

    def allowed(self) -> Tensor:
        if (few := self.kept()) is not None:
            return mask_of(few.tokens)
        mask = np.zeros((1, self.words), dtype=np.int32)
        self.compute([(self, 0)], mask)
        return torch.from_numpy(mask[0])

    def kept(self) -> Few | None:
        if self.place == len(self.runs):
            self.runs.append(self._run())
        run = self.runs[self.place]
        return run[-1] if run else None

    @classmethod
    def compute(cls, places: Sequence[tuple["Grammar", int]], masks: Words) -> None:
        for words in {grammar.words for grammar, _ in places}:
            its = [(grammar._here(), row) for grammar, row in places if grammar.words == words]
            # The library fills rows of its own length alone, and a model's vocabulary may be padded.
            fits = masks.shape[1] == words
            filled = masks if fits else np.empty((len(masks), words), dtype=np.int32)
            fill_next_token_bitmask_par(_executor(), its, filled)
            if not fits:
                rows, width = [row for _, row in its], min(words, masks.shape[1])
                masks[rows, width:] = 0
                masks[rows, :width] = filled[rows, :width]

    def accepts(self, token: int) -> bool:
        if (few := self.kept()) is not None:
            return token in few.tokens
        if self.place < len(self.way) and self.way[self.place] == token:
            return True
        # A model's vocabulary may be padded; asked for a token that it does not know the matcher fails for good.
        return token < self.vocabulary and bool(self._here().validate_tokens([token]))

    def advance(self, token: int) -> None:
        few = self.kept()
        if self.place == len(self.way) or self.way[self.place] != token:
            self._here()
            if token != self.end and not self.matcher.consume_token(token):
                raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
            self.way.append(token)
            run = self.runs[self.place]
            if few is not None and len(run) > 1 and few.only == token:
                self.runs.append(run[:-1])
        self.place += 1

    def rollback(self, count: int) -> None:
        self.place -= count

    def _here(self) -> LLMatcher:
        """The matcher, brought back to the place."""
        if self.place == len(self.way):
            return self.matcher
        count = sum(token != self.end for token in self.way[self.place :])
        if count and not self.matcher.rollback(count):
            raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
        del self.way[self.place :], self.runs[self.place + 1 :]
        return self.matcher

    def _run(self) -> list[Few]:
        """The tokens that must come after the way, the last one first."""
        if self.way and self.way[-1] == self.end:
            return [Few.of([])]
        if must := self.matcher.compute_ff_tokens():
            return [_alone(token) for token in reversed(must)]
        return [_alone(self.end)] if self.matcher.is_stopped() else []


@cache
def _alone(token: int) -> Few:
    return Few.of([token])


@cache
def _executor() -> LLExecutor:
    """The threads that compute masks, one for each core."""
    return LLExecutor()
