"""Plain decoding."""

import torch

from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.scheduling.group import Group


class NoDraft(Drafter):
    """Proposes no tokens."""

    def propose(self, group: Group, limits: list[int]) -> Draft:
        return Draft(group.pending.new_zeros(len(group.pending), 0), torch.zeros_like(group.pending))
