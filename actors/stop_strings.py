"""Where a completion's text ends: at the first of some strings, wherever the tokens' borders lie."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from exspec.actors.engine.request import Completion


class StopStrings:
    """Ends a completion at the first of some strings, wherever the tokens' borders lie.

    For `Request.stop`: a call makes a check, which takes the completion's tokens one by one and returns the string that
    the text now contains, or None. `cut` gives the text before it. least: tokens before which no string counts that is
    complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], least: int = 0) -> None:
        if not strings or not all(strings):
            raise ValueError("stop: expected one or more strings, none of them empty")
        self.tokenizer, self.strings, self.least = tokenizer, tuple(strings), least
        # A token adds a byte of text at least, special ones aside, and a character has four bytes at most.
        self.tail = 4 * max(map(len, strings)) + 8

    def __call__(self) -> "StopMatcher":
        return StopMatcher(self)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of the tokens up to the stop string, or all of it where there is none."""
        found = self.found(tokens)
        return self.text(tokens)[: found[0] if found else None]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def found(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Place and text of the string that begins first; of those that begin together, the longest."""
        text, before = self.text(tokens), len(self.text(tokens[: max(self.least - 1, 0)]))
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        first = min((place for place in places if place[0] >= 0), default=None)
        return (first[0], first[2]) if first else None


class StopMatcher:
    """Looks for stop strings in one completion. Keeps the end of its text, so that most tokens need no decoding."""

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.pieces = _pieces(stop.tokenizer)
        # Clean-up takes spaces out of what is written, so without spaces a string that is there is never missed.
        self.drops = " " if self.pieces.cleaned else ""
        self.strings = [s.replace(self.drops, "") if self.drops else s for s in stop.strings]
        # What clean-up takes out may lie in the middle of a string whose end was there before.
        self.lasts = frozenset(s[-1] for s in stop.strings) if not self.drops else None
        longest = max(map(len, stop.strings))
        self.kept = 2 * longest + CLEANED if self.drops else longest - 1
        self.doubtful = any(UNKNOWN in s for s in stop.strings)  # it is also what an unfinished character looks like
        self.tokens: list[int] = []  # all, and those that are not special
        self.written: list[int] = []
        self.end = ""  # the last characters of the text, or more; empty where they are to be decoded

    def __call__(self, token: int) -> str | None:
        self.tokens.append(token)
        piece = self.pieces[token]
        if token in self.pieces.special:
            return self._decoded() if piece else None
        self.written.append(token)
        if piece is None or not self.end or self.doubtful:
            return self._decoded()
        text = self.end + piece
        self.end = text[-self.kept :] if self.kept else piece
        if self.lasts is not None and self.lasts.isdisjoint(piece):
            return None
        text = text.replace(self.drops, "") if self.drops else text
        return self._decoded() if any(s in text for s in self.strings) else None

    def _decoded(self) -> str | None:
        """What the text itself says."""
        self.end = self.stop.text(self.written[-self.stop.tail :])
        if not any(s in self.end for s in self.stop.strings):
            return None
        # The tail may begin inside a character, and its first word without its space: the whole text decides.
        found = self.stop.found(self.tokens)
        return found[1] if found else None


UNKNOWN = "\ufffd"  # what bytes that are no whole character are decoded as
CLEANED = 8  # characters of the longest piece of text that clean-up looks at, and some more


class Pieces(dict[int, str | None]):
    """What each token adds to a text that it does not begin; None where that depends on the tokens before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.special = tokenizer, frozenset(tokenizer.all_special_ids)
        self.cleaned = bool(tokenizer.clean_up_tokenization_spaces)

    def __missing__(self, token: int) -> str | None:
        once, twice = (str(self.tokenizer.decode([token] * n, skip_special_tokens=True)) for n in (1, 2))
        whole = twice.startswith(once) and UNKNOWN not in twice
        self[token] = piece = twice[len(once) :] if whole else None
        return piece


@lru_cache(maxsize=8)
def _pieces(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    return Pieces(tokenizer)


def completion_text(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop: StopStrings | None) -> str:
    """The text of a completion: without its end token, and cut before the stop string that ended it."""
    if stop is not None and isinstance(completion.stopped_by, str):
        return stop.cut(completion.tokens)
    tokens = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
