"""Constraints: which tokens a sequence may take next.

A constraint is a state of some automaton, and tokens advance it. Its masks apply at every position that a round
verifies. So the committed tokens are those of plain decoding under the same constraint, whatever was drafted. A token
is forced if it is the only one allowed. A forced token is free as a draft, since the target cannot disagree.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 32  # tokens in one word of a mask: token t is allowed if bit t % 32 of word t // 32 is set
FEW = 256  # a mask that allows at most this many tokens is kept as a list of tokens
Words = NDArray[np.int32]


class Few(NamedTuple):
    """A mask that allows few tokens: the tokens, in order, and the mask's nonzero words, by index."""

    tokens: list[int]
    words: dict[int, int]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> "Few":
        words: dict[int, int] = {}
        ordered = sorted(tokens)
        for token in ordered:
            words[token // BITS] = words.get(token // BITS, 0) | 1 << token % BITS
        signed = {word: bits - 2**BITS if bits >= 2 ** (BITS - 1) else bits for word, bits in words.items()}
        return cls(ordered, signed)

    @property
    def only(self) -> int | None:
        """The allowed token if there is exactly one, else None."""
        return self.tokens[0] if len(self.tokens) == 1 else None


class Constraint(Protocol):
    """What is allowed next depends only on the tokens that the constraint was advanced by."""

    def allowed(self) -> Tensor:
        """The mask of the next token: int32 [words]; words past its end are zero. It allows at least one token, until
        an end token has come."""
        ...

    def kept(self) -> Few | Words | None:
        """The mask of the next token if it is available; None if `compute` has to make it.

        The same object always means the same mask, so that callers need not write it to the same place twice.
        """
        ...

    @classmethod
    def compute(cls, rows: Sequence[tuple[Self, int]], masks: Words) -> None:
        """Write masks that are not kept. rows: constraints, each with the row of `masks` [N, words] that its mask
        overwrites."""
        raise TypeError(f"{cls.__name__} keeps its masks; none of {len(rows)} has to be written to {masks.shape}")

    def accepts(self, token: int) -> bool:
        """Whether a token is allowed next."""
        ...

    def advance(self, token: int) -> None:
        """Advance by an allowed token."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...


MakeConstraint = Callable[[], Constraint]


class Node:
    """A state of an automaton. children: the next state, by allowed token."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}

    @cached_property
    def mask(self) -> Tensor:
        return mask_of(self.children)

    @cached_property
    def kept(self) -> Few | Words:
        return Few.of(self.children) if len(self.children) <= FEW else self.mask.numpy()


class Automaton(Constraint):
    """A constraint given by its states. path: the states so far, the current one last."""

    def __init__(self, start: Node) -> None:
        self.path = [start]

    def allowed(self) -> Tensor:
        return self.path[-1].mask

    def kept(self) -> Few | Words:
        return self.path[-1].kept

    def accepts(self, token: int) -> bool:
        return token in self.path[-1].children

    def advance(self, token: int) -> None:
        self.path.append(self.path[-1].children[token])

    def rollback(self, count: int) -> None:
        del self.path[len(self.path) - count :]


class Barred(Constraint):
    """Allows all tokens except end tokens before the least length, and tokens that would complete a bad word.

    vocabulary: V. ends: tokens that end a sequence. least: tokens that must come before an end. words: bad words, as
    sequences of tokens.
    """

    def __init__(self, vocabulary: int, ends: Set[int], least: int, words: Iterable[tuple[int, ...]]) -> None:
        self.vocabulary, self.least, self.words = vocabulary, least, tuple(words)
        self.ends = frozenset(end for end in ends if end < vocabulary)  # a model's config may name others
        self.tokens: list[int] = []
        self._masks: dict[frozenset[int], Words] = {}

    def allowed(self) -> Tensor:
        return torch.from_numpy(self.kept())

    def kept(self) -> Words:
        barred = self._barred()
        if barred not in self._masks:
            self._masks[barred] = mask_without(barred, self.vocabulary)
        return self._masks[barred]

    def accepts(self, token: int) -> bool:
        return token not in self._barred()

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def _barred(self) -> frozenset[int]:
        tokens, count = self.tokens, len(self.tokens)
        barred = {word[-1] for word in self.words if tokens[count - len(word) + 1 :] == list(word[:-1])}
        return frozenset(barred | self.ends if count < self.least else barred)


class Guarded(Constraint):
    """A request's constraint. When it raises, it allows everything from then on.

    vocabulary: V. failed: called with what was raised; it ends the sequence.
    """

    def __init__(self, inner: Constraint, vocabulary: int, failed: Callable[[BaseException], None]) -> None:
        self.inner, self.vocabulary, self.failed = inner, vocabulary, failed

    # Called some dozens of times per row and round: a `try` that raises nothing is free, a common wrapper is not.
    # SystemExit is caught too, and a panic of Rust code, which is no Exception.

    def allowed(self) -> Tensor:
        try:
            return self.inner.allowed()
        except BaseException as error:
            return self._free(error).allowed()

    def kept(self) -> Few | Words | None:
        try:
            kept = self.inner.kept()
            if isinstance(kept, Few) and kept.tokens and not 0 <= kept.tokens[0] <= kept.tokens[-1] < self.vocabulary:
                raise ValueError(f"constraint: one of the tokens {kept.tokens} is outside the vocabulary")
            return kept
        except BaseException as error:
            return self._free(error).kept()

    def accepts(self, token: int) -> bool:
        try:
            return self.inner.accepts(token)
        except BaseException as error:
            return self._free(error).accepts(token)

    def advance(self, token: int) -> None:
        try:
            self.inner.advance(token)
        except BaseException as error:
            self._free(error)

    def rollback(self, count: int) -> None:
        try:
            self.inner.rollback(count)
        except BaseException as error:
            self._free(error)

    @classmethod
    def compute(cls, rows: Sequence[tuple[Self, int]], masks: Words) -> None:
        kinds: defaultdict[type[Constraint], list[tuple[Self, int]]] = defaultdict(list)
        for guarded, row in rows:
            kinds[type(guarded.inner)].append((guarded, row))
        for kind, alike in kinds.items():
            try:
                kind.compute([(guarded.inner, row) for guarded, row in alike], masks)
            except KeyboardInterrupt:
                raise
            except BaseException:
                for guarded, row in alike:  # find the row that failed
                    try:
                        kind.compute([(guarded.inner, row)], masks)
                    except BaseException as error:
                        guarded._free(error)
                        masks[row] = -1

    def _free(self, error: BaseException) -> Constraint:
        self.failed(error)
        self.inner = Barred(self.vocabulary, frozenset(), 0, ())
        return self.inner


def chain(tokens: Sequence[int], end: Node) -> Node:
    """States that allow these tokens one after the other, and lead to `end`."""
    for token in reversed(tokens):
        node = Node()
        node.children[token] = end
        end = node
    return end


def choice(options: Iterable[Sequence[int]], end: Node) -> Node:
    """A trie: states that allow any of the options and continue as `end` does after each.

    An option may begin with a shorter one. Where the shorter one ends, the longer one's next token is allowed as well
    as `end`'s tokens. Raises ValueError if one token is both, since the option would be ambiguous.
    """
    root, ends = Node(), []
    for option in options:
        node = root
        for token in option:
            node = node.children.setdefault(token, Node())
        ends.append(node)
    for node in ends:
        if clash := node.children.keys() & end.children.keys():
            raise ValueError(f"token {min(clash)} both continues a longer option and follows a shorter one")
        node.children |= end.children
    return root


def mask_of(tokens: Iterable[int]) -> Tensor:
    """A mask that allows only these tokens."""
    words = Few.of(tokens).words
    mask = torch.zeros(max(words, default=-1) + 1, dtype=torch.int32)
    mask.numpy()[list(words)] = list(words.values())
    return mask


def mask_without(tokens: Iterable[int], vocabulary: int) -> Words:
    """A mask that allows all of a vocabulary except these tokens."""
    mask = np.full(-(-vocabulary // BITS), -1, dtype=np.int32)
    for word, bits in Few.of({*tokens, *range(vocabulary, BITS * len(mask))}).words.items():
        mask[word] &= ~bits
    return mask


def tokens_of(mask: Tensor) -> list[int]:
    """The tokens that a mask allows, in order."""
    return tokens_in(mask.numpy())


def tokens_in(mask: Words) -> list[int]:
    """The tokens that a mask [words] allows, in order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def forced(constraint: Constraint, most: int) -> list[int]:
    """The tokens that must come next, at most `most`: each is the only one allowed. The constraint stays unchanged."""
    tokens: list[int] = []
    while len(tokens) < most and (token := only(constraint)) is not None:
        constraint.advance(token)
        tokens.append(token)
    constraint.rollback(len(tokens))
    return tokens


def only(constraint: Constraint) -> int | None:
    """The next token if it is known to be the only one allowed; else None."""
    return kept.only if isinstance(kept := constraint.kept(), Few) else None


def unpacked(masks: Tensor, vocabulary: int) -> Tensor:
    """Masks [..., words] as bool [..., vocabulary]."""
    bits = masks[..., None] >> torch.arange(BITS, device=masks.device, dtype=masks.dtype) & 1
    return bits.flatten(-2)[..., :vocabulary].bool()
