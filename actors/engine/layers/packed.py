"""Weights in oneDNN's blocked layout, as a second copy: products are faster on some CPUs, and slower on others."""

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_PACKED: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()  # by address and shape


def packs(device: torch.device) -> bool:
    """Whether weights can be packed for the device."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout. Everything in this process that packs a weight shares the copy."""
    key = (weight.data_ptr(), *weight.shape, *weight.stride())
    if (packed := _PACKED.get(key)) is None:
        _PACKED[key] = packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _shaped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], len(weight))


_LIBRARY = torch.library.Library("exspec", "FRAGMENT")
_LIBRARY.define("packed_product(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.impl("packed_product", _product, "MkldnnCPU")  # the layout of the weight decides
_LIBRARY.impl("packed_product", _shaped, "Meta")
packed_product = torch.ops.exspec.packed_product.default  # x @ weight.T + bias, with a packed weight


class PackedLinear(nn.Module):
    """A linear layer for inference with a packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = pack(linear.weight), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias)
