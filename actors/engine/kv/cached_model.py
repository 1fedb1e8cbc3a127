"""A causal language model with the KV of many sequences. Only this file and `forward.py` use transformers' cache and
mask interfaces.

`forward` takes a `Batch`, and overwrites what a sequence has cached from its start in the batch on. So a rollback is a
smaller start. `check` raises AssertionError if the cached KV cannot be right.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import COMPILED, KernelsName
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.forward import Filled, Forward, running
from exspec.actors.engine.kv.pages import BIN, Pages
from exspec.actors.engine.kv.window import Reads, Rings, chosen_pages, recent_pages
from exspec.actors.engine.layers.adapters import using
from exspec.actors.engine.layers.cuts import cut, traced
from exspec.actors.engine.layers.pieces import cut_layers
from exspec.actors.engine.layers.products import join_layers
from exspec.actors.engine.layers.runtime_copy import runtime_copy
from exspec.actors.engine.layers.spans import gate

IN_PLACE, GATHERED = "exspec_in_place", "exspec_gathered"  # as `attention.py` registers them


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head size) of a model that holds keys and values of every token."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_size


def context_length(config: PretrainedConfig) -> int:
    """The most tokens of a sequence, prompt and completion together."""
    return int(config.get_text_config().max_position_embeddings)


class Located(NamedTuple):
    """Where a forward's tokens are. positions: [R, Q]. page_table, write: as `locate` returns them. adapters: of the
    rows [R], if they have any."""

    positions: Tensor
    page_table: Tensor
    write: Tensor
    adapters: Tensor | None


class PagedModel:
    """KV in pages: `pages` gives the location of token i of a sequence; tokens never move.

    Per layer, K and V are [pages + 1, P, H, D], allocated once. Dead rows and columns write to the first page, the
    bin, so that a forward has no branch for them.

    attention: name of the operator that reads the pages, see `attention.py`. Gathered, a forward reads whole pages up
    to `kv_columns`; in place, it reads the KV that a row has. kernels: see `EngineConfig`. part, device: the layers
    that have KV, and where; default: all, on the model's device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pages: Pages | Rings,
        attention: str,
        kernels: KernelsName = "eager",
        part: range | None = None,
        device: torch.device | None = None,
    ) -> None:
        layers, heads, size = kv_shape(model.config)
        shape = (pages.pages + 1, pages.size, heads, size)
        sizes = [shape if part is None or layer in part else (0,) for layer in range(layers)]
        self.model, self.pages = runtime_copy(model, attention, kernels == "packed"), pages
        self.gathers = attention == GATHERED
        if (head := self.model.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(_contiguous)
        # Zeros, not empty: a masked column is multiplied by zero, and uninitialised memory may hold NaN.
        self.keys = [torch.zeros(size, dtype=model.dtype, device=device or model.device) for size in sizes]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.states: dict[int, Tensor] = {}  # hidden states by number of layers passed: [pages + 1, P, D]
        self.weights: Tensor | None = None  # of the pages that the slots' last whole forward read: [L, W + 1, n]
        self.last_position = context_length(model.config) - 1
        self.adapters: Tensor | None = None  # by slot [W + 1], if rows have adapters
        self.gated = False  # whether forwards can skip layers
        if kernels in COMPILED:
            join_layers(self.model)
            cut_layers(self.model)

    def remember(self, layers: Iterable[int]) -> None:
        """From now on keep the hidden states after each of these layers, counted from 1, in pages like keys and
        values. A forward may then end after any layer, and begin after one of these."""
        self.use_gates()
        for layer in layers:
            size = (*self.keys[0].shape[:2], self.model.config.get_text_config().hidden_size)
            if layer not in self.states:
                self.states[layer] = torch.zeros(size, dtype=self.keys[0].dtype, device=self.keys[0].device)

    def use_gates(self) -> None:
        """From now on forwards can skip layers."""
        if not self.gated:
            gate(self.model)
            self.gated = True

    def weigh(self) -> None:
        """From now on keep the weights of the pages that a forward reads, by layer and slot, as `attention.py` defines
        them."""
        if self.weights is None:
            size = (len(self.keys), *self.pages.table.shape)
            self.weights = torch.zeros(size, dtype=torch.float32, device=self.keys[0].device)

    def forget(self) -> None:
        """Stop keeping hidden states and weights."""
        self.states.clear()
        self.weights = None

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        keep: int = 0,
        first: int = 0,
        last: int | None = None,
        reads: Reads | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """Feed the batch's tokens and return logits [R, Q, V], or those of the last `keep` columns.

        first, last: layers first .. last - 1 run; None: to the end. reads: the pages that rows read; None: all, or the
        window's. inputs: other inputs of the model beside tokens.
        """
        whole = reads is None and first == 0 and last is None
        weights: list[Tensor] | None = [] if whole and self.weights is not None else None
        output = self._run(batch, first, last, reads, weights, fills=False, logits_to_keep=keep, **inputs)
        if self.weights is not None and weights:
            self.weights[:, batch.slots, : weights[0].shape[1]] = torch.stack(weights)
        logits: Tensor = output.logits
        cut(logits)
        return logits

    @torch.inference_mode()
    def fill(self, batch: Batch, last: int | None = None, **inputs: Tensor) -> None:
        """Feed tokens only for their KV. Rows may be successive parts of a sequence. last, inputs: as in `forward`. A
        program drops what does not lead to KV by itself."""
        with suppress(Filled):
            self._run(batch, 0, last, None, None, fills=not traced(), logits_to_keep=1, **inputs)

    @torch.inference_mode()
    def few_pages(self, slots: Tensor, latest: Tensor, recent: int, chosen: int) -> Reads:
        """What a forward of columns up to the positions `latest` reads if it reads few pages: the first one, `recent`
        ones, and the `chosen` ones that weighed most in the last whole forward. slots, latest: [R]."""
        table, size = self.pages.on_device, self.pages.size
        if self.weights is None or not chosen:
            return recent_pages(table[slots], latest, recent, size)
        return chosen_pages(table[slots], self.weights[:, slots], latest, recent, chosen, size)

    @torch.inference_mode()
    def recall(self, layers: Iterable[int], batch: Batch) -> Tensor:
        """The remembered hidden states [R, Q, len(layers) * D] at the batch's positions."""
        write = self.located(batch).write
        states = [self.states[layer].flatten(0, 1)[write] for layer in layers]
        return torch.cat(states, dim=-1).view(*batch.tokens.shape, -1)

    def _run(
        self,
        batch: Batch,
        first: int,
        last: int | None,
        reads: Reads | None,
        weights: list[Tensor] | None,
        *,
        fills: bool,
        **options: Any,
    ) -> Any:
        located = self.located(batch, reads)
        forward = self.forward_of(located, first, last or len(self.keys), fills, weights)
        return self.apply(located, forward, input_ids=batch.tokens, **options)

    def located(self, batch: Batch, reads: Reads | None = None) -> Located:
        """The locations of a batch's tokens, and the pages that its rows read: `reads`, if not all or the window's."""
        slots, tokens, starts, kv_columns = batch
        pages, width = self.pages, tokens.shape[1]
        read = -(-kv_columns // pages.size) if self.gathers else pages.table.shape[1]
        if isinstance(pages, Rings):
            reads = pages.reads(slots, starts, width)
        found = locate(pages.on_device, slots, starts, width, kv_columns, pages.size, read, reads)
        return Located(*found, None if self.adapters is None else self.adapters[slots])

    def forward_of(
        self,
        located: Located,
        first: int,
        last: int,
        fills: bool,
        weights: list[Tensor] | None = None,
        entering: Tensor | None = None,
        stops: bool = False,
    ) -> Forward:
        tables = list(located.page_table) if located.page_table.dim() > 4 else []
        shape, write = located.positions.shape, located.write
        stores = self.keys, self.values, self.states
        return Forward(*stores, write, shape, first, last, fills, tables, weights, entering, stops)

    def apply(self, located: Located, forward: Forward, **inputs: Any) -> Any:
        """Call the model as one forward."""
        with running(forward), using(located.adapters):
            return self.model(
                attention_mask=forward.tables[0] if forward.tables else located.page_table,
                position_ids=located.positions.clamp(max=self.last_position),
                past_key_values=forward,
                use_cache=True,
                **inputs,
            )

    def check(self, lengths: dict[int, int]) -> None:
        self.pages.check(lengths)
        for layer, stores in enumerate(zip(self.keys, self.values, strict=True)):
            assert all(store.isfinite().all() for store in stores), f"layer {layer}: KV holds NaN or infinity"


def locate(
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    width: int,
    kv_columns: int,
    size: int,
    read: int,
    reads: Reads | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of a forward's columns, the pages that its rows read, and where it writes its columns.

    table: [W + 1, n], the pages of every slot; the last row is for dead rows. slots, starts: [R]. width: Q. size: P.
    read: pages of a row that are read; `reads`, if not the first ones. Returns positions [R, Q], a page table
    [R, 1, 1, 2 + read] as in `attention.py`, or one for each layer, and indices [R * Q] of tokens in the stores.
    """
    rows = table[slots]  # [R, n]
    ends = torch.where(slots == len(table) - 1, 0, kv_columns)
    positions = starts[:, None] + torch.arange(width, device=starts.device)  # [R, Q]
    inside = positions.clamp(0, kv_columns - 1)
    dead = (positions < 0) | (positions >= ends[:, None])
    page = torch.where(dead, BIN, rows.gather(1, inside // size))
    seen = rows[:, :read]
    if reads is not None:  # in a shorter table, columns have smaller numbers
        seen, skipped = reads.pages, reads.skipped * size
        starts, ends = starts - skipped, (ends - skipped).clamp(max=seen.shape[-1] * size)
    span = torch.stack([starts, ends], dim=1).expand(*seen.shape[:-1], -1)
    page_table = torch.cat([span, seen], dim=-1).int()
    return inside, page_table[..., None, None, :], (page * size + inside % size).flatten()


def _contiguous(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Copy a slice of the last columns: torch would otherwise read the weights once for each row."""
    return (inputs[0].contiguous(),)


class RealignedModel:
    """KV in transformers' own cache, right-aligned: rows of different lengths are padded on the left. Every forward
    first drops rejected tokens and pads again (the paper's unpad-append-repad, here one gather per layer).

    A forward computes all rows of the cache. Rows that are not in the batch have ended, and their KV is dropped.
    """

    def __init__(self, model: PreTrainedModel, rows: int, packed: bool) -> None:
        self.model = runtime_copy(model, None, packed)
        self.cache: Any = DynamicCache()
        self.lengths = torch.zeros(rows, dtype=torch.long, device=model.device)  # tokens cached, by row
        self.offsets = torch.zeros_like(self.lengths)  # column of token 0, by row
        self.last_position = context_length(model.config) - 1
        self.adapters: Tensor | None = None  # by row [B + 1], if rows have adapters

    @torch.inference_mode()
    def forward(self, batch: Batch, keep: int = 0) -> Tensor:
        slots, tokens, starts, _ = batch
        # A token with a negative position cannot be cached on the left. It is moved to the end of its row, and its
        # logits are moved back.
        early = (starts < 0)[:, None]
        tokens, starts = torch.where(early, tokens.roll(-1, 1), tokens), starts.clamp(min=0)
        self.lengths = torch.zeros_like(self.lengths).index_copy(0, slots, starts)
        width = self._realign()
        all_tokens = tokens.new_zeros(len(self.lengths), tokens.shape[1])
        all_tokens[slots] = tokens
        padding = torch.arange(width, device=tokens.device) >= self.offsets[:, None]  # [B, width]
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        with using(None if self.adapters is None else self.adapters[: len(all_tokens)]):
            output = self.model(
                input_ids=all_tokens,
                attention_mask=torch.cat([padding, torch.ones_like(all_tokens, dtype=torch.bool)], dim=1),
                position_ids=positions.clamp(max=self.last_position),
                past_key_values=self.cache,
                use_cache=True,
            )
        self.lengths[slots] += tokens.shape[1]
        logits = output.logits[slots]
        return torch.where(early[..., None], logits.roll(1, 1), logits)[:, -keep:]

    def fill(self, batch: Batch) -> None:
        self.forward(batch)

    def _realign(self) -> int:
        """Move every row's first `lengths` tokens to the right edge. Returns the new width: that of the longest row."""
        width = int(self.lengths.max())
        if width == 0:
            self.cache = DynamicCache()
        offsets = width - self.lengths
        shift = (self.offsets - offsets)[:, None]
        for layer in self.cache.layers:
            rows, heads, old_width, size = layer.keys.shape
            source = (torch.arange(width, device=layer.keys.device) + shift).clamp(0, old_width - 1)  # [B, width]
            index = source[:, None, :, None].expand(rows, heads, width, size)
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
        self.offsets = offsets
        return width

    def check(self, lengths: dict[int, int]) -> None:
        for slot, length in lengths.items():
            assert int(self.lengths[slot]) >= length, (
                f"row {slot}: {int(self.lengths[slot])} tokens cached, not {length}"
            )
        for layer in self.cache.layers:
            assert all(kv.isfinite().all() for kv in (layer.keys, layer.values)), "KV holds NaN or infinity"


CachedModel = PagedModel | RealignedModel
