"""Attention over pages of KV in Triton: the operator in place on a GPU, see `attention.py`.

A program works on one row, one KV head, one tile of queries and one split of the row's KV. A tile has a fixed number of
queries: pairs of a column and a query head that share the KV head. A split is a fixed number of tokens, counted from
the sequence's begin. A second kernel merges a query's splits in order.

All sizes in `Tiling` follow from head size and dtype, and the same compiled code serves every R, Q and n. So the sums
of a query have the same terms in the same order in every forward: they depend on its position, its sequence and the
window. Tokens that a query does not see add exact zeros. Only a GPU can show that a row of a product on tensor cores
does not depend on its place in the tile.
"""

from math import gcd, inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exspec.actors.engine.kv.tiling import tiling

LOG2E = 1.4426950408889634
EVERYTHING = 2**30  # a window that no sequence fills
VARYING = ["window", "width", "pages", "row_stride", "head_stride", "column_stride"]  # must not give other code


def attend(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> Tensor:
    """The operator in place, see `attention.py`. The grid depends on shapes, so nothing waits for the device."""
    return _run(query, keys, values, page_table, scale, window, softcap, weighs=False)[0]


def weigh(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The operator in place and the pages' weights [R, n]."""
    result, parts = _run(query, keys, values, page_table, scale, window, softcap, weighs=True)
    rows, _, heads, _ = parts.shape
    weights = (parts / LOG2E).softmax(dim=-1).nan_to_num(0.0)  # dead rows have no part
    return result, weights.view(rows, 2, heads, page_table.shape[-1] - 2, -1).sum((1, 2, 4))


def _run(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    *,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and the log2-sum-exp2 [R, 2, Hq, parts] of the scores of the first and last live column. A part has
    gcd(page, step) tokens. Without `weighs`, they mean nothing."""
    rows, heads, width, size = query.shape
    _, page, kv_heads, _ = keys.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    query, page_table = _in_steps(query), page_table.contiguous()
    pages, group = page_table.shape[-1] - 2, heads // kv_heads
    tile = tiling(size, query.dtype)
    tiles, splits = triton.cdiv(width * group, tile.rows), triton.cdiv(pages * page, tile.split)
    mixed = query.new_empty(rows, width, heads, splits, size, dtype=torch.float32)
    sums = query.new_empty(rows, width, heads, splits, 2, dtype=torch.float32)  # the highest score, the sum of weights
    result = query.new_empty(rows, width, heads, size)
    part = gcd(page, tile.tokens) if weighs else 0
    parts = query.new_full((rows, 2, heads, pages * page // part), -inf, dtype=torch.float32) if weighs else sums
    varying = window if window > 0 else EVERYTHING, width, pages
    strides = [stride // size for stride in query.stride()[:3]]
    decay = -2 / softcap if softcap else 0.0
    shape: dict[str, Any] = {"PAGE": page, "SIZE": size, "LANES": tile.lanes, "SPLIT": tile.split}
    shape["enable_fp_fusion"] = True  # the default differs between versions
    with torch.cuda.device_of(query):
        attend_split[rows * kv_heads * tiles, splits](
            query, keys, values, page_table, mixed, sums, parts, scale * LOG2E, softcap * LOG2E, decay, *varying,
            *strides, GROUP=group, HEADS=kv_heads, CAPPED=softcap > 0, ROWS=tile.rows, TOKENS=tile.tokens, PART=part,
            num_warps=tile.warps, num_stages=tile.stages, **shape,
        )  # fmt: skip
        merge_splits[rows * width * heads,](
            mixed, sums, page_table, result, *varying, splits, HEADS=heads, num_warps=1, **shape
        )
    return result, parts


def _in_steps(query: Tensor) -> Tensor:
    """The query with strides that are multiples of its head size, as the kernel reads it. Usually they are."""
    steps = query.stride(3) == 1 and not any(stride % query.shape[3] for stride in query.stride()[:3])
    return query if steps else query.contiguous()


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def attend_split(  # type: ignore[no-untyped-def]
    query, keys, values, page_table, mixed, sums, parts, scale, softcap, decay, window, width, pages,
    row_stride, head_stride, column_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PART: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of the KV of a tile of queries: the mixed values, not yet divided, and the weights' sum and maximum.

    Scores have the factor log2(e), so weights are powers of two. They are relative to the highest score so far.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    tiles = (width * GROUP + ROWS - 1) // ROWS
    tile, head, row = program % tiles, program // tiles % HEADS, program // (tiles * HEADS)
    entry = page_table + row.to(tl.int64) * (2 + pages)
    start, end = tl.load(entry), tl.minimum(tl.load(entry + 1), pages * PAGE)

    # The tokens that any query of the tile sees in this split. Steps begin at multiples of TOKENS.
    earliest, latest = start + tile * ROWS // GROUP, start + (tile * ROWS + ROWS - 1) // GROUP
    begin = tl.maximum(tl.maximum(earliest - window + 1, 0) // TOKENS * TOKENS, split * SPLIT)
    stop = tl.minimum(tl.minimum(latest, start + width - 1) + 1, tl.minimum(end, split * SPLIT + SPLIT))
    if begin >= stop:
        return

    member = tile * ROWS + tl.arange(0, ROWS)
    column = member // GROUP
    query_head = head * GROUP + member % GROUP
    position = start + column
    live = (column < width) & (position >= 0) & (position < end)
    lane = tl.arange(0, LANES)
    there = live[:, None] & (lane < SIZE)[None, :]
    place = row.to(tl.int64) * row_stride + query_head * head_stride + column * column_stride
    asked = tl.load(query + (place * SIZE)[:, None] + lane[None, :], mask=there, other=0.0)

    highest_score = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mix = tl.full([ROWS, LANES], 0.0, tl.float32)
    for at in range(begin, stop, TOKENS):
        token = at + tl.arange(0, TOKENS)
        number = tl.load(entry + 2 + token // PAGE, mask=token < stop, other=0).to(tl.int64)
        cell = ((number * PAGE + token % PAGE) * HEADS + head) * SIZE
        stored = (token < stop)[:, None] & (lane < SIZE)[None, :]
        key = tl.load(keys + cell[:, None] + lane[None, :], mask=stored, other=0.0)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:  # softcap * tanh(score / softcap)
            shrunk = tl.exp2(tl.abs(score) * decay)
            score = tl.where(score < 0, -softcap, softcap) * ((1 - shrunk) / (1 + shrunk))
        seen = (token[None, :] <= position[:, None]) & (token[None, :] > position[:, None] - window) & live[:, None]
        score = tl.where(seen, score, float("-inf"))
        if PART > 0:
            by_part = tl.reshape(score, [ROWS, TOKENS // PART, PART])
            top = tl.max(by_part, 2)
            level = tl.where(top == float("-inf"), 0.0, top)
            summed = top + tl.log2(tl.maximum(tl.sum(tl.exp2(by_part - level[:, :, None]), 2), 1.0))
            number = at // PART + tl.arange(0, TOKENS // PART)
            count = pages * PAGE // PART
            inside = (number < count)[None, :]
            first, last = tl.maximum(-start, 0), tl.minimum(width, end - start) - 1
            to = parts + ((row.to(tl.int64) * 2) * (HEADS * GROUP) + query_head)[:, None] * count + number[None, :]
            tl.store(to, summed, mask=(live & (column == first))[:, None] & inside)
            tl.store(to + HEADS * GROUP * count, summed, mask=(live & (column == last))[:, None] & inside)
        highest = tl.maximum(highest_score, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(highest_score - base)
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(values + cell[:, None] + lane[None, :], mask=stored, other=0.0)
        mix = tl.dot(weight.to(value.dtype), value, mix * fade[:, None], input_precision="ieee")
        highest_score = highest

    place = ((row.to(tl.int64) * width + column) * (HEADS * GROUP) + query_head) * tl.num_programs(1) + split
    tl.store(sums + place * 2, highest_score, mask=live)
    tl.store(sums + place * 2 + 1, total, mask=live)
    tl.store(mixed + (place * SIZE)[:, None] + lane[None, :], mix, mask=there)


@triton.jit(do_not_specialize=[*VARYING[:3], "splits"])  # type: ignore[untyped-decorator]
def merge_splits(  # type: ignore[no-untyped-def]
    mixed, sums, page_table, result, window, width, pages, splits,
    HEADS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The result of one query from the splits that it sees, in their order; zeros if it is dead."""
    program = tl.program_id(0)
    entry = page_table + (program // (width * HEADS)).to(tl.int64) * (2 + pages)
    start, end = tl.load(entry), tl.minimum(tl.load(entry + 1), pages * PAGE)
    position = start + program // HEADS % width
    live = (position >= 0) & (position < end)
    first = tl.maximum(position - window + 1, 0) // SPLIT
    stop = tl.where(live, position // SPLIT + 1, first)
    lane = tl.arange(0, LANES)

    highest_score = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    mix = tl.full([LANES], 0.0, tl.float32)
    for split in tl.range(first, stop, num_stages=4):
        place = program.to(tl.int64) * splits + split + tl.arange(0, 1)
        score, weights = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
        more = tl.load(mixed + place * SIZE + lane, mask=lane < SIZE, other=0.0)
        highest = tl.maximum(highest_score, score)
        fade, factor = tl.exp2(highest_score - highest), tl.exp2(score - highest)
        total = total * fade + weights * factor
        mix = mix * fade + more * factor
        highest_score = highest
    mix = tl.where(live, mix / tl.where(live, total, 1.0), 0.0)
    tl.store(result + program.to(tl.int64) * SIZE + lane, mix.to(result.dtype.element_ty), mask=lane < SIZE)
