"""The constraint walker: it advances the constraints of a round's rows along the drafts."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from exspec.actors.engine.scheduling.pool import Sequence
from exspec.actors.engine.tokens.constraint import BITS, Constraint, Few, Words, only, tokens_in, unpacked

Candidates = dict[tuple[int, int], list[int]]  # tokens by row and position in the round


class Masks:
    """The masks of a round's positions, on the host and on the device: int32 [positions, rows, words].

    They stay from round to round, so that only changes are written and sent. A row allows everything until a mask is
    written to it, and again after `free`.
    """

    def __init__(self, positions: int, rows: int, vocabulary: int, device: torch.device) -> None:
        words = -(-vocabulary // BITS)
        self.host = torch.full((positions, rows, words), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = self.host.to(device)  # on a CPU the same memory as `host`
        self.array: Words = self.host.numpy()
        # By position and row: the mask that was written, if it is one that its constraint keeps.
        self.written: list[list[Few | Words | None]] = [[None] * rows for _ in range(positions)]
        self.taken: set[int] = set()  # rows that do not allow everything

    def free(self, rows: Iterable[int]) -> None:
        """Make rows allow everything again."""
        for row in self.taken.intersection(rows):
            self.array[:, row] = -1
            for written in self.written:
                written[row] = None
            self.device[:, row] = -1
            self.taken.remove(row)

    def write(self, position: int, constraints: dict[int, Constraint]) -> None:
        """Write the constraints' masks to their rows at one position, and send them to the device."""
        written, masks, changed = self.written[position], self.array[position], False
        missing: defaultdict[type[Constraint], list[tuple[Constraint, int]]] = defaultdict(list)
        for row, constraint in constraints.items():
            kept = constraint.kept()
            if kept is None:
                missing[type(constraint)].append((constraint, row))
            elif kept is not written[row]:
                _put(masks[row], kept, written[row])
                changed = True
            written[row] = kept
        for kind, rows in missing.items():
            kind.compute(rows, masks)
        self.taken.update(constraints)
        if (changed or missing) and self.device is not self.host:
            self.device[position].copy_(self.host[position], non_blocking=True)


def _put(row: Words, mask: Few | Words, before: Few | Words | None) -> None:
    """Overwrite a row with a mask. before: the mask that the row holds, or None if unknown."""
    if isinstance(mask, Few) and isinstance(before, Few):
        for word in before.words:
            row[word] = 0
    else:
        row[:] = 0
    if isinstance(mask, Few):
        for word, bits in mask.words.items():
            row[word] = bits
    else:
        width = min(len(mask), len(row))
        row[:width] = mask[:width]


class ConstraintWalker:
    """Advances the constraints of a round's rows along the drafts: once to correct the drafts, once to write the masks.

    sequences: of the rows; None is a dead row. masks: for the verified positions. A row without a constraint is allowed
    everything; a mask past a row's draft means nothing. first: masks of one position, for the drafter. ends: whether a
    token ends a sequence.
    """

    def __init__(
        self, sequences: list[Sequence | None], masks: Masks, first: Masks, ends: Callable[[Sequence, int], bool]
    ) -> None:
        self.masks, self.first, self.ends, self.rows = masks, first, ends, len(sequences)
        self.constrained: dict[int, tuple[Sequence, Constraint]] = {
            row: (s, s.constraint) for row, s in enumerate(sequences) if s is not None and s.constraint is not None
        }
        self.walked: dict[int, list[int]] = {}  # by row: the tokens that its constraint was advanced by
        self.no_choice: dict[int, list[bool]] = {}  # by row and position: whether only one token was allowed
        self.proposed = [0] * self.rows  # by row: tokens of the draft or of its correction, whichever is longer

    def ahead(self, most: int) -> tuple[Tensor, Tensor]:
        """What is known before the draft: the tokens [R, most] that must come first, padded with -1, and the masks,
        int32 [R, words], of the token after them. A mask that is not available allows everything: computing it would
        keep the device waiting."""
        must, known = np.full((self.rows, most), -1), {}
        counts = dict.fromkeys(self.constrained, 0)
        for row, (sequence, constraint) in self.constrained.items():
            while counts[row] < most and (token := only(constraint)) is not None and not self.ends(sequence, token):
                must[row, counts[row]] = token
                constraint.advance(token)
                counts[row] += 1
            if constraint.kept() is not None:
                known[row] = constraint
        self.first.free(row for row in range(self.rows) if row not in known)
        self.first.write(0, known)
        for row, count in counts.items():
            self.constrained[row][1].rollback(count)
        device = self.first.device
        return torch.from_numpy(must).to(device.device, non_blocking=True), device[0, : self.rows]

    def walk(self, drafts: list[list[int]], most: list[int]) -> list[list[int]]:
        """The tokens of each row to verify, at most `most[r]`: its draft up to the first token that is not allowed,
        with forced tokens in their positions. The constraints stay advanced by these tokens."""
        walked = [
            self._walk(row, draft, most[row]) if row in self.constrained else draft for row, draft in enumerate(drafts)
        ]
        self.proposed = [max(len(draft), len(tokens)) for draft, tokens in zip(drafts, walked, strict=True)]
        return walked

    def _walk(self, row: int, draft: list[int], most: int) -> list[int]:
        sequence, constraint = self.constrained[row]
        tokens: list[int] = []
        advanced: list[int] = []
        no_choice, left = [], iter(draft)
        while True:
            token = must = only(constraint)
            no_choice.append(must is not None)
            if len(tokens) == most:
                break
            proposed = next(left, None)
            if must is None and proposed is not None and constraint.accepts(proposed):
                token = proposed
            if token is None:
                break
            if token != proposed:
                left = iter(())  # the rest of the draft follows another token
            tokens.append(token)
            if self.ends(sequence, token):
                break
            constraint.advance(token)
            advanced.append(token)
        self.walked[row], self.no_choice[row] = advanced, no_choice
        return tokens

    def write_masks(self, width: int) -> Tensor:
        """The masks of `width` positions, on the device: int32 [R, width, words]."""
        self.rewind()
        # Not before: another round may have written masks since this one began.
        self.masks.free(row for row in range(self.rows) if row not in self.constrained)
        for position in range(width):
            here = {row: self.constrained[row][1] for row, tokens in self.walked.items() if len(tokens) >= position}
            self.masks.write(position, here)
            for row, constraint in here.items():
                if position < len(self.walked[row]):
                    constraint.advance(self.walked[row][position])
        return self.masks.device[:width, : self.rows].transpose(0, 1)

    def rewind(self) -> None:
        """Roll every constraint back to the round's start."""
        for row, tokens in self.walked.items():
            self.constrained[row][1].rollback(len(tokens))

    def candidates(self, width: int) -> Candidates:
        """The tokens that scored rows may choose from, at the positions where there is a choice."""
        candidates: Candidates = {}
        for row, (sequence, _) in self.constrained.items():
            if most := sequence.request.scored:
                for position in range(min(len(self.walked[row]) + 1, width)):
                    tokens = self._tokens(position, row, most)
                    if 1 < len(tokens) <= most:
                        candidates[row, position] = tokens
        return candidates

    def forced(self, row: int, tokens: int) -> int:
        """How many of a row's first `tokens` positions of the round allowed only one token."""
        return sum(self.no_choice[row][:tokens])

    def _tokens(self, position: int, row: int, most: int) -> list[int]:
        """The tokens that a row may choose from, or none if there are more than `most`."""
        written, mask = self.masks.written[position][row], self.masks.array[position, row]
        if isinstance(written, Few):
            return written.tokens
        # Inside a text thousands of tokens are allowed, which the first words of the mask already show.
        return [] if np.count_nonzero(mask[: 2 * most]) > most or np.count_nonzero(mask) > most else tokens_in(mask)


def candidate_ids(candidates: Candidates, rows: int, width: int, device: torch.device) -> Tensor:
    """Candidates as [R, width, M], padded with -1; M is a power of two, so that there are few shapes."""
    most = 1 << (max(map(len, candidates.values())) - 1).bit_length()
    ids = torch.full((rows, width, most), -1)
    for (row, position), tokens in candidates.items():
        ids[row, position, : len(tokens)] = torch.tensor(tokens)
    return ids.to(device, non_blocking=True)


def narrowed(logits: Tensor, drafted: Tensor, must: Tensor, masks: Tensor) -> Tensor:
    """Logits [R, Q, V] of a draft, with the tokens excluded that `must` and `masks` of `ConstraintWalker.ahead` forbid.
    drafted: [R, Q], how many tokens of the draft come before each column."""
    vocabulary, most = logits.shape[-1], must.shape[1]
    here = pad(must, (0, 1), value=-1).gather(1, drafted.clamp(max=most))[..., None]  # [R, Q, 1]
    other = torch.arange(vocabulary, device=logits.device) != here
    first = ((must >= 0).sum(dim=1, keepdim=True) == drafted)[..., None]
    barred = torch.where(here >= 0, other, first & ~unpacked(masks[:, None], vocabulary))
    lacking = barred.all(dim=-1, keepdim=True)  # a draft's smaller vocabulary may lack the allowed tokens
    return logits.masked_fill(barred & ~lacking, -torch.inf)
