"""Labels from lists."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from exspec.actors.answers.answers import SEPARATORS, SUFFIXES, AnswerError, Answers, end_token
from exspec.actors.engine.request import Completion, Scores
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice


class Choices(Answers):
    """One label for each field. The answer is a JSON object, or the label alone if there is one field without a name.

    fields: labels by field. columns: output column by field; each field has four columns: `COLUMN`,
    `COLUMN_confidence`, `COLUMN_runner_up` and `COLUMN_runner_up_confidence`. spaces: whether the JSON has spaces after
    commas and colons.

    Labels are written in the tokens that the tokenizer gives them. A label's confidence is its probability among the
    labels: the product, over all positions of its tokens where another label could go on, of the target's probability
    of the label's token among the allowed tokens. The runner-up is the likeliest other label. Labels that differ from
    the chosen one at the same position and with the same token are not told apart: they are named together, with ` | `
    between them, and share one confidence.

    Raises AnswerError naming the field and label that the tokenizer cannot write.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: Mapping[str, Sequence[str]],
        columns: Mapping[str, str],
        spaces: bool = True,
    ) -> None:
        self.tokenizer, self.columns, self.given = tokenizer, columns, (fields, spaces)
        self.scored = max(map(len, fields.values())) + 1  # a position where a label is chosen allows no more tokens
        self.end_ids = frozenset({end_token(tokenizer)})
        named = list(fields) != [""]
        comma, colon = SEPARATORS[spaces]
        self.fields: list[tuple[str, list[int], dict[str, list[int]]]] = []  # name, tokens before, tokens by label
        texts = []  # by field: the text before the label, and the text of each label
        last = ""  # the text of a label of the field before
        for name, labels in fields.items():
            opening = f'"{comma}' if last else "{"
            before = f'{opening}"{_quoted(name)}"{colon}"' if named else ""
            written = {label: _quoted(label) if named else label for label in labels}
            tokens = {label: self._tokens(before, text) for label, text in written.items()}
            if len({tuple(t) for t in tokens.values()}) < len(tokens):
                raise AnswerError(f"{_prefix(name)}two labels have the same tokens")
            self.fields.append((name, self._tokens(last, before), tokens))
            texts.append((before, written))
            last = next(iter(written.values()))
        after = self._tokens(last, '"}') if named else []
        for i, (name, labels) in enumerate(fields.items()):
            for label in labels:  # tested in a whole answer: the text of a token depends on its neighbours
                chosen = [label if n == i else next(iter(written)) for n, (_, written) in enumerate(texts)]
                parts = [(before, tokens[c]) for (_, before, tokens), c in zip(self.fields, chosen, strict=True)]
                decoded = self._text([t for before, label_tokens in parts for t in (*before, *label_tokens)] + after)
                expected = "".join(before + written[c] for (before, written), c in zip(texts, chosen, strict=True))
                if decoded != expected + ('"}' if named else ""):
                    raise AnswerError(f"{_prefix(name)}label {label!r}: the tokenizer writes the answer as {decoded!r}")
        node = chain([*after, *self.end_ids], Node())
        for name, before_tokens, tokens in reversed(self.fields):
            try:
                node = chain(before_tokens, choice(tokens.values(), node))
            except ValueError as error:
                raise AnswerError(f"{_prefix(name)}labels cannot be told apart: {error}") from error
        self.start = node
        self.longest = sum(len(b) + max(map(len, t.values())) for _, b, t in self.fields) + len(after) + 1

    def __reduce__(self) -> Any:
        # Pickles the arguments: the trie is as deep as an answer is long, deeper than pickle can recurse.
        fields, spaces = self.given
        return Choices, (self.tokenizer, fields, self.columns, spaces)

    def constraint(self) -> Automaton:
        return Automaton(self.start)

    def read(self, completion: Completion, text: str) -> dict[str, Any]:  # noqa: ARG002
        if completion.finish_reason != "stop":
            raise AnswerError(f"no label after {len(completion.tokens)} tokens, where the context ends")
        values: dict[str, Any] = {}
        position = 0
        for name, before, labels in self.fields:
            position += len(before)
            decision = _decide(labels, completion.tokens[position:], completion.scores[position:])
            column = self.columns[name]
            values |= {f"{column}{suffix}": value for suffix, value in zip(SUFFIXES, decision, strict=True)}
            position += len(labels[decision[0]])
        return values

    def _tokens(self, before: str, text: str) -> list[int]:
        """The tokens of a text that follows another one: in its context if it starts a token there, else by itself."""
        whole, head = self._encode(before + text), self._encode(before)
        return whole[len(head) :] if whole[: len(head)] == head else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _decide(
    labels: Mapping[str, Sequence[int]], tokens: Sequence[int], scores: Sequence[Scores]
) -> tuple[str, float, str, float]:
    """The label that the tokens begin with and its confidence, the runner-up and its confidence."""
    left, confidence, rivals = labels, 1.0, [(0.0, "")]
    for n, token in enumerate(tokens):
        likely = scores[n] if scores else {}
        branches: dict[int | None, dict[str, Sequence[int]]] = defaultdict(dict)  # labels by n-th token; None: it ends
        for label, label_tokens in left.items():
            branches[label_tokens[n] if len(label_tokens) > n else None][label] = label_tokens
        past = next((t for t in likely if t not in branches), None)  # the token after a label that ends here
        chances = {b: math.exp(likely.get(past if b is None else b, 0.0)) for b in branches}  # type: ignore[arg-type]
        taken = token if token in branches else None
        rivals += [(confidence * chances[b], " | ".join(names)) for b, names in branches.items() if b != taken]
        confidence *= chances[taken]
        left = branches[taken]
        if taken is None:
            break
    (label,) = left
    best = max(rivals, key=lambda rival: rival[0])
    return label, confidence, best[1], best[0]


def _quoted(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)[1:-1]


def _prefix(field: str) -> str:
    return f"field {field!r}: " if field else ""
