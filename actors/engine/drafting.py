"""Drafters: what proposes the tokens that the target verifies."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exspec.actors.engine.cached_model import CachedModel
from exspec.actors.engine.draft_length import Confidence
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.group import Group
from exspec.actors.engine.sampling import Sampler


class Draft(NamedTuple):
    """tokens: [R, N]. lengths: [R], how many of a row's tokens are proposed; what lies past them means nothing."""

    tokens: Tensor
    lengths: Tensor


class Drafter(Protocol):
    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        """Take in prompt tokens [R, C] of the sequences in `slots` [R], at positions starts[r] + c."""
        ...

    def propose(self, group: Group, limits: list[int]) -> Draft:
        """Draft at most limits[r] tokens after row r's pending token."""
        ...


class NoDraft:
    """Drafts nothing: plain decoding."""

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        pass

    def propose(self, group: Group, limits: list[int]) -> Draft:  # noqa: ARG002
        return Draft(group.pending.new_zeros(len(group.pending), 0), torch.zeros_like(group.pending))


class DraftModel:
    """A smaller model with the same vocabulary, which keeps its own KV between rounds.

    The KV of a round's last draft is never computed. So the first step feeds the last two tokens always: after a fully
    accepted draft the first of them fills the gap, otherwise it is written again with the same value. It feeds them
    even where nothing is to be drafted, or the gap would grow.

    vocabulary, target_vocabulary: embedding sizes, which may differ by padding. columns: KV columns of a slot; a
    draft attends as many as its group needs, rounded up to a multiple of `step`: it does not decide what is committed,
    so its shapes are free. confidence: decides after each step which rows go on. recorder: records the whole loop.
    """

    def __init__(
        self,
        cached: CachedModel,
        vocabularies: tuple[int, int],
        columns: int,
        step: int,
        confidence: Confidence,
        recorder: Recorder,
    ) -> None:
        vocabulary, target_vocabulary = vocabularies
        self.cached, self.columns, self.step, self.confidence = cached, columns, step, confidence
        self.shared = min(vocabulary, target_vocabulary)
        self.last_token = vocabulary - 1
        self.ends_early = not recorder.records  # to look whether any row goes on is to wait for the device
        self._feed, self._loop = recorder.wrap(self._fill), recorder.wrap(self._draft)

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self._feed(slots, tokens, starts, attended)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        needed = -(-(group.longest + max(count, 1)) // self.step) * self.step
        attended = min(needed, self.columns)
        most = torch.tensor(limits, device=group.pending.device)
        return Draft(
            *self._loop(group.slots, group.previous, group.pending, group.starts, most, group.sampler, count, attended)
        )

    def _fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> Tensor:
        return self.cached.forward(slots, tokens.clamp(max=self.last_token), starts, attended, keep=1)

    def _draft(
        self,
        slots: Tensor | None,
        previous: Tensor,
        pending: Tensor,
        starts: Tensor,
        most: Tensor,
        sampler: Sampler,
        count: int,
        attended: int,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, N] with N <= count, and lengths [R] <= most [R]."""

        def forward(tokens: Tensor, starts: Tensor) -> Tensor:
            logits = self.cached.forward(slots, tokens.clamp(max=self.last_token), starts, attended)
            return logits[..., : self.shared]

        tokens = pending.new_empty(len(pending), 0)
        lengths, chance = torch.zeros_like(pending), torch.ones_like(pending, dtype=torch.float32)
        # A prompt of one token has none before the pending one. It feeds the pending one first and then a dead token,
        # and its first draft comes from the first column.
        alone = starts == 0
        fed = torch.where(alone[:, None], pending[:, None], torch.stack([previous, pending], dim=1))
        logits = forward(fed, (starts - 1).clamp(min=0))
        logits = torch.where(alone[:, None], logits[:, 0], logits[:, 1])[:, None]  # [R, 1, V]
        goes_on = live = most > 0
        for i in range(count):
            if i > 0:
                logits = forward(tokens[:, -1:], starts + i)
            token = sampler.choose(logits, (starts + 1 + i)[:, None], tokens)
            tokens = torch.cat([tokens, token], dim=1)
            chance, kept = self.confidence.survives(chance, logits, token)
            goes_on = goes_on & kept & (most > i)
            lengths = lengths + goes_on
            if self.ends_early and not self.confidence.pays(chance, goes_on, live):
                break
        return tokens, lengths
