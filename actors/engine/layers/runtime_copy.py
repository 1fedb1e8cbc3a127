"""The runtime copy of a model: the caller's weights, the engine's attention, and optionally packed linear layers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def runtime_copy(model: PreTrainedModel, attention: str | None, packed: bool) -> PreTrainedModel:
    """A copy of the modules that shares the model's weights. The caller's model stays unchanged.

    attention: name of the attention implementation; None keeps the model's own.
    packed: hold the weights of linear layers a second time, in oneDNN's layout. For the shapes of a round this is up to
        3 times as fast as the plain layout on some CPUs, and slower on others.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    runtime = copy.deepcopy(model, shared)
    if attention is not None:
        runtime.config._attn_implementation = attention
    if packed:
        for module in list(runtime.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
    return runtime


def packs(device: torch.device) -> bool:
    """Whether linear layers can be packed for the device."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """A linear layer for inference with its weight [out, in] in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
