"""LoRA adapters by row (arXiv:2106.09685): in a forward, each row adds its own adapter to the target's layers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Rows(threading.local):
    adapters: Tensor | None = None


_ROWS = _Rows()  # of this thread


@contextmanager
def using(adapters: Tensor | None) -> Iterator[None]:
    """The rows of forwards inside use these adapters [R]: 0 is none, n is the n-th. None: no row has one."""
    _ROWS.adapters = adapters
    try:
        yield
    finally:
        _ROWS.adapters = None


class AdaptedLinear(nn.Module):
    """A linear layer with adapters: base(x) + B A x, where A and B are those of the row.

    All adapters are computed for all rows, and zeros replace the results of other adapters. So the products have fixed
    shapes, as those of other layers, and cost as much as their ranks together, S.

    down: all A [S, in]. up: all B [out, S], scaled. mask: [N + 1, S], whether a rank belongs to an adapter; row 0 has
    none.
    """

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.base, self.down, self.up = base, _linear(down), _linear(up)
        self.mask: Tensor
        self.register_buffer("mask", mask, persistent=False)

    @property
    def weight(self) -> Any:
        """Of the base: some families ask for its dtype."""
        return getattr(self.base, "weight", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if (rows := _ROWS.adapters) is None:
            return out
        low: Tensor = self.down(x)
        by_row = low.view(len(rows), -1, low.shape[-1])  # some families join rows and columns
        added: Tensor = self.up(torch.where(self.mask[rows][:, None], by_row, 0))
        return out + added.view_as(out)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def adapters_of(model: nn.Module) -> int:
    """How many adapters the rows of a model can have."""
    return next((len(m.mask) - 1 for m in model.modules() if isinstance(m, AdaptedLinear)), 0)
