"""The most rows per hour that one GPU can decode with Qwen3-8B and Qwen3-0.6B in bfloat16: computed, not measured.

A forward takes at least the time to read its bytes, and at least the time to compute its tokens.
"""

from math import ceil

TARGET, DRAFT = 15.1e9, 1.19e9  # bytes of weights that a forward reads: all but the target's embedding table
KV_TARGET, KV_DRAFT = 147_456, 114_688  # bytes per token
PARAMETERS = 8.19e9  # of the target


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

    def seconds(size: float, tokens: int) -> float:
        return max(size / bandwidth, 2 * PARAMETERS * tokens / flops)

    if acceptance is None:
        acceptance, drafted = 0.0, 0
    tokens = sum(acceptance**i for i in range(drafted + 1))  # per row and round, bonus token included
    verify = seconds(TARGET + batch * columns * KV_TARGET, batch * (drafted + 1))
    draft = drafted * (DRAFT + batch * columns * KV_DRAFT) / bandwidth
    prefill = ceil(prompt / 128) * seconds(TARGET + (DRAFT if drafted else 0), 128)
    return 3600 / (prefill + completion / tokens * (verify + draft) / batch)
