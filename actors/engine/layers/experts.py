"""A mixture's experts, computed so that no bit of a token depends on how other tokens are routed.

The rounding of a matrix product may depend on its shape, and transformers' own products have as many rows as tokens
were routed to the expert. Here the number of rows of a product follows from the forward's shape alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "exspec_windows"  # under which transformers knows this implementation
FEWEST = 8  # rows of a product: with fewer, reading the weights takes all the time


def windowed_linear(x: Tensor, weight: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Multiply each row by the weights of its expert, in products of `rows` rows.

    x: [S, I], sorted by expert, S >= rows. weight: [E, O, I]. ends: [E], where each expert's rows end. Where an expert
    has fewer rows left, the product includes neighbouring rows, and their results are dropped. Returns [S, O].
    """
    out, start = x.new_zeros(len(x), weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        for first in range(start, end, rows):
            window, last = min(first, len(x) - rows), min(first + rows, end)
            product = linear(x[window : window + rows], weight[expert])
            out[first:last] = product[first - window : last - window]
        start = end
    return out


def _shaped(x: Tensor, weight: Tensor, ends: Tensor, rows: int) -> Tensor:
    del ends, rows
    return x.new_empty(len(x), weight.shape[1])


_LIBRARY = torch.library.Library("exspec", "FRAGMENT")  # an operator, so that a trace holds it as one call
_LIBRARY.define("windowed_linear(Tensor x, Tensor weight, Tensor ends, int rows) -> Tensor")
_LIBRARY.impl("windowed_linear", windowed_linear, "CPU")
_LIBRARY.impl("windowed_linear", _shaped, "Meta")


def windowed_experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run a module's experts on hidden states [T, H]. Returns [T, H].

    index, weights: [T, k], the experts of each token and their weights.
    """
    tokens, chosen = index.shape
    mean = -(-tokens * chosen // self.num_experts)
    rows = min(tokens, max(FEWEST, 1 << (mean - 1).bit_length()))
    experts, order = index.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=experts.device), right=True)

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        weight = weight.transpose(1, 2) if self.is_transposed else weight
        out: Tensor = torch.ops.exspec.windowed_linear(x.to(weight.dtype), weight, ends, rows)
        return out + getattr(self, f"{name}_bias")[experts] if self.has_bias else out

    up = product(hidden[order // chosen], "gate_up_proj" if self.has_gate else "up_proj")
    out = product(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj")
    if getattr(self, "has_post_expert_norm", False):  # absent in transformers 5.10
        out = self.post_expert_norm(out)
    out = out * weights.flatten()[order, None]
    return out[order.argsort()].view(tokens, chosen, -1).sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, windowed_experts)


def used(model: Any) -> dict[str, str]:
    """For the record: the implementation of a mixture's experts, if it is one of `implementations`."""
    name = getattr(getattr(model, "config", None), "_experts_implementation", None)
    return {"experts": name} if name in (NAME, "batched_mm") else {}


def implementations(device: torch.device) -> tuple[str | None, ...]:
    """Implementations of experts on a device, the fastest first, by name; None is transformers' own choice."""
    return (NAME,) if device.type == "cpu" else (None, "batched_mm")
