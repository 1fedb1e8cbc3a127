"""The sizes that the Triton kernel works in. They follow from head size and dtype alone, so that the order of a query's
sums does, too."""

from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """lanes: the head size, padded for matrix products. rows: queries of a tile. tokens: of one step of the loop over
    KV. split: tokens of a split. warps: of a program."""

    lanes: int
    rows: int
    tokens: int
    split: int
    warps: int


def tiling(size: int, dtype: torch.dtype) -> Tiling:
    """A step has 16 KiB of keys and a split 128 KiB, within bounds. Chosen so that no register spills: in float32,
    products do not run on tensor cores and take more registers."""
    lanes, single = max(16, 1 << (size - 1).bit_length()), dtype.itemsize > 2
    tokens, split = 2**14 // (lanes * dtype.itemsize), 2**17 // (lanes * dtype.itemsize)
    return Tiling(lanes, 16 if single else 32, min(max(tokens, 16), 128), min(split, 512), 8 if single else 4)
