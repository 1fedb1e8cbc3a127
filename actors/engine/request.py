"""What goes into the engine and what comes out: requests and completions, in token ids."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exspec.actors.engine.constraint import MakeConstraint
from exspec.actors.engine.statistics import SequenceStatistics

FinishReason = Literal["stop", "length"]
# Looks at the completion after each of its tokens and returns what ended it, or None to go on.
StopCheck = Callable[[Sequence[int]], str | None]
Scores = dict[int, float]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default is greedy.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p: keep the k likeliest tokens (0: all), then the smallest set whose probability reaches p (1: all).
    seed: of the sequence's noise; the same seed gives the same tokens whatever else runs. 64 bits.
    repetition_penalty: as in transformers: logits of tokens seen in prompt or completion are divided by it where
        positive and multiplied where negative; 1 is off.

    Raises ValueError naming the setting that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0, 1 is off"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ValueError(f"{name}: expected {expected}, not {getattr(self, name)}")


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    id: the caller's own; the completion comes back under it.
    prompt: token ids, at least one.
    end_ids: token ids that end the sequence beside the model's own.
    stop: a check on the completion's tokens, for endings that the engine cannot see, such as stop strings.
    constraint: makes the constraint that the completion is held to; it must come to allow an end token.
    scored: whether the completion tells how likely the allowed tokens were. For constraints with few of them.
    """

    id: Hashable
    prompt: Sequence[int]
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    stop: StopCheck | None = None
    constraint: MakeConstraint | None = None
    scored: bool = False


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
