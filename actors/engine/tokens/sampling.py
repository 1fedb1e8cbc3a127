"""Choosing tokens with shared noise.

For a sequence's seed s, position t and token v there is one Gumbel noise g(s, t, v), computed from a counter-based
hash. The token at t is argmax over v of (logits[v] / temperature + g(s, t, v)), which is a sample from the softmax
(Gumbel-max trick). Target and draft use the same noise: a draft with the target's distribution proposes the target's
own token, and the committed tokens are those of plain sampling with the same seed, whatever was drafted
(drafter-invariant coupling: Daliri, Musco, Suresh 2024, arXiv:2408.07978).

Tensors of [R, Q, V] only take part in elementwise operations of 32 bits and in reductions: no sort, int64 or double.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from exspec.actors.engine.layers.cuts import cut
from exspec.actors.engine.request import Sampling
from exspec.actors.engine.tokens.constraint import unpacked

TINY = 1e-30  # lower bound of top_p: a much smaller value would be 0 in float32 and keep no token
FEW = 256  # top_k up to this takes the largest logits; for a larger top_k the threshold is searched
SHORT = 4  # chunks of fewer tokens than this save nothing
STEPS = 8  # of a search that need not be exact
NEGLIGIBLE = 7.0  # V tokens with logits this much plus log V below the largest have together e^-7 of its probability
PADDED = 2**15  # a vocabulary that is not given is rounded up to a multiple of this, so that there are few shapes

_MASK32, _SIGN32 = 2**32 - 1, 2**31
_FACTORS = 0x7FEB352D, 0x846CA68B - 2**32
_SALTS = 0, 0x9E3779B9 - 2**32
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1
Gather = Callable[[Tensor], Tensor]
_INTEGERS = {2: torch.int16, 4: torch.int32}


def _int32(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers."""
    return (((x & _MASK32) ^ _SIGN32) - _SIGN32).to(torch.int32)


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of int32 numbers as if unsigned, in place: the mask removes the copies of the sign bit."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """A bijective hash of int32 numbers, in place: lowbias32 of C. Wellons' hash prospector. Its products wrap around.

    key: added between the two halves of the hash.
    """
    x = _fold(x, 16).mul_(_FACTORS[0])
    if key is not None:
        x.add_(key)
    return _fold(_fold(x, 15).mul_(_FACTORS[1]), 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """g(s, t, v) as float32 [R, Q, V], from 64-bit seeds [R] and positions [R, Q].

    -log(-log(1 - u)) for u = (n + 1/2) / 2^32 with a hash n of 32 bits. The largest noise decides, and it comes from
    the smallest u, where float32 distinguishes every value of n.
    """
    cut(seeds)  # compiled alone, so that it has the same bits wherever it is used
    low, high = _int32(seeds)[:, None], _int32(seeds >> 32)[:, None]
    # Two keys of 32 bits each: rows share noise only if both keys are equal.
    first, second = (_mix(_mix(_mix(low ^ salt) ^ high) ^ positions.to(torch.int32)) for salt in _SALTS)  # [R, Q]
    # Tokens are hashed first: otherwise rows whose keys differ in one bit would have the same set of noise.
    tokens = _mix(torch.arange(vocabulary, dtype=torch.int32, device=seeds.device))
    bits = _mix(tokens ^ first[..., None], second[..., None])
    uniform = bits.float().mul_(2.0**-32).add_(2.0**-33)  # from -1/2 to 1/2, small where n is small
    uniform.sub_(uniform.floor()).clamp_max_(_BELOW_ONE)
    noise = uniform.neg_().log1p_().neg_().log_().neg_()
    cut(noise)
    return noise


class Uses:
    """The features that a row's sampling parameters use, as bits of a number."""

    SAMPLED = 1
    REPETITION = 2
    COUNTED = 4
    SMALL_K = 8
    LARGE_K = 16
    TOP_P = 32
    WIDE_P = 64  # top_p over more tokens than the few largest
    MIN_P = 128
    PENALISED = REPETITION | COUNTED
    FILTERED = SMALL_K | LARGE_K | TOP_P


def _uses(row: Sampling) -> int:
    uses = Uses.REPETITION * (row.repetition_penalty != 1)
    uses |= Uses.COUNTED * bool(row.presence_penalty or row.frequency_penalty)
    if row.temperature > 0:
        uses |= Uses.SAMPLED | Uses.MIN_P * (row.min_p > 0) | Uses.SMALL_K * (0 < row.top_k <= FEW)
        uses |= Uses.LARGE_K * (row.top_k > FEW) | Uses.TOP_P * (row.top_p < 1)
        uses |= Uses.WIDE_P * (row.top_p < 1 and not 0 < row.top_k <= FEW)
    return uses


class Sampler:
    """Chooses tokens for the rows of one group.

    rows: the sampling parameters of each row. seen: the tokens of each row so far, for penalties. prompts: how many of
    these tokens belong to the prompt; default: all. For rows that stay for many rounds, `SamplerState` makes samplers
    at less cost.

    uses: the features that any of the rows uses. numbers: float32 [R, 7] and integers: int64 [R, 2], see `_parameters`.
    held: int32 [R, V], present if any row has a penalty: twice the count of a token in the completion, plus 1 if it is
    in the prompt.
    """

    uses: int
    numbers: Tensor
    integers: Tensor
    held: Tensor

    def __init__(
        self,
        rows: Sequence[Sampling],
        seen: Sequence[Sequence[int]],
        device: torch.device,
        prompts: Sequence[int] | None = None,
    ) -> None:
        penalised = any(_uses(row) & Uses.PENALISED for row in rows)
        vocabulary = -(-(1 + max(map(max, seen))) // PADDED) * PADDED if penalised else 0
        state = SamplerState(len(rows), vocabulary, device)
        for slot, (row, tokens, prompt) in enumerate(zip(rows, seen, prompts or map(len, seen), strict=True)):
            state.admit(slot, row, tokens[:prompt], tokens[prompt:])
        vars(self).update(state.rows(torch.arange(len(rows), device=device), range(len(rows))).state)

    @property
    def state(self) -> dict[str, Any]:
        """All attributes: tensors, and the plain values that decide how they are used."""
        return vars(self)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Sampler":
        sampler = cls.__new__(cls)
        vars(sampler).update(state)
        return sampler

    @property
    def greedy(self) -> bool:
        return not self.uses & Uses.SAMPLED

    @property
    def temperature(self) -> Tensor:
        """[R, 1, 1], 1 for greedy rows."""
        return self._number(0)

    def _number(self, index: int) -> Tensor:
        return self.numbers[:, index, None, None]

    def choose(self, logits: Tensor, positions: Tensor, drafts: Tensor, masks: Tensor | None = None) -> Tensor:
        """The token [R, Q] that follows each column of logits [R, Q, V].

        positions: [R, Q], of the chosen tokens in their sequences. drafts: [R, N], this round's tokens up to the one
        fed to the last column; penalties count them as seen. masks: int32 [R, Q, words], the tokens that may be chosen;
        None: all.
        """
        return self.draw(self.distribution(logits, drafts, masks), positions)

    def propose(self, logits: Tensor, positions: Tensor, drafts: Tensor, masks: Tensor | None = None) -> Tensor:
        """As `choose`, except that a few tokens at the threshold of top-k and top-p may be kept or dropped wrongly.

        For drafts, which decide nothing: it takes at most half the passes over the logits.
        """
        return self.draw(self.distribution(logits, drafts, masks, exact=False), positions)

    def distribution(
        self, logits: Tensor, drafts: Tensor, masks: Tensor | None = None, *, exact: bool = True
    ) -> Tensor:
        """Logits [R, Q, V] of the distribution that tokens are drawn from: after penalties, masks, temperature and
        filters. That of a greedy row has temperature 1 and no filter. Arguments: as of `choose`."""
        if self.uses & (Uses.PENALISED | Uses.FILTERED):
            cut(logits, compiles=False)  # these are hundreds of operations
        if self.uses & Uses.PENALISED:
            logits = self._penalise(logits.float(), drafts)
        if masks is not None:
            logits = logits.masked_fill(~unpacked(masks, logits.shape[-1]), -torch.inf)
        if self.greedy:
            return logits
        scaled = logits.float() / self.temperature
        if self.uses & Uses.MIN_P:
            # p < min_p times the largest p, as logits. A greedy row may keep any set that has its largest logit.
            floor = scaled.amax(dim=-1, keepdim=True) + self._number(3).log()
        if self.uses & Uses.FILTERED:
            scaled.masked_fill_(logits < self._threshold(logits, scaled, exact), -torch.inf)
        if self.uses & Uses.MIN_P:
            scaled.masked_fill_(scaled < floor, -torch.inf)
        return scaled

    def draw(self, scaled: Tensor, positions: Tensor) -> Tensor:
        """The token [R, Q] drawn from each distribution: its logits [R, Q, V] plus noise, except in greedy rows."""
        if self.greedy:
            return scaled.argmax(dim=-1)
        noise = gumbel_noise(self.integers[:, 0], positions, scaled.shape[-1])
        return noise.mul_(self._number(1)).add_(scaled).argmax(dim=-1)

    def _penalise(self, logits: Tensor, drafts: Tensor) -> Tensor:
        held = self._held(drafts, logits.shape)
        if self.uses & Uses.REPETITION:
            penalty = self._number(4)
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(held > 0, penalised, logits)
        if self.uses & Uses.COUNTED:
            counts = held >> 1
            logits = logits - self._number(5) * (counts > 0) - self._number(6) * counts
        return logits

    def _held(self, drafts: Tensor, shape: torch.Size) -> Tensor:
        """`held` at each column, with the drafts before the column counted: int32 [R, Q, V]."""
        _, width, vocabulary = shape
        held = pad(self.held, (0, vocabulary - self.held.shape[1]))[:, None].repeat(1, width, 1)
        count = drafts.shape[1]
        columns, numbers = (torch.arange(n, device=drafts.device) for n in (width, count))
        before = numbers <= columns[:, None] + (count - width)  # [Q, N]
        # A draft's smaller vocabulary may lack a token.
        added = before & (drafts < vocabulary)[:, None]  # [R, Q, N]
        return held.scatter_add_(2, drafts.clamp(max=vocabulary - 1)[:, None].expand_as(added), 2 * added.int())

    def _threshold(self, logits: Tensor, scaled: Tensor, exact: bool = True) -> Tensor:
        """The smallest of the logits [R, Q, V] that remains after top-k and then top-p: [R, Q, 1].

        As in transformers' logits processors, except that all ties with the smallest logit stay. -inf in rows without
        top-k and top-p. exact: to the bit, or nearly.
        """
        high = logits.amax(dim=-1, keepdim=True)
        lowest = torch.full_like(high, -torch.inf)
        reach = self.temperature * (math.log(logits.shape[-1]) + NEGLIGIBLE)

        def search(holds: Callable[[Tensor], Tensor], low: Tensor) -> Tensor:
            return _search(holds, low, high) if exact else _approach(holds, low.maximum(high - reach), high)

        # A row's own parameters choose its computation, whatever the other rows use: two orders of adding up might
        # differ in the last bit.
        top_k, top_p = self.integers[:, 1, None, None].expand_as(high), self._number(2)
        few = (top_k > 0) & (top_k <= FEW)
        kth = nucleus = lowest
        if self.uses & Uses.LARGE_K:
            count = top_k.clamp(max=logits.shape[-1])
            kth = torch.where(top_k > 0, search(lambda t: _count(logits >= t) >= count, lowest), kth)
        if self.uses & Uses.SMALL_K:
            top = _top(logits, FEW)
            picked = top.gather(2, (top_k - 1).clamp(min=0, max=top.shape[-1] - 1))
            kth = torch.where(few, picked, kth)
            nucleus = self._nucleus(top, _count(logits == picked), picked)
        if self.uses & Uses.WIDE_P:
            weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
            mass: Callable[[Tensor], Tensor] = lambda t: ((logits >= t) * weights).sum(dim=-1, keepdim=True)  # noqa: E731
            wanted = top_p * mass(kth)
            nucleus = torch.where(few, nucleus, search(lambda t: mass(t) >= wanted, kth))
        return torch.where(top_p < 1, nucleus, kth)

    def _nucleus(self, top: Tensor, ties: Tensor, kth: Tensor) -> Tensor:
        """The smallest logit [R, Q, 1] that top-p leaves of the k-th largest logit [R, Q, 1] and the larger ones.

        top: [R, Q, N], the largest logits in order, with all that are above the k-th. ties: [R, Q, 1], how many logits
        are equal to the k-th.
        """
        weights, weight = (((x.float() - top[..., :1].float()) / self.temperature).exp() for x in (top, kth))
        total = torch.where(top > kth, weights, 0).sum(dim=-1, keepdim=True) + ties * weight
        # A token stays while the likelier tokens have not reached p; the first always stays.
        kept = weights.cumsum(dim=-1) - weights < self._number(2) * total
        return top.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True).maximum(kth)


class SamplerState:
    """The sampling parameters and token counts of the sequences in `slots` slots, kept on the device.

    No sequence has the additional slot number `slots`: dead rows point to it. Tokens are counted only for sequences
    with a penalty: int32 [slots + 1, V], allocated when the first such sequence comes. wrap: `Recorder.wrap`.
    """

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        device: torch.device,
        wrap: Callable[[Gather], Gather] = lambda gather: gather,
    ) -> None:
        self.vocabulary, self.device = vocabulary, device
        self._rows = [Sampling()] * (slots + 1)
        self._uses = [0] * (slots + 1)
        self._changed: set[int] = set()
        self._numbers, self._integers = (
            torch.tensor([values] * (slots + 1), device=device) for values in _parameters(Sampling())
        )
        self._held: Tensor | None = None
        self._held_by = wrap(self._gather)

    def admit(self, slot: int, sampling: Sampling, prompt: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """Put a sequence into a slot, with its prompt and the tokens that its completion already has."""
        if sampling != self._rows[slot]:
            self._rows[slot], self._uses[slot] = sampling, _uses(sampling)
            self._changed.add(slot)
        if self._uses[slot] & Uses.PENALISED:
            if self._held is None:
                size = len(self._rows), self.vocabulary
                self._held = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._held[slot] = 0
            self._held[slot].index_fill_(0, self._on_device(prompt), 1)
            self.committed({slot: tokens})

    def committed(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Count newly committed tokens, by slot: all tokens of a round in one call."""
        counted = {slot: row for slot, row in tokens.items() if self._uses[slot] & Uses.PENALISED}
        indices = [slot * self.vocabulary + token for slot, row in counted.items() for token in row]
        if indices and self._held is not None:
            index = self._on_device(indices)
            self._held.view(-1).scatter_add_(0, index, torch.full_like(index, 2, dtype=torch.int32))

    def rows(self, numbers: Tensor, slots: Iterable[int]) -> Sampler:
        """The sampler of a round. numbers: the rows' slots [R], on the device. slots: the slots of the live rows."""
        self._refresh()
        slots = list(slots)
        uses = reduce(or_, {self._uses[slot] for slot in slots}, 0)
        state: dict[str, Any] = {"uses": uses}
        if uses & (Uses.SAMPLED | Uses.PENALISED):
            state |= {"numbers": self._numbers[numbers], "integers": self._integers[numbers]}
        if uses & Uses.PENALISED:
            state["held"] = self._held_by(numbers)
        return Sampler.of_state(state)

    def _gather(self, numbers: Tensor) -> Tensor:
        assert self._held is not None, "no penalised sequence was admitted"
        return self._held[numbers]

    def _refresh(self) -> None:
        """Copy the parameters of newly admitted sequences to the device."""
        if self._changed:
            index = self._on_device(list(self._changed))
            values = zip(*(_parameters(self._rows[slot]) for slot in self._changed), strict=True)
            for table, rows in zip((self._numbers, self._integers), values, strict=True):
                table.index_copy_(0, index, self._on_device(rows, table.dtype))
            self._changed.clear()

    def _on_device(self, values: Sequence[Any], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _parameters(row: Sampling) -> tuple[list[float], list[int]]:
    """The `numbers` (temperature, noise factor, top_p, min_p, three penalties) and `integers` (seed, top_k) of a row.

    A greedy row has neither noise nor filters.
    """
    seed = (row.seed + 2**63) % 2**64 - 2**63  # a seed may fill 64 unsigned bits; int64 wraps around
    penalties = [row.repetition_penalty, row.presence_penalty, row.frequency_penalty]
    if row.temperature == 0:
        return [1.0, 0.0, 1.0, 0.0, *penalties], [seed, 0]
    return [row.temperature, 1.0, max(row.top_p, TINY), row.min_p, *penalties], [seed, row.top_k]


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dim=-1, keepdim=True, dtype=torch.int32)


def _top(logits: Tensor, count: int) -> Tensor:
    """The `count` largest of logits [R, Q, V] in descending order: [R, Q, count], or [R, Q, V] if V is smaller.

    They lie in the `count` chunks with the largest maxima, which one pass over the logits finds.
    """
    vocabulary = logits.shape[-1]
    size = math.isqrt(vocabulary // count)
    if size < SHORT:
        return logits.topk(min(count, vocabulary)).values
    whole = logits[..., : vocabulary // size * size].unflatten(-1, (-1, size))  # [R, Q, chunks, size]
    best = whole.amax(dim=-1).topk(count).indices
    picked = whole.gather(2, best[..., None].expand(-1, -1, -1, size)).flatten(2)
    return torch.cat([picked, logits[..., vocabulary // size * size :]], dim=-1).topk(count).values


def _search(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The largest floats from `low` to `high` at which `holds`. It holds at low, and fails from some point on.

    Bisects the 2^16 or 2^32 floats themselves: a fixed number of steps, and an exact result.
    """
    inside, outside = _ordered(low), _ordered(high) + 1
    for _ in range(8 * low.itemsize):
        middle = (inside + outside) >> 1
        held = holds(_float(middle, low.dtype))
        inside, outside = torch.where(held, middle, inside), torch.where(held, outside, middle)
    return _float(inside, low.dtype)


def _approach(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The result of `_search`, or less by up to (high - low) / 2^STEPS."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        held = holds(middle)
        low, high = torch.where(held, middle, low), torch.where(held, high, middle)
    return low


def _ordered(values: Tensor) -> Tensor:
    """Floats as int64 in the same order; both zeros become 0."""
    kind = _INTEGERS[values.itemsize]
    bits = values.view(kind).long()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def _float(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_ordered`."""
    kind = _INTEGERS[dtype.itemsize]
    return torch.where(ordered < 0, torch.iinfo(kind).min - ordered, ordered).to(kind).view(dtype)
