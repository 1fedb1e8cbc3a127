"""Pages of KV: allocated to sequences on demand, and shared between prompts with the same beginning."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch

BIN = 0  # the page that dead columns write to; no sequence has it


class Store(Protocol):
    """Allocates the KV of the slots' sequences."""

    def cached(self, tokens: Sequence[int], prefilled: int, adapter: int) -> int:
        """How many of the first `prefilled` tokens of a sequence are cached already. adapter: of the sequence."""
        ...

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int, adapter: int) -> int | None:
        """Allocate KV for the first `reach` tokens of a sequence in a free slot. Prefill chunks will compute the first
        `prefilled` tokens.

        Returns how many of them are cached already; None if there is no room.
        """
        ...

    def extend(self, slot: int, reach: int) -> bool:
        """Allocate KV for the first `reach` tokens of a slot. Returns False if there is no room."""
        ...

    def end(self, slot: int) -> None:
        """Release the KV of a slot."""
        ...

    def forget(self) -> None:
        """Release the cached KV that no slot uses."""
        ...

    def check(self, lengths: dict[int, int]) -> None:
        """Raise AssertionError if a slot has too little KV for its length, or a page is lost or allocated twice."""
        ...


class Boundless:
    """The store of models whose KV grows by itself."""

    def cached(self, tokens: Sequence[int], prefilled: int, adapter: int) -> int:  # noqa: ARG002
        return 0

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int, adapter: int) -> int | None:  # noqa: ARG002
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
    """The pages of one prefill chunk. Their KV depends only on this chunk and the chunks before it.

    A node of a tree: the path from the root spells the prompt. chunk: the sequence's adapter, and the tokens. users:
    how many slots use it.
    """

    def __init__(self, parent: "Prefix | None", chunk: tuple[int, ...], pages: list[int]) -> None:
        self.parent, self.chunk, self.pages = parent, chunk, pages
        self.children: dict[tuple[int, ...], Prefix] = {}
        self.users = 0


class Pages:
    """Pages of `size` tokens each, by slot. Token i of a sequence lies in page table[slot, i // size] at i % size.

    Whole prefill chunks with equal content and the same adapter share pages. These pages stay after the last sequence
    that used them. When free pages are short, the longest unused ones are evicted. Unused entries of a table are page
    0, the bin.

    slots: W. pages: how many can be allocated. chunk: tokens of a prefill chunk, a multiple of `size`. longest: tokens
    that a row of the table has entries for.

    Invariant: a page is free, or belongs to one slot or to one prefix. The users of a prefix are the slots whose
    `prefix` is this one or one below it.
    """

    def __init__(self, slots: int, pages: int, size: int, chunk: int, longest: int, device: torch.device) -> None:
        self.pages, self.size, self.chunk = pages, size, chunk
        self.free = list(range(pages, BIN, -1))
        self.root = Prefix(None, (), [])
        self.idle: OrderedDict[Prefix, None] = OrderedDict()  # no users, no children; longest unused first
        self.unused = 0  # pages of prefixes without users
        self.own: list[list[int]] = [[] for _ in range(slots)]  # pages that a slot does not share
        self.prefix = [self.root] * slots  # the last prefix of each slot
        self.counts = [0] * slots  # pages of a slot, including shared ones
        self.table = torch.zeros(slots + 1, -(-longest // size), dtype=torch.int32)
        self.on_device = self.table if device.type == "cpu" else self.table.to(device)

    def cached(self, tokens: Sequence[int], prefilled: int, adapter: int) -> int:
        return (len(self._path(self._chunks(tokens, prefilled, adapter))) - 1) * self.chunk

    def begin(self, slot: int, tokens: Sequence[int], prefilled: int, reach: int, adapter: int) -> int | None:
        chunks = list(self._chunks(tokens, prefilled, adapter))
        path = self._path(chunks)
        self._use(path[-1])
        shared = [page for prefix in path for page in prefix.pages]
        pages = self._take(self._count(reach) - len(shared))
        if pages is None:
            self._leave(path[-1])
            return None
        cached = len(path) - 1
        self._enter(slot, 0, shared + pages)
        for chunk in chunks[cached:]:
            own, pages = pages[: self.chunk // self.size], pages[self.chunk // self.size :]
            child = Prefix(path[-1], chunk, own)
            child.users = 1
            path[-1].children[chunk] = child
            path.append(child)
        self.own[slot], self.prefix[slot] = pages, path[-1]
        return cached * self.chunk

    def extend(self, slot: int, reach: int) -> bool:
        more = self._count(reach) - self.counts[slot]
        if more <= 0:
            return True
        pages = self._take(more)
        if pages is None:
            return False
        self.own[slot] += pages
        self._enter(slot, self.counts[slot], pages)
        return True

    def end(self, slot: int) -> None:
        self.free += reversed(self.own[slot])
        self._leave(self.prefix[slot])
        self.own[slot], self.prefix[slot], self.counts[slot] = [], self.root, 0
        self.table[slot] = BIN
        self._send(slot)

    def forget(self) -> None:
        while self.idle:
            self._evict()

    def check(self, lengths: dict[int, int]) -> None:
        prefixes = list(_below(self.root))
        pages = [*self.free, *chain(*self.own), *(page for p in prefixes for page in p.pages)]
        assert sorted(pages) == list(range(1, self.pages + 1)), f"pages lost or allocated twice: {sorted(pages)}"
        users = dict.fromkeys(prefixes, 0)
        for slot, prefix in enumerate(self.prefix):
            above = _above(prefix)
            for p in above:
                users[p] += 1
            entries = [page for p in reversed(above) for page in p.pages] + self.own[slot]
            row = self.table[slot].tolist()
            assert row == entries + [BIN] * (len(row) - len(entries)), f"slot {slot}: table has {row}, not {entries}"
            length = lengths.get(slot, 0)
            assert len(entries) * self.size >= length, f"slot {slot}: {len(entries)} pages for {length} tokens"
        for prefix, count in users.items():
            assert prefix.users == count, f"a prefix counts {prefix.users} users, and has {count}"
        unused = [p for p in prefixes if p.users == 0]
        assert self.unused == sum(len(p.pages) for p in unused), "pages without users are miscounted"
        assert set(self.idle) == {p for p in unused if not p.children}, "the wrong prefixes are idle"
        assert torch.equal(self.table, self.on_device.cpu()), "the device has another table"

    def _chunks(self, tokens: Sequence[int], prefilled: int, adapter: int) -> Iterator[tuple[int, ...]]:
        return ((adapter, *tokens[i : i + self.chunk]) for i in range(0, prefilled - self.chunk + 1, self.chunk))

    def _path(self, chunks: Iterable[tuple[int, ...]]) -> list[Prefix]:
        """The cached prefixes that spell the first chunks, from the root on."""
        path = [self.root]
        for chunk in chunks:
            if (child := path[-1].children.get(chunk)) is None:
                break
            path.append(child)
        return path

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _take(self, count: int) -> list[int] | None:
        """Take `count` pages, evicting idle prefixes as needed; None if there are not enough."""
        if count > len(self.free) + self.unused:
            return None
        while count > len(self.free):
            self._evict()
        return [self.free.pop() for _ in range(count)]

    def _evict(self) -> None:
        """Free the pages of the longest unused prefix."""
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

    def _enter(self, slot: int, first: int, pages: list[int]) -> None:
        """Write pages into a slot's row of the table, from entry `first` on."""
        self.table[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.counts[slot] = first + len(pages)
        self._send(slot)

    def _send(self, slot: int) -> None:
        if self.on_device is not self.table:  # the copy from pageable memory is staged at once, so the row may change
            self.on_device[slot].copy_(self.table[slot], non_blocking=True)


def _above(prefix: Prefix) -> list[Prefix]:
    """The prefix and all prefixes above it, without the root."""
    path = []
    while prefix.parent is not None:
        path.append(prefix)
        prefix = prefix.parent
    return path


def _below(prefix: Prefix) -> list[Prefix]:
    """All prefixes below this one."""
    below = [*prefix.children.values()]
    for p in below:
        below += p.children.values()
    return below
