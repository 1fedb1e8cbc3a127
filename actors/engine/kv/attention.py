"""Attention over pages of KV: an operator that reads pages in place, where there is a kernel, and one that works on
gathered pages everywhere.

Per layer, keys and values are [pages, P, H, D]. Column s of a sequence lies in its page_(s // P) at offset s % P. Page
0 is a bin. `page_table`, int32 [R, 1, 1, 2 + n], has for every row [start, end, page_0 ... page_(n-1)]. Column q of the
row's query has the position p = start + q and attends to the KV columns max(0, p - window + 1) .. p, or 0 .. p if
window is 0. Columns with p < 0 or p >= end are dead: their output is finite and means nothing.

    exspec::attend_in_place(query, keys, values, page_table, scale, window, softcap) -> [R, Q, Hq, D]
    exspec::attend_gathered(query, keys, values, page_table, scale, window, softcap) -> [R, Q, Hq, D]
    exspec::weigh_in_place, exspec::weigh_gathered: the same, and the weights [R, n] of the pages

query: [R, Hq, Q, D]; query head h uses KV head h // (Hq // H). softcap: scores = softcap * tanh(scores / softcap), or
none if 0. Scores and sums are float32. The weight of a page is the attention that it gets from the row's first and last
column that are not dead, added over the query heads: a row's weights add up to 2 * Hq. Dead rows have zeros.

In place, no bit of a row's result depends on the other rows, on R, on n or on the numbers of its pages. Nor does it
depend on Q or on the column q of a position: tests show this on a CPU; on a GPU, `paged_kernel.py` says what it rests
on. Over gathered pages this only holds within one shape (R, Q, n).
"""

import importlib
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from exspec.actors.engine.faults import first_line
from exspec.actors.engine.kv.forward import running_forward
from exspec.actors.engine.native import load_kernels

T = TypeVar("T")
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float, int, float], Tensor]
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, float, int, float], tuple[Tensor, Tensor]]

UNSUPPORTED = ("s_aux", "position_bias")  # options of transformers that would change the scores


def attend_gathered(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> Tensor:
    """The operator on any device. It first copies each row's pages side by side.

    Query heads that share a KV head are folded into the query length, so that KV is not copied for each of them.
    """
    rows, heads, width, size = query.shape
    fold = heads // keys.shape[2]
    key, value = _side_by_side(keys, page_table), _side_by_side(values, page_table)  # [R, H, S, D]
    mask = PER_FORWARD.of(page_table, _mask, width, key.shape[2], fold, window, query.dtype)
    folded = query.reshape(rows, -1, fold * width, size)  # [R, H, G * Q, D]
    if softcap:
        mixed = _capped_attention(folded, key, value, mask, scale, softcap)
    else:
        mixed = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return mixed.reshape(rows, heads, width, size).transpose(1, 2).contiguous()


def weigh_gathered(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`attend_gathered` and the pages' weights."""
    mixed = attend_gathered(query, keys, values, page_table, scale, window, softcap)
    rows, heads, width, _ = query.shape
    start, end = page_table[:, 0, 0, :1], page_table[:, 0, 0, 1:2]
    first, last = (-start).clamp(0, width - 1), (end - start - 1).clamp(0, width - 1)
    columns = torch.cat([first, last], dim=1).long()  # [R, 2]
    positions = start + columns
    asked = query.gather(2, columns[:, None, :, None].expand(-1, heads, -1, query.shape[3]))  # [R, Hq, 2, D]
    key = _side_by_side(keys, page_table).repeat_interleave(heads // keys.shape[2], dim=1)  # [R, Hq, S, D]
    scores = asked.float() @ key.float().mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    numbers = torch.arange(key.shape[2], device=query.device)
    seen = (numbers <= positions[..., None]) & ((positions >= 0) & (positions < end))[..., None]
    if window > 0:
        seen &= numbers > positions[..., None] - window
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    return mixed, weights.view(rows, heads, 2, -1, keys.shape[1]).sum((1, 2, 4))


class PerForward(threading.local):
    """Values that the layers of one forward share. Each forward has its own page table, which is never overwritten. The
    table is held here, so that its identity stays unique."""

    def __init__(self) -> None:
        self.page_table: Tensor | None = None
        self.values: dict[Any, Any] = {}

    def of(self, page_table: Tensor, make: Callable[..., T], *shape: Any) -> T:
        """make(page_table, *shape), computed once per forward."""
        if page_table is not self.page_table:
            self.page_table, self.values = page_table, {}
        if (make, shape) not in self.values:
            self.values[make, shape] = make(page_table, *shape)
        return self.values[make, shape]  # type: ignore[no-any-return]


def _mask(page_table: Tensor, width: int, columns: int, fold: int, window: int, dtype: torch.dtype) -> Tensor:
    """The mask added to the scores, [R, 1, G * Q, S]: 0, or the lowest finite number."""
    positions = page_table[:, 0, 0, :1] + torch.arange(width, dtype=torch.int32, device=page_table.device)  # [R, Q]
    numbers = torch.arange(columns, dtype=torch.int32, device=page_table.device)
    hidden = numbers > positions[..., None]  # [R, Q, S]
    if window > 0:
        hidden |= numbers <= positions[..., None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=page_table.device)
    # Not infinity: everything may be hidden from a dead column.
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).repeat(1, fold, 1)[:, None]


PER_FORWARD = PerForward()  # of this thread


def _side_by_side(store: Tensor, page_table: Tensor) -> Tensor:
    """The rows' pages of a store [pages, P, H, D], as [R, H, n * P, D]."""
    table = page_table[:, 0, 0, 2:]
    pages = store.index_select(0, table.reshape(-1))
    return pages.view(len(table), -1, *store.shape[2:]).transpose(1, 2)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    scores = query.float() @ key.float().transpose(2, 3) * scale
    weights = (cap * torch.tanh(scores / cap) + mask.float()).softmax(dim=-1)
    return (weights @ value.float()).to(query.dtype)


def attend_on_gpu(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> Tensor:
    """The operator in place on CUDA."""
    from exspec.actors.engine.kv.paged_kernel import attend  # needs Triton, which torch brings on a GPU only

    return attend(query, keys, values, page_table, scale, window, softcap)


def weigh_on_gpu(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The operator in place on CUDA, and the pages' weights."""
    from exspec.actors.engine.kv.paged_kernel import weigh

    return weigh(query, keys, values, page_table, scale, window, softcap)


def _shaped(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, scale: float, window: int, softcap: float = 0.0
) -> Tensor:
    """An operator's result without values, for traces."""
    del keys, values, page_table, scale, window, softcap
    rows, heads, width, size = query.shape
    return query.new_empty(rows, width, heads, size)


def _shaped_too(query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, *options: Any) -> Any:
    weights = query.new_empty(len(query), page_table.shape[-1] - 2, dtype=torch.float32)
    return _shaped(query, keys, values, page_table, *options), weights


def _operators() -> torch.library.Library:
    library = torch.library.Library("exspec", "DEF")
    arguments = (
        "Tensor query, Tensor keys, Tensor values, Tensor page_table, float scale, int window, float softcap=0.0"
    )
    for place in ("in_place", "gathered"):
        library.define(f"attend_{place}({arguments}) -> Tensor")
        library.impl(f"attend_{place}", _shaped, "Meta")
        library.define(f"weigh_{place}({arguments}) -> (Tensor, Tensor)")
        library.impl(f"weigh_{place}", _shaped_too, "Meta")
    library.impl("attend_in_place", attend_on_gpu, "CUDA")
    library.impl("weigh_in_place", weigh_on_gpu, "CUDA")
    for device in ("CPU", "CUDA"):
        library.impl("attend_gathered", attend_gathered, device)
        library.impl("weigh_gathered", weigh_gathered, device)
    return library


_LIBRARY = _operators()  # the operators exist as long as this object


@lru_cache
def trial(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    weighs: bool = False,
) -> str | None:
    """The reason why attention in place cannot be used here, in one line; None if it can. weighs: try the weights of
    pages instead.

    On a CPU, the first trial on a machine compiles the kernels, which needs a C++ compiler and some seconds.
    """
    try:
        _prepare(device)
        for width, window, softcap, longest in _cases(page_size):
            example = _example(device, dtype, heads, kv_heads, head_size, page_size, width, longest)
            options = head_size**-0.5, window, softcap
            result = torch.ops.exspec.attend_in_place.default(*example, *options)
            if weighs:
                expected, over_copies = torch.ops.exspec.weigh_gathered.default(*example, *options)
                weighed, weights = torch.ops.exspec.weigh_in_place.default(*example, *options)
                if not weighed.equal(result):
                    return "attention in place gives other bits if it weighs pages"
                if (distance := (weights - over_copies).abs().max().item()) > heads / 32:
                    return f"weights of pages are {distance:.1e} away from those over copies"
            else:
                expected = torch.ops.exspec.attend_gathered.default(*example, *options)
            if reason := _difference(result, expected, example[-1]):
                return reason
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # compilers, drivers and kernels fail in many ways, and all of them are reasons
        return first_line(fault)
    return None


def _prepare(device: torch.device) -> None:
    if device.type == "cpu":
        load_kernels()
    elif device.type == "cuda":
        importlib.import_module("exspec.actors.engine.kv.paged_kernel")


def _cases(page_size: int) -> list[tuple[int, int, float, int]]:
    """Columns, window, soft-cap and tokens of the longest row. The long rows have several splits on a GPU."""
    short, long = 3 * page_size, 1100
    return [
        (1, 0, 0.0, short),
        (6, 0, 0.0, short),
        (6, page_size + 1, 0.0, short),
        (6, 0, 2.0, short),
        (6, 0, 0.0, long),
        (40, 600, 0.0, long),
    ]


def _example(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    width: int,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A few ragged rows of random numbers: query, keys, values, page_table. One row and some columns are dead."""
    random = torch.Generator().manual_seed(width)
    pages = -(-(longest + width) // page_size)
    starts = [0, 1, page_size - 1, page_size, pages * page_size - width, pages * page_size - 1, 0, 2]
    ends = [min(start + width, pages * page_size) for start in starts[:-2]] + [0, 3]
    table = 1 + torch.randperm(len(starts) * pages, generator=random).view(len(starts), pages)
    page_table = torch.cat([torch.tensor([starts, ends]).T, table], dim=1)[:, None, None].int()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    store = (len(starts) * pages + 1, page_size, kv_heads, head_size)
    query = normal(len(starts), width, heads, head_size).transpose(1, 2)
    return query, normal(*store), normal(*store), page_table.to(device)


def _difference(result: Tensor, expected: Tensor, page_table: Tensor) -> str | None:
    positions = page_table[:, 0, 0, :1] + torch.arange(result.shape[1], device=page_table.device)
    live = (positions >= 0) & (positions < page_table[:, 0, 0, 1:2])
    if not result.isfinite().all():
        return "attention in place gives NaN or infinity"
    distance = (result - expected)[live].abs().max().item()
    bound = 16 * torch.finfo(result.dtype).eps
    return None if distance <= bound else f"attention in place is {distance:.1e} away from attention over copies"


def paged_attention(attend: Attend, weigh: Weigh | None = None) -> Callable[..., tuple[Tensor, None]]:
    """Wrap operators as transformers calls attention: key and value are the stores [pages, P, H, D] that the cache's
    `update` returned, and the mask is `page_table`. The result is [R, Q, Hq, D]. weigh: runs if the forward asks for
    the pages' weights."""

    def forward(
        _: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        dropout: float = 0.0,  # noqa: ARG001
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Raises TypeError for an option that would change the scores in a way that the operators do not support."""
        if unknown := [name for name in UNSUPPORTED if options.get(name) is not None]:
            raise TypeError(f"attention with {unknown[0]} is not supported")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        here = running_forward()
        table = here.tables[here.layer] if here and here.tables else attention_mask
        arguments = query, key, value, table, scale, sliding_window or 0, softcap or 0.0
        if weigh is None or here is None or here.weights is None:
            return attend(*arguments), None
        mixed, weights = weigh(*arguments)
        here.weights.append(weights)
        return mixed, None

    return forward


_OPS = torch.ops.exspec
AttentionInterface.register(
    "exspec_in_place", paged_attention(_OPS.attend_in_place.default, _OPS.weigh_in_place.default)
)
AttentionInterface.register(
    "exspec_gathered", paged_attention(_OPS.attend_gathered.default, _OPS.weigh_gathered.default)
)
