"""A causal language model together with the KV of many sequences. The one file that touches transformers' cache and
mask interfaces.

Both stores have the same `forward`: row r feeds tokens[r] to the sequence in slot slots[r], whose first starts[r]
tokens are cached; what was cached from there on is forgotten. So rollback is a smaller start.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import KernelsName
from exspec.actors.engine.kv.pages import BIN, Pages
from exspec.actors.engine.layers.fused import compiled, fuse, put
from exspec.actors.engine.layers.spans import gate
from exspec.actors.engine.layers.twin import twin

IN_PLACE, GATHERED = "exspec_in_place", "exspec_gathered"  # as `attention.py` registers them


class CachedModel(Protocol):
    """A model with the KV of its sequences. `bytes` is what the KV holds now."""

    @property
    def bytes(self) -> int: ...

    def forward(
        self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int, keep: int = 0, first: int = 0
    ) -> Tensor:
        """Feed tokens [R, Q] at positions starts[r] + q and return logits [R, Q, V], or of the last `keep` columns.

        slots, starts: [R]. A position is dead that is negative, or not below `attended`: it leaves no trace and its
        logits mean nothing. first: layers that have computed these tokens already, see `PagedModel.remember`.
        """
        ...

    def fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        """Feed tokens as `forward` does, for their KV alone. Rows may be successive parts of one sequence."""
        ...

    def check(self, lengths: dict[int, int]) -> None:
        """Raise AssertionError where what is cached cannot be right."""
        ...


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head size) of a model that holds keys and values of every token."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_size


def context_length(config: PretrainedConfig) -> int:
    """Tokens that a sequence may have, prompt and completion together."""
    return int(config.get_text_config().max_position_embeddings)


class PagedModel:
    """KV in pages: token i of a sequence lies where `pages` says, for its whole life.

    Per layer, K and V are [pages + 1, P, H, D], allocated once. Dead rows and columns write to the first page, the
    bin, so that a forward has no branch on who is dead.

    attention: the name of what reads the pages, see `attention.py`. Gathered, a forward attends whole pages up to
    `attended`; in place it attends what a row has. kernels: see `EngineConfig`.
    """

    def __init__(self, model: PreTrainedModel, pages: Pages, attention: str, kernels: KernelsName = "eager") -> None:
        layers, heads, size = kv_shape(model.config)
        shape = (pages.pages + 1, pages.size, heads, size)
        self.model, self.pages = twin(model, attention, kernels == "packed"), pages
        self.gathers = attention == GATHERED
        if (head := self.model.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(_contiguous)
        # Zeros, not empty: a masked column is multiplied by zero, and zero times what memory held may be NaN.
        self.is_initialized = False  # what transformers would take for a cache of another model
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.last_position = context_length(model.config) - 1
        self.write = torch.zeros(0, dtype=torch.long, device=model.device)
        self.shape = torch.Size()  # of the tokens of the forward at hand
        self.states: dict[int, Tensor] = {}  # hidden states that have left so many layers: [pages + 1, P, D]
        self.gated = False  # its layers can be passed by
        self.first, self.last, self.fills = 0, layers, False  # the layers of the forward at hand, and what it is for
        self._where: Callable[..., Any] = where
        if kernels == "compiled":
            fuse(self.model, self)
            self._where = compiled(where)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.states.values()))

    def remember(self, layers: Iterable[int]) -> None:
        """Keep from now on the hidden states that leave each of these layers, counted from 1: a token's lie where its
        keys and values do. A forward may leave after any layer, and begin behind one of these."""
        if not self.gated:
            gate(self.model, self)
            self.gated = True
        for layer in layers:
            size = (*self.keys[0].shape[:2], self.model.config.get_text_config().hidden_size)
            if layer not in self.states:
                self.states[layer] = torch.zeros(size, dtype=self.keys[0].dtype, device=self.keys[0].device)

    def forget(self) -> None:
        """Remember nothing from now on."""
        self.states.clear()

    @torch.inference_mode()
    def forward(
        self,
        slots: Tensor,
        tokens: Tensor,
        starts: Tensor,
        attended: int,
        keep: int = 0,
        first: int = 0,
        last: int | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """last: the layer that the logits are taken after, counted from 1; None: all. inputs: what the model wants
        beside tokens."""
        self.first, self.last, self.fills = first, last or len(self.keys), False
        logits: Tensor = self._run(slots, tokens, starts, attended, logits_to_keep=keep, **inputs).logits
        return logits

    @torch.inference_mode()
    def fill(
        self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int, last: int | None = None, **inputs: Tensor
    ) -> None:
        """last: the last layer that is filled, counted from 1; None: all. inputs: as `forward` takes them."""
        self.first, self.last, self.fills = 0, last or len(self.keys), True
        with suppress(Filled):
            self._run(slots, tokens, starts, attended, logits_to_keep=1, **inputs)

    @torch.inference_mode()
    def recall(self, layers: Iterable[int], slots: Tensor, starts: Tensor, width: int, attended: int) -> Tensor:
        """The hidden states [R, width, len(layers) * D] that were remembered of tokens at starts[r] + q."""
        pages = self.pages
        _, _, places = self._where(pages.on_device, slots, starts, width, attended, pages.size, 0)
        found = [self.states[layer].flatten(0, 1)[places] for layer in layers]
        return torch.cat(found, dim=-1).view(len(slots), width, -1)

    def _run(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int, **options: Any) -> Any:
        pages = self.pages
        read = -(-attended // pages.size) if self.gathers else pages.table.shape[1]
        self.shape = tokens.shape
        positions, places, self.write = self._where(
            pages.on_device, slots, starts, tokens.shape[1], attended, pages.size, read
        )
        return self.model(
            input_ids=tokens,
            attention_mask=places,
            position_ids=positions.clamp(max=self.last_position),
            past_key_values=self,
            use_cache=True,
            **options,
        )

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention of every layer: store key and value [R, H, Q, D], return all pages [N, P, H, D]."""
        for store, new in zip(self.stores(layer_idx), (key, value), strict=True):
            put(store, new, self.write)
        if self.fills_last(layer_idx) and self.last not in self.states:
            raise Filled
        return self.stores(layer_idx)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: [N, P, H, D] each."""
        return self.keys[layer], self.values[layer]

    def fills_last(self, layer: int) -> bool:
        """Whether this is the last layer that the forward at hand fills. Its keys and values are the same bit for bit
        whether it ends there, or goes on for the hidden states that are remembered: it runs uncompiled either way."""
        return self.fills and layer + 1 == self.last

    def enter(self, layer: int) -> Tensor:
        """The hidden states [R, Q, D] that the tokens of the forward at hand have left a layer with."""
        return self.states[layer].flatten(0, 1)[self.write].view(*self.shape, -1)

    def leave(self, layer: int, hidden: Tensor) -> None:
        if layer in self.states:
            self.states[layer].flatten(0, 1).index_put_((self.write,), hidden.flatten(0, 1))
        if self.fills and layer == self.last:
            raise Filled

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Families that count positions from here are given them."""
        return 0

    def check(self, lengths: dict[int, int]) -> None:
        self.pages.check(lengths)
        for layer, stores in enumerate(zip(self.keys, self.values, strict=True)):
            assert all(store.isfinite().all() for store in stores), f"layer {layer}: KV holds NaN or infinity"


def where(
    table: Tensor, slots: Tensor, starts: Tensor, width: int, attended: int, size: int, read: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the columns of a forward stand, what its rows read, and where its columns are written.

    table: [W + 1, n], the last row of dead ones. slots, starts: [R]. Returns positions [R, Q], places [R, 1, 1, 2 +
    read] as `attention.py` has them, and numbers [R * Q] of tokens in the store.
    """
    rows = table[slots]  # [R, n]
    ends = torch.where(slots == len(table) - 1, 0, attended)
    positions = starts[:, None] + torch.arange(width, device=starts.device)  # [R, Q]
    inside = positions.clamp(0, attended - 1)
    dead = (positions < 0) | (positions >= ends[:, None])
    page = torch.where(dead, BIN, rows.gather(1, inside // size))
    places = torch.cat([starts[:, None], ends[:, None], rows[:, :read]], dim=1).int()
    return inside, places[:, None, None], (page * size + inside % size).flatten()


def _contiguous(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The last columns alone are no matrix as they lie: torch would read the weights once for each row."""
    return (inputs[0].contiguous(),)


class Filled(Exception):  # noqa: N818 -- it is none
    """A forward has written all keys and values."""


class RealignedModel:
    """KV on transformers' own cache, right-aligned: rows of different lengths are padded on the left, and every
    forward first drops what was rejected and pads anew (the paper's unpad-append-repad, here one gather a layer).

    A forward computes all rows of the batch; those that it was not asked for have ended and are forgotten.
    """

    def __init__(self, model: PreTrainedModel, rows: int, packed: bool) -> None:
        self.model = twin(model, None, packed)
        self.cache: Any = DynamicCache()
        self.lengths = torch.zeros(rows, dtype=torch.long, device=model.device)  # tokens cached, by row
        self.offsets = torch.zeros_like(self.lengths)  # column of token 0, by row
        self.last_position = context_length(model.config) - 1

    @property
    def bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    @torch.inference_mode()
    def forward(
        self,
        slots: Tensor,
        tokens: Tensor,
        starts: Tensor,
        attended: int,  # noqa: ARG002
        keep: int = 0,
        first: int = 0,
    ) -> Tensor:
        assert not first, "no layer has computed tokens that no forward was given"
        # A position before the first cannot be cached on the left: such a row's tokens come first, and its logits last.
        early = (starts < 0)[:, None]
        tokens, starts = torch.where(early, tokens.roll(-1, 1), tokens), starts.clamp(min=0)
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
        )
        self.lengths[slots] += tokens.shape[1]
        logits = output.logits[slots]
        return torch.where(early[..., None], logits.roll(1, 1), logits)[:, -keep:]

    def fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self.forward(slots, tokens, starts, attended)

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
