"""The constraints of a round's rows, walked along their drafts."""

from collections.abc import Callable

import torch
from torch import Tensor

from exspec.actors.engine.constraint import BITS, Constraint, allows, only, tokens_of
from exspec.actors.engine.pool import Sequence

Candidates = dict[tuple[int, int], list[int]]


class Guide:
    """Walks the constraints of a round's rows along their drafts, and keeps the masks on the way.

    sequences: of the rows; None is a dead one. A row without a constraint, or past its draft, is allowed everything.
    vocabulary: tokens that a mask must cover. ends: whether a token ends a sequence.
    """

    def __init__(
        self, sequences: list[Sequence | None], vocabulary: int, ends: Callable[[Sequence, int], bool]
    ) -> None:
        self.ends, self.words = ends, -(-vocabulary // BITS)
        self.rows = len(sequences)
        self.constrained: dict[int, tuple[Sequence, Constraint]] = {
            row: (s, s.constraint) for row, s in enumerate(sequences) if s is not None and s.constraint is not None
        }
        self.walking = set(self.constrained)
        self.steps = dict.fromkeys(self.constrained, 0)  # tokens walked
        self.masks = [self._here()]  # of every place so far: int32 [R, words]

    @property
    def here(self) -> Tensor:
        """The masks of the place that the rows have come to: int32 [R, words]."""
        return self.masks[-1]

    def advance(self, tokens: list[int | None]) -> None:
        """Move every row by its token; None where its draft has ended."""
        for row in sorted(self.walking):
            token, (sequence, constraint) = tokens[row], self.constrained[row]
            # A drafter without a guide may propose what is not allowed: the target will not agree.
            if token is None or self.ends(sequence, token) or not allows(self.here[row], token):
                self.walking.remove(row)
            else:
                constraint.advance(token)
                self.steps[row] += 1
        self.masks.append(self._here())

    def back(self) -> None:
        """Leave every constraint where the round found it."""
        for row, (_, constraint) in self.constrained.items():
            constraint.rollback(self.steps[row])
        self.walking.clear()

    def ended(self, row: int) -> bool:
        """Whether a constrained row's draft has come to its end."""
        return row in self.constrained and row not in self.walking

    def along(self, width: int) -> Tensor:
        """The masks of `width` places: int32 [R, width, words]."""
        everything = torch.full_like(self.here, -1)
        return torch.stack([*self.masks[:width], *[everything] * (width - len(self.masks))], dim=1)

    def candidates(self, width: int) -> Candidates:
        """The tokens that scored rows may choose from, by row and place, where there is a choice."""
        found: Candidates = {}
        for row, (sequence, _) in self.constrained.items():
            if sequence.request.scored:
                most = sequence.request.scored
                places = enumerate(self.masks[: min(self.steps[row] + 1, width)])
                few = ((place, mask[row]) for place, mask in places if mask[row].count_nonzero() <= most)
                allowed = ((place, tokens_of(mask)) for place, mask in few)
                found |= {(row, place): tokens for place, tokens in allowed if 1 < len(tokens) <= most}
        return found

    def forced(self, row: int, tokens: int) -> int:
        """How many of the first tokens of a row's round had no alternative."""
        return sum(only(mask[row]) is not None for mask in self.masks[:tokens])

    def _here(self) -> Tensor:
        masks = torch.full((self.rows, self.words), -1, dtype=torch.int32)
        for row in self.walking:
            mask = self.constrained[row][1].allowed()[: self.words]
            masks[row] = 0
            masks[row, : len(mask)] = mask
        return masks


def candidate_ids(candidates: Candidates, rows: int, width: int, device: torch.device) -> Tensor:
    """Candidates as [R, width, M], filled up with -1; M is a power of two, so that shapes are few."""
    most = 1 << (max(map(len, candidates.values())) - 1).bit_length()
    ids = torch.full((rows, width, most), -1)
    for (row, place), tokens in candidates.items():
        ids[row, place, : len(tokens)] = torch.tensor(tokens)
    return ids.to(device)
