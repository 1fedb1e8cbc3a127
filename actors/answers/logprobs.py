"""Log-probabilities as columns of an output."""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from exspec.actors.engine.request import Completion, Logprob

_TOKEN = pa.struct(
    [("token", pa.string()), ("id", pa.int32()), ("logprob", pa.float32()), ("sampled_logprob", pa.float32())]
)
_TOP = pa.list_(pa.list_(_TOKEN))
_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "tokens": (pa.list_(pa.string()), "the text of each token"),
    "token_ids": (pa.list_(pa.int32()), "the id of each token"),
    "logprobs": (pa.list_(pa.float32()), "the log-probability of each token, by the target alone"),
    "sampled_logprobs": (pa.list_(pa.float32()), "the same in the distribution that the token was drawn from"),
    "cumulative_logprob": (pa.float64(), "the sum of `logprobs`"),
    "top_logprobs": (_TOP, "for each token the likeliest ones by the target, in order"),
}
COLUMNS = pa.schema([pa.field(n, t, metadata={"description": d}) for n, (t, d) in _COLUMNS.items()])


def values(completion: Completion, text: Callable[[int], str]) -> dict[str, Any]:
    """The values of a completion, by column. text: of a token."""
    chosen = [found.chosen for found in completion.logprobs]

    def drawn(one: Logprob) -> float | None:
        return None if math.isinf(one.drawn) else one.drawn  # it could not be drawn

    def described(one: Logprob) -> dict[str, Any]:
        return {"token": text(one.token), "id": one.token, "logprob": one.target, "sampled_logprob": drawn(one)}

    return {
        "tokens": [text(one.token) for one in chosen],
        "token_ids": [one.token for one in chosen],
        "logprobs": [one.target for one in chosen],
        "sampled_logprobs": list(map(drawn, chosen)),
        "cumulative_logprob": math.fsum(one.target for one in chosen),
        # Arrow's memory: a tenth of Python's, for hundreds of rows that wait for the end of their chunk.
        "top_logprobs": pa.scalar([list(map(described, found.likeliest)) for found in completion.logprobs], _TOP),
    }
