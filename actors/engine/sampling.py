"""Choosing tokens with shared noise.

For a sequence's seed s, position t and token v there is one Gumbel noise g(s, t, v), computed from a counter-based
hash. The token at t is argmax over v of (logits[v] / temperature + g(s, t, v)), which is a sample from the softmax
(Gumbel-max trick). Target and draft use the same noise, so a draft that has the target's distribution proposes the
target's own token, and what is committed is what plain sampling with that seed gives, whatever was drafted
(drafter-invariant coupling: Daliri, Musco, Suresh 2024, arXiv:2408.07978).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exspec.actors.engine.constraint import unpacked
from exspec.actors.engine.request import LARGEST_INT, Sampling

_MASK32 = 0xFFFFFFFF
TINY = 1e-30  # a smaller top_p would be 0 in float32 and keep no token at all
SEEN = 256  # the tokens seen are padded to a multiple of this: few shapes


def _mix(x: Tensor) -> Tensor:
    """A bijective hash of 32-bit numbers held in int64 (lowbias32 of C. Wellons' hash prospector)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """g(s, t, v) as float32 [R, Q, V], from 64-bit seeds [R] and positions [R, Q]."""
    low, high = (seeds & _MASK32)[:, None], ((seeds >> 32) & _MASK32)[:, None]
    key = _mix(_mix(_mix(low) ^ high) ^ positions)  # [R, Q]
    tokens = torch.arange(vocabulary, device=seeds.device)
    # Twice through the hash with two keys: one pass would give rows whose keys differ in one bit the same set of noise.
    bits = _mix(_mix(tokens ^ key[..., None]) ^ _mix(key + 0x9E3779B9 & _MASK32)[..., None])
    uniform = (bits.double() + 0.5) / 2**32  # inside (0, 1): double holds all 33 bits
    return -(-uniform.log()).log().float()


class Sampler:
    """Chooses tokens for the rows of one group.

    rows: the sampling parameters of each row. seen: the tokens of each row so far, which penalties need. prompts: how
    many of them are the prompt's; all of them unless given.
    """

    def __init__(
        self,
        rows: Sequence[Sampling],
        seen: Sequence[Sequence[int]],
        device: torch.device,
        prompts: Sequence[int] | None = None,
    ) -> None:
        self.greedy = all(row.temperature == 0 for row in rows)
        self.penalised = any(row.repetition_penalty != 1 for row in rows)
        self.counted = any(row.presence_penalty or row.frequency_penalty for row in rows)
        self.filtered = any(row.temperature > 0 and (row.top_k > 0 or row.top_p < 1) for row in rows)
        self.floored = any(row.temperature > 0 and row.min_p > 0 for row in rows)
        if self.penalised:
            width = -(-max(map(len, seen)) // SEEN) * SEEN
            # A row is padded with its own first token, which it has seen.
            self.seen = torch.tensor([[*s, *[s[0]] * (width - len(s))] for s in seen], device=device)  # [R, S]
            self.penalty = _column([row.repetition_penalty for row in rows], device)
        if self.counted:
            written = [s[p:] for s, p in zip(seen, prompts or map(len, seen), strict=True)]
            width = -(-max(map(len, written)) // SEEN) * SEEN
            # Padded with what no vocabulary has.
            padded = [[*s, *[LARGEST_INT] * (width - len(s))] for s in written]
            self.written = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), width)  # [R, S]
            self.presence = _column([row.presence_penalty for row in rows], device)
            self.frequency = _column([row.frequency_penalty for row in rows], device)
        if not self.greedy:
            # Python's seeds may fill 64 unsigned bits; int64 wraps.
            self.seeds = torch.tensor([(row.seed + 2**63) % 2**64 - 2**63 for row in rows], device=device)
            self.sampled = _column([float(row.temperature > 0) for row in rows], device)
            self.temperature = _column([row.temperature or 1.0 for row in rows], device)
            self.top_k = torch.tensor([row.top_k or 2**31 for row in rows], device=device)[:, None, None]
            self.top_p = _column([max(row.top_p, TINY) for row in rows], device)
            self.min_p = _column([row.min_p for row in rows], device)

    @property
    def state(self) -> dict[str, Any]:
        """All that it is: its tensors, and the flags that decide what it does with them."""
        return vars(self)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Sampler":
        made = cls.__new__(cls)
        vars(made).update(state)
        return made

    def choose(self, logits: Tensor, positions: Tensor, drafts: Tensor, masks: Tensor | None = None) -> Tensor:
        """The token [R, Q] that follows each column of logits [R, Q, V].

        positions: [R, Q], the place in the sequence of the token chosen. drafts: [R, N], tokens of this round that
        lie before the last column, the last one directly before it; a repetition penalty counts them as seen.
        masks: int32 [R, Q, words], the tokens that may be chosen; None: all.
        """
        if self.penalised:
            logits = self._penalise(logits.float(), drafts)
        if self.counted:
            counts = self._counts(drafts, logits.shape)
            logits = logits.float() - self.presence * (counts > 0) - self.frequency * counts
        if masks is not None:
            logits = logits.masked_fill(~unpacked(masks, logits.shape[-1]), -torch.inf)
        if self.greedy:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.filtered:
            logits = self._filter(logits)
        if self.floored:
            # p < min_p times the largest p, in logits. Greedy rows have their largest, and it is enough.
            logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + self.min_p.log(), -torch.inf)
        noise = gumbel_noise(self.seeds, positions, logits.shape[-1])
        return (logits + noise * self.sampled).argmax(dim=-1)

    def _penalise(self, logits: Tensor, drafts: Tensor) -> Tensor:
        rows, width, vocabulary = logits.shape
        # One column more than the vocabulary takes the tokens that a smaller vocabulary does not have.
        seen = torch.zeros(rows, 1, vocabulary + 1, dtype=torch.bool, device=logits.device)
        known = torch.cat([self.seen, drafts], dim=1).clamp(max=vocabulary)[:, None]
        before = known.shape[2] - width + 1  # tokens that even the first column has behind it
        seen = seen.scatter(2, known[..., :before], True).repeat(1, width, 1)  # [R, Q, V + 1]
        for column in range(1, width):
            token = known[..., before + column - 1 : before + column]
            seen[:, column:].scatter_(2, token.expand(-1, width - column, 1), True)
        penalised = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return torch.where(seen[..., :vocabulary], penalised, logits)

    def _counts(self, drafts: Tensor, shape: torch.Size) -> Tensor:
        """How often the completion has had each token at each place: [R, Q, V]."""
        rows, width, vocabulary = shape
        known = torch.cat([self.written, drafts], dim=1).clamp(max=vocabulary)[:, None]
        before = known.shape[2] - width + 1
        counts = torch.zeros(rows, 1, vocabulary + 1, device=drafts.device)
        first = known[..., :before]
        counts = counts.scatter_add(2, first, torch.ones_like(first, dtype=counts.dtype)).repeat(1, width, 1)
        for column in range(1, width):
            token = known[..., before + column - 1 : before + column].expand(-1, width - column, 1)
            counts[:, column:].scatter_add_(2, token, torch.ones_like(token, dtype=counts.dtype))
        return counts[..., :vocabulary]

    def _filter(self, logits: Tensor) -> Tensor:
        """Top-k, then top-p over what is left, as transformers' logits processors do it. Ties with the k-th stay."""
        vocabulary = logits.shape[-1]
        ordered = logits.sort(dim=-1, descending=True).values
        kth = ordered.gather(2, (self.top_k.clamp(max=vocabulary) - 1).expand(*logits.shape[:2], 1))
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        probability = ordered.softmax(dim=-1)
        # A token stays while the likelier ones before it have not reached p; the first always stays.
        kept = (probability.cumsum(dim=-1) - probability) < self.top_p
        threshold = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True).maximum(kth)
        filtered = logits.masked_fill(logits < threshold, -torch.inf)
        # Greedy rows stay whole: with top_k = 1 and the like they would lose nothing, but -inf must not meet 0 * noise.
        return torch.where(self.sampled > 0, filtered, logits)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]  # [R, 1, 1]
