"""Labels out of lists."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from exspec.actors.answers.answers import SEPARATORS, SUFFIXES, AnswerError, end_token
from exspec.actors.engine.request import Completion, Scores
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice


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


def _quoted(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)[1:-1]


def _place(field: str) -> str:
    return f"field {field!r}: " if field else ""
