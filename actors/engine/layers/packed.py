"""Weights as a second copy in a layout that makes products fast: panels of float32 where the engine's own kernel works,
and oneDNN's blocks elsewhere.

    exspec::panels(weight) -> [ceil(out / PANEL), in, PANEL], from a float32 weight [out, in]
    exspec::packed_product(x, weight, width, bias) -> [R, out]: x @ weight.T + bias, for x [R, in] and width = out

With panels, no bit of a row depends on the other rows or on R.
"""

from functools import lru_cache
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from exspec.actors.engine.faults import first_line, warn_once
from exspec.actors.engine.native import load_kernels

_PACKED: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()  # by address and shape
BOUND = 1e-4  # between products of 100 random numbers each


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights can be packed for the device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported()


def is_quantized(config: PretrainedConfig) -> bool:
    """Whether a model's weights are quantized."""
    return getattr(config, "quantization_config", None) is not None


def quantization(config: PretrainedConfig) -> str:
    """The name of the format of quantized weights."""
    found: Any = config.quantization_config
    given = found if isinstance(found, dict) else vars(found)
    method = given.get("quant_method")
    return str(getattr(method, "value", method))


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer with a plain matrix. Quantized ones have other weights or forwards."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return not hasattr(module.weight, "__tensor_flatten__")  # tensors of torchao consist of others


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the faster layout. Everything in this process that packs a weight shares the copy."""
    key = (weight.data_ptr(), *weight.shape, *weight.stride())
    if (packed := _PACKED.get(key)) is None:
        own = weight.dtype == torch.float32
        if own and (reason := trial()) is not None:
            warn_once(f"packed weights are in oneDNN's layout: {reason}")
            own = False
        layout = torch.ops.exspec.panels if own else torch.ops.mkldnn._reorder_linear_weight
        _PACKED[key] = packed = layout(weight.detach())
    return packed


@lru_cache
def trial() -> str | None:
    """The reason why the engine's own kernel cannot be used here, in one line; None if it can."""
    try:
        load_kernels()
        random = torch.Generator().manual_seed(0)
        for rows, width in ((1, 70), (5, 33), (64, 128)):
            x, weight, bias = (torch.randn(*s, generator=random) for s in ((rows, 100), (width, 100), (width,)))
            found = packed_product(x, torch.ops.exspec.panels(weight), width, bias)
            distance = (found - (x @ weight.T + bias)).abs().max().item()
            if not distance <= BOUND:
                return f"a product of packed weights is {distance:.1e} away from the usual one"
    except Exception as fault:  # compilers and kernels fail in many ways, and all of them are reasons
        return first_line(fault)
    return None


def _blocked(x: Tensor, weight: Tensor, width: int, bias: Tensor | None = None) -> Tensor:
    del width
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _shaped(x: Tensor, weight: Tensor, width: int, bias: Tensor | None = None) -> Tensor:
    del weight, bias
    return x.new_empty(*x.shape[:-1], width)


_LIBRARY = torch.library.Library("exspec", "FRAGMENT")
_LIBRARY.define("panels(Tensor weight) -> Tensor")
_LIBRARY.define("packed_product(Tensor x, Tensor weight, int width, Tensor? bias=None) -> Tensor")
_LIBRARY.impl("packed_product", _blocked, "MkldnnCPU")  # the layout of the weight decides
_LIBRARY.impl("packed_product", _shaped, "Meta")
packed_product = torch.ops.exspec.packed_product.default


class PackedLinear(nn.Module):
    """A linear layer for inference with a packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.width = pack(linear.weight), linear.bias, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = packed_product(x.reshape(-1, x.shape[-1]), self.weight, self.width, self.bias)
        return found.view(*x.shape[:-1], self.width)
