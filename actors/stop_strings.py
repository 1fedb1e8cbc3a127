"""Stop strings: they end a completion's text, wherever the tokens' borders lie."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from exspec.actors.engine.request import Completion


class StopStrings:
    """Ends a completion at the first of several strings, wherever the tokens' borders lie.

    For `Request.stop`: a call makes a check, which takes the completion's tokens one by one and returns the string that
    the text now contains, or None. `cut` returns the text before the string.

    min_new_tokens: strings that are complete before this many tokens are ignored.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], min_new_tokens: int = 0) -> None:
        if not strings or not all(strings):
            raise ValueError("stop: expected one or more strings, none of them empty")
        self.tokenizer, self.strings, self.min_new_tokens = tokenizer, tuple(strings), min_new_tokens
        # Every token that is not special adds at least one byte of text, and a character has at most four bytes.
        self.tail = 4 * max(map(len, strings)) + 8

    def __call__(self) -> "StopMatcher":
        return StopMatcher(self)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of the tokens up to the first stop string, or all of it if there is none."""
        first = self.first(tokens)
        return self.text(tokens)[: first[0] if first else None]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def first(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Position and text of the stop string that begins first, or of the longest of several that begin there."""
        text, before = self.text(tokens), len(self.text(tokens[: max(self.min_new_tokens - 1, 0)]))
        matches = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        first = min((match for match in matches if match[0] >= 0), default=None)
        return (first[0], first[2]) if first else None


class StopMatcher:
    """Searches one completion for stop strings. It keeps the end of the text, so that most tokens need no decoding."""

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.pieces = _pieces(stop.tokenizer)
        # The tokenizer's clean-up removes spaces. A comparison without spaces misses no string.
        self.drops = " " if self.pieces.cleaned else ""
        self.strings = [s.replace(self.drops, "") if self.drops else s for s in stop.strings]
        # With clean-up, a token may complete a string whose last character was there before: no shortcut then.
        self.lasts = frozenset(s[-1] for s in stop.strings) if not self.drops else None
        longest = max(map(len, stop.strings))
        self.kept = 2 * longest + CLEANED if self.drops else longest - 1
        self.doubtful = any(UNKNOWN in s for s in stop.strings)  # an unfinished character is decoded as the same
        self.tokens: list[int] = []  # of the completion
        self.written: list[int] = []  # the tokens that are not special
        self.end = ""  # at least the last `kept` characters of the text; empty if they have to be decoded

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
        """The stop string in the decoded text, or None."""
        self.end = self.stop.text(self.written[-self.stop.tail :])
        if not any(s in self.end for s in self.stop.strings):
            return None
        # The decoded tail may begin inside a character, or lack the first space: the whole text decides.
        first = self.stop.first(self.tokens)
        return first[1] if first else None


UNKNOWN = "\ufffd"  # what an incomplete character is decoded as
CLEANED = 8  # characters: more than the longest piece of text that clean-up changes


class Pieces(dict[int, str | None]):
    """By token: the text that it adds after other text; None where that depends on the tokens before it."""

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
