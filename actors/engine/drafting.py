"""Drafters: what proposes the tokens that the target verifies."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exspec.actors.engine.cached_model import CachedModel
from exspec.actors.engine.constraint import unpacked
from exspec.actors.engine.draft_length import Confidence
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.group import Group
from exspec.actors.engine.guide import Guide
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
        self._step = recorder.wrap(self._one)

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self._feed(slots, tokens, starts, attended)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        needed = -(-(group.longest + max(count, 1)) // self.step) * self.step
        attended = min(needed, self.columns)
        if group.guide is not None:
            return self._guided(group, group.guide, limits, attended)
        most = torch.tensor(limits, device=group.pending.device)
        return Draft(
            *self._loop(group.slots, group.previous, group.pending, group.starts, most, group.sampler, count, attended)
        )

    def _fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self.cached.fill(slots, tokens.clamp(max=self.last_token), starts, attended)

    def _draft(
        self,
        slots: Tensor,
        previous: Tensor,
        pending: Tensor,
        starts: Tensor,
        most: Tensor,
        sampler: Sampler,
        count: int,
        attended: int,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, N] with N <= count, and lengths [R] <= most [R]."""
        tokens = pending.new_empty(len(pending), 0)
        lengths, chance = torch.zeros_like(pending), torch.ones_like(pending, dtype=torch.float32)
        logits = self._logits_of_two(slots, previous, pending, starts, attended)
        goes_on = live = most > 0
        for i in range(count):
            if i > 0:
                logits = self._logits(slots, tokens[:, -1:], starts + i, attended)
            token = sampler.choose(logits, (starts + 1 + i)[:, None], tokens)
            tokens = torch.cat([tokens, token], dim=1)
            chance, kept = self.confidence.survives(chance, logits, token)
            goes_on = goes_on & kept & (most > i)
            lengths = lengths + goes_on
            if self.ends_early and not self.confidence.pays(chance, goes_on, live):
                break
        return tokens, lengths

    def _guided(self, group: Group, guide: Guide, limits: list[int], attended: int) -> Draft:
        """The same under constraints, which walk on the host: so it waits for every token, and feeds two again."""
        previous, pending = group.previous, group.pending
        chance = torch.ones_like(pending, dtype=torch.float32)
        live = goes_on = torch.tensor(limits, device=pending.device) > 0
        drafted, lengths = [], [0] * len(limits)
        for i in range(max(*limits, 1)):
            masks = guide.here[:, None].to(pending.device)
            token, chance, kept = self._step(
                group.slots, previous, pending, group.starts + i, group.sampler, masks, chance, attended
            )
            within = torch.tensor([i < limit for limit in limits], device=pending.device)
            goes_on = goes_on & kept & within
            rows = list(zip(token.tolist(), goes_on.tolist(), strict=True))
            if not any(on for _, on in rows):
                break
            drafted.append(token)
            guide.advance([chosen if on else None for chosen, on in rows])
            lengths = [n + on for n, (_, on) in zip(lengths, rows, strict=True)]
            # A draft that has come to an end token has nothing after it.
            goes_on = goes_on & torch.tensor([not guide.ended(r) for r in range(len(rows))], device=pending.device)
            if not self.confidence.pays(chance, goes_on, live):
                break
            previous, pending = pending, token
        tokens = torch.stack(drafted, dim=1) if drafted else pending.new_empty(len(pending), 0)
        return Draft(tokens, torch.tensor(lengths, device=pending.device))

    def _one(
        self,
        slots: Tensor,
        previous: Tensor,
        pending: Tensor,
        starts: Tensor,
        sampler: Sampler,
        masks: Tensor,
        chance: Tensor,
        attended: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The draft's token [R] after `pending`, of those that masks [R, 1, words] allow; chances; which to keep."""
        logits = self._logits_of_two(slots, previous, pending, starts, attended)
        logits = logits.masked_fill(~unpacked(masks, logits.shape[-1]), -torch.inf)
        token = sampler.choose(logits, (starts + 1)[:, None], pending[:, None][:, :0])
        return token[:, 0], *self.confidence.survives(chance, logits, token)

    def _logits(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> Tensor:
        """Logits [R, 1, V] after the last of tokens [R, Q]."""
        logits = self.cached.forward(slots, tokens.clamp(max=self.last_token), starts, attended, keep=1)
        return logits[..., : self.shared]

    def _logits_of_two(self, slots: Tensor, previous: Tensor, pending: Tensor, starts: Tensor, attended: int) -> Tensor:
        """Logits [R, 1, V] after the pending token. Before the pending one of a prompt of one token is no place."""
        return self._logits(slots, torch.stack([previous, pending], dim=1), starts - 1, attended)
