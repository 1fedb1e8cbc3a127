"""A model as the engine runs it: the caller's weights, our attention, and on a CPU linear layers packed for oneDNN."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel


def twin(model: PreTrainedModel, grouped: bool) -> PreTrainedModel:
    """A copy of the modules that shares the model's weights. The caller's model stays as it is, for other uses.

    grouped: with `grouped_attention` instead of the attention it was loaded with.

    On a CPU with oneDNN the weights of linear layers are held a second time, in the layout that its kernels want: that
    is 1.4 to 3 times the speed of the plain layout for the shapes of a round.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    if grouped:
        made.config._attn_implementation = "exspec_grouped"
    if packs(model):
        for module in list(made.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
    return made


def packs(model: PreTrainedModel) -> bool:
    """Whether the engine holds the model's linear weights a second time."""
    return model.device.type == "cpu" and torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """A linear layer for inference, its weight [out, in] in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def grouped_attention(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,  # noqa: ARG001
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [R, G * H, Q, D], key and value [R, H, S, D], mask [R, 1, G * Q, S].

    Query heads that share a KV head are folded into the query length, so that no KV is copied for each of them.
    """
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]:
        raise TypeError(f"attention with {unknown[0]} is not supported")
    rows, heads, width, size = query.shape
    folded = query.reshape(rows, key.shape[1], -1, size)  # [R, H, G * Q, D]
    mixed = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register("exspec_grouped", grouped_attention)
