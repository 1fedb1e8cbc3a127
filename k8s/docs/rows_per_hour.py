"""The speed that one GPU can have with Qwen3-8B and Qwen3-0.6B in bfloat16, at most: computed, not measured.

A forward takes at least the time to read its bytes, and at least the time to compute its tokens.
"""

from functools import partial
from math import ceil

TARGET, DRAFT = 15.1e9, 1.19e9  # bytes of weights that a forward reads: all but the target's embedding table
KV_TARGET, KV_DRAFT = 147_456, 114_688  # bytes per token
PARAMETERS = 8.19e9  # of the target
HELD_TARGET, HELD_DRAFT = 16.4e9, 1.19e9  # bytes of weights in memory
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MARGIN = 64  # tokens read in addition to the window: the first page, and a page that is not full


def forward_seconds(bandwidth: float, flops: float, size: float, tokens: int) -> float:
    """Seconds of a forward of the target that reads `size` bytes and computes so many tokens."""
    return max(size / bandwidth, 2 * PARAMETERS * tokens / flops)


def rows_per_hour(
    bandwidth: float,
    flops: float,
    batch: int,
    acceptance: float | None = None,
    drafted: int = 5,
    prompt: int = 400,
    completion: int = 250,
    columns: int = 525,
) -> float:
    """bandwidth: bytes/s. flops: dense bfloat16/s. acceptance: chance that a drafted token is right; None: plain
    decoding. prompt, completion: tokens. columns: tokens whose KV a row reads on average: the prompt and half of the
    completion."""

    seconds = partial(forward_seconds, bandwidth, flops)
    if acceptance is None:
        acceptance, drafted = 0.0, 0
    tokens = sum(acceptance**i for i in range(drafted + 1))  # per row and round, bonus token included
    verify = seconds(TARGET + batch * columns * KV_TARGET, batch * (drafted + 1))
    draft = drafted * (DRAFT + batch * columns * KV_DRAFT) / bandwidth
    prefill = ceil(prompt / 128) * seconds(TARGET + (DRAFT if drafted else 0), 128)
    return 3600 / (prefill + completion / tokens * (verify + draft) / batch)


def times_plain(
    bandwidth: float,
    flops: float,
    memory: float,
    columns: int,
    acceptance: float,
    window: int | None = None,
    sparse: bool = False,
) -> float:
    """Tokens/s of speculation over those of plain decoding, each with its best B, and with its best K up to 16. 0 if
    not even one row fits.

    memory: bytes for weights and KV. columns: tokens whose KV a row reads on average. window: tokens of KV that the
    drafter reads; None: all. sparse: the target drafts, not the draft model.
    """

    seconds = partial(forward_seconds, bandwidth, flops)
    read = columns if window is None else min(window + MARGIN, columns)

    def speed(batch: int, drafted: int) -> float:
        verify = seconds(TARGET + batch * columns * KV_TARGET, batch * (drafted + 1))
        tokens = sum(acceptance**i for i in range(drafted + 1))
        if sparse:
            return batch * tokens / (verify + drafted * seconds(TARGET + batch * read * KV_TARGET, batch))
        return batch * tokens / (verify + drafted * (DRAFT + batch * read * KV_DRAFT) / bandwidth)

    def best(weights: float, row: float, lengths: range) -> float:
        return max((speed(b, k) for b in BATCHES if weights + b * row <= memory for k in lengths), default=0.0)

    row = columns * KV_TARGET
    own = (0.0, 0.0) if sparse else (HELD_DRAFT, read * KV_DRAFT)
    return best(HELD_TARGET + own[0], row + own[1], range(1, 17)) / best(HELD_TARGET, row, range(1))
