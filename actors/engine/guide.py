"""The constraints of a round's rows, walked along their drafts."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from exspec.actors.engine.constraint import BITS, Constraint, Few, Words, tokens_in
from exspec.actors.engine.pool import Sequence

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
            self.device[:, row] = self.host[:, row]
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


class Guide:
    """Walks the constraints of a round's rows along their drafts, and writes the masks on the way.

    sequences: of the rows; None is a dead one. A row without a constraint is allowed everything; what a constrained one
    is allowed past its draft means nothing. ends: whether a token ends a sequence.
    """

    def __init__(self, sequences: list[Sequence | None], masks: Masks, ends: Callable[[Sequence, int], bool]) -> None:
        self.ends, self.masks, self.rows = ends, masks, len(sequences)
        self.constrained: dict[int, tuple[Sequence, Constraint]] = {
            row: (s, s.constraint) for row, s in enumerate(sequences) if s is not None and s.constraint is not None
        }
        masks.free(row for row in range(self.rows) if row not in self.constrained)
        self.walking = {row: constraint for row, (_, constraint) in self.constrained.items()}
        self.steps = dict.fromkeys(self.constrained, 0)  # tokens walked
        self.only: list[set[int]] = []  # of every place so far: the rows that one token alone was allowed in
        self.ahead: list[list[int | None]] = [[None] * self.rows]  # moves that nobody has asked for yet

    @property
    def here(self) -> Tensor:
        """The masks of the place that the rows have come to, on the device: int32 [R, words]."""
        self._arrive()
        return self.masks.device[len(self.only) - 1, : self.rows]

    def advance(self, tokens: list[int | None]) -> None:
        """Move every row by its token; None where its draft has ended. The masks are made when they are asked for."""
        self.ahead.append(tokens)

    def _arrive(self) -> None:
        for tokens in self.ahead:
            if self.only:
                self._walk(tokens)
            self._here()
        self.ahead.clear()

    def _walk(self, tokens: list[int | None]) -> None:
        masks = self.masks.array[len(self.only) - 1]
        for row, constraint in list(self.walking.items()):
            token = tokens[row]
            # A drafter without a guide may propose what is not allowed: the target will not agree.
            if token is None or self.ends(self.constrained[row][0], token) or not _allows(masks[row], token):
                del self.walking[row]
            else:
                constraint.advance(token)
                self.steps[row] += 1

    def back(self) -> None:
        """Leave every constraint where the round found it."""
        self.ahead.clear()
        for row, (_, constraint) in self.constrained.items():
            constraint.rollback(self.steps[row])
        self.walking.clear()

    def closes(self, row: int, token: int) -> bool:
        """Whether a token ends a constrained row's draft."""
        return row in self.constrained and self.ends(self.constrained[row][0], token)

    def along(self, width: int) -> Tensor:
        """The masks of `width` places, on the device: int32 [R, width, words]."""
        self._arrive()
        return self.masks.device[:width, : self.rows].transpose(0, 1)

    def candidates(self, width: int) -> Candidates:
        """The tokens that scored rows may choose from, by row and place, where there is a choice."""
        self._arrive()
        found: Candidates = {}
        for row, (sequence, _) in self.constrained.items():
            if most := sequence.request.scored:
                for place in range(min(self.steps[row] + 1, width)):
                    tokens = self._tokens(place, row, most)
                    if 1 < len(tokens) <= most:
                        found[row, place] = tokens
        return found

    def forced(self, row: int, tokens: int) -> int:
        """How many of the first tokens of a row's round had no alternative."""
        return sum(row in rows for rows in self.only[:tokens])

    def _tokens(self, place: int, row: int, most: int) -> list[int]:
        """The tokens that a row may choose from, or none where they are too many."""
        written, mask = self.masks.written[place][row], self.masks.array[place, row]
        if isinstance(written, Few):
            return written.tokens
        # A text has thousands everywhere, and is told by its first words.
        return [] if np.count_nonzero(mask[: 2 * most]) > most or np.count_nonzero(mask) > most else tokens_in(mask)

    def _here(self) -> None:
        place = len(self.only)
        self.masks.write(place, self.walking)
        written = self.masks.written[place]
        self.only.append({row for row in self.walking if isinstance(few := written[row], Few) and few.only is not None})


def _allows(mask: Words, token: int) -> bool:
    return token // BITS < len(mask) and bool(int(mask[token // BITS]) >> token % BITS & 1)


def candidate_ids(candidates: Candidates, rows: int, width: int, device: torch.device) -> Tensor:
    """Candidates as [R, width, M], filled up with -1; M is a power of two, so that shapes are few."""
    most = 1 << (max(map(len, candidates.values())) - 1).bit_length()
    ids = torch.full((rows, width, most), -1)
    for (row, place), tokens in candidates.items():
        ids[row, place, : len(tokens)] = torch.tensor(tokens)
    return ids.to(device, non_blocking=True)
