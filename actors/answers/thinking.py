"""Sections of thinking: cut at a budget, and kept apart from the answer after them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from exspec.actors.answers.answers import AnswerError, Answers
from exspec.actors.engine.request import Completion, Request
from exspec.actors.engine.tokens.constraint import Constraint, Few, Words, mask_of, mask_without

SPACES = 4  # tokens, at most, between a begin marker and the end of a prompt
MARKERS = ("<think>", "</think>")  # of most models that think


@dataclass(frozen=True)
class Section:
    """begin, end: the tokens of the markers. budget: tokens between them, at most. closing: the tokens that end a
    section at its budget, the end marker last. ends: tokens that end a completion. vocabulary: of the tokenizer."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    budget: int
    closing: tuple[int, ...]
    ends: frozenset[int]
    vocabulary: int

    def after(self, tokens: Sequence[int], inside: bool) -> tuple[int, int, int]:
        """Of a completion: where its section begins and ends, without the markers, and where the answer begins. A
        completion that does not begin with a section has none. inside: whether the prompt has begun it."""
        start = 0 if inside else len(self.begin)
        if not inside and tuple(tokens[:start]) != self.begin:
            return 0, 0, 0
        size = len(self.end)
        for at in range(start, len(tokens) - size + 1):
            if tuple(tokens[at : at + size]) == self.end:
                return start, at, at + size
        return start, len(tokens), len(tokens)


class State(NamedTuple):
    """phase: inside a section, outside of one, or in the answer, where its own constraint holds. forced: tokens that
    must come next. used: tokens of the section so far. last: the last tokens, as many as a marker has."""

    phase: Literal["inside", "outside", "answer"]
    forced: tuple[int, ...] = ()
    used: int = 0
    last: tuple[int, ...] = ()


class Thinking(Constraint):
    """Allows everything in a section, until its budget is used: then its closing is forced. After it, the answer's own
    constraint holds.

    answer: the constraint of what follows, if there is one. Then a completion must begin with a section.
    """

    def __init__(self, section: Section, inside: bool, answer: Constraint | None) -> None:
        self.section, self.answer = section, answer
        outside = State("outside", section.begin if answer else ())
        self.path = [self._limited(State("inside")) if inside else outside]

    def allowed(self) -> Tensor:
        if (kept := self.kept()) is None:
            assert self.answer is not None
            return self.answer.allowed()
        return mask_of(kept.tokens) if isinstance(kept, Few) else torch.from_numpy(kept)

    def kept(self) -> Few | Words | None:
        state = self.path[-1]
        if state.forced:
            return _single(state.forced[0])
        if state.phase == "answer":
            assert self.answer is not None
            return self.answer.kept()
        # A section must lead to the answer, if the answer has a form.
        barred = self.section.ends if self.answer else frozenset[int]()
        return _all_but(barred, self.section.vocabulary)

    @classmethod
    def compute(cls, rows: Sequence[tuple[Self, int]], masks: Words) -> None:
        kinds: defaultdict[type[Constraint], list[tuple[Constraint, int]]] = defaultdict(list)
        for thinking, row in rows:
            assert thinking.answer is not None
            kinds[type(thinking.answer)].append((thinking.answer, row))
        for kind, alike in kinds.items():
            kind.compute(alike, masks)

    def accepts(self, token: int) -> bool:
        state = self.path[-1]
        if state.forced:
            return token == state.forced[0]
        if state.phase == "answer":
            assert self.answer is not None
            return self.answer.accepts(token)
        return token < self.section.vocabulary and not (self.answer and token in self.section.ends)

    def advance(self, token: int) -> None:
        state = self.path[-1]
        if state.phase == "answer":
            assert self.answer is not None
            self.answer.advance(token)
        self.path.append(self._next(state, token))

    def rollback(self, count: int) -> None:
        if not count:
            return
        gone = self.path[-count - 1 : -1]  # the states in which the tokens came
        del self.path[len(self.path) - count :]
        if self.answer and (back := sum(state.phase == "answer" for state in gone)):
            self.answer.rollback(back)

    def _next(self, state: State, token: int) -> State:
        section = self.section
        if state.phase == "answer":
            return state
        last = (*state.last, token)[-max(len(section.begin), len(section.end)) :]
        if state.phase == "outside":
            if last[-len(section.begin) :] == section.begin:
                return self._limited(State("inside"))
            return State("outside", state.forced[1:], last=last)
        if state.forced:  # of the closing
            rest = state.forced[1:]
            return State("inside", rest, state.used, last) if rest else self._left
        if last[-len(section.end) :] == section.end:
            return self._left
        return self._limited(State("inside", used=state.used + 1, last=last))

    @property
    def _left(self) -> State:
        """The state after a section. Without a constraint of the answer, another section may follow."""
        return State("answer" if self.answer else "outside")

    def _limited(self, state: State) -> State:
        """The state inside a section, with the closing forced if the budget is used."""
        section = self.section
        if state.used < section.budget:
            return state
        begun = next((n for n in range(len(section.end) - 1, 0, -1) if state.last[-n:] == section.end[:n]), 0)
        return state._replace(forced=section.end[begun:] if begun else section.closing)


class Thoughtful(Answers):
    """Answers after sections of thinking, which get the column `thinking`. inner: the form of the answers. ends: end
    tokens of the target, which cannot come in a section before an answer that has a form."""

    def __init__(
        self,
        tokenizer: Any,
        inner: Answers,
        budget: int,
        markers: Sequence[str] = (),
        sentence: str | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer, self.inner = tokenizer, inner
        begin, end = markers or _markers(tokenizer)
        begins, closes, says = (self._tokens(text) for text in (begin, end, sentence or ""))
        for text, tokens in ((begin, begins), (end, closes)):
            if not tokens:
                raise AnswerError(f"thinking_markers: {text!r} has no tokens")
        if sentence and end in sentence:
            raise AnswerError(f"thinking_sentence: has the end marker {end!r}, which follows it anyway; leave it out")
        size = len(tokenizer)
        ends = frozenset(token for token in ends | inner.end_ids if token < size)  # a model's config may name others
        self.section = Section(begins, closes, budget, (*says, *closes), ends, size)
        self.scored, self.end_ids, self.limits = inner.scored, inner.end_ids, inner.limits
        if inner.longest:
            self.longest = inner.longest + budget + len(begins) + len(self.section.closing)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def constraint(self) -> Thinking:
        return self._made(False)

    def _made(self, inside: bool) -> Thinking:
        return Thinking(self.section, inside, self.inner.constraint() if self.inner.constraint else None)

    def requests(self, request: Request, given: Sequence[Sequence[int]] | None) -> list[Request]:
        made = partial(self._made, self._opened(request.prompt))
        return self.inner.requests(replace(request, constraint=made), given)

    def _opened(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with a begin marker, and at most a few tokens of spaces after it."""
        size = len(self.section.begin)
        tail = prompt[-size - SPACES :]
        at = _last(tail, self.section.begin)
        return at >= 0 and not self.tokenizer.decode(list(tail[at + size :])).strip()

    def joined(self, request: Request, completions: Sequence[Completion]) -> tuple[Completion, dict[str, Any]]:
        whole, values = self.inner.joined(request, completions)
        tokens = whole.tokens
        start, end, after = self.section.after(tokens, self._opened(request.prompt))
        if after and end == len(tokens):
            if self.inner.constraint:
                raise AnswerError(f"the completion ends within its thinking, after {len(tokens)} tokens")
            end -= whole.finish_reason == "stop"  # without the end token
        thought = self.tokenizer.decode(tokens[start:end], skip_special_tokens=True) if after else None
        return replace(whole, tokens=tokens[after:], scores=whole.scores[after:]), values | {"thinking": thought}

    def read(self, completion: Completion, text: str) -> dict[str, Any]:
        return self.inner.read(completion, text)


def _markers(tokenizer: Any) -> tuple[str, str]:
    """The markers that the chat template has."""
    template = str(tokenizer.chat_template or "")
    if all(marker in template for marker in MARKERS):
        return MARKERS
    raise AnswerError(
        f"thinking_markers: the chat template has no {' and '.join(MARKERS)}; set the texts that begin and end thinking"
    )


def _last(tokens: Sequence[int], marker: tuple[int, ...]) -> int:
    """Where a marker comes last in tokens; -1 if it does not."""
    size = len(marker)
    places = range(len(tokens) - size, -1, -1)
    return next((at for at in places if tuple(tokens[at : at + size]) == marker), -1)


@cache
def _single(token: int) -> Few:
    return Few.of([token])


@cache
def _all_but(barred: frozenset[int], vocabulary: int) -> Words:
    return mask_without(barred, vocabulary)
