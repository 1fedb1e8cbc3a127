"""A new drafter: one file, and a line in the registry."""

import torch

from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.scheduling.group import Group


class NGram(Drafter):
    """Proposes what followed an earlier occurrence of the sequence's last two tokens."""

    lengths = (2, 4)
    probed_with = 4

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.rows[slot] = list(tokens)

    def committed(self, tokens: dict[int, list[int]]) -> None:
        for slot, new in tokens.items():
            self.rows[slot] += new

    def propose(self, group: Group, limits: list[int]) -> Draft:
        drafts = [self._row(s.slot)[:limit] if s else [] for s, limit in zip(group.sequences, limits, strict=True)]
        longest = max(map(len, drafts))
        tokens = torch.tensor([draft + [0] * (longest - len(draft)) for draft in drafts], dtype=torch.long)
        device = group.pending.device
        lengths = torch.tensor([len(draft) for draft in drafts])
        return Draft(tokens.reshape(len(drafts), longest).to(device), lengths.to(device), drafts)

    def _row(self, slot: int) -> list[int]:
        row = self.rows[slot]
        for end in range(len(row) - 2, 1, -1):
            if row[end - 2 : end] == row[-2:]:
                return row[end:]
        return []
