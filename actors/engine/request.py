"""The engine's input and output: requests and completions, in token ids."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from exspec.actors.engine.statistics import SequenceStatistics

if TYPE_CHECKING:
    from exspec.actors.engine.tokens.constraint import MakeConstraint

FinishReason = Literal["stop", "length", "error"]
# Takes the completion's tokens one by one. Returns what ended the completion, or None to continue. It may keep state.
StopCheck = Callable[[int], str | None]
MakeStop = Callable[[], StopCheck]
Scores = dict[int, float]  # log-probabilities by token
SMALLEST, LARGEST = 1e-6, 1e6  # a logit times or divided by a number in this range stays a finite float32
LARGEST_INT = 2**31 - 1
HIGHEST = 100  # penalty that is subtracted from logits
MOST_LIKELY = 20  # of the likeliest tokens that a request may ask for, per position


class Logprob(NamedTuple):
    """A token and its log-probability: by the target alone, and in the distribution that tokens are drawn from, after
    penalties, constraint, temperature and filters. There -inf means that it cannot be drawn. For a greedy row that
    distribution has temperature 1 and no filters."""

    token: int
    target: float
    drawn: float


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token that was chosen, and of the likeliest by the target, in order.
    rank: of the chosen token by the target's logits, from 1; tokens with equal logits share the best rank."""

    chosen: Logprob
    rank: int
    likeliest: list[Logprob]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default is greedy.

    temperature: 0 is greedy; otherwise logits are divided by it in float32. From 1e-6 to 1e6.
    top_k, top_p: keep the k likeliest tokens (0: all), then the smallest set whose probability reaches p (1: all).
    seed: of the sequence's noise, 64 bits. The same seed gives the same tokens, whatever else runs.
    repetition_penalty: as in transformers, logits of tokens in the prompt or the completion are divided by it if
        positive and multiplied by it if negative. From 1e-6 to 1e6; 1 is off.
    presence_penalty, frequency_penalty: as in OpenAI's API, subtracted from the logits of tokens in the completion:
        once, and once per occurrence. From -100 to 100; 0 is off.
    min_p: drop tokens whose probability is below this share of the largest probability; 0 is off.

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
            kind = int if name in ("seed", "top_k") else float  # numpy's numbers would overflow
            object.__setattr__(self, name, kind(getattr(self, name)))


def _computable(value: object) -> bool:
    return isinstance(value, Real) and bool(SMALLEST <= value <= LARGEST)  # type: ignore[operator]


def _penalty(value: object) -> bool:
    return isinstance(value, Real) and bool(-HIGHEST <= value <= HIGHEST)  # type: ignore[operator]


def _whole(value: object) -> bool:
    return isinstance(value, Integral)


# Fields of a request that are whole numbers.
NUMBERS = ("max_new_tokens", "min_new_tokens", "scored", "logprobs", "adapter")


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    id: chosen by the caller; the completion has the same id.
    prompt: token ids, at least one.
    end_ids: token ids that end the sequence, in addition to the model's own.
    stop: makes a check of the completion's tokens, for endings that the engine cannot see, such as stop strings. Each
        decoding of the request makes a new check.
    min_new_tokens: neither an end token nor a stop may come before this many tokens.
    ignore_end: treat end tokens like other tokens.
    bad_words: sequences of tokens that may not occur in the completion.
    constraint: makes the completion's constraint, which must allow an end token at some point.
    scored: keep log-probabilities at positions where the constraint allows a choice between at most this many tokens;
        0 keeps none.
    logprobs: keep log-probabilities of every chosen token, and of so many of the likeliest, at most 20; None keeps
        none. Tokens that a constraint forces then take part in rounds, because their logits are needed.
    given: the completion's tokens, which are scored and not chosen; max_new_tokens is their number. They are their own
        draft, so that a round scores as many as it has columns. Needs `logprobs` and method plain. In an engine that
        embeds, every request needs it, and no logprobs; the last one is not read.
    adapter: number of the target's adapter that it is decoded with; 0 is none.

    Token ids are copied, except a prompt that is a tuple of `int`. An exception in `stop` or `constraint` ends this
    request alone.

    Raises RequestError if token ids or lengths are not whole numbers: a tensor of them would fail for all rows.
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
    logprobs: int | None = None
    given: Sequence[int] | None = None
    adapter: int = 0

    def __post_init__(self) -> None:
        numbers = [name for name in NUMBERS if name != "logprobs" or self.logprobs is not None]
        lengths = {name: [getattr(self, name)] for name in numbers}
        for name, values in {**self.token_ids, **lengths}.items():
            if bad := [kind.__name__ for kind in set(map(type, values)) if not issubclass(kind, Integral)]:
                raise RequestError(f"request {self.id!r}: {name}: expected whole numbers, not {bad[0]}")
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"request {self.id!r}: sampling: expected Sampling, not {type(self.sampling).__name__}")
        words = tuple(tuple(map(int, word)) for word in self.bad_words)
        copies: dict[str, Collection[int]] = {"end_ids": frozenset(map(int, self.end_ids))}
        if type(self.prompt) is not tuple or set(map(type, self.prompt)) != {int}:
            copies["prompt"] = list(map(int, self.prompt))
        if self.given is not None:
            copies["given"] = list(map(int, self.given))
            lengths["max_new_tokens"] = [len(copies["given"])]
        vars(self).update(copies, bad_words=words, **{name: int(value) for name, (value,) in lengths.items()})

    @property
    def token_ids(self) -> dict[str, Iterable[int]]:
        """All token ids of the request, by field."""
        own = {"prompt": self.prompt, "end_ids": self.end_ids, "bad_words": chain(*self.bad_words)}
        return own if self.given is None else own | {"given": self.given}


@dataclass(frozen=True)
class Completion:
    """A finished sequence.

    tokens: the completion, without the prompt, with the end token. After a stop string, the last token is the one that
        completed the string, and the caller cuts the text before the string.
    finish_reason: `stop` (end token or stop check), `length` (max_new_tokens or the model's context), or `error`.
    stopped_by: the end token's id, or the result of the stop check; None after `length`.
    scores: of a scored request, for each position the target's log-probabilities of the allowed tokens, normalised over
        these tokens; empty where there was no choice.
    logprobs: of each token, if the request asks for them.
    state: in an engine that embeds, the sum [D] in float32 of the hidden states that its tokens follow, in order.
    error: the exception that the request's stop check or constraint raised. The tokens then mean nothing.
    """

    id: Hashable
    tokens: list[int]
    finish_reason: FinishReason
    stopped_by: int | str | None
    statistics: SequenceStatistics
    scores: list[Scores] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: BaseException | None = None
    state: Any = None


class RequestError(ValueError):
    """The request can never be decoded. The message names it and says what was expected."""


@dataclass(frozen=True)
class Room:
    """The most tokens of a sequence: in the model's context, and in a slot."""

    context: int
    capacity: int

    def longest_prompt(self, new: int) -> int:
        """Tokens of the longest prompt that leaves room for `new` tokens."""
        return min(self.context, self.capacity) - new

    def refusal(self, prompt: int, new: int, whole: bool = False) -> str | None:
        """The reason why `new` tokens do not fit after a prompt of `prompt` tokens; None if they fit. whole: whether
        all of them must fit into the context, which otherwise ends a completion."""
        if prompt >= self.context:
            return f"a prompt of {prompt} tokens leaves no room in the context of {self.context}"
        if whole and prompt + new > self.context:
            return f"{prompt} prompt and {new} given tokens do not fit the context of {self.context}"
        if min(prompt + new, self.context) > self.capacity:
            return (
                f"{prompt} prompt and {new} new tokens do not fit the slots' capacity of {self.capacity} tokens; "
                "raise capacity or lower max_new_tokens"
            )
        return None
