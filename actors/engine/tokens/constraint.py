"""Constraints: which tokens a sequence may take next.

A constraint is a place in some automaton, moved by tokens. Its masks apply at every position that a round verifies, so
what is committed is what plain decoding under the same constraint gives, whatever was drafted. Where one token alone
is allowed it is forced: as a draft it is free, for the target cannot disagree.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 32  # tokens of a mask's word: token t is allowed where bit t % 32 of word t // 32 is set
FEW = 256  # tokens up to which a place is kept as a list of them
Words = NDArray[np.int32]


class Few(NamedTuple):
    """A mask that allows few tokens: those, in order, and its words that are not zero, by number."""

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
        """The token that is allowed, if it is one alone."""
        return self.tokens[0] if len(self.tokens) == 1 else None


class Constraint(Protocol):
    """Stands behind the tokens it was advanced by. What is allowed there follows from those tokens alone."""

    def allowed(self) -> Tensor:
        """The mask here: int32 [words], words past its end are zero. At least one token is allowed before an end."""
        ...

    def kept(self) -> Few | Words | None:
        """The mask here where it is at hand; None where `compute` has to be asked for it.

        One object stands for one mask, so that nobody has to write it again where it has been written already.
        """
        ...

    @classmethod
    def compute(cls, places: Sequence[tuple[Self, int]], masks: Words) -> None:
        """Write the masks of places that are not kept, each constraint's over the row of masks [N, words] given."""
        raise TypeError(f"{cls.__name__} keeps its masks, none of {len(places)} is to be written to {masks.shape}")

    def accepts(self, token: int) -> bool:
        """Whether a token is allowed here."""
        ...

    def advance(self, token: int) -> None:
        """Move on by an allowed token."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...


MakeConstraint = Callable[[], Constraint]


class Node:
    """A place in an automaton of tokens: where each allowed one leads."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}

    @cached_property
    def mask(self) -> Tensor:
        return mask_of(self.children)

    @cached_property
    def kept(self) -> Few | Words:
        return Few.of(self.children) if len(self.children) <= FEW else self.mask.numpy()


class Automaton(Constraint):
    """A constraint given by its places; the way back is kept."""

    def __init__(self, start: Node) -> None:
        self.way = [start]

    def allowed(self) -> Tensor:
        return self.way[-1].mask

    def kept(self) -> Few | Words:
        return self.way[-1].kept

    def accepts(self, token: int) -> bool:
        return token in self.way[-1].children

    def advance(self, token: int) -> None:
        self.way.append(self.way[-1].children[token])

    def rollback(self, count: int) -> None:
        del self.way[len(self.way) - count :]


class Barred(Constraint):
    """Any token but some: end tokens before the least length, and those that would complete a barred sequence.

    vocabulary: of V tokens. ends: tokens that end a sequence. least: tokens that come before.
    """

    def __init__(self, vocabulary: int, ends: Set[int], least: int, words: Iterable[tuple[int, ...]]) -> None:
        self.vocabulary, self.ends, self.least, self.words = vocabulary, frozenset(ends), least, tuple(words)
        self.way: list[int] = []
        self._masks: dict[frozenset[int], Words] = {}

    def allowed(self) -> Tensor:
        return torch.from_numpy(self.kept())

    def kept(self) -> Words:
        now = self._barred()
        if now not in self._masks:
            self._masks[now] = mask_without(now, self.vocabulary)
        return self._masks[now]

    def accepts(self, token: int) -> bool:
        return token not in self._barred()

    def advance(self, token: int) -> None:
        self.way.append(token)

    def rollback(self, count: int) -> None:
        del self.way[len(self.way) - count :]

    def _barred(self) -> frozenset[int]:
        """The tokens that may not come here."""
        barred = {word[-1] for word in self.words if self.way[len(self.way) - len(word) + 1 :] == list(word[:-1])}
        return frozenset(barred | self.ends if len(self.way) < self.least else barred)


def chain(tokens: Sequence[int], end: Node) -> Node:
    """Places that allow these tokens, one after the other, and lead to `end`."""
    for token in reversed(tokens):
        node = Node()
        node.children[token] = end
        end = node
    return end


def choice(options: Iterable[Sequence[int]], end: Node) -> Node:
    """A trie: places that allow any of the options, and go on as `end` does after each.

    An option may begin with another one: where that ends, the longer one's next token is allowed beside `end`'s.
    Raises ValueError where those are the same token, for then nobody could tell which option was meant.
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
    """A mask that allows these tokens alone."""
    words = Few.of(tokens).words
    mask = torch.zeros(max(words, default=-1) + 1, dtype=torch.int32)
    mask.numpy()[list(words)] = list(words.values())
    return mask


def mask_without(tokens: Iterable[int], vocabulary: int) -> Words:
    """A mask that allows all of a vocabulary but these tokens."""
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
    """The tokens that must come next, each the only one allowed, `most` at most. Leaves the constraint as it was."""
    found: list[int] = []
    while len(found) < most and (token := only(constraint)) is not None:
        constraint.advance(token)
        found.append(token)
    constraint.rollback(len(found))
    return found


def only(constraint: Constraint) -> int | None:
    """The token that must come next, if there is no other."""
    return kept.only if isinstance(kept := constraint.kept(), Few) else None


def unpacked(masks: Tensor, vocabulary: int) -> Tensor:
    """Masks [..., words] as bool [..., vocabulary]."""
    bits = masks[..., None] >> torch.arange(BITS, device=masks.device, dtype=masks.dtype) & 1
    return bits.flatten(-2)[..., :vocabulary].bool()
