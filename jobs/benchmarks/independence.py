"""Whether the bits of a row's logits depend on anything but the row's own tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.methods import recorder_for


class RowIndependence:
    """Compares verify forwards of one shape, which differ only in what must not change a row's logits.

    The KV holds twice as many sequences of random tokens as a forward has rows: `rows`, and `others` to put in their
    place.
    """

    def __init__(self, target: PreTrainedModel, config: EngineConfig) -> None:
        self.config, self.count = config, config.batch_size
        twice = replace(config.plain(), batch_size=2 * self.count, window=2 * self.count, pages=None)
        self.engine = Engine(target, None, twice)
        self.device = self.engine.device
        self.forward = self.engine.target.forward
        self.recorded = recorder_for(self.device, config).wrap(self.forward)
        self.random = torch.Generator().manual_seed(0)
        self.rows, self.others = self._filled(0), self._filled(self.count)

    def _filled(self, slot: int) -> Batch:
        """A forward's rows, from `slot` on, and KV of everything before them."""
        chunk, capacity = self.config.prefill_columns, self.engine.config.capacity
        for number in range(slot, slot + self.count):
            begun = self.engine.pool.store.begin(number, [], 0, capacity, 0)
            assert begun is not None, "there are pages for every slot"
        slots = torch.arange(slot, slot + self.count, device=self.device)
        for start in range(0, capacity - chunk + 1, chunk):
            self.engine.target.fill(Batch(slots, self._tokens(chunk), torch.full_like(slots, start), capacity))
        last = capacity // chunk * chunk - 2 * self.config.width
        starts = torch.randint(self.config.width, last + 1, (self.count,), generator=self.random).to(self.device)
        return Batch(slots, self._tokens(self.config.width), starts, capacity)

    def _tokens(self, width: int) -> Tensor:
        shape = (self.count, width)
        return torch.randint(1, self.engine.vocabulary, shape, generator=self.random).to(self.device)

    def logits(self, rows: Batch, forward: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """[R, Q, V]."""
        return (forward or self.forward)(rows).clone()

    def compare(self) -> dict[str, Any]:
        """For each change: how many rows kept every bit, and the largest difference of a logit."""
        base = self.logits(self.rows)
        order = torch.randperm(self.count, generator=self.random).to(self.device)
        backward = torch.arange(self.count - 1, -1, -1, device=self.device)
        slots, tokens, starts, kv_columns = self.rows
        nobody = torch.full_like(slots, self.engine.pool.slots)
        dead = Batch(nobody, torch.zeros_like(tokens), torch.zeros_like(starts), kv_columns)
        changed = {
            "again": _compared(base, self.logits(self.rows)),
            "recorded": _compared(base, self.logits(self.rows, self.recorded)),
            "permuted": _compared(base[order], self.logits(_ordered(self.rows, order))),
            "reversed": _compared(base[backward], self.logits(_ordered(self.rows, backward))),
            "others_changed": _compared(base, self._beside(self.others)),
            "others_dead": _compared(base, self._beside(dead)),
            "later_tokens_changed": self._later_tokens(base),
            "column": self._column(base),
        }
        return {"equal": all(c["equal"] == c["rows"] for c in changed.values()), "changed": changed}

    def _beside(self, others: Batch) -> Tensor:
        """Every row's logits [R, Q, V], with every second row replaced: first the odd rows, then the even ones."""
        even = torch.arange(self.count, device=self.device) % 2 == 0
        first, second = (self.logits(_either(kept, self.rows, others)) for kept in (even, ~even))
        return torch.where(even[:, None, None], first, second)

    def _later_tokens(self, base: Tensor) -> dict[str, Any]:
        """Change the tokens behind a column: they could be drafts that are rejected."""
        kept = (self.config.width + 1) // 2
        tokens = torch.cat([self.rows.tokens[:, :kept], self.others.tokens[:, kept:]], dim=1)
        return _compared(base[:, :kept], self.logits(self.rows._replace(tokens=tokens))[:, :kept])

    def _column(self, base: Tensor) -> dict[str, Any]:
        """Feed the same positions in other columns, as a round does that begins later."""
        moved = self.config.width // 2
        self.logits(self.rows)  # write the KV of the columns that the moved ones attend
        tokens = torch.cat([self.rows.tokens[:, moved:], self.others.tokens[:, :moved]], dim=1)
        later = self.rows._replace(tokens=tokens).shifted(moved)
        return _compared(base[:, moved:], self.logits(later)[:, : self.config.width - moved])


def _ordered(rows: Batch, order: Tensor) -> Batch:
    return Batch(rows.slots[order], rows.tokens[order], rows.starts[order], rows.kv_columns)


def _either(kept: Tensor, rows: Batch, others: Batch) -> Batch:
    """The rows where `kept` [R] is true, and the others elsewhere."""
    slots, starts = (torch.where(kept, a, b) for a, b in ((rows.slots, others.slots), (rows.starts, others.starts)))
    return Batch(slots, torch.where(kept[:, None], rows.tokens, others.tokens), starts, rows.kv_columns)


def _compared(expected: Tensor, found: Tensor) -> dict[str, Any]:
    """Compare logits [R, C, V] row by row."""
    equal = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
    return {
        "rows": len(equal),
        "equal": sum(equal),
        "same_tokens": int((expected.argmax(-1) == found.argmax(-1)).all(dim=1).sum()),
        "largest_difference": float((expected.float() - found.float()).abs().max()),
        "first_row": None if all(equal) else equal.index(False),
    }
