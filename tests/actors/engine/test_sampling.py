"""The shared noise: it samples from the softmax, each seed and place for itself, and couples draft and target."""

import pytest
import torch
from scipy import stats

from exspec.actors.engine import Sampling
from exspec.actors.engine.tokens.sampling import Sampler, gumbel_noise

DRAWS = 40_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
NONE = torch.zeros(DRAWS, 0, dtype=torch.long)


def draw(logits: torch.Tensor, sampling: Sampling, position: int | None = 17, first_seed: int = 0) -> torch.Tensor:
    """One token from each of many seeds, or from one seed at each of many places."""
    seeds = [first_seed + i if position is not None else first_seed for i in range(DRAWS)]
    places = torch.arange(DRAWS)[:, None] if position is None else torch.full((DRAWS, 1), position)
    rows = [Sampling(**{**vars(sampling), "seed": seed}) for seed in seeds]
    sampler = Sampler(rows, [[0]] * DRAWS, torch.device("cpu"))
    return sampler.choose(logits.expand(DRAWS, 1, -1), places, NONE)[:, 0]


def p_value(tokens: torch.Tensor, probability: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probability))
    kept = probability > 0
    assert counts[~kept].sum() == 0
    return float(
        stats.chisquare(
            counts[kept].numpy(), (probability[kept] * len(tokens)).double().numpy(), sum_check=False
        ).pvalue
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("position", [17, None], ids=["over seeds", "over places"])
def test_samples_follow_the_softmax(temperature: float, position: int | None) -> None:
    tokens = draw(LOGITS, Sampling(temperature=temperature), position)
    assert p_value(tokens, (LOGITS / temperature).softmax(-1)) > 1e-3


def test_the_statistical_test_can_fail() -> None:
    tokens = draw(LOGITS, Sampling(temperature=1.0))
    assert p_value(tokens, (LOGITS / 1.05).softmax(-1)) < 1e-3


def test_top_k_and_top_p_cut_the_distribution() -> None:
    probability = LOGITS.softmax(-1)
    top3 = torch.where(probability >= probability.sort().values[-3], probability, 0)
    assert p_value(draw(LOGITS, Sampling(temperature=1.0, top_k=3)), top3 / top3.sum()) > 1e-3
    # 0.40, 0.25, 0.15: the third brings the sum past 0.7, the fourth is cut.
    assert p_value(draw(LOGITS, Sampling(temperature=1.0, top_p=0.7)), top3 / top3.sum()) > 1e-3


def test_neighbouring_places_and_seeds_are_independent() -> None:
    """A chi-square test on pairs: (seed, place t) with (seed, t + 1), and (seed, t) with (seed + 1, t)."""
    sampling = Sampling(temperature=1.0)
    here = draw(LOGITS, sampling, 17)
    for other in (
        draw(LOGITS, sampling, 18),
        draw(LOGITS, sampling, 17, first_seed=1),
        draw(LOGITS, sampling, 17, 2**32),
    ):
        table = torch.zeros(8, 8).index_put((here, other), torch.ones(DRAWS), accumulate=True)
        table = torch.cat([table[:, :6], table[:, 6:].sum(1, keepdim=True)], 1)
        assert stats.chi2_contingency(table[[0, 1, 2, 3, 4, 5, 7]].numpy()).pvalue > 1e-3


def test_noise_is_gumbel_and_the_same_wherever_it_is_computed() -> None:
    seeds, places = torch.arange(50), torch.arange(40).expand(50, 40)
    noise = gumbel_noise(seeds, places, 31)
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert torch.equal(gumbel_noise(seeds[7:9], places[7:9, 11:13], 31), noise[7:9, 11:13])
    assert torch.equal(gumbel_noise(seeds[3:4], places[3:4], 12), noise[3:4, :, :12]), "no matter the vocabulary's size"


def test_seeds_of_64_bits_all_differ() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, -1 % 2**63]
    rows = [Sampling(temperature=1.0, seed=seed) for seed in seeds]
    sampler = Sampler(rows, [[0]] * len(rows), torch.device("cpu"))
    flat = torch.zeros(len(rows), 64, 1000)
    tokens = sampler.choose(flat, torch.arange(64).expand(len(rows), 64), torch.zeros(len(rows), 63, dtype=torch.long))
    assert len({tuple(row) for row in tokens.tolist()}) == len(set(seeds))


@pytest.mark.slow
def test_draft_and_target_agree_as_often_as_the_coupling_promises() -> None:
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
def test_bad_settings_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [1e-30, 1e-50, 5e-324])
def test_however_small_top_p_is_the_likeliest_token_stays(top_p: float) -> None:
    """It was 0 in float32 and kept nothing: token 0 came out for ever."""
    likeliest_last = LOGITS.flip(0)
    assert set(draw(likeliest_last, Sampling(temperature=1.0, top_p=top_p)).tolist()) == {len(LOGITS) - 1}


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_at_the_ends_of_their_ranges_logits_stay_finite(temperature: float, penalty: float) -> None:
    row = Sampling(temperature, repetition_penalty=penalty)
    sampler = Sampler([row], [[0, 7]], torch.device("cpu"))
    logits = sampler._penalise((1e4 * LOGITS)[None, None], torch.zeros(1, 0, dtype=torch.long)) / sampler.temperature
    assert logits.isfinite().all()
    assert set(draw(LOGITS, Sampling(1e-6)).tolist()) == {int(LOGITS.argmax())}
