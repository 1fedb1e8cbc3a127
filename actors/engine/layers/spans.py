"""Forwards that run only some of a model's layers: they end early, or resume where another forward has ended."""

from typing import Any

from torch import Tensor, nn

from exspec.actors.engine.kv.forward import forward_of

# By class of layer: the length of the tuple that it returns, hidden states first; 0 if it returns only them.
ITEMS: dict[type[nn.Module], int] = {}


class Gate(nn.Module):
    """A layer that a forward can skip. number: the layer's index in the model."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # some families read attributes of their layers

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward, number = forward_of((*args, *kwargs.values())), self.number
        if forward is None:
            raise TypeError(f"layer {number} is not given the cache")
        if number == forward.first and number:
            hidden = forward.enter(number)
        if number + 1 == forward.first == len(forward.keys):  # nothing but the head runs
            hidden = forward.enter(forward.first)
        if not forward.first <= number < forward.last:
            items = ITEMS.get(type(self.layer), 0)
            return (hidden, *[None] * (items - 1)) if items else hidden
        out = self.layer(hidden, *args, **kwargs)
        items = ITEMS[type(self.layer)] = len(out) if isinstance(out, tuple) else 0
        forward.leave(number + 1, out[0] if items else out)
        return out


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model: its list of `num_hidden_layers` modules, or else its longest list of modules."""
    config: Any = getattr(model, "config", None)
    count = config.get_text_config().num_hidden_layers if config is not None else 0
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: (len(m) == count, len(m)))


def gate(model: nn.Module) -> None:
    """Make the model's layers skippable."""
    layers = layers_of(model)
    for number, layer in enumerate(layers):
        layers[number] = Gate(layer, number)
