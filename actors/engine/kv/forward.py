"""One forward over pages of KV, as the model's layers see it: it replaces transformers' cache."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from exspec.actors.engine.layers.cuts import cut


class Filled(Exception):  # noqa: N818 -- not an error
    """Ends a fill that has written all its keys and values."""


class Left(Exception):  # noqa: N818 -- not an error
    """Ends a forward that stops after its last layer. hidden: the hidden states [R, Q, D]."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Forward:
    """The cache that every layer receives during one forward.

    keys, values: by layer, [N, P, H, D]. states: remembered hidden states, [N, P, D], by the number of layers that they
    have passed. write: [R * Q], indices of the tokens in the stores that the forward writes. shape: (R, Q). first,
    last: layers first .. last - 1 run. fills: the forward only computes keys and values, and ends once it has
    written them. tables: the page table of each layer, if they differ. weights: collects those of the pages [R, n] by
    layer, if they are asked for. entering: the hidden states [R, Q, D] before `first`, if they are not remembered.
    stops: it ends after its last layer and raises Left.
    """

    is_initialized = False  # some families read it

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
        tables: Sequence[Tensor] = (),
        weights: list[Tensor] | None = None,
        entering: Tensor | None = None,
        stops: bool = False,
    ) -> None:
        self.keys, self.values, self.states = keys, values, states
        self.write, self.shape = write, shape
        self.first, self.last, self.fills = first, last, fills
        self.tables, self.weights = tables, weights
        self.entering, self.stops = entering, stops
        self.layer = first  # whose attention comes next

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: [N, P, H, D] each."""
        return self.keys[layer], self.values[layer]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention of every layer: store key and value [R, H, Q, D], return all pages [N, P, H, D]."""
        self.layer = layer_idx
        for store, new in zip(self.stores(layer_idx), (key, value), strict=True):
            put(store, new, self.write)
        cut(key)
        if self.fills and layer_idx + 1 == self.last and self.last not in self.states:
            raise Filled
        return self.stores(layer_idx)

    def enter(self, layer: int) -> Tensor:
        """The hidden states [R, Q, D] of the forward's tokens after `layer` layers."""
        if self.entering is not None:
            return self.entering
        return self.states[layer].flatten(0, 1)[self.write].view(*self.shape, -1)

    def leave(self, layer: int, hidden: Tensor) -> None:
        """Remember hidden states [R, Q, D] after `layer` layers. Raises Filled after the last layer of a fill, and
        Left if the forward stops there."""
        if layer in self.states:
            self.states[layer].flatten(0, 1).index_put_((self.write,), hidden.flatten(0, 1))
        if self.fills and layer == self.last:
            raise Filled
        if self.stops and layer == self.last:
            raise Left(hidden)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """0: some families ask, but the positions are passed to them."""
        return 0


class _Running(threading.local):
    forward: Forward | None = None


_RUNNING = _Running()  # of this thread


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """The forward that the attention of a model inside belongs to: transformers does not pass it on."""
    _RUNNING.forward = forward
    try:
        yield
    finally:
        _RUNNING.forward = None


def running_forward() -> Forward | None:
    """The forward that the caller is part of."""
    return _RUNNING.forward


def forward_of(arguments: Iterable[Any]) -> Forward | None:
    """The `Forward` that a layer receives as its cache; None if it receives none."""
    return next((x for x in arguments if isinstance(x, Forward)), None)


def put(store: Tensor, new: Tensor, write: Tensor) -> Tensor:
    """Write keys or values [R, H, Q, D] at `write` [R * Q] of the store's tokens; returns the store [N, P, H, D]."""
    flat = new.transpose(1, 2).reshape(-1, *store.shape[2:])
    store.view(-1, *store.shape[2:]).index_put_((write,), flat)
    return store
