"""What completions are to be: any text, one of some labels, or JSON of a schema; and how they are read as values."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar, Protocol

import jsonschema
import numpy as np
import pyarrow as pa
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from exspec.actors.engine.request import Completion, Scores
from exspec.actors.engine.tokens.constraint import (
    BITS,
    Automaton,
    Constraint,
    Few,
    MakeConstraint,
    Node,
    Words,
    chain,
    choice,
    mask_of,
)

FEW = 256  # tokens that may stand at a place of a JSON answer where a label is chosen; in a free text it is thousands
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


class Choices:
    """One label of each field. One field without a name is answered with the label alone, others with a JSON object.

    fields: labels by field. columns: of the output, by field; each field has four: `COLUMN`, and with `_confidence`,
    `_runner_up` and `_runner_up_confidence` behind it. spaces: whether JSON has them behind commas and colons.

    Labels are written in the tokens that the tokenizer gives them. A label's confidence is its probability among the
    labels: at every place of its tokens where another label could go on, the target's probability of its own token
    among those that are allowed, all multiplied. The runner-up is the likeliest other label; where several labels part
    from the chosen one together, nobody looked how they part from each other: they are named together, with ` | `
    between them, and share their confidence.

    Raises AnswerError naming the field and label that the tokenizer cannot write.
    """

    scored = sys.maxsize
    limits: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: Mapping[str, Sequence[str]],
        columns: Mapping[str, str],
        spaces: bool = True,
    ) -> None:
        self.tokenizer, self.columns, self.given = tokenizer, columns, (fields, spaces)
        self.end_ids = frozenset({end_token(tokenizer)})
        named = list(fields) != [""]
        comma, colon = SEPARATORS[spaces]
        self.fields: list[tuple[str, list[int], dict[str, list[int]]]] = []  # name, tokens before, tokens by label
        texts, last = [], ""  # what stands before the labels of a field, and their own texts; a label of the last field
        for name, labels in fields.items():
            opening = f'"{comma}' if last else "{"
            before = f'{opening}"{_quoted(name)}"{colon}"' if named else ""
            written = {label: _quoted(label) if named else label for label in labels}
            tokens = {label: self._tokens(before, text) for label, text in written.items()}
            if len({tuple(t) for t in tokens.values()}) < len(tokens):
                raise AnswerError(f"{_place(name)}two labels have the same tokens")
            self.fields.append((name, self._tokens(last, before), tokens))
            texts.append((before, written))
            last = next(iter(written.values()))
        after = self._tokens(last, '"}') if named else []
        for i, (name, labels) in enumerate(fields.items()):
            for label in labels:  # in a whole answer, for tokens are read as they stand together
                chosen = [label if n == i else next(iter(written)) for n, (_, written) in enumerate(texts)]
                parts = [(before, tokens[c]) for (_, before, tokens), c in zip(self.fields, chosen, strict=True)]
                found = self._text([t for before, its in parts for t in (*before, *its)] + after)
                expected = "".join(before + written[c] for (before, written), c in zip(texts, chosen, strict=True))
                if found != expected + ('"}' if named else ""):
                    raise AnswerError(f"{_place(name)}label {label!r}: the tokenizer writes the answer as {found!r}")
        node = chain([*after, *self.end_ids], Node())
        for name, before_tokens, tokens in reversed(self.fields):
            try:
                node = chain(before_tokens, choice(tokens.values(), node))
            except ValueError as error:
                raise AnswerError(f"{_place(name)}labels cannot be told apart: {error}") from error
        self.start = node
        self.longest = sum(len(b) + max(map(len, t.values())) for _, b, t in self.fields) + len(after) + 1

    def __reduce__(self) -> Any:
        # By what it was made of: a trie is as deep as an answer is long, deeper than a pickle may be.
        fields, spaces = self.given
        return Choices, (self.tokenizer, fields, self.columns, spaces)

    def constraint(self) -> Automaton:
        return Automaton(self.start)

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        values: dict[str, Any] = {}
        place = 0
        if completion.finish_reason != "stop":
            raise AnswerError(f"no label after {len(completion.tokens)} tokens, where the context ends")
        for name, before, labels in self.fields:
            place += len(before)
            found = _decide(labels, completion.tokens[place:], completion.scores[place:])
            column = self.columns[name]
            values |= {f"{column}{suffix}": value for suffix, value in zip(SUFFIXES, found, strict=True)}
            place += len(labels[found[0]])
        return values

    def _tokens(self, before: str, text: str) -> list[int]:
        """The tokens of a text that follows another one, if it is tokenized as it would be there."""
        whole, head = self._encode(before + text), self._encode(before)
        return whole[len(head) :] if whole[: len(head)] == head else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


SUFFIXES = ("", "_confidence", "_runner_up", "_runner_up_confidence")


def _decide(
    labels: Mapping[str, Sequence[int]], tokens: Sequence[int], scores: Sequence[Scores]
) -> tuple[str, float, str, float]:
    """The label that the tokens begin with, its confidence, and the runner-up with its own."""
    left, confidence, rivals = labels, 1.0, [(0.0, "")]
    for place, token in enumerate(tokens):
        likely = scores[place] if scores else {}
        ways: dict[int | None, dict[str, Sequence[int]]] = defaultdict(dict)  # None: the label ends here
        for label, its in left.items():
            ways[its[place] if len(its) > place else None][label] = its
        past = next((t for t in likely if t not in ways), None)  # the token behind a label that ends here
        chances = {way: math.exp(likely.get(past if way is None else way, 0.0)) for way in ways}  # type: ignore[arg-type]
        taken = token if token in ways else None
        rivals += [(confidence * chances[way], " | ".join(found)) for way, found in ways.items() if way != taken]
        confidence *= chances[taken]
        left = ways[taken]
        if taken is None:
            break
    (label,) = left
    best = max(rivals, key=lambda rival: rival[0])
    return label, confidence, best[1], best[0]


class Json:
    """JSON of a schema, held to it by llguidance, and checked against it once more.

    columns: names and types of the output's, by top-level property; each holds the property's value, or its JSON text
    where the column is text and the value is not. labels: of the properties that are one of some texts; their columns
    are four, as those of `Choices`. Raises AnswerError where the schema asks for what cannot be held to.
    """

    longest = None
    limits: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schema: Mapping[str, Any],
        columns: Mapping[str, tuple[str, pa.DataType]],
        spaces: bool = True,
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.tokenizer, self.schema, self.columns = tokenizer, schema, columns
        self.labels = labels or {}
        self.scored = FEW if self.labels else 0
        self.end = end_token(tokenizer)
        self.end_ids = frozenset({self.end})
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise AnswerError(f"json_schema: {error.json_path}: {error.message}") from error
        comma, colon = SEPARATORS[spaces]
        form = {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}
        self.grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults=form)  # type: ignore[arg-type]
        wrong, messages = LLMatcher.validate_grammar_with_warnings(self.grammar)
        if wrong:
            raise AnswerError(f"json_schema: {messages[0]}")

    @cached_property
    def _vocabulary(self) -> Any:
        try:
            return from_tokenizer(self.tokenizer, eos_token=self.end)  # type: ignore[arg-type]
        except Exception as error:  # the library's own, of no common kind
            raise AnswerError(f"json_schema: the tokenizer cannot be held to a grammar: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        unpickled = ("_vocabulary", "_matcher")
        return {name: value for name, value in vars(self).items() if name not in unpickled}

    @cached_property
    def _matcher(self) -> LLMatcher:
        return LLMatcher(self._vocabulary, self.grammar, log_level=0)

    def constraint(self) -> "Grammar":
        return Grammar(self._matcher.deep_copy(), self._vocabulary.vocab_size, self.end)

    def read(self, completion: Completion, text: str) -> dict[str, Any]:
        if completion.finish_reason != "stop":
            raise AnswerError(
                f"the JSON is not complete after {len(completion.tokens)} tokens; raise max_new_tokens, or bound the "
                "schema's texts and lists"
            )
        try:
            value = json.loads(text)
            jsonschema.validate(value, self.schema, jsonschema.Draft202012Validator)
        except (json.JSONDecodeError, jsonschema.ValidationError) as error:
            raise AnswerError(f"the JSON does not meet the schema: {str(error).splitlines()[0]}") from error
        values = {column: _cell(value.get(name), kind, name) for name, (column, kind) in self.columns.items()}
        for name, found in self._decided(completion).items():
            column, _ = self.columns[name]
            values |= {f"{column}{suffix}": part for suffix, part in zip(SUFFIXES, found, strict=True)}
        return values

    def _decided(self, completion: Completion) -> dict[str, tuple[str, float, str, float]]:
        """Of the properties that are labels: the label, its confidence, the runner-up and its own."""
        if not (self.labels and completion.scores):
            return {}
        pieces = [self._vocabulary.decode_bytes([token]) for token in completion.tokens if token != self.end]
        spans = _spans(b"".join(pieces))
        found = {}
        for name, labels in self.labels.items():
            if name in spans and spans[name][1] in labels:
                start, label = spans[name]
                found[name] = self._confidence(pieces, completion.scores, start, label, labels)
        return found

    def _confidence(
        self, pieces: Sequence[bytes], scores: Sequence[Scores], start: int, label: str, labels: Sequence[str]
    ) -> tuple[str, float, str, float]:
        """As `_decide`, where a label may be written in more than one way: a token speaks for all labels that its text
        may begin. start: of the label's text in the answer's bytes, its quotation mark included."""
        written = {name: json.dumps(name, ensure_ascii=False).encode() for name in labels}
        end, at, confidence, rivals = start + len(written[label]), 0, 1.0, [(0.0, "")]
        left, answer = list(labels), b"".join(pieces)

        def way(text: bytes) -> tuple[str, ...]:
            """The labels that are left where this much of the answer, from `start` on, has been written."""
            return tuple(n for n in left if written[n].startswith(text) or text.startswith(written[n]))

        for piece, likely in zip(pieces, scores, strict=False):
            if at < end and at + len(piece) > start:
                before, skipped = answer[start:at], max(start - at, 0)
                chances: dict[tuple[str, ...], float] = defaultdict(float)
                for token, score in likely.items():
                    text = before + self._vocabulary.decode_bytes([token])[skipped:]
                    chances[way(text)] += math.exp(score)
                chances.pop((), None)  # written in another form than the one that was taken
                if total := sum(chances.values()):
                    others = {names: chance / total for names, chance in chances.items() if label not in names}
                    rivals += [(confidence * chance, " | ".join(names)) for names, chance in others.items()]
                    confidence *= sum(chance for names, chance in chances.items() if label in names) / total
                left = list(way(before + piece[skipped:]))
            at += len(piece)
        best = max(rivals, key=lambda rival: rival[0])
        return label, confidence, best[1], best[0]


def _spans(answer: bytes) -> dict[str, tuple[int, Any]]:
    """Where the values of a JSON object's properties begin, in bytes, and what they are."""
    text, decoder = answer.decode(), json.JSONDecoder()
    found, at = {}, text.index("{") + 1
    while (at := _next(text, at)) < len(text) and text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _next(text, at)
        value, at = decoder.raw_decode(text, start)
        found[name] = (len(text[:start].encode()), value)
    return found


def _next(text: str, at: int) -> int:
    """The place of what comes next, past spaces, commas and colons."""
    while at < len(text) and text[at] in " ,:\n\t\r":
        at += 1
    return at


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


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise AnswerError("the tokenizer names no end token, which an answer needs")
    return end


def _cell(value: Any, kind: pa.DataType, name: str) -> Any:
    """A JSON value as a column of this type takes it."""
    if value is None or pa.types.is_boolean(kind):
        return value
    if pa.types.is_list(kind):
        return [_cell(item, kind.value_type, name) for item in value]
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value)
    if pa.types.is_integer(kind) and not -(2**63) <= value < 2**63:
        raise AnswerError(f"{name} is {value}, which 64 bits do not hold; bound it in the schema")
    return int(value) if pa.types.is_integer(kind) else float(value)


def _quoted(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)[1:-1]


def _place(field: str) -> str:
    return f"field {field!r}: " if field else ""
