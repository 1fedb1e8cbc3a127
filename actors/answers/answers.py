"""Forms of answers: their common interface, and free text."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from exspec.actors.engine.request import Completion, Request
from exspec.actors.engine.tokens.constraint import MakeConstraint

SEPARATORS = {True: (", ", ": "), False: (",", ":")}  # after JSON's items and keys, with and without spaces


class AnswerError(ValueError):
    """A form of answers that is not possible, or a completion that does not have the form; the message says why."""


class Answers(ABC):
    """What requests ask for, and how completions are read.

    constraint, scored, end_ids: fields of the requests. limits: other fields of the requests, by name. longest: tokens
    of the longest answer, or None if there is no limit.
    """

    constraint: MakeConstraint | None = None
    scored: int = 0
    end_ids: frozenset[int] = frozenset()
    longest: int | None = None
    limits: Mapping[str, Any] = {}

    def requests(self, request: Request, given: Sequence[Sequence[int]] | None) -> list[Request]:  # noqa: ARG002
        """The engine's requests for a row. given: the tokens of its completions in a scoring job."""
        return [request]

    def joined(self, request: Request, completions: Sequence[Completion]) -> tuple[Completion, dict[str, Any]]:  # noqa: ARG002
        """The row's completion, and values by column, from the completions of `requests`."""
        return completions[0], {}

    @abstractmethod
    def read(self, completion: Completion, text: str) -> dict[str, Any]:
        """The values of a completion, by column. Raises AnswerError if the completion is not an answer."""


def asked(answers: Answers) -> dict[str, Any]:
    """The fields of a request for an answer, by name."""
    shared = {"constraint": answers.constraint, "scored": answers.scored, "end_ids": answers.end_ids}
    return {**shared, **answers.limits}


class FreeText(Answers):
    """Any text, optionally with a least number of tokens, without ending at end tokens, or without bad words.

    A bad word is barred in two forms: as the tokenizer writes it at the start of a text, and after a space.
    """

    def __init__(
        self, tokenizer: Any = None, min_new_tokens: int = 0, ignore_end: bool = False, bad_words: Sequence[str] = ()
    ) -> None:
        written = (tokenizer(f"{before}{word}", add_special_tokens=False) for word in bad_words for before in ("", " "))
        tokens = dict.fromkeys(tuple(ids["input_ids"]) for ids in written)
        if () in tokens:
            raise AnswerError(f"bad_words: one of {', '.join(map(repr, bad_words))} has no tokens")
        self.limits: dict[str, Any] = {
            "min_new_tokens": min_new_tokens,
            "ignore_end": ignore_end,
            "bad_words": tuple(tokens),
        }

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        return {}


SUFFIXES = ("", "_confidence", "_runner_up", "_runner_up_confidence")


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise AnswerError("the tokenizer has no end token, which an answer needs")
    return end
