"""What goes into the engine and what comes out: requests and completions, in token ids."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

from exspec.actors.engine.statistics import SequenceStatistics

if TYPE_CHECKING:
    from exspec.actors.engine.tokens.constraint import MakeConstraint

FinishReason = Literal["stop", "length"]
# Takes the completion's tokens one by one and returns what ended it, or None to go on. It may keep what it has seen.
StopCheck = Callable[[int], str | None]
MakeStop = Callable[[], StopCheck]
Scores = dict[int, float]
# A logit divided or multiplied by a number between these stays a finite float32.
SMALLEST, LARGEST = 1e-6, 1e6
LARGEST_INT = 2**31 - 1
HIGHEST = 100  # of a penalty that is taken off logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default is greedy.

    temperature: 0 is greedy; otherwise logits are divided by it, in float32: from 1e-6 to 1e6.
    top_k, top_p: keep the k likeliest tokens (0: all), then the smallest set whose probability reaches p (1: all).
    seed: of the sequence's noise; the same seed gives the same tokens whatever else runs. 64 bits.
    repetition_penalty: as in transformers: logits of tokens seen in prompt or completion are divided by it where
        positive and multiplied where negative, from 1e-6 to 1e6; 1 is off.
    presence_penalty, frequency_penalty: taken off the logits of tokens of the completion, once, and as often as they
        are in it, as in OpenAI's API; from -100 to 100, 0 is off.
    min_p: drop tokens less likely than this share of the likeliest one's probability; 0 is off.

    Raises ValueError naming the setting that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (_computable(self.temperature) or self.temperature == 0, "0 (greedy), or 1e-6 to 1e6"),
            "top_k": (_whole(self.top_k) and 0 <= self.top_k <= LARGEST_INT, "0 (off), or a whole number below 2**31"),
            "top_p": (isinstance(self.top_p, Real) and 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            "seed": (_whole(self.seed), "a whole number"),
            "repetition_penalty": (_computable(self.repetition_penalty), "above 0 (1e-6 to 1e6), 1 is off"),
            "presence_penalty": (_penalty(self.presence_penalty), f"{-HIGHEST} to {HIGHEST}, 0 is off"),
            "frequency_penalty": (_penalty(self.frequency_penalty), f"{-HIGHEST} to {HIGHEST}, 0 is off"),
            "min_p": (isinstance(self.min_p, Real) and 0 <= self.min_p <= 1, "0 (off) to 1"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ValueError(f"{name}: expected {expected}, not {getattr(self, name)}")


def _computable(value: object) -> bool:
    return isinstance(value, Real) and bool(SMALLEST <= value <= LARGEST)  # type: ignore[operator]


def _penalty(value: object) -> bool:
    return isinstance(value, Real) and bool(-HIGHEST <= value <= HIGHEST)  # type: ignore[operator]


def _whole(value: object) -> bool:
    return isinstance(value, Integral)


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    id: the caller's own; the completion comes back under it.
    prompt: token ids, at least one.
    end_ids: token ids that end the sequence beside the model's own.
    stop: makes a check on the completion's tokens, for endings that the engine cannot see, such as stop strings. Every
        decoding of the request has a check of its own.
    min_new_tokens: no end token and no stop comes before so many tokens.
    ignore_end: an end token is a token like others.
    bad_words: sequences of tokens that the completion never has.
    constraint: makes the constraint that the completion is held to; it must come to allow an end token.
    scored: the completion tells how likely each token was at places where a constraint allows a choice of so many at
        most; 0 is at none.

    Raises RequestError where prompt or max_new_tokens are no whole numbers: a tensor of them would fail for all rows.
    """

    id: Hashable
    prompt: Sequence[int]
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    stop: MakeStop | None = None
    min_new_tokens: int = 0
    ignore_end: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: "MakeConstraint | None" = None
    scored: int = 0

    def __post_init__(self) -> None:
        lengths = {"max_new_tokens": [self.max_new_tokens], "min_new_tokens": [self.min_new_tokens]}
        for name, values in {"prompt": self.prompt, **lengths, "bad_words": sum(self.bad_words, ())}.items():
            if bad := [kind.__name__ for kind in set(map(type, values)) if not issubclass(kind, Integral)]:
                raise RequestError(f"request {self.id!r}: {name}: expected whole numbers, not {bad[0]}")


@dataclass(frozen=True)
class Completion:
    """A finished sequence.

    tokens: the completion, without the prompt. An end token is its last one; with a stop string, the last token is
        the one that completed the string, and the text is to be cut before it.
    finish_reason: `stop` (end token or stop check) or `length` (max_new_tokens or the model's context).
    stopped_by: the end token's id, or what the stop check returned; None after `length`.
    scores: of a scored request, for each of the tokens the target's log-probability of every token that was allowed in
        its place, among those; empty where there was no choice.
    """

    id: Hashable
    tokens: list[int]
    finish_reason: FinishReason
    stopped_by: int | str | None
    statistics: SequenceStatistics
    scores: list[Scores] = field(default_factory=list)


class RequestError(ValueError):
    """A request that can never be decoded; the message names it and says what was expected."""


@dataclass(frozen=True)
class Room:
    """Tokens that a sequence may have: in the model's context, and in a slot."""

    context: int
    capacity: int

    def longest_prompt(self, new: int) -> int:
        """Tokens of the longest prompt that so many new ones can follow."""
        return min(self.context, self.capacity) - new

    def refusal(self, prompt: int, new: int) -> str | None:
        """Why a prompt of so many tokens cannot be followed by so many new ones; None where it can."""
        if prompt >= self.context:
            return f"a prompt of {prompt} tokens leaves no room in the context of {self.context}"
        if min(prompt + new, self.context) > self.capacity:
            return (
                f"{prompt} prompt and {new} new tokens do not fit the slots' capacity of {self.capacity} tokens; "
                "raise capacity or lower max_new_tokens"
            )
        return None
