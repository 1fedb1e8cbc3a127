"""Drafters: what proposes the tokens that the target verifies."""

from typing import NamedTuple, Protocol

import numpy as np
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
        self._two, self._pick = recorder.wrap(self._logits_of_two), recorder.wrap(self._choose)

    def prefill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self._feed(slots, tokens, starts, attended)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        needed = -(-(group.longest + max(count, 1)) // self.step) * self.step
        attended = min(needed, self.columns)
        if group.guide is not None:
            return self._guided(group, group.guide, limits, attended)
        most = torch.from_numpy(np.array(limits)).to(group.pending.device, non_blocking=True)
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
            token = sampler.propose(logits, (starts + 1 + i)[:, None], tokens)
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
        on = [limit > 0 for limit in limits]
        live = torch.tensor(on)
        drafted, lengths = [], [0] * len(limits)
        for i in range(max(*limits, 1)):
            logits = self._two(group.slots, previous, pending, group.starts + i, attended)
            # The masks are made while the device computes: nothing asked for them before.
            found = self._pick(logits, group.starts + i, group.sampler, guide.here[:, None], chance)
            token, chance = found[0].long(), found[1].float()
            chosen, chances, kept = found.cpu()
            tokens = chosen.long().tolist()
            on = [o and bool(k) and i < limit for o, k, limit in zip(on, kept.tolist(), limits, strict=True)]
            if not any(on):
                break
            drafted.append(token)
            guide.advance([t if o else None for t, o in zip(tokens, on, strict=True)])
            lengths = [n + o for n, o in zip(lengths, on, strict=True)]
            # A draft that has come to an end token has nothing after it.
            on = [o and not guide.closes(row, t) for row, (o, t) in enumerate(zip(on, tokens, strict=True))]
            if not self.confidence.pays(chances.float(), torch.tensor(on), live):
                break
            previous, pending = pending, token
        drafts = torch.stack(drafted, dim=1) if drafted else pending.new_empty(len(pending), 0)
        return Draft(drafts, torch.tensor(lengths).to(pending.device, non_blocking=True))

    def _choose(self, logits: Tensor, starts: Tensor, sampler: Sampler, masks: Tensor, chance: Tensor) -> Tensor:
        """Of those that masks [R, 1, words] allow the draft's token after `starts`; its chance; whether to keep it.

        In one tensor, float64 [3, R], which holds tokens exactly: so there is one thing to wait for.
        """
        logits = logits.masked_fill(~unpacked(masks, logits.shape[-1]), -torch.inf)
        token = sampler.propose(logits, (starts + 1)[:, None], starts.new_empty(len(starts), 0))
        chance, kept = self.confidence.survives(chance, logits, token)
        return torch.stack([token[:, 0].double(), chance.double(), kept.double()])

    def _logits(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> Tensor:
        """Logits [R, 1, V] after the last of tokens [R, Q]."""
        logits = self.cached.forward(slots, tokens.clamp(max=self.last_token), starts, attended, keep=1)
        return logits[..., : self.shared]

    def _logits_of_two(self, slots: Tensor, previous: Tensor, pending: Tensor, starts: Tensor, attended: int) -> Tensor:
        """Logits [R, 1, V] after the pending token. Before the pending one of a prompt of one token is no place."""
        return self._logits(slots, torch.stack([previous, pending], dim=1), starts - 1, attended)
