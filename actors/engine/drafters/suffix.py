"""Look-up: what followed the last tokens of a sequence before, in itself or in completions of others.

SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt look-up. No model, no KV, all of it on the host.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Self

import numpy as np
import torch
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, Drafter, Given
from exspec.actors.engine.group import Group
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan

CONTEXT = 8  # tokens that are looked up, at most
STORE = 64 * MEBIBYTE  # for what was learned of completions
NODE, PLACE = 260, 300  # bytes of a node of the tree, and of a token of a running sequence
BITS = 21  # of a token id, so that three of them are a number of 63
GRAMS = (3, 2)  # tokens by which a sequence finds a place in itself


class Suffix(Drafter):
    """Proposes what followed the longest suffix of the sequence, of CONTEXT tokens at most, that has occurred.

    Of completions that have ended the likeliest continuation, of the sequence itself the last. worth: a draft ends
    where the chance of all of it, by what has occurred, falls below this. Where verify has a fixed width its columns
    are paid for, and any chance is worth it.
    """

    lengths: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 8, 12, 16)
    looked_at: ClassVar[int] = 16

    @classmethod
    def refusal(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:  # noqa: ARG003
        size = target.get_text_config().vocab_size
        return f"it looks up tokens below {1 << BITS}, and the target has {size}" if size > 1 << BITS else None

    @classmethod
    def memory(cls, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype) -> MemoryPlan:  # noqa: ARG003
        return MemoryPlan(host=STORE + config.slots * config.capacity * PLACE)

    @classmethod
    def build(cls, given: Given) -> Self:
        by_chance = not given.config.fixed_shapes or given.config.draft_length in ("explicit", "both")
        return cls(given.config.slots, given.config.threshold if by_chance else 0.0)

    def __init__(self, slots: int, worth: float = 0.0, store: int = STORE) -> None:
        self.worth, self.store = worth, store
        self.rows = [Row([])] * slots
        self.tree = Tree(store // NODE)

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.rows[slot] = Row(tokens)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        drafts = [
            self._row(sequence.slot, limit) if sequence and limit else []
            for sequence, limit in zip(group.sequences, limits, strict=True)
        ]
        values = np.zeros((len(drafts), max(map(len, drafts)) + 1), dtype=np.int64)
        for row, draft in enumerate(drafts):
            values[row, 0] = len(draft)
            values[row, 1 : len(draft) + 1] = draft
        sent = torch.from_numpy(values).to(group.pending.device, non_blocking=True)
        return Draft(sent[:, 1:], sent[:, 0], drafts)

    def _row(self, slot: int, most: int) -> list[int]:
        row = self.rows[slot]
        node, depth = self.tree.find(row.tokens[-CONTEXT:])
        place, matched = row.find()
        if depth >= matched:
            return self.tree.follow(node, depth, most, self.worth)
        if self.worth:  # what followed m tokens once goes on with chance m / (m + 1)
            most = min(most, int(math.log(self.worth) / math.log(matched / (matched + 1))))
        return row.follow(place, most)

    def committed(self, tokens: dict[int, list[int]]) -> None:
        for slot, new in tokens.items():
            self.rows[slot].extend(new)

    def end(self, slot: int, prompt: Sequence[int], completion: list[int]) -> None:
        self.rows[slot] = Row([])
        self.learn(prompt, completion)

    def learn(self, prompt: Sequence[int], completion: list[int]) -> None:
        self.tree.learn([*prompt[-CONTEXT:], *completion])

    def forget(self) -> None:
        self.tree = Tree(self.store // NODE)


class Row:
    """The tokens of a sequence, and where each few of them stood last."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        array = np.array(tokens, dtype=np.int64)
        self.last: list[dict[int, int]] = []  # by number of tokens: the place behind them, where something follows
        for size in GRAMS:
            count = max(len(tokens) - size, 0)
            keys = np.zeros(count, dtype=np.int64)
            for i in range(size):
                keys = keys << BITS | array[i : i + count]
            self.last.append(dict(zip(keys.tolist(), range(size, size + count), strict=True)))

    def extend(self, new: list[int]) -> None:
        tokens, before = self.tokens, len(self.tokens)
        tokens += new
        for size, last in zip(GRAMS, self.last, strict=True):
            for place in range(max(before, size), len(tokens)):
                last[_key(tokens, place, size)] = place

    def find(self) -> tuple[int, int]:
        """The last place at which as many of the last tokens stood as GRAMS has, and how many of them, CONTEXT at most;
        (0, 0) where there is none."""
        tokens, length = self.tokens, len(self.tokens)
        for size, last in zip(GRAMS, self.last, strict=True):
            if length >= size and (place := last.get(_key(tokens, length, size))) is not None:
                while size < min(CONTEXT, place) and tokens[place - size - 1] == tokens[length - size - 1]:
                    size += 1
                return place, size
        return 0, 0

    def follow(self, place: int, most: int) -> list[int]:
        """What stood there; what comes to the end of the sequence goes on with itself."""
        tokens = self.tokens[place : place + most]
        return (tokens * -(-most // len(tokens)))[:most]


def _key(tokens: list[int], place: int, size: int) -> int:
    """The `size` tokens before a place as a number."""
    key = 0
    for token in tokens[place - size : place]:
        key = key << BITS | token
    return key


class Tree:
    """How often each token followed each string of CONTEXT tokens or fewer, in the latest completions.

    A node is a string that has occurred, of one token more at most; its children are the strings with a token more.
    Everything is kept in one dictionary and in lists by the number of a node, which are smaller than objects.

    count: by node, how often. best: the token of the child with the highest count, -1: unknown. link: the node of the
    string without its first token. nodes: that there may be; where there are more the oldest completions are taken out.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.children: dict[int, int] = {}  # by node and token
        self.count, self.best, self.link = [0], [-1], [0]
        self.unused: list[int] = []
        self.kept: deque[np.ndarray] = deque()

    def learn(self, tokens: list[int]) -> None:
        """Count a completion, with the last tokens before it."""
        self.kept.append(np.array(tokens, dtype=np.int32))
        self._add(tokens)
        while len(self.children) > self.nodes:
            self._remove(self.kept.popleft().tolist())

    def _add(self, tokens: list[int]) -> None:
        children, count, best, link, unused = self.children, self.count, self.best, self.link, self.unused
        standing = [0]  # on the strings that end here, the shortest first
        for token in tokens:
            shorter, after = 0, [0]
            for node in standing:
                key = node << BITS | token
                child = children.get(key)
                if child is None:
                    if unused:
                        child = unused.pop()
                        link[child] = shorter
                    else:
                        child = len(count)
                        count.append(0)
                        best.append(-1)
                        link.append(shorter)
                    children[key] = child
                count[child] = often = count[child] + 1
                if (other := best[node]) != token and (other < 0 or often >= count[children[node << BITS | other]]):
                    best[node] = token
                after.append(child)
                shorter = child
            standing = after[: CONTEXT + 1]

    def _remove(self, tokens: list[int]) -> None:
        """Take out what `_add` has put in."""
        children, count, best = self.children, self.count, self.best
        standing = [0]
        for token in tokens:
            after = [0]
            for node in standing:
                key = node << BITS | token
                child = children[key]
                count[child] -= 1
                if not count[child]:
                    del children[key]
                    best[child] = -1
                    self.unused.append(child)
                    if best[node] == token:
                        best[node] = -1
                after.append(child)
            standing = after[: CONTEXT + 1]

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The node of the longest suffix of the tokens, CONTEXT at most, that something is known to follow, and its
        length; (0, 0) where there is none."""
        children, best, link = self.children, self.best, self.link
        node = depth = 0
        for token in tokens:
            while (child := children.get(node << BITS | token)) is None and node:
                node, depth = link[node], depth - 1
            node, depth = (0, 0) if child is None else (child, depth + 1)
        while node and best[node] < 0:
            node, depth = link[node], depth - 1
        return node, depth

    def follow(self, node: int, depth: int, most: int, worth: float) -> list[int]:
        """The likeliest tokens after a node, while the chance of all is at least `worth`."""
        children, count, best, link = self.children, self.count, self.best, self.link
        tokens: list[int] = []
        chance = 1.0
        while len(tokens) < most:
            while node and best[node] < 0:
                node, depth = link[node], depth - 1
            if not node:  # of no context
                break
            token = best[node]
            child = children[node << BITS | token]
            chance *= count[child] / count[node]
            if chance < worth:
                break
            tokens.append(token)
            node, depth = (child, depth + 1) if depth < CONTEXT else (link[child], depth)
        return tokens

    def check(self) -> None:
        """Raise AssertionError where the counts are not those of the completions that are kept."""
        found: dict[tuple[int, ...], int] = {}
        for kept in self.kept:
            tokens = kept.tolist()
            for end in range(1, len(tokens) + 1):
                for start in range(max(0, end - CONTEXT - 1), end):
                    string = tuple(tokens[start:end])
                    found[string] = found.get(string, 0) + 1
        assert len(self.children) == len(found), f"{len(self.children)} nodes, expected {len(found)}"
        assert len(self.count) == 1 + len(found) + len(self.unused), "nodes are lost"
        for string, often in found.items():
            node = 0
            for token in string:
                node = self.children[node << BITS | token]
            assert self.count[node] == often, f"{string} counted {self.count[node]} times, occurred {often} times"
            shorter = 0
            for token in islice(string, 1, None):
                shorter = self.children[shorter << BITS | token]
            assert self.link[node] == shorter, f"{string} is linked to another string than its own without the first"
