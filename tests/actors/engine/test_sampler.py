"""The parts that choosing tokens is made of: the hash, what top-k and top-p leave, and what is kept by slot."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from exspec.actors.engine import Sampling
from exspec.actors.engine.tokens.sampling import FEW, Sampler, SamplerState, _mix, _search, _top, gumbel_noise
from tests import tiny

CPU = torch.device("cpu")
NONE = torch.zeros(1, 0, dtype=torch.long)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def sampler(*rows: Sampling) -> Sampler:
    return Sampler(rows, [[0]] * len(rows), CPU)


def lowbias32(x: Any, key: Any) -> Any:
    """In numpy's uint32, which wraps by definition."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) + key
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


@pytest.mark.parametrize("count", [1, 7, 4099])
def test_products_of_the_hash_wrap(count: int) -> None:
    """Whether they are computed one by one or many at a time."""
    numbers = np.random.default_rng(0).integers(0, 2**32, (2, count), dtype=np.uint32)
    numbers[0, 0] = 2**32 - 1
    x, key = (torch.from_numpy(n.view(np.int32).copy()) for n in numbers)
    assert (_mix(x, key).numpy().view(np.uint32) == lowbias32(*numbers)).all()


def test_noise_is_finite_and_its_largest_are_as_frequent_as_they_should_be() -> None:
    """The largest noise decides, so it comes of many bits: of 24, dozens of those above 8 would be the same."""
    noise = torch.cat(
        [gumbel_noise(torch.arange(16) + i, torch.zeros(16, 1, dtype=torch.long), 2**16) for i in (0, 99)]
    )
    assert noise.isfinite().all()
    for above in (4, 6, 8, 9):
        expected = noise.numel() * -np.expm1(-np.exp(-above))
        found = int((noise > above).sum())
        assert abs(found - expected) < 4 * expected**0.5, above
    large = noise[noise > 8]
    assert len(large) - len(large.unique()) < 5


@pytest.mark.parametrize("bit", [0, 1, 15, 31, 32, 40, 63])
def test_seeds_that_differ_in_one_bit_share_nothing(bit: int) -> None:
    """Neither token by token, nor as a set: one noise in 2^32 is the same by chance."""
    seeds = torch.tensor([5, 5 ^ (1 << bit if bit < 63 else -(2**63))])
    one, other = gumbel_noise(seeds, torch.tensor([[3], [3]]), 20_000)[:, 0].double()
    uniform, shifted = ((-(-x).exp()).exp() for x in (one, other))
    assert abs(float(torch.corrcoef(torch.stack([uniform, shifted]))[0, 1])) < 4 / 20_000**0.5
    large = [set(x[x > 3].tolist()) for x in (one, other)]
    assert len(large[0] & large[1]) < 5


def left(logits: Tensor, row: Sampling) -> Tensor:
    """The smallest of logits [V] that transformers leaves."""
    scores = logits.float()[None] / row.temperature
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(None, scores)
    if row.top_p < 1:
        scores = TopPLogitsWarper(row.top_p)(None, scores)
    return logits[scores[0] > -torch.inf].min()


ROWS = {
    "few": [(0.7, 5, 1.0), (1.3, 40, 0.8), (1.0, 1, 0.5), (0.5, 200, 0.99), (1.0, 0, 1.0), (0.0, 3, 0.5)],
    "wide": [(0.7, 0, 0.3), (1.3, 0, 0.8), (2.0, 0, 0.99), (1.0, 0, 1e-9), (1.0, 0, 1.0), (0.0, 0, 0.5)],
    "large": [(0.7, 500, 1.0), (1.3, 2 * FEW, 0.9), (1.0, 7, 0.8), (1.0, 2**31 - 1, 0.9), (1.0, 0, 1.0)],
    "few of some": [(0.7, 5, 0.9), (1.0, 0, 0.9), (1.0, FEW, 1.0), (1.0, 0, 1.0), (0.0, 9, 0.5)],
}


@pytest.mark.parametrize("vocabulary", [3, 61, 1000, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_left_is_what_transformers_leaves(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    """With all that ties with the last of it; the rows of a group have no part in each other's."""
    rows = [Sampling(temperature=t, top_k=k, top_p=p) for t, k, p in ROWS[name]]
    logits = normal(len(rows), 2, vocabulary, dtype=dtype)
    logits[:, 1, ::3] = -torch.inf  # barred tokens
    logits[:, 1, 1] = 0.0
    chooses = sampler(*rows)
    threshold = chooses._threshold(logits, logits.float() / chooses.temperature)
    for (r, row), column in product(enumerate(rows), range(2)):
        whole = row.temperature == 0 or (row.top_k == 0 and row.top_p == 1)
        values = logits[r, column]
        found = values[(values >= threshold[r, column]) & values.isfinite()].min()
        assert found == (values[values.isfinite()].min() if whole else left(values, row)), (row, column)


@pytest.mark.parametrize("count", [1, 32, FEW])
@pytest.mark.parametrize("vocabulary", [10, 700, 5000, 20_011])
def test_the_largest_are_found_by_chunks(vocabulary: int, count: int) -> None:
    """Wherever they lie: all in one chunk, past the last whole one, or equal."""
    logits = normal(4, 2, vocabulary)
    logits[1] = torch.arange(vocabulary)
    logits[2] = -torch.arange(vocabulary)
    logits[3] = logits[3].round()
    assert torch.equal(_top(logits, count), logits.topk(min(count, vocabulary)).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_search_ends_at_the_very_float(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    wanted = torch.tensor([-torch.inf, -largest, -1.5, -torch.finfo(dtype).smallest_normal, 0.0, 1.0, 3.25, largest])
    low, high = (torch.full_like(wanted.to(dtype), end) for end in (-torch.inf, largest))
    assert torch.equal(_search(lambda t: t <= wanted.to(dtype), low, high), wanted.to(dtype))


@pytest.mark.parametrize(
    "row",
    [
        Sampling(1.0, top_p=0.9),
        Sampling(0.8, top_k=1000, top_p=0.95),
        Sampling(2.0, top_k=400),
        Sampling(2.0, top_k=20),
    ],
    ids=str,
)
def test_proposals_are_nearly_what_would_be_chosen(row: Sampling) -> None:
    rows = [Sampling(**{**vars(row), "seed": seed}) for seed in range(300)]
    chooses, logits = sampler(*rows), normal(300, 1, 3000)
    places = torch.ones(300, 1, dtype=torch.long)
    chosen, proposed = (f(logits, places, NONE.expand(300, 0)) for f in (chooses.choose, chooses.propose))
    whole = sampler(*(Sampling(row.temperature, seed=seed) for seed in range(300))).choose(
        logits, places, NONE.expand(300, 0)
    )
    assert (chosen == proposed).float().mean() > 0.985
    assert (chosen == whole).float().mean() < 0.97, "what is left makes no difference"


class Sequences:
    """Sequences in slots as lists of tokens: the slow, obvious way."""

    def __init__(self, slots: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.held: dict[int, tuple[Sampling, list[int], list[int]]] = {}
        self.slots, self.state = slots, SamplerState(slots, tiny.VOCABULARY, CPU)

    def tokens(self, least: int = 0) -> list[int]:
        return [self.random.randrange(tiny.VOCABULARY) for _ in range(self.random.randrange(least, 9))]

    def admit(self) -> None:
        slot, pick = self.random.randrange(self.slots), self.random.choice
        row = Sampling(
            pick([0.0, 0.7]), pick([0, 20]), pick([1.0, 0.9]), self.random.randrange(2**64),
            pick([1.0, 1.4]), pick([0.0, 0.6]), pick([0.0, -0.4]), pick([0.0, 0.05]),
        )  # fmt: skip
        self.held[slot] = row if self.random.random() < 0.8 else Sampling(), self.tokens(least=1), self.tokens()
        self.state.admit(slot, *self.held[slot])

    def commit(self) -> None:
        added = {slot: self.tokens() for slot in self.held if self.random.random() < 0.6}
        for slot, tokens in added.items():
            self.held[slot][2].extend(tokens)
        self.state.committed(added)

    def expected(self, slot: int, logits: Tensor, drafts: list[int]) -> int:
        """The token after the sequence's and the drafts, of logits [V]."""
        row, prompt, written = self.held[slot]
        tokens = [*prompt, *written, *drafts]
        scores = RepetitionPenaltyLogitsProcessor(row.repetition_penalty)(torch.tensor([tokens]), logits[None].clone())
        scores = tiny.Penalties(len(prompt), row)(torch.tensor([tokens]), scores)
        alone = Sampling(row.temperature, row.top_k, row.top_p, row.seed, min_p=row.min_p)
        return int(sampler(alone).choose(scores[None], torch.tensor([[len(tokens)]]), NONE))

    def check(self, rows: int, width: int, seed: int) -> None:
        """A round of `rows` rows, some of them dead, against one sequence and column at a time."""
        living = self.random.sample(sorted(self.held), min(rows - 1, len(self.held)))
        numbers = torch.tensor([*living, *[self.slots] * (rows - len(living))])
        logits = normal(rows, width, tiny.VOCABULARY, seed=seed)
        drafts = torch.tensor([[self.random.randrange(tiny.VOCABULARY) for _ in range(width - 1)] for _ in numbers])
        drafts = drafts.reshape(rows, width - 1).long()
        lengths = [len(self.held[s][1]) + len(self.held[s][2]) if s in living else 0 for s in numbers.tolist()]
        positions = torch.tensor(lengths)[:, None] + torch.arange(width)
        chosen = self.state.rows(numbers, living).choose(logits, positions, drafts)
        for (r, slot), column in product(enumerate(living), range(width)):
            expected = self.expected(slot, logits[r, column], drafts[r, :column].tolist())
            assert int(chosen[r, column]) == expected, (self.held[slot], column)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_by_slot_is_what_the_sequences_are(seed: int) -> None:
    """Slots taken again, several times before a round, tokens committed to some rows: whatever was there before."""
    sequences = Sequences(6, seed)
    for step in range(12):
        for _ in range(sequences.random.randrange(3) + (step == 0)):
            sequences.admit()
        sequences.check(4, 1 + step % 3, seed=step)
        sequences.commit()


def test_tokens_are_counted_where_some_row_is_penalised_alone() -> None:
    state = SamplerState(3, tiny.VOCABULARY, CPU)
    state.admit(0, Sampling(), [1, 2])
    state.admit(1, Sampling(0.5, seed=3), [1, 2])
    state.committed({0: [3], 1: [4]})
    greedy, sampled = (state.rows(torch.tensor([slot, 3]), [slot]) for slot in (0, 1))
    assert [k for k, v in greedy.state.items() if isinstance(v, Tensor)] == []
    assert sampled.state.keys() == {"uses", "numbers", "integers"}
    state.admit(2, Sampling(presence_penalty=1.0), [1, 2], [2, 7])
    assert state.rows(torch.tensor([2, 3]), [2]).held.nonzero().tolist() == [[0, 1], [0, 2], [0, 7]]
    assert "held" not in state.rows(torch.tensor([1, 3]), [1]).state


def test_a_smaller_vocabulary_lacks_tokens() -> None:
    """A draft's logits may be of fewer tokens than were seen or drafted."""
    row = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    chooses = Sampler([row], [[3, 40]], CPU, [1])
    logits = torch.full((1, 1, 8), 1.0)
    logits[..., 3], logits[..., 5] = 1.9, 1.5
    assert int(chooses.choose(logits, torch.tensor([[2]]), torch.tensor([[50]]))) == 5
    assert int(chooses.choose(logits, torch.tensor([[2]]), torch.tensor([[5, 50]]))) == 0
