"""Short page tables: a forward that reads the first page of each row and its last ones.

The first page stays because attention puts its surplus weight on the first tokens (StreamingLLM, arXiv:2309.17453).
Keys are stored rotated by their true positions, so pages can be left out without changing others. A sliding layer
counts columns of the short table, so it may see the first page and chosen ones where a whole forward would not.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from exspec.actors.engine.kv.pages import BIN


class Reads(NamedTuple):
    """The pages that the rows of a forward read, if not all.

    pages: [R, n], or [L, R, n] by layer, in their order; those past a row's end are not seen. The last ones are the
    row's last ones. skipped: [R], how many pages of a row are not among them.
    """

    pages: Tensor
    skipped: Tensor


def window_pages(window: int, columns: int, size: int) -> int:
    """Pages of `size` tokens that hold the last `window` tokens of each of `columns` successive positions."""
    return -(-(window + columns - 2) // size) + 1


def recent_pages(rows: Tensor, latest: Tensor, count: int, size: int, begins: Tensor | int = 1) -> Reads:
    """Each row's first page and the `count` pages up to position `latest`, none of them before page `begins`.

    rows: [R, n], all pages of the rows. latest, begins: [R].
    """
    first = (latest // size - count + 1).clamp(min=begins)
    others = first[:, None] + torch.arange(count, device=rows.device)
    numbers = torch.cat([torch.zeros_like(first)[:, None], others], dim=1)
    return Reads(rows.gather(1, numbers.clamp(max=rows.shape[1] - 1)), first - 1)


def chosen_pages(rows: Tensor, weights: Tensor, latest: Tensor, recent: int, chosen: int, size: int) -> Reads:
    """Each row's first page, its `recent` pages up to position `latest`, and the `chosen` other ones of most weight, by
    layer. rows: [R, n], all pages of the rows. weights: [L, R, n]. latest: [R]."""
    last, numbers = latest // size, torch.arange(rows.shape[1], device=rows.device)
    always = (numbers == 0) | (numbers > (last - recent)[:, None])  # [R, n]
    worth = weights.masked_fill(always, torch.inf).masked_fill(numbers > last[:, None], -1.0)
    count = min(1 + chosen + recent, rows.shape[1])
    found = worth.topk(count, dim=-1).indices.sort(dim=-1).values  # [L, R, count]
    pages = rows.expand(len(weights), -1, -1).gather(2, found)
    return Reads(pages, (last + 1 - count).clamp(min=0))


def first_page(length: int, window: int, size: int) -> int:
    """The first page after page 0 that a window reads at position `length`."""
    return max(length // size - window_pages(window, 1, size) + 1, 1)


class Rings:
    """Pages of a drafter's KV, by slot: page 0 of the sequence, and a ring for the last `window` tokens. In a ring, a
    page takes the place of an older one. So KV does not grow with the text, and nothing is allocated.

    columns: of a forward, at most: the ring has room for them, too. longest: tokens that a row of the table has entries
    for. Attributes that `Pages` has mean the same here.
    """

    def __init__(self, slots: int, window: int, columns: int, size: int, longest: int, device: torch.device) -> None:
        self.window, self.size = window, size
        each = ring_pages(window, columns, size)
        self.pages = slots * each
        page = torch.arange(-(-longest // size))
        place = torch.where(page == 0, 0, 1 + (page - 1) % (each - 1))
        table = torch.arange(1, self.pages + 1, each)[:, None] + place
        self.table = torch.cat([table, torch.full_like(table[:1], BIN)]).int()
        self.on_device = self.table.to(device)
        self.begins = torch.ones(slots + 1, dtype=torch.long, device=device)

    def begin(self, slot: int, length: int) -> None:
        """Put a sequence into a slot: of its first `length` tokens, page 0 and the window are fed."""
        self.begins[slot] = first_page(length, self.window, self.size)

    def reads(self, slots: Tensor, starts: Tensor, width: int) -> Reads:
        """What columns starts .. starts + width - 1 of the slots' sequences read. slots, starts: [R]."""
        count = window_pages(self.window, width, self.size)
        begins = torch.where(starts < self.size, 1, self.begins[slots])  # the first page itself is fed, too
        return recent_pages(self.on_device[slots], starts + width - 1, count, self.size, begins)

    def check(self, lengths: Mapping[int, int]) -> None:
        for slot, length in lengths.items():
            first = int(self.begins[slot])
            assert 1 <= first <= max(length // self.size, 1), f"slot {slot}: {length} tokens, but they begin at {first}"


def ring_pages(window: int, columns: int, size: int) -> int:
    """Pages of a slot in `Rings`. One more than a forward reads: rejected drafts and padding lie ahead of it."""
    return 1 + window_pages(window, columns, size) + 1
