"""Log-probabilities of chosen tokens, and of the likeliest ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from exspec.actors.engine.layers.cuts import cut


class Logprobs(NamedTuple):
    """ids: int64 [R, Q, 1 + N], of the chosen token and of the N likeliest by the target. values: float32
    [R, Q, 1 + N, 2], their log-probabilities by the target and in the distribution that tokens are drawn from. ranks:
    int64 [R, Q], how many tokens the target thinks likelier than the chosen one."""

    ids: Tensor
    values: Tensor
    ranks: Tensor


def logprobs(logits: Tensor, scaled: Tensor, chosen: Tensor, likeliest: int) -> Logprobs:
    """logits, scaled: [R, Q, V], the target's and those of the distribution; they may be one tensor. chosen: [R, Q]."""
    ids = chosen[..., None]
    ranks = (logits > logits.gather(2, ids)).sum(dim=-1)
    cut(logits, compiles=False)  # sums have the same bits whatever is compiled
    if likeliest:
        ids = torch.cat([ids, logits.topk(min(likeliest, logits.shape[-1])).indices], dim=-1)
    found = _of(logits, ids)
    return Logprobs(ids, torch.stack([found, found if scaled is logits else _of(scaled, ids)], dim=-1), ranks)


def _of(logits: Tensor, ids: Tensor) -> Tensor:
    """Of tokens [R, Q, M]."""
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(2, ids)
