"""A span of a model's layers: forwards that leave early, and such that go on where another has left."""

from typing import Any, Protocol

from torch import Tensor, nn


class Span(Protocol):
    """The forward at hand: it runs the layers `first` to `last`, the latter left out."""

    first: int
    last: int

    def enter(self, layer: int) -> Tensor:
        """The hidden states [R, Q, D] that have left so many layers."""
        ...

    def leave(self, layer: int, hidden: Tensor) -> None:
        """The hidden states have left so many layers. May end the forward by an exception."""
        ...


class Gate(nn.Module):
    """A layer that is passed by where it is not in the span. `place` is its number."""

    def __init__(self, layer: nn.Module, place: int, span: Span) -> None:
        super().__init__()
        self.layer, self.place, self.span = layer, place, span
        self.items = 0  # that the layer returns, the hidden states being the first of them; 0: those alone

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # families ask their layers for what they are

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        span, place = self.span, self.place
        if place == span.first and place:
            hidden = span.enter(place)
        if not span.first <= place < span.last:
            return (hidden, *[None] * (self.items - 1)) if self.items else hidden
        out = self.layer(hidden, *args, **kwargs)
        self.items = len(out) if isinstance(out, tuple) else 0
        span.leave(place + 1, out[0] if self.items else out)
        return out


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model, which are the longest list of modules in it."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def gate(model: nn.Module, span: Span) -> None:
    """Let the layers of a model be passed by as the span says."""
    layers = layers_of(model)
    for place, layer in enumerate(layers):
        layers[place] = Gate(layer, place, span)
