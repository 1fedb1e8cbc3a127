"""One forward over pages of KV, as the layers of a model see it: it stands in the place of transformers' cache."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Filled(Exception):  # noqa: N818 -- it is no error
    """A forward has written all keys and values that it runs for."""


class Forward:
    """What a layer is handed as its cache during one forward.

    keys, values: by layer, [N, P, H, D]. states: hidden states that are remembered, [N, P, D], by the number of layers
    that they have left. write: [R * Q], the tokens of the stores that the forward writes. shape: (R, Q). first, last:
    the layers that run, the latter left out. fills: the forward is for keys and values alone, and ends once it has
    written them.
    """

    is_initialized = False  # True would make transformers ask for more of its own cache

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        states: Mapping[int, Tensor],
        write: Tensor,
        shape: torch.Size,
        first: int,
        last: int,
        fills: bool,
    ) -> None:
        self.keys, self.values, self.states = keys, values, states
        self.write, self.shape = write, shape
        self.first, self.last, self.fills = first, last, fills

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: [N, P, H, D] each."""
        return self.keys[layer], self.values[layer]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention of every layer: store key and value [R, H, Q, D], return all pages [N, P, H, D]."""
        for store, new in zip(self.stores(layer_idx), (key, value), strict=True):
            put(store, new, self.write)
        if self.fills_last(layer_idx) and self.last not in self.states:
            raise Filled
        return self.stores(layer_idx)

    def fills_last(self, layer: int) -> bool:
        """Whether this is the last layer that the forward fills. That layer always runs uncompiled, so that its keys
        and values are the same bit for bit whether the forward ends there or in the middle of the layer."""
        return self.fills and layer + 1 == self.last

    def enter(self, layer: int) -> Tensor:
        """The hidden states [R, Q, D] with which the forward's tokens have left so many layers."""
        return self.states[layer].flatten(0, 1)[self.write].view(*self.shape, -1)

    def leave(self, layer: int, hidden: Tensor) -> None:
        """The hidden states [R, Q, D] have left so many layers. Raises Filled after the last layer of a fill."""
        if layer in self.states:
            self.states[layer].flatten(0, 1).index_put_((self.write,), hidden.flatten(0, 1))
        if self.fills and layer == self.last:
            raise Filled

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Families that count positions from here are given them."""
        return 0


class Traced:
    """What a layer sees of a forward while it is traced: the layer's own keys and values, and where to write."""

    def __init__(self, keys: Tensor, values: Tensor, write: Tensor) -> None:
        self.keys, self.values, self.write = keys, values, write

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return put(self.keys, key, self.write), put(self.values, value, self.write)


def forward_of(arguments: Iterable[Any]) -> Forward | None:
    """The forward that a layer is called in: it is among the layer's arguments, as the cache."""
    return next((x for x in arguments if isinstance(x, Forward)), None)


def put(store: Tensor, new: Tensor, write: Tensor) -> Tensor:
    """Write keys or values [R, H, Q, D] at `write` [R * Q] of the store's tokens; returns the store [N, P, H, D]."""
    flat = new.transpose(1, 2).reshape(-1, *store.shape[2:])
    store.view(-1, *store.shape[2:]).index_put_((write,), flat)
    return store
