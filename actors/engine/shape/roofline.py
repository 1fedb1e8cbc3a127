"""Upper bounds on the speed of a GPU: computed from the bytes and flops of forwards, not measured.

A forward takes at least the time to read its bytes, and at least the time to compute its tokens (the roofline model,
doi:10.1145/1498765.1498785). Attention's own flops are left out, and all experts of a mixture are read.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.model import WINDOW
from exspec.actors.engine.drafters.sparse import window_of
from exspec.actors.engine.kv.cached_model import kv_shape
from exspec.actors.engine.shape.plan import SHARE

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFTS = range(1, 17)  # K
LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)  # tokens of a text
ACCEPTANCE = 0.8  # chance that a drafted token is right if those before it are
MARGIN = 64  # tokens read in addition to a window: the first page, and a page that is not full
PREFILL = 16, 128  # rows and columns of a prefill forward
PAYS = 1.05  # times plain decoding


class Card(NamedTuple):
    """bandwidth: bytes/s. flops: dense, in bfloat16, per second. free: GiB of memory."""

    bandwidth: float
    flops: float
    free: int


CARDS = {
    "L4": Card(0.30e12, 121e12, 22),
    "L40S": Card(0.86e12, 362e12, 44),
    "A100 80 GB": Card(2.04e12, 312e12, 79),
    "H100": Card(3.35e12, 989e12, 79),
    "H200": Card(4.80e12, 989e12, 139),
}


class Sizes(NamedTuple):
    """Of a model. held: bytes of its weights. read: bytes that a forward reads of them, all experts included: not an
    embedding table that the output head does not share. parameters: that a token is multiplied with. kv: bytes of a
    token's KV."""

    held: float
    read: float
    parameters: float
    kv: float

    @classmethod
    def of(cls, model: PretrainedConfig, dtype: torch.dtype) -> Self:
        text = model.get_text_config()
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(model)
        held = sum(p.numel() for p in built.parameters())
        read = held - (0 if text.tie_word_embeddings else built.get_input_embeddings().weight.numel())
        experts = [p for name, p in built.named_parameters() if ".experts." in name]  # [E, ...] each
        used = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
        idle = sum(p.numel() * (1 - (used or len(p)) / len(p)) for p in experts)
        layers, heads, size = kv_shape(model)
        each = dtype.itemsize
        return cls(held * each, read * each, read - idle, 2 * layers * heads * size * each)


@dataclass(frozen=True)
class Drafting:
    """A way to draft. model: that drafts. own: it is not the target, and has weights and KV of its own. window: tokens
    whose KV it reads; None: all. Without its own KV, it reads as `sparse` does."""

    name: str
    model: Sizes
    own: bool = True
    window: int | None = None

    def seen(self, read: int) -> int:
        """Tokens whose KV it reads if the target reads that of so many."""
        window = self.window if self.own else _sparse_window(read)
        return read if window is None else min(read, window + MARGIN)


@cache
def _sparse_window(read: int) -> int:
    return window_of(EngineConfig(capacity=read))


def draftings(target: Sizes, draft: Sizes | None = None) -> list[Drafting]:
    """The ways to draft for a target, with a draft model if there is one."""
    models = [Drafting("model", draft), Drafting(f"model {WINDOW}", draft, window=WINDOW)] if draft else []
    return [*models, Drafting("sparse", target, own=False)]


@dataclass(frozen=True)
class Roofline:
    """The bounds of a target on a card."""

    card: Card
    target: Sizes

    def forward(self, model: Sizes, rows: int, columns: int, read: int) -> float:
        """Seconds of a forward of rows x columns tokens; each row reads the KV of `read` tokens."""
        size = model.read + rows * read * model.kv
        return max(size / self.card.bandwidth, 2 * model.parameters * rows * columns / self.card.flops)

    def round(self, rows: int, read: int, drafts: int, drafting: Drafting | None) -> float:
        """Seconds to draft so many tokens for each row, and to verify them."""
        verify = self.forward(self.target, rows, drafts + 1, read)
        return verify + (drafts * self.forward(drafting.model, rows, 1, drafting.seen(read)) if drafting else 0.0)

    def rows_per_hour(
        self, batch: int, prompt: int, completion: int, drafting: Drafting | None = None, acceptance: float = 0.0
    ) -> float:
        """Rows with a prompt and a completion of so many tokens, at K = 5."""
        drafts = 5 if drafting else 0
        models = [self.target, drafting.model] if drafting and drafting.own else [self.target]
        rows, columns = PREFILL
        prefill = -(-prompt // columns) * sum(self.forward(model, rows, columns, 0) for model in models) / rows
        seconds = self.round(batch, prompt + completion // 2, drafts, drafting)
        return 3600 / (prefill + completion / _tokens(acceptance, drafts) * seconds / batch)

    def times_plain(self, read: int, drafting: Drafting) -> float:
        """Tokens/s over those of plain decoding, prefill not counted, each with its best B and K. 0 if not even one row
        fits. read: tokens whose KV a row reads on average."""
        plain = self._best(read)
        return self._best(read, drafting) / plain if plain else 0.0

    def pays_from(self, drafting: Drafting) -> int | None:
        """The length, in steps of 100 tokens, from which drafting pays, up to the longest of LENGTHS. None: there is no
        such length, or the longest does not fit."""
        ratios = {n: self.times_plain(n, drafting) for n in range(100, LENGTHS[-1] + 1, 100)}
        loses = max((n for n, ratio in ratios.items() if ratio < PAYS), default=0)
        return loses + 100 if loses < LENGTHS[-1] else None

    def _best(self, read: int, drafting: Drafting | None = None) -> float:
        """Tokens/s with the best B and K that fit the memory."""
        held, row = self.target.held, read * self.target.kv
        if drafting and drafting.own:
            held, row = held + drafting.model.held, row + drafting.seen(read) * drafting.model.kv
        most = min(int((self.card.free * 2**30 * SHARE - held) // row), BATCHES[-1])
        fitting = [b for b in {*BATCHES, most} if 0 < b <= most]
        lengths = DRAFTS if drafting else range(1)
        acceptance = ACCEPTANCE if drafting else 0.0
        speeds = (b * _tokens(acceptance, k) / self.round(b, read, k, drafting) for b in fitting for k in lengths)
        return max(speeds, default=0.0)


def _tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a row commits in a round."""
    return sum(acceptance**i for i in range(drafts + 1))
