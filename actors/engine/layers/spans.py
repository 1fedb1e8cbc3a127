"""Forwards that run a part of a model's layers: they end early, or begin where another forward has ended."""

from typing import Any

from torch import Tensor, nn

from exspec.actors.engine.kv.forward import forward_of

# Items that layers of a class return, the hidden states being the first of them; 0: those alone.
ITEMS: dict[type[nn.Module], int] = {}


class Gate(nn.Module):
    """A layer that a forward skips unless it runs it. `place` is the layer's number."""

    def __init__(self, layer: nn.Module, place: int) -> None:
        super().__init__()
        self.layer, self.place = layer, place

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # some families read attributes of their layers

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward, place = forward_of((*args, *kwargs.values())), self.place
        if forward is None:
            raise TypeError(f"layer {place} is not given the cache")
        if place == forward.first and place:
            hidden = forward.enter(place)
        if not forward.first <= place < forward.last:
            items = ITEMS.get(type(self.layer), 0)
            return (hidden, *[None] * (items - 1)) if items else hidden
        out = self.layer(hidden, *args, **kwargs)
        items = ITEMS[type(self.layer)] = len(out) if isinstance(out, tuple) else 0
        forward.leave(place + 1, out[0] if items else out)
        return out


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model: a list of as many modules as its config tells, or the longest one."""
    config: Any = getattr(model, "config", None)
    count = config.get_text_config().num_hidden_layers if config is not None else 0
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: (len(m) == count, len(m)))


def gate(model: nn.Module) -> None:
    """Let forwards skip layers of the model."""
    layers = layers_of(model)
    for place, layer in enumerate(layers):
        layers[place] = Gate(layer, place)
