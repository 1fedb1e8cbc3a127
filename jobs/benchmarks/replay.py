"""A drafter whose acceptance rate can be set."""

import random
from collections.abc import Hashable, Sequence

import torch

from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Sequence as Decoded


class ReplayDrafter(Drafter):
    """Runs a draft model at its full cost, then replaces its tokens with known completions."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.caches = drafter, drafter.caches
        self.proposals: dict[Hashable, list[int]] = {}

    def replay(self, completions: Sequence[list[int]], acceptance: float) -> None:
        """Propose these completions from now on, by request id. A token is right with the chance `acceptance`."""
        rng = random.Random(0)
        self.proposals = {
            number: [token if rng.random() < acceptance else (token + 1) % 100 for token in tokens]
            for number, tokens in enumerate(completions)
        }

    def prefill(self, batch: Batch) -> None:
        self.drafter.prefill(batch)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = self.drafter.propose(group, limits)
        rows, count = draft.tokens.shape
        tokens = [self._next(sequence, count) for sequence in group.sequences]
        replaced = torch.tensor(tokens, dtype=torch.long).reshape(rows, count)
        return Draft(replaced.to(draft.tokens.device, non_blocking=True), draft.lengths)

    def _next(self, sequence: Decoded | None, count: int) -> list[int]:
        if sequence is None:
            return [0] * count
        done = len(sequence.tokens) - len(sequence.request.prompt)
        return [*self.proposals.get(sequence.request.id, [])[done : done + count], *[0] * count][:count]
