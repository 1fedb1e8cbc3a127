"""The rows of one round, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.request import MOST_LIKELY
from exspec.actors.engine.scheduling.pool import Sequence
from exspec.actors.engine.tokens.constraint_walker import ConstraintWalker
from exspec.actors.engine.tokens.sampling import Sampler, SamplerState


@dataclass(frozen=True)
class Group:
    """R rows; a row without a sequence is dead.

    slots: [R].
    previous, pending: [R], the last two committed tokens. starts: [R], the position of the pending token.
    kv_columns: KV columns that the target attends to; no token is committed past them. width: columns of the verify.
    longest: tokens of the longest row, including the pending token.
    useful: by row, the most drafts that fit its bucket and its budget; 0 for dead rows.
    walker: walks the rows' constraints; None if no row has one.
    likeliest: how many of the likeliest tokens get log-probabilities, beside the chosen one: 0, or MOST_LIKELY if a row
        asks for one or more, so that no value depends on another row; None if no row asks for any.
    given: of rows whose completion is given, the tokens after the pending one [R, width], with -1 where the target
        chooses; None if there is no such row.
    """

    sequences: list[Sequence | None]
    slots: Tensor
    previous: Tensor
    pending: Tensor
    starts: Tensor
    kv_columns: int
    width: int
    longest: int
    useful: list[int]
    sampler: Sampler
    walker: ConstraintWalker | None = None
    likeliest: int | None = None
    given: Tensor | None = None

    @classmethod
    def of(
        cls,
        sequences: list[Sequence],
        rows: int,
        slots: int,
        kv_columns: int,
        config: EngineConfig,
        device: torch.device,
        walker: Callable[[list[Sequence | None]], ConstraintWalker | None],
        samplers: SamplerState,
    ) -> "Group":
        """A group of the sequences, padded with dead rows to `rows`; `slots` is W.

        Dead rows come last and point to slot W, which no sequence has. walker: makes the rows' constraint walker.
        samplers: the sampling state of the slots' sequences.
        """
        dead = rows - len(sequences)
        padded = [*sequences, *[None] * dead]
        live = [s.slot for s in sequences]
        lengths = [s.length for s in sequences]
        values = np.zeros((4, rows), dtype=np.int64)  # numpy converts nested lists faster than torch does
        values[0] = [*live, *[slots] * dead]
        # A prompt of one token has no token before the pending one.
        values[1:, : len(sequences)] = [s.tokens[-2:][0] for s in sequences], [s.tokens[-1] for s in sequences], lengths
        numbers, previous, pending, starts = torch.from_numpy(values).to(device, non_blocking=True)
        asked = [s.request.logprobs for s in sequences if s.request.logprobs is not None]
        width = config.width_at(max(lengths))
        useful = [
            min(config.drafted_at(n) if s.request.given is None else width - 1, kv_columns - n - 1, s.budget - 1)
            for s, n in zip(sequences, lengths, strict=True)
        ]
        return cls(
            sequences=padded,
            slots=numbers,
            previous=previous,
            pending=pending,
            starts=starts,
            kv_columns=kv_columns,
            width=width,
            longest=max(lengths) + 1,
            useful=[*useful, *[0] * dead],
            sampler=samplers.rows(numbers, live),
            walker=walker(padded),
            likeliest=MOST_LIKELY if any(asked) else 0 if asked else None,
            given=_given(sequences, rows, width, device),
        )


def _given(sequences: list[Sequence], rows: int, width: int, device: torch.device) -> Tensor | None:
    rest = [s.request.given and s.request.given[len(s.committed) :][:width] for s in sequences]
    if not any(rest):
        return None
    values = np.full((rows, width), -1, dtype=np.int64)
    for row, tokens in enumerate(rest):
        if tokens:
            values[row, : len(tokens)] = tokens
    return torch.from_numpy(values).to(device, non_blocking=True)
