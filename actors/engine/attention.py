"""Stand-in."""
from typing import Any
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IN_PLACE, GATHERED = "exspec_in_place", "exspec_gathered"


def gathered(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
    places = attention_mask[:, 0, 0]
    R, Hq, Q, D = query.shape
    P, H = key.shape[1:3]
    table = places[:, 2:].long()
    k = key[table].flatten(1, 2).transpose(1, 2)
    v = value[table].flatten(1, 2).transpose(1, 2)
    S = k.shape[2]
    pos = places[:, :1] + torch.arange(Q)
    pos = torch.minimum(pos.clamp(min=0), (places[:, 1:2] - 1).clamp(min=0))
    mask = torch.arange(S) <= pos[..., None]
    folded = query.reshape(R, H, -1, D)
    m = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)[:, None].repeat(1, 1, Hq // H, 1)
    mixed = scaled_dot_product_attention(folded, k, v, attn_mask=m, scale=scaling)
    return mixed.reshape(R, Hq, Q, D).transpose(1, 2).contiguous(), None


def trial(*a: Any) -> str | None:
    return "no"


AttentionInterface.register(GATHERED, gathered)
