"""The rows of one round, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exspec.actors.engine.scheduling.pool import Sequence
from exspec.actors.engine.tokens.constraint_walker import ConstraintWalker
from exspec.actors.engine.tokens.sampling import Sampler, SamplerState


@dataclass(frozen=True)
class Group:
    """R rows, of which those without a sequence are dead.

    slots: [R].
    previous, pending: [R], the last two committed tokens. starts: [R], the position of the pending one.
    kv_columns: KV columns that the target attends to; nothing is committed past them.
    longest: tokens of the longest row, the pending one among them.
    useful: drafts that row r can take at most, for its bucket and its budget; dead rows take none.
    walker: of the rows' constraints; None where no row has one.
    """

    sequences: list[Sequence | None]
    slots: Tensor
    previous: Tensor
    pending: Tensor
    starts: Tensor
    kv_columns: int
    longest: int
    useful: list[int]
    sampler: Sampler
    walker: ConstraintWalker | None = None

    @classmethod
    def of(
        cls,
        sequences: list[Sequence],
        rows: int,
        slots: int,
        kv_columns: int,
        drafts: int,
        device: torch.device,
        walker: Callable[[list[Sequence | None]], ConstraintWalker | None],
        samplers: SamplerState,
    ) -> "Group":
        """Rows for the sequences, filled up with dead ones to `rows`; `slots` is W and `drafts` is K.

        Dead rows come last, and point to slot W, which no sequence has. walker: makes the walker of the rows. samplers:
        the sampling state of the slots' sequences.
        """
        dead = rows - len(sequences)
        placed = [*sequences, *[None] * dead]
        held = [s.slot for s in sequences]
        lengths = [s.length for s in sequences]
        values = np.zeros((4, rows), dtype=np.int64)  # numpy converts nested lists faster than torch does
        values[0] = [*held, *[slots] * dead]
        # A prompt of one token has no token before the pending one.
        values[1:, : len(sequences)] = [s.tokens[-2:][0] for s in sequences], [s.tokens[-1] for s in sequences], lengths
        numbers, previous, pending, starts = torch.from_numpy(values).to(device, non_blocking=True)
        useful = [min(drafts, kv_columns - n - 1, s.budget - 1) for s, n in zip(sequences, lengths, strict=True)]
        return cls(
            sequences=placed,
            slots=numbers,
            previous=previous,
            pending=pending,
            starts=starts,
            kv_columns=kv_columns,
            longest=max(lengths) + 1,
            useful=[*useful, *[0] * dead],
            sampler=samplers.rows(numbers, held),
            walker=walker(placed),
        )
