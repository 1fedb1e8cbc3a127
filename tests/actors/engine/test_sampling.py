"""How tokens are chosen: the noise, what top-k and top-p leave, and what is kept by slot."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from exspec.actors.engine import Sampling
from exspec.actors.engine.tokens.sampling import FEW, Sampler, SamplerState, _mix, _search, _top, gumbel_noise
from tests import tiny

DRAWS = 40_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
CPU = torch.device("cpu")
NONE = torch.zeros(1, 0, dtype=torch.long)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def sampler(*rows: Sampling) -> Sampler:
    return Sampler(rows, [[0]] * len(rows), CPU)


def draw(logits: Tensor, sampling: Sampling, position: int | None = 17, first_seed: int = 0) -> Tensor:
    """One token from each of many seeds; without a position, from one seed at each of many positions."""
    seeds = range(first_seed, first_seed + DRAWS) if position is not None else [first_seed] * DRAWS
    positions = torch.arange(DRAWS)[:, None] if position is None else torch.full((DRAWS, 1), position)
    rows = [replace(sampling, seed=seed) for seed in seeds]
    return sampler(*rows).choose(logits.expand(DRAWS, 1, -1), positions, NONE.expand(DRAWS, 0))[:, 0]


def p_value(tokens: Tensor, probability: Tensor) -> float:
    expected = (probability * len(tokens)).double().numpy()
    return float(stats.chisquare(np.bincount(tokens, minlength=len(expected)), expected, sum_check=False).pvalue)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("position", [17, None], ids=["over seeds", "over positions"])
def test_samples_follow_the_softmax(temperature: float, position: int | None) -> None:
    tokens = draw(LOGITS, Sampling(temperature=temperature), position)
    assert p_value(tokens, (LOGITS / temperature).softmax(-1)) > 1e-3


def test_the_statistical_test_finds_a_difference() -> None:
    tokens = draw(LOGITS, Sampling(temperature=1.0))
    assert p_value(tokens, (LOGITS / 1.05).softmax(-1)) < 1e-3


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """A chi-square test on pairs: (seed, position t) with (seed, t + 1), (seed + 1, t) and (seed + 2**32, t)."""
    sampling = Sampling(temperature=1.0)
    here = draw(LOGITS, sampling, 17)
    for position, first_seed in ((18, 0), (17, 1), (17, 2**32)):
        other = draw(LOGITS, sampling, position, first_seed)
        table = torch.zeros(8, 8).index_put((here, other), torch.ones(DRAWS), accumulate=True)
        table = torch.cat([table[:, :6], table[:, 6:].sum(1, keepdim=True)], 1)
        assert stats.chi2_contingency(table[[0, 1, 2, 3, 4, 5, 7]].numpy()).pvalue > 1e-3


def test_noise_is_gumbel_and_does_not_depend_on_batch_or_vocabulary() -> None:
    seeds, positions = torch.arange(50), torch.arange(40).expand(50, 40)
    noise = gumbel_noise(seeds, positions, 31)
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert torch.equal(gumbel_noise(seeds[7:9], positions[7:9, 11:13], 31), noise[7:9, 11:13])
    assert torch.equal(gumbel_noise(seeds[3:4], positions[3:4], 12), noise[3:4, :, :12])


def test_seeds_of_64_bits_all_differ() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, -1 % 2**63]
    chooses = sampler(*(Sampling(temperature=1.0, seed=seed) for seed in seeds))
    positions, drafts = torch.arange(64).expand(len(seeds), 64), torch.zeros(len(seeds), 63, dtype=torch.long)
    tokens = chooses.choose(torch.zeros(len(seeds), 64, 1000), positions, drafts)
    assert len({tuple(row) for row in tokens.tolist()}) == len(set(seeds))


@pytest.mark.slow
def test_draft_and_target_agree_as_often_as_the_coupling_guarantees() -> None:
    """At least (1 - TV) / (1 + TV), for every pair of distributions (Daliri, Musco, Suresh 2024)."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        draft = LOGITS + 0.7 * torch.randn(len(LOGITS), generator=generator)
        distance = 0.5 * (LOGITS.softmax(-1) - draft.softmax(-1)).abs().sum()
        sampling = Sampling(temperature=1.0)
        agreed = (draw(LOGITS, sampling) == draw(draft, sampling)).float().mean()
        assert agreed >= (1 - distance) / (1 + distance) - 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature: expected 0"),
        ({"top_k": -1}, "top_k: expected 0"),
        ({"top_p": 0}, "top_p: expected above 0"),
        ({"top_p": 1.5}, "top_p: expected above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected above 0"),
        ({"temperature": 1e-39}, r"temperature: expected 0 \(greedy\), or 1e-6 to 1e6, not 1e-39"),
        ({"temperature": float("inf")}, "temperature: expected 0"),
        ({"temperature": float("nan")}, "temperature: expected 0"),
        ({"temperature": "warm"}, "temperature: expected 0"),
        ({"top_k": 2**63}, "top_k: expected 0 .* below"),
        ({"top_k": 2.5}, "top_k: expected 0"),
        ({"seed": 0.5}, "seed: expected a whole number"),
        ({"top_p": float("nan")}, "top_p: expected above 0"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty: expected above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: expected above 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [1e-30, 1e-50, 5e-324])
def test_the_most_likely_token_stays_however_small_top_p_is(top_p: float) -> None:
    """The fault: it was 0 in float32 and left no token."""
    assert set(draw(LOGITS.flip(0), Sampling(temperature=1.0, top_p=top_p)).tolist()) == {len(LOGITS) - 1}


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_logits_stay_finite_with_extreme_settings(temperature: float, penalty: float) -> None:
    row = Sampling(temperature, repetition_penalty=penalty)
    sampler = Sampler([row], [[0, 7]], CPU)
    logits = sampler._penalise((1e4 * LOGITS)[None, None], torch.zeros(1, 0, dtype=torch.long)) / sampler.temperature
    assert logits.isfinite().all()
    assert set(draw(LOGITS, Sampling(1e-6)).tolist()) == {int(LOGITS.argmax())}


def lowbias32(x: Any, key: Any) -> Any:
    """In numpy's uint32, which wraps."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) + key
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


@pytest.mark.parametrize("count", [1, 7, 4099])
def test_the_hash_wraps_as_uint32(count: int) -> None:
    """For one number and for many at a time."""
    numbers = np.random.default_rng(0).integers(0, 2**32, (2, count), dtype=np.uint32)
    numbers[0, 0] = 2**32 - 1
    x, key = (torch.from_numpy(n.view(np.int32).copy()) for n in numbers)
    assert (_mix(x, key).numpy().view(np.uint32) == lowbias32(*numbers)).all()


def test_large_noise_is_finite_and_as_frequent_as_it_should_be() -> None:
    """The largest noise decides, so it needs many bits: with 24, dozens of values above 8 would be equal."""
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
def test_seeds_that_differ_in_one_bit_have_independent_noise(bit: int) -> None:
    """Token by token, and as a set of values."""
    seeds = torch.tensor([5, 5 ^ (1 << bit if bit < 63 else -(2**63))])
    one, other = gumbel_noise(seeds, torch.tensor([[3], [3]]), 20_000)[:, 0].double()
    uniform, shifted = ((-(-x).exp()).exp() for x in (one, other))
    assert abs(float(torch.corrcoef(torch.stack([uniform, shifted]))[0, 1])) < 4 / 20_000**0.5
    large = [set(x[x > 3].tolist()) for x in (one, other)]
    assert len(large[0] & large[1]) < 5


def left(logits: Tensor, row: Sampling) -> Tensor:
    """The smallest of logits [V] that transformers keeps."""
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
@DTYPES
@pytest.mark.parametrize("name", ROWS)
def test_top_k_and_top_p_keep_what_transformers_keeps(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    """And all tokens that tie with the last kept one. Rows do not affect each other."""
    rows = [Sampling(temperature=t, top_k=k, top_p=p) for t, k, p in ROWS[name]]
    logits = normal(len(rows), 2, vocabulary, dtype=dtype)
    logits[:, 1, ::3] = -torch.inf  # forbidden tokens
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
def test_the_largest_logits_are_found_by_chunks(vocabulary: int, count: int) -> None:
    """If all are in one chunk, past the last whole chunk, or equal."""
    logits = normal(4, 2, vocabulary)
    logits[1] = torch.arange(vocabulary)
    logits[2] = -torch.arange(vocabulary)
    logits[3] = logits[3].round()
    assert torch.equal(_top(logits, count), logits.topk(min(count, vocabulary)).values)


@DTYPES
def test_the_search_finds_the_exact_float(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    wanted = torch.tensor([-torch.inf, -largest, -1.5, -torch.finfo(dtype).smallest_normal, 0.0, 1.0, 3.25, largest])
    low, high = (torch.full_like(wanted.to(dtype), end) for end in (-torch.inf, largest))
    assert torch.equal(_search(lambda t: t <= wanted.to(dtype), low, high), wanted.to(dtype))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 0.9), (0.8, 1000, 0.95), (2.0, 400, 1.0), (2.0, 20, 1.0)]
)
def test_proposals_nearly_always_equal_the_choice(temperature: float, top_k: int, top_p: float) -> None:
    cut = sampler(*(Sampling(temperature, top_k, top_p, seed) for seed in range(300)))
    whole = sampler(*(Sampling(temperature, seed=seed) for seed in range(300)))
    arguments = normal(300, 1, 3000), torch.ones(300, 1, dtype=torch.long), NONE.expand(300, 0)
    chosen = cut.choose(*arguments)
    assert (chosen == cut.propose(*arguments)).float().mean() > 0.985
    assert (chosen == whole.choose(*arguments)).float().mean() < 0.97, "top-k and top-p make no difference"


class Sequences:
    """The slow, obvious way: every slot's sequence as a list of tokens."""

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
        """The token after the sequence and the drafts, from logits [V]."""
        row, prompt, written = self.held[slot]
        tokens = [*prompt, *written, *drafts]
        scores = RepetitionPenaltyLogitsProcessor(row.repetition_penalty)(torch.tensor([tokens]), logits[None].clone())
        scores = tiny.Penalties(len(prompt), row)(torch.tensor([tokens]), scores)
        alone = Sampling(row.temperature, row.top_k, row.top_p, row.seed, min_p=row.min_p)
        return int(sampler(alone).choose(scores[None], torch.tensor([[len(tokens)]]), NONE))

    def check(self, rows: int, width: int, seed: int) -> None:
        """A round of `rows` rows, some of them dead, compared with one sequence and column at a time."""
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
def test_slots_choose_tokens_as_their_sequences_do(seed: int) -> None:
    """Slots are admitted to several times before a round, and only some rows commit tokens."""
    sequences = Sequences(6, seed)
    for step in range(12):
        for _ in range(sequences.random.randrange(3) + (step == 0)):
            sequences.admit()
        sequences.check(4, 1 + step % 3, seed=step)
        sequences.commit()


def test_tokens_are_counted_only_for_penalised_rows() -> None:
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


def test_a_drafts_vocabulary_may_be_smaller() -> None:
    """Tokens past its end may have been seen or drafted."""
    row = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    chooses = Sampler([row], [[3, 40]], CPU, [1])
    logits = torch.full((1, 1, 8), 1.0)
    logits[..., 3], logits[..., 5] = 1.9, 1.5
    assert int(chooses.choose(logits, torch.tensor([[2]]), torch.tensor([[50]]))) == 5
    assert int(chooses.choose(logits, torch.tensor([[2]]), torch.tensor([[5, 50]]))) == 0
