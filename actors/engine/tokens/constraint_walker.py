"""The constraints of a round's rows, walked along their drafts."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from exspec.actors.engine.scheduling.pool import Sequence
from exspec.actors.engine.tokens.constraint import BITS, Constraint, Few, Words, only, tokens_in, unpacked

Candidates = dict[tuple[int, int], list[int]]


class Masks:
    """The masks of a round's places, on the host and on the device: int32 [places, rows, words].

    They stay from round to round, so that only what has changed is written and sent. A row allows everything until a
    mask is written to it, and again after `free`.
    """

    def __init__(self, places: int, rows: int, vocabulary: int, device: torch.device) -> None:
        words = -(-vocabulary // BITS)
        self.host = torch.full((places, rows, words), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = self.host.to(device)  # the same memory, where that is the host's
        self.array: Words = self.host.numpy()
        self.written: list[list[Few | Words | None]] = [[None] * rows for _ in range(places)]  # None: something else
        self.taken: set[int] = set()  # rows that do not allow everything

    def free(self, rows: Iterable[int]) -> None:
        """Let rows allow everything again."""
        for row in self.taken.intersection(rows):
            self.array[:, row] = -1
            for written in self.written:
                written[row] = None
            self.device[:, row] = -1
            self.taken.remove(row)

    def write(self, place: int, constraints: dict[int, Constraint]) -> None:
        """Write the masks of a place by row, and send them to the device."""
        written, masks, changed = self.written[place], self.array[place], False
        asked: defaultdict[type[Constraint], list[tuple[Constraint, int]]] = defaultdict(list)
        for row, constraint in constraints.items():
            kept = constraint.kept()
            if kept is None:
                asked[type(constraint)].append((constraint, row))
            elif kept is not written[row]:
                _put(masks[row], kept, written[row])
                changed = True
            written[row] = kept
        for kind, its in asked.items():
            kind.compute(its, masks)
        self.taken.update(constraints)
        if (changed or asked) and self.device is not self.host:
            self.device[place].copy_(self.host[place], non_blocking=True)


def _put(row: Words, mask: Few | Words, before: Few | Words | None) -> None:
    """Write a mask over a row that holds another one; None: nobody knows which."""
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
    """Walks the constraints of a round's rows along their drafts: once to see what stands, once to write the masks.

    sequences: of the rows; None is a dead one. A row without a constraint is allowed everything; what a constrained one
    is allowed past its draft means nothing. masks: of the places that are verified. first: of one place, for those who
    draft. ends: whether a token ends a sequence.
    """

    def __init__(
        self, sequences: list[Sequence | None], masks: Masks, first: Masks, ends: Callable[[Sequence, int], bool]
    ) -> None:
        self.masks, self.first, self.ends, self.rows = masks, first, ends, len(sequences)
        self.constrained: dict[int, tuple[Sequence, Constraint]] = {
            row: (s, s.constraint) for row, s in enumerate(sequences) if s is not None and s.constraint is not None
        }
        masks.free(row for row in range(self.rows) if row not in self.constrained)
        self.walked: dict[int, list[int]] = {}  # tokens that a row's constraint was moved by
        self.alone: dict[int, list[bool]] = {}  # of every place of that walk: whether one token alone was allowed
        self.proposed = [0] * self.rows  # drafts that were walked along, or that a walk left out

    def ahead(self, most: int) -> tuple[Tensor, Tensor]:
        """What is known before anything is drafted: the tokens [R, most] that must come first, -1 behind them; and
        masks, int32 [R, words], of what may come then. A mask that is not at hand allows everything: the device would
        wait while it is made."""
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
        """What there is to verify of each row's draft, `most[r]` tokens at most: it, up to the first token that may not
        come, and those that must come in their places. Leaves the constraints behind that."""
        walked = [
            self._walk(row, draft, most[row]) if row in self.constrained else draft for row, draft in enumerate(drafts)
        ]
        self.proposed = [max(len(draft), len(tokens)) for draft, tokens in zip(drafts, walked, strict=True)]
        return walked

    def _walk(self, row: int, draft: list[int], most: int) -> list[int]:
        sequence, constraint = self.constrained[row]
        tokens: list[int] = []
        moved: list[int] = []
        alone, left = [], iter(draft)
        while True:
            token = must = only(constraint)
            alone.append(must is not None)
            if len(tokens) == most:
                break
            proposed = next(left, None)
            if must is None and proposed is not None and constraint.accepts(proposed):
                token = proposed
            if token is None:
                break
            if token != proposed:
                left = iter(())  # what was drafted follows another token
            tokens.append(token)
            if self.ends(sequence, token):
                break
            constraint.advance(token)
            moved.append(token)
        self.walked[row], self.alone[row] = moved, alone
        return tokens

    def along(self, width: int) -> Tensor:
        """The masks of `width` places, on the device: int32 [R, width, words]."""
        self.rewind()
        for place in range(width):
            here = {row: self.constrained[row][1] for row, tokens in self.walked.items() if len(tokens) >= place}
            self.masks.write(place, here)
            for row, constraint in here.items():
                if place < len(self.walked[row]):
                    constraint.advance(self.walked[row][place])
        return self.masks.device[:width, : self.rows].transpose(0, 1)

    def rewind(self) -> None:
        """Put every constraint back to the round's start."""
        for row, tokens in self.walked.items():
            self.constrained[row][1].rollback(len(tokens))

    def candidates(self, width: int) -> Candidates:
        """The tokens that scored rows may choose from, by row and place, where there is a choice."""
        found: Candidates = {}
        for row, (sequence, _) in self.constrained.items():
            if most := sequence.request.scored:
                for place in range(min(len(self.walked[row]) + 1, width)):
                    tokens = self._tokens(place, row, most)
                    if 1 < len(tokens) <= most:
                        found[row, place] = tokens
        return found

    def forced(self, row: int, tokens: int) -> int:
        """How many of the first tokens of a row's round had no alternative."""
        return sum(self.alone[row][:tokens])

    def _tokens(self, place: int, row: int, most: int) -> list[int]:
        """The tokens that a row may choose from, or none where they are too many."""
        written, mask = self.masks.written[place][row], self.masks.array[place, row]
        if isinstance(written, Few):
            return written.tokens
        # A text has thousands everywhere, and is told by its first words.
        return [] if np.count_nonzero(mask[: 2 * most]) > most or np.count_nonzero(mask) > most else tokens_in(mask)


def candidate_ids(candidates: Candidates, rows: int, width: int, device: torch.device) -> Tensor:
    """Candidates as [R, width, M], filled up with -1; M is a power of two, so that shapes are few."""
    most = 1 << (max(map(len, candidates.values())) - 1).bit_length()
    ids = torch.full((rows, width, most), -1)
    for (row, place), tokens in candidates.items():
        ids[row, place, : len(tokens)] = torch.tensor(tokens)
    return ids.to(device, non_blocking=True)


def narrowed(logits: Tensor, places: Tensor, must: Tensor, masks: Tensor) -> Tensor:
    """Logits [R, Q, V] of a draft's places [R, Q] with what is known ahead of it: see `ConstraintWalker.ahead`."""
    vocabulary, most = logits.shape[-1], must.shape[1]
    here = pad(must, (0, 1), value=-1).gather(1, places.clamp(max=most))[..., None]  # [R, Q, 1]
    other = torch.arange(vocabulary, device=logits.device) != here
    first = ((must >= 0).sum(dim=1, keepdim=True) == places)[..., None]
    barred = torch.where(here >= 0, other, first & ~unpacked(masks[:, None], vocabulary))
    lacking = barred.all(dim=-1, keepdim=True)  # this vocabulary may be the smaller one
    return logits.masked_fill(barred & ~lacking, -torch.inf)
