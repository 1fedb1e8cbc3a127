"""What answers are asked of the engine, and read out of its completions: free text, and what all kinds have."""

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from exspec.actors.engine.request import Completion
from exspec.actors.engine.tokens.constraint import MakeConstraint

SEPARATORS = {True: (", ", ": "), False: (",", ":")}  # of JSON's items and of its keys, with spaces or without


class AnswerError(ValueError):
    """Answers that cannot be asked for, or a completion that is none; the message says why."""


class Answers(Protocol):
    """What requests ask for, and how completions are read.

    constraint, scored, end_ids: of the requests; limits: what else they ask for. longest: tokens of the longest answer,
    where there is one.
    """

    @property
    def constraint(self) -> MakeConstraint | None: ...
    @property
    def scored(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def longest(self) -> int | None: ...
    @property
    def limits(self) -> dict[str, Any]: ...

    def read(self, completion: Completion, text: str) -> dict[str, Any]:
        """The values of a completion, by column. Raises AnswerError where it is no answer."""
        ...


def asked(answers: Answers) -> dict[str, Any]:
    """What a request asks for, so that its completion is such an answer."""
    shared = {"constraint": answers.constraint, "scored": answers.scored, "end_ids": answers.end_ids}
    return shared | answers.limits


class FreeText:
    """Anything, within limits: so many tokens at least, no end at end tokens, and no words that are bad.

    A word is barred as the tokenizer writes it at the beginning of a text and behind a space.
    """

    constraint, scored, longest, end_ids = None, 0, None, frozenset[int]()

    def __init__(
        self, tokenizer: Any = None, min_new_tokens: int = 0, ignore_end: bool = False, bad_words: Sequence[str] = ()
    ) -> None:
        written = (tokenizer(f"{before}{word}", add_special_tokens=False) for word in bad_words for before in ("", " "))
        tokens = dict.fromkeys(tuple(ids["input_ids"]) for ids in written)
        if () in tokens:
            raise AnswerError(f"bad_words: one of {', '.join(map(repr, bad_words))} has no tokens")
        self.limits = {"min_new_tokens": min_new_tokens, "ignore_end": ignore_end, "bad_words": tuple(tokens)}

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        return {}


SUFFIXES = ("", "_confidence", "_runner_up", "_runner_up_confidence")


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise AnswerError("the tokenizer names no end token, which an answer needs")
    return end
