"""Look-up: propose the tokens that followed the last tokens before, in the sequence itself or in other completions.

SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt look-up, on the host, without a model or KV.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Self

import numpy as np
import torch
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, Drafter, DrafterContext
from exspec.actors.engine.kv.memory import MEBIBYTE, MemoryPlan
from exspec.actors.engine.scheduling.group import Group

CONTEXT = 8  # the most tokens that are looked up
STORE = 64 * MEBIBYTE  # for completions and the counts of their strings
SLICE = 256  # tokens learned at a time: the engine's thread does nothing else meanwhile
NODE, TOKEN = 260, 300  # bytes of a node of the tree, and of a token of a running sequence
KEPT = 144  # bytes of a kept completion, plus four for each of its tokens
BITS = 21  # of a token id, so that three ids fit a number of 63 bits
GRAMS = (3, 2)  # how many last tokens a sequence looks up in itself
LEAST = 0.1  # a draft ends at a lower chance than this: more tokens would only take the host's time


class Suffix(Drafter):
    """Proposes, token by token, the likeliest token after the sequence's suffixes of at most CONTEXT tokens.

    A token that followed c of the n occurrences of a suffix in finished completions has the chance c / (n + 1). If the
    sequence itself has had its last m tokens before, the token that followed them has the chance m / (m + 1). A draft
    ends when the chance of all its tokens falls below `worth`. A long completion is learned over several rounds.
    """

    lengths: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 8, 12, 16)
    probed_with: ClassVar[int] = 8
    learns: ClassVar[bool] = True

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        size = target.get_text_config().vocab_size
        return f"it looks up tokens below {1 << BITS}, and the target has {size} tokens" if size > 1 << BITS else None

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        return MemoryPlan(host=STORE + config.slots * config.capacity * TOKEN)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        # With fixed shapes a shorter draft saves no columns.
        by_chance = not context.config.fixed_shapes or context.config.draft_length in ("explicit", "both")
        return cls(context.config.slots, context.config.threshold if by_chance else LEAST)

    def __init__(self, slots: int, worth: float = LEAST, store: int = STORE) -> None:
        self.worth, self.store = max(worth, LEAST), store
        self.rows = [Row([])] * slots
        self.forget()

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
        row, tree = self.rows[slot], self.tree
        tokens, length = row.tokens, len(row.tokens)
        node, depth = tree.find(tokens[-CONTEXT:])
        next_, matched = row.find()
        chance = 1.0
        while len(tokens) < length + most:
            token, sure = tree.guess(node)
            if matched and matched / (matched + 1) > sure:
                token, sure = tokens[next_], matched / (matched + 1)
            chance *= sure
            if chance < self.worth:
                break
            tokens.append(token)
            node, depth = tree.step(node, depth, token)
            next_, matched = row.step(next_, matched)
        draft = tokens[length:]
        del tokens[length:]
        return draft

    def committed(self, tokens: dict[int, list[int]]) -> None:
        for slot, new in tokens.items():
            self.rows[slot].extend(new)
        self._learn(max(SLICE, 2 * sum(map(len, tokens.values()))))  # more tokens than completions gain in a round

    def end(self, slot: int) -> None:
        self.rows[slot] = Row([])

    def learn(self, prompt: Sequence[int], completion: list[int]) -> None:
        self.waiting.append(np.array([*prompt[-CONTEXT:], *completion], dtype=np.int32))
        self._learn(SLICE)

    def _learn(self, most: int) -> None:
        """Learn about `most` of the waiting tokens, in slices that overlap by CONTEXT."""
        while self.waiting and most > 0:
            tokens = self.waiting.popleft()
            if len(tokens) > SLICE + CONTEXT:
                self.waiting.appendleft(tokens[SLICE:])
            self.tree.learn(tokens[: SLICE + CONTEXT].tolist())
            most -= SLICE

    def catch_up(self) -> None:
        while self.waiting:
            self._learn(SLICE)

    def forget(self) -> None:
        self.tree = Tree(self.store)
        self.waiting: deque[np.ndarray] = deque()  # tokens still to be learned


class Row:
    """The tokens of a sequence, and where each short string of them occurred last."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        array = np.array(tokens, dtype=np.int64)
        # By size in GRAMS and by `_key`: the index of the token that followed the string's last occurrence.
        self.last: list[dict[int, int]] = []
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
            for end in range(max(before, size), len(tokens)):
                last[_key(tokens, end, size)] = end

    def find(self) -> tuple[int, int]:
        """The index of the token after the last earlier occurrence of the last tokens, of one of the sizes GRAMS, and
        how many tokens match there, at most CONTEXT; (0, 0) if there is no occurrence."""
        tokens, length = self.tokens, len(self.tokens)
        for size, last in zip(GRAMS, self.last, strict=True):
            if length >= size and (end := last.get(_key(tokens, length, size))) is not None:
                while size < min(CONTEXT, end) and tokens[end - size - 1] == tokens[length - size - 1]:
                    size += 1
                return end, size
        return 0, 0

    def step(self, end: int, matched: int) -> tuple[int, int]:
        """As `find`, after one more token. (end, matched): the result before that token."""
        if matched and self.tokens[end] == self.tokens[-1]:
            return end + 1, min(matched + 1, CONTEXT)
        return self.find()


def _key(tokens: list[int], end: int, size: int) -> int:
    """The `size` tokens before index `end` as a number."""
    key = 0
    for token in tokens[end - size : end]:
        key = key << BITS | token
    return key


class Tree:
    """Counts how often each token followed each string of at most CONTEXT tokens, in the latest completions.

    A node is a string that has occurred, of at most CONTEXT + 1 tokens. Its children are the strings with one more
    token. One dictionary and lists by node number hold everything, since they are smaller than objects.

    count: by node, how often the string occurred. best: the token of the child that had the highest count when it was
    last counted; -1 if unknown. top: the count of that child. link: the node of the string without its first token.
    store: bytes, an eighth of them for the completions themselves; the oldest completions are removed when it is full.
    """

    def __init__(self, store: int) -> None:
        self.room = store // 8
        self.nodes = (store - self.room) // NODE
        self.children: dict[int, int] = {}  # by node and token
        self.count, self.best, self.top, self.link = [0], [-1], [0], [0]
        self.unused: list[int] = []
        self.kept: deque[np.ndarray] = deque()
        self.held = 0  # bytes of `kept`

    def learn(self, tokens: list[int]) -> None:
        """Count a completion and the last tokens before it. Only the last tokens count of a completion that might fill
        half of the tree by itself."""
        tokens = tokens[-max(self.nodes // (2 * (CONTEXT + 1)), 1) :]
        nodes, size = (CONTEXT + 1) * len(tokens), KEPT + 4 * len(tokens)  # at most
        while self.kept and (len(self.children) + nodes > self.nodes or self.held + size > self.room):
            oldest = self.kept.popleft()
            self.held -= KEPT + 4 * len(oldest)
            self._remove(oldest.tolist())
        self.kept.append(np.array(tokens, dtype=np.int32))
        self.held += size
        self._add(tokens)

    def _add(self, tokens: list[int]) -> None:
        children, count, best, top, link = self.children, self.count, self.best, self.top, self.link
        suffixes = [0]  # nodes of the strings that end here, the shortest first
        for token in tokens:
            shorter, after = 0, [0]
            for node in suffixes:
                key = node << BITS | token
                child = children.get(key)
                if child is None:
                    if self.unused:
                        child = self.unused.pop()
                        link[child] = shorter
                    else:
                        child = len(count)
                        count.append(0)
                        best.append(-1)
                        top.append(0)
                        link.append(shorter)
                    children[key] = child
                count[child] = often = count[child] + 1
                if often >= top[node]:
                    best[node], top[node] = token, often
                after.append(child)
                shorter = child
            suffixes = after[: CONTEXT + 1]

    def _remove(self, tokens: list[int]) -> None:
        children, count, best, top = self.children, self.count, self.best, self.top
        suffixes = [0]
        for token in tokens:
            after = [0]
            for node in suffixes:
                key = node << BITS | token
                child = children[key]
                count[child] = often = count[child] - 1
                if best[node] == token:
                    top[node] = often
                    if not often:
                        best[node] = -1
                if not often:
                    del children[key]
                    best[child], top[child] = -1, 0
                    self.unused.append(child)
                after.append(child)
            suffixes = after[: CONTEXT + 1]

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The node of the longest suffix that has occurred, of at most CONTEXT tokens, and its length."""
        node = depth = 0
        for token in tokens:
            node, depth = self.step(node, depth, token)
        return node, depth

    def step(self, node: int, depth: int, token: int) -> tuple[int, int]:
        """As `find`, after one more token. (node, depth): the result before that token."""
        children, link = self.children, self.link
        if depth == CONTEXT:
            node, depth = link[node], depth - 1
        while (child := children.get(node << BITS | token)) is None and node:
            node, depth = link[node], depth - 1
        return (0, 0) if child is None else (child, depth + 1)

    def guess(self, node: int) -> tuple[int, float]:
        """The likeliest token after a node's string or one of its suffixes, and its chance; (-1, 0) if none is known.
        The empty string predicts nothing."""
        count, top, link = self.count, self.top, self.link
        surest, chance = 0, 0.0
        while node:
            share = top[node] / (count[node] + 1)
            if share > chance:
                surest, chance = node, share
            node = link[node]
        return self.best[surest] if surest else -1, chance

    def check(self) -> None:
        """Raise AssertionError if the counts are not those of the kept completions."""
        expected: dict[tuple[int, ...], int] = {}
        for kept in self.kept:
            tokens = kept.tolist()
            for end in range(1, len(tokens) + 1):
                for start in range(max(0, end - CONTEXT - 1), end):
                    string = tuple(tokens[start:end])
                    expected[string] = expected.get(string, 0) + 1
        assert len(self.children) == len(expected), f"{len(self.children)} nodes, expected {len(expected)}"
        assert len(self.count) == 1 + len(expected) + len(self.unused), "nodes are lost"
        assert self.held == sum(KEPT + 4 * len(kept) for kept in self.kept), "kept bytes are miscounted"
        for node, token in enumerate(self.best):
            top = self.count[self.children[node << BITS | token]] if token >= 0 else 0
            assert self.top[node] == top, f"node {node}: its best child counts {top}, not {self.top[node]}"
        for string, often in expected.items():
            node = 0
            for token in string:
                node = self.children[node << BITS | token]
            assert self.count[node] == often, f"{string} counted {self.count[node]} times, occurred {often} times"
            shorter = 0
            for token in islice(string, 1, None):
                shorter = self.children[shorter << BITS | token]
            assert self.link[node] == shorter, f"{string}: the link is not the string without its first token"
