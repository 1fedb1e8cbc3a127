"""JSON that follows a schema."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jsonschema
import pyarrow as pa
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from exspec.actors.answers.answers import SEPARATORS, SUFFIXES, AnswerError, Answers, end_token
from exspec.actors.answers.grammar import Grammar
from exspec.actors.engine.request import Completion, Scores

FEW = 256  # where a label is chosen at most this many tokens are allowed; inside a free text it is thousands


class Json(Answers):
    """JSON that follows a schema: llguidance constrains the completion, and `read` validates it again.

    columns: name and type of the output column, by top-level property. A column holds the property's value, or its JSON
    text if the column is text and the value is not. labels: the labels of each property that is an enumeration of
    texts; such a property has four columns, as in `Choices`. Raises AnswerError if the grammar cannot express the
    schema.
    """

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
        except Exception as error:  # the library's errors have no common class
            raise AnswerError(f"json_schema: the tokenizer cannot be constrained by a grammar: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        unpickled = ("_vocabulary", "_matcher")
        return {name: value for name, value in vars(self).items() if name not in unpickled}

    @cached_property
    def _matcher(self) -> LLMatcher:
        return LLMatcher(self._vocabulary, self.grammar, log_level=0)

    def constraint(self) -> Grammar:
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
        for name, decision in self._decisions(completion).items():
            column, _ = self.columns[name]
            values |= {f"{column}{suffix}": value for suffix, value in zip(SUFFIXES, decision, strict=True)}
        return values

    def _decisions(self, completion: Completion) -> dict[str, tuple[str, float, str, float]]:
        """By property with labels: the label and its confidence, the runner-up and its confidence."""
        if not (self.labels and completion.scores):
            return {}
        pieces = [self._vocabulary.decode_bytes([token]) for token in completion.tokens if token != self.end]
        spans = _spans(b"".join(pieces))
        decisions = {}
        for name, labels in self.labels.items():
            if name in spans and spans[name][1] in labels:
                start, label = spans[name]
                decisions[name] = self._decide(pieces, completion.scores, start, label, labels)
        return decisions

    def _decide(
        self, pieces: Sequence[bytes], scores: Sequence[Scores], start: int, label: str, labels: Sequence[str]
    ) -> tuple[str, float, str, float]:
        """The label and its confidence, the runner-up and its confidence. As `choices._decide`, but several
        tokenizations of a label are possible: a token counts for every label that its text may begin.

        start: where the label begins in the answer's bytes, its quotation mark included.
        """
        written = {name: json.dumps(name, ensure_ascii=False).encode() for name in labels}
        end, at, confidence, rivals = start + len(written[label]), 0, 1.0, [(0.0, "")]
        left, answer = list(labels), b"".join(pieces)

        def compatible(text: bytes) -> tuple[str, ...]:
            """The labels that are still possible after this text of the answer, from `start` on."""
            return tuple(n for n in left if written[n].startswith(text) or text.startswith(written[n]))

        for piece, likely in zip(pieces, scores, strict=False):
            if at < end and at + len(piece) > start:
                before, skipped = answer[start:at], max(start - at, 0)
                chances: dict[tuple[str, ...], float] = defaultdict(float)
                for token, score in likely.items():
                    text = before + self._vocabulary.decode_bytes([token])[skipped:]
                    chances[compatible(text)] += math.exp(score)
                chances.pop((), None)  # tokens that begin no label as it is written here
                if total := sum(chances.values()):
                    others = {names: chance / total for names, chance in chances.items() if label not in names}
                    rivals += [(confidence * chance, " | ".join(names)) for names, chance in others.items()]
                    confidence *= sum(chance for names, chance in chances.items() if label in names) / total
                left = list(compatible(before + piece[skipped:]))
            at += len(piece)
        best = max(rivals, key=lambda rival: rival[0])
        return label, confidence, best[1], best[0]


def _spans(answer: bytes) -> dict[str, tuple[int, Any]]:
    """By property of a JSON object: where its value begins, in bytes, and the value."""
    text, decoder = answer.decode(), json.JSONDecoder()
    spans, at = {}, text.index("{") + 1
    while (at := _next(text, at)) < len(text) and text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _next(text, at)
        value, at = decoder.raw_decode(text, start)
        spans[name] = (len(text[:start].encode()), value)
    return spans


def _next(text: str, at: int) -> int:
    """The next index at or after `at` that holds no space, comma or colon."""
    while at < len(text) and text[at] in " ,:\n\t\r":
        at += 1
    return at


def _cell(value: Any, kind: pa.DataType, name: str) -> Any:
    if value is None or pa.types.is_boolean(kind):
        return value
    if pa.types.is_list(kind):
        return [_cell(item, kind.value_type, name) for item in value]
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value)
    if pa.types.is_integer(kind) and not -(2**63) <= value < 2**63:
        raise AnswerError(f"{name} is {value}, which does not fit 64 bits; bound it in the schema")
    return int(value) if pa.types.is_integer(kind) else float(value)
