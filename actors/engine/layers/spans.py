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


# Items that layers of a class return, the hidden states being the first of them; 0: those alone.
ITEMS: dict[type[nn.Module], int] = {}


class Gate(nn.Module):
    """A layer that is passed by where it is not in the span. `place` is its number."""

    def __init__(self, layer: nn.Module, place: int, span: Span) -> None:
        super().__init__()
        self.layer, self.place, self.span = layer, place, span

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
            items = ITEMS.get(type(self.layer), 0)
            return (hidden, *[None] * (items - 1)) if items else hidden
        out = self.layer(hidden, *args, **kwargs)
        items = ITEMS[type(self.layer)] = len(out) if isinstance(out, tuple) else 0
        span.leave(place + 1, out[0] if items else out)
        return out


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model: a list of as many modules as its config tells, or the longest one."""
    config: Any = getattr(model, "config", None)
    count = config.get_text_config().num_hidden_layers if config is not None else 0
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: (len(m) == count, len(m)))


def gate(model: nn.Module, span: Span) -> None:
    """Let the layers of a model be passed by as the span says."""
    layers = layers_of(model)
    for place, layer in enumerate(layers):
        layers[place] = Gate(layer, place, span)
