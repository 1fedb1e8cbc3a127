"""The rows of one round, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exspec.actors.engine.guide import Guide
from exspec.actors.engine.pool import Sequence
from exspec.actors.engine.sampling import Sampler, SamplerState


@dataclass(frozen=True)
class Group:
    """R rows, of which those without a sequence are dead.

    slots: [R].
    previous, pending: [R], the last two committed tokens. starts: [R], the place of the pending one.
    attended: KV columns that the target attends; nothing is committed past them.
    useful: drafts that row r can take at most, for its bucket and its budget; dead rows take none.
    guide: where any of the rows is constrained. Whoever drafts moves it along.
    """

    sequences: list[Sequence | None]
    slots: Tensor
    previous: Tensor
    pending: Tensor
    starts: Tensor
    attended: int
    useful: list[int]
    sampler: Sampler
    guide: Guide | None = None

    @property
    def longest(self) -> int:
        return max(s.length for s in self.sequences if s) + 1

    @classmethod
    def of(
        cls,
        sequences: list[Sequence],
        rows: int,
        slots: int,
        attended: int,
        drafts: int,
        device: torch.device,
        guide: Callable[[list[Sequence | None]], Guide | None],
        samplers: SamplerState,
    ) -> "Group":
        """Rows for the sequences, filled up with dead ones to `rows`; `slots` is W and `drafts` is K.

        Dead rows come last, and point to slot W, which nobody owns. guide: makes the guide of the rows. samplers: what
        is kept of the slots' sequences.
        """
        placed = [*sequences, *[None] * (rows - len(sequences))]
        numbers, previous, pending, starts = torch.tensor(
            [_row(s, slots) for s in placed], device=device
        ).T.contiguous()
        return cls(
            sequences=placed,
            slots=numbers,
            previous=previous,
            pending=pending,
            starts=starts,
            attended=attended,
            useful=[0 if s is None else min(drafts, attended - s.length - 1, s.budget - 1) for s in placed],
            sampler=samplers.rows(numbers, [s.slot for s in sequences]),
            guide=guide(placed),
        )


def _row(sequence: Sequence | None, dead_slot: int) -> list[int]:
    """Slot, previous token, pending token and its place; a prompt of one token has no previous one."""
    if sequence is None:
        return [dead_slot, 0, 0, 0]
    return [sequence.slot, sequence.tokens[-2:][0], sequence.tokens[-1], sequence.length]
