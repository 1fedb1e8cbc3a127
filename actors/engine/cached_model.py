"""A causal language model together with the KV of many sequences. The one file that touches transformers' cache and
mask interfaces.

Both stores have the same `forward`: row r feeds tokens[r] to the sequence in slot slots[r], whose first starts[r]
tokens are cached; what was cached from there on is forgotten. So rollback is a smaller start.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from exspec.actors.engine.twin import twin


class CachedModel(Protocol):
    """A model with the KV of its sequences. `bytes` is what the KV holds now."""

    @property
    def bytes(self) -> int: ...

    def forward(self, slots: Tensor | None, tokens: Tensor, starts: Tensor, attended: int, keep: int = 0) -> Tensor:
        """Feed tokens [R, Q] at positions starts[r] + q and return logits [R, Q, V], or of the last `keep` columns.

        slots: [R]; None is all of them, in order, whose KV is then read in place. starts: [R].
        attended: KV columns that every row attends. A position past them is dead: it leaves no trace and its logits
        mean nothing.
        """
        ...

    def check(self, lengths: dict[int, int]) -> None:
        """Raise AssertionError unless the first `length` tokens of every slot given are cached."""
        ...


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head size) of a model with plain full attention."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_size


def context_length(config: PretrainedConfig) -> int:
    """Tokens that a sequence may have, prompt and completion together."""
    return int(config.get_text_config().max_position_embeddings)


class SlotModel:
    """KV by slot, left-aligned: token i of a sequence lies in column i of its slot for its whole life.

    Per layer, K and V are [slots + 1, H, columns, D], allocated once. The extra slot is the bin that dead rows read
    and dead columns write, so that a forward has no branch on who is dead. `bin` is its number.
    """

    def __init__(self, model: PreTrainedModel, slots: int, columns: int) -> None:
        layers, heads, size = kv_shape(model.config)
        shape = (slots + 1, heads, columns, size)
        self.model, self.bin = twin(model, grouped=True), slots
        self.fold = model.config.get_text_config().num_attention_heads // heads  # query heads that share a KV head
        # Zeros, not empty: a masked column is multiplied by zero, and zero times what memory held may be NaN.
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.last_position = min(columns, context_length(model.config)) - 1
        # Kept on the device for `check`: columns written from 0 on, by slot, and whether any row ever left a gap.
        self.written = torch.zeros(slots + 1, dtype=torch.long, device=model.device)
        self.gap = torch.zeros((), dtype=torch.bool, device=model.device)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @torch.inference_mode()
    def forward(self, slots: Tensor | None, tokens: Tensor, starts: Tensor, attended: int, keep: int = 0) -> Tensor:
        width = tokens.shape[1]
        device = tokens.device
        self._selected, self._attended = slots, attended
        slots = torch.arange(self.bin, device=device) if slots is None else slots
        offsets = torch.arange(width, device=device)
        positions = starts[:, None] + offsets  # [R, Q]
        dead = positions >= attended
        self._write = (
            torch.where(dead, self.bin, slots[:, None]),
            torch.where(dead, offsets % attended, positions),
        )
        self.gap |= ((starts > self.written[slots]) & (slots != self.bin)).any()
        self.written[slots] = (starts + width).clamp(max=attended)
        positions = positions.clamp(max=min(attended - 1, self.last_position))
        hidden = torch.arange(attended, device=device) > positions[:, None, :, None]  # [R, 1, Q, S]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        output = self.model(
            input_ids=tokens,
            attention_mask=mask.repeat(1, 1, self.fold, 1),
            position_ids=positions,
            past_key_values=self,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention of every layer: store key and value [R, H, Q, D], return the rows' [R, H, S, D]."""
        found = []
        for store, new in ((self.keys[layer_idx], key), (self.values[layer_idx], value)):
            store[self._write[0], :, self._write[1]] = new.transpose(1, 2)
            columns = store[:, :, : self._attended]
            found.append(columns[: self.bin] if self._selected is None else columns.index_select(0, self._selected))
        return found[0], found[1]

    def check(self, lengths: dict[int, int]) -> None:
        assert not self.gap, "a row was fed past the end of what is cached"
        for slot, length in lengths.items():
            assert self.written[slot] >= length, f"slot {slot}: {int(self.written[slot])} columns cached, not {length}"
        for layer, stores in enumerate(zip(self.keys, self.values, strict=True)):
            assert all(store.isfinite().all() for store in stores), f"layer {layer}: KV holds NaN or infinity"


class RealignedModel:
    """KV on transformers' own cache, right-aligned: rows of different lengths are padded on the left, and every
    forward first drops what was rejected and pads anew (the paper's unpad-append-repad, here one gather a layer).

    A forward computes all rows of the batch; those that it was not asked for have ended and are forgotten.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model = twin(model, grouped=False)
        self.cache: Any = DynamicCache()
        self.lengths = torch.zeros(rows, dtype=torch.long, device=model.device)  # tokens cached, by row
        self.offsets = torch.zeros_like(self.lengths)  # column of token 0, by row
        self.last_position = context_length(model.config) - 1

    @property
    def bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    @torch.inference_mode()
    def forward(self, slots: Tensor | None, tokens: Tensor, starts: Tensor, attended: int, keep: int = 0) -> Tensor:  # noqa: ARG002
        slots = torch.arange(len(self.lengths), device=tokens.device) if slots is None else slots
        self.lengths = torch.zeros_like(self.lengths).index_copy(0, slots, starts)
        width = self._realign()
        all_tokens = tokens.new_zeros(len(self.lengths), tokens.shape[1])
        all_tokens[slots] = tokens
        padding = torch.arange(width, device=tokens.device) >= self.offsets[:, None]  # [B, width]
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        output = self.model(
            input_ids=all_tokens,
            attention_mask=torch.cat([padding, torch.ones_like(all_tokens, dtype=torch.bool)], dim=1),
            position_ids=positions.clamp(max=self.last_position),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        self.lengths[slots] += tokens.shape[1]
        return output.logits[slots]  # type: ignore[no-any-return]

    def _realign(self) -> int:
        """Move every row's first `lengths` tokens to the right edge; returns the new width, that of the longest row."""
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
