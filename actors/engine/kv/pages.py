"""Which page of KV holds which token of which sequence: given when it is needed, shared where prompts begin alike."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

BIN = 0  # the page that dead columns write to and that no sequence has


class Store(Protocol):
    """Gives and takes back the KV that the sequences of slots need."""

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int) -> int | None:
        """Give a free slot what the first `reach` of a sequence's tokens need, of which the first `prefilled` are
        going to be fed in prefill chunks.

        Returns how many of them, from the first on, are there already; None where there is no room.
        """
        ...

    def extend(self, slot: int, reach: int) -> bool:
        """Give a slot what its first `reach` tokens need. False where there is no room."""
        ...

    def end(self, slot: int) -> None:
        """Take back what a slot has."""
        ...

    def forget(self) -> None:
        """Let go of all that no slot has."""
        ...

    def check(self, lengths: dict[int, int]) -> None:
        """Raise AssertionError unless each slot has what its length needs, and nothing is had twice or lost."""
        ...


class Boundless:
    """Where every slot's KV grows by itself."""

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int) -> int | None:  # noqa: ARG002
        return 0

    def extend(self, slot: int, reach: int) -> bool:  # noqa: ARG002
        return True

    def end(self, slot: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def check(self, lengths: dict[int, int]) -> None:
        pass


class Prefix:
    """The pages of one prefill chunk, whose KV depends on the chunk and on those before it alone.

    A node of a tree: the way from the root spells the prompt. users: slots that have it.
    """

    def __init__(self, parent: "Prefix | None", chunk: tuple[int, ...], pages: list[int]) -> None:
        self.parent, self.chunk, self.pages = parent, chunk, pages
        self.children: dict[tuple[int, ...], Prefix] = {}
        self.users = 0


class Pages:
    """Pages of `size` tokens each, by slot. Token i of a sequence lies in page table[slot, i // size] at i % size.

    Whole prefill chunks are shared by their content: their pages stay after the last sequence that had them, and are
    taken, the longest unused first, when others are short. What a table does not name is page 0, the bin.

    slots: W. pages: that can be given. chunk: tokens of a prefill chunk, a multiple of `size`. longest: tokens that a
    table has entries for.

    Invariant: a page is free, or a slot's own, or a prefix's; a prefix has as many users as slots that stand on it or
    on one below it.
    """

    def __init__(self, slots: int, pages: int, size: int, chunk: int, longest: int, device: torch.device) -> None:
        self.pages, self.size, self.chunk = pages, size, chunk
        self.free = list(range(pages, BIN, -1))
        self.root = Prefix(None, (), [])
        self.idle: OrderedDict[Prefix, None] = OrderedDict()  # without users and children, the longest unused first
        self.unused = 0  # pages of prefixes without users
        self.own: list[list[int]] = [[] for _ in range(slots)]
        self.standing = [self.root] * slots
        self.counts = [0] * slots  # pages of a slot, shared ones among them
        self.table = torch.zeros(slots + 1, -(-longest // size), dtype=torch.int32)
        self.on_device = self.table if device.type == "cpu" else self.table.to(device)

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int) -> int | None:
        chunks = [tuple(tokens[i : i + self.chunk]) for i in range(0, prefilled - self.chunk + 1, self.chunk)]
        way = [self.root]
        for chunk in chunks:
            if (found := way[-1].children.get(chunk)) is None:
                break
            way.append(found)
        self._use(way[-1])
        shared = [page for prefix in way for page in prefix.pages]
        pages = self._take(self._count(reach) - len(shared))
        if pages is None:
            self._leave(way[-1])
            return None
        known = len(way) - 1
        self._name(slot, 0, shared + pages)
        for chunk in chunks[known:]:
            here, pages = pages[: self.chunk // self.size], pages[self.chunk // self.size :]
            made = Prefix(way[-1], chunk, here)
            made.users = 1
            way[-1].children[chunk] = made
            way.append(made)
        self.own[slot], self.standing[slot] = pages, way[-1]
        return known * self.chunk

    def extend(self, slot: int, reach: int) -> bool:
        more = self._count(reach) - self.counts[slot]
        if more <= 0:
            return True
        pages = self._take(more)
        if pages is None:
            return False
        self.own[slot] += pages
        self._name(slot, self.counts[slot], pages)
        return True

    def end(self, slot: int) -> None:
        self.free += reversed(self.own[slot])
        self._leave(self.standing[slot])
        self.own[slot], self.standing[slot], self.counts[slot] = [], self.root, 0
        self.table[slot] = BIN
        self._changed(slot)

    def forget(self) -> None:
        while self.idle:
            self._evict()

    def check(self, lengths: dict[int, int]) -> None:
        prefixes = list(_below(self.root))
        had = [*self.free, *chain(*self.own), *(page for p in prefixes for page in p.pages)]
        assert sorted(had) == list(range(1, self.pages + 1)), f"pages lost or given twice: {sorted(had)}"
        users = dict.fromkeys(prefixes, 0)
        for slot, prefix in enumerate(self.standing):
            way = list(_above(prefix))
            for p in way:
                users[p] += 1
            named = [page for p in reversed(way) for page in p.pages] + self.own[slot]
            row = self.table[slot].tolist()
            assert row == named + [BIN] * (len(row) - len(named)), f"slot {slot}: the table names {row}, not {named}"
            length = lengths.get(slot, 0)
            assert len(named) * self.size >= length, f"slot {slot}: {len(named)} pages for {length} tokens"
        for prefix, count in users.items():
            assert prefix.users == count, f"a prefix counts {prefix.users} users, and has {count}"
        unused = [p for p in prefixes if p.users == 0]
        assert self.unused == sum(len(p.pages) for p in unused), "pages without users are miscounted"
        assert set(self.idle) == {p for p in unused if not p.children}, "what may be taken is not what is idle"
        assert torch.equal(self.table, self.on_device.cpu()), "the device has another table"

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _take(self, count: int) -> list[int] | None:
        """So many free pages, those of idle prefixes among them; None where they do not suffice."""
        if count > len(self.free) + self.unused:
            return None
        while count > len(self.free):
            self._evict()
        return [self.free.pop() for _ in range(count)]

    def _evict(self) -> None:
        """Free the pages of the prefix that is unused for longest."""
        prefix, _ = self.idle.popitem(last=False)
        parent = prefix.parent
        assert parent is not None
        del parent.children[prefix.chunk]
        self.free += reversed(prefix.pages)
        self.unused -= len(prefix.pages)
        if parent.users == 0 and not parent.children and parent is not self.root:
            self.idle[parent] = None

    def _use(self, prefix: Prefix) -> None:
        for p in _above(prefix):
            if p.users == 0:
                self.unused -= len(p.pages)
                self.idle.pop(p, None)
            p.users += 1

    def _leave(self, prefix: Prefix) -> None:
        for p in _above(prefix):
            p.users -= 1
            if p.users == 0:
                self.unused += len(p.pages)
                if not p.children:
                    self.idle[p] = None

    def _name(self, slot: int, first: int, pages: list[int]) -> None:
        self.table[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.counts[slot] = first + len(pages)
        self._changed(slot)

    def _changed(self, slot: int) -> None:
        if self.on_device is not self.table:  # a copy out of ordinary memory is staged at once: nothing waits for it
            self.on_device[slot].copy_(self.table[slot], non_blocking=True)


def _above(prefix: Prefix) -> list[Prefix]:
    """The prefix and those it goes on from, but for the root."""
    way = []
    while prefix.parent is not None:
        way.append(prefix)
        prefix = prefix.parent
    return way


def _below(prefix: Prefix) -> list[Prefix]:
    """All prefixes that go on from this one."""
    found = [*prefix.children.values()]
    for p in found:
        found += p.children.values()
    return found
