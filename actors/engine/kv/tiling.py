"""The sizes that the Triton kernel works in. They follow from head size and dtype alone, so that the order of a query's
sums does, too."""

from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """lanes: the head size, padded for matrix products. rows: queries of a tile. tokens: of one step of the loop over
    KV. split: tokens of a split. warps: of a program. stages: steps whose loads overlap."""

    lanes: int
    rows: int
    tokens: int
    split: int
    warps: int
    stages: int


def tiling(size: int, dtype: torch.dtype) -> Tiling:
    """A step has 16 KiB of keys and a split 128 KiB, within bounds. Chosen so that no register spills: in float32,
    products do not run on tensor cores and take more registers."""
    lanes = max(16, 1 << (size - 1).bit_length())
    width = lanes * dtype.itemsize
    rows, warps, stages = (16, 8, 2) if dtype.itemsize > 2 else (32, 4, 3)
    return Tiling(lanes, rows, min(max(2**14 // width, 16), 128), min(2**17 // width, 512), warps, stages)
