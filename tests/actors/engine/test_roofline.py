"""The bounds follow from bytes and flops: compared with numbers computed by hand."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from exspec.actors.engine.shape.roofline import ACCEPTANCE, Card, Drafting, Roofline, Sizes, draftings

TINY = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4}  # fmt: skip
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # q, k and v, o, feed-forward, norms
READ = 2 * LAYER + 8 + 100 * 8
TARGET, DRAFT = Sizes(1000.0, 800.0, 400.0, 10.0), Sizes(100.0, 100.0, 50.0, 5.0)


def test_the_sizes_are_those_of_the_models_tensors() -> None:
    apart = Sizes.of(LlamaConfig(**TINY, tie_word_embeddings=False), torch.bfloat16)
    shared = Sizes.of(LlamaConfig(**TINY, tie_word_embeddings=True), torch.float32)
    assert apart == (2 * (READ + 800), 2 * READ, READ, 2 * 2 * 4 * 2)
    assert shared == (4 * READ, 4 * READ, READ, 2 * 2 * 4 * 4)


def test_a_token_is_multiplied_with_its_own_experts_only() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    sizes = Sizes.of(Qwen3MoeConfig(**TINY, **experts), torch.bfloat16)
    assert sizes.read / 2 - sizes.parameters == 2 * 6 * 3 * 8 * 16, "six of the eight experts of both layers"


def test_a_forward_reads_its_bytes_and_computes_its_tokens() -> None:
    bounds = Roofline(Card(bandwidth=100.0, flops=1e12, free=1), TARGET)
    assert bounds.forward(TARGET, 4, 2, 30) == (800 + 4 * 30 * 10) / 100
    slow = Roofline(Card(bandwidth=1e12, flops=100.0, free=1), TARGET)
    assert slow.forward(TARGET, 4, 2, 30) == 2 * 400 * 8 / 100


def test_a_round_drafts_and_verifies() -> None:
    bounds = Roofline(Card(100.0, 1e12, 1), TARGET)
    verify = (800 + 4 * 1000 * 10) / 100
    assert bounds.round(4, 1000, 0, None) == verify
    assert bounds.round(4, 1000, 3, Drafting("draft", DRAFT)) == verify + 3 * (100 + 4 * 1000 * 5) / 100
    assert bounds.round(4, 1000, 3, Drafting("", DRAFT, window=36)) == verify + 3 * (100 + 4 * 100 * 5) / 100
    assert bounds.round(4, 1000, 3, Drafting("", TARGET, own=False)) == verify + 3 * (800 + 4 * 320 * 10) / 100


def test_drafting_that_costs_nothing_is_worth_its_tokens() -> None:
    bounds = Roofline(Card(100.0, 1e12, 1), TARGET)
    free = Drafting("", Sizes(0.0, 0.0, 0.0, 0.0))
    most = sum(ACCEPTANCE**i for i in range(17))
    assert bounds.times_plain(1000, free) == pytest.approx(most)
    assert bounds.pays_from(free) == 100
    useless = Drafting("", TARGET._replace(held=0.0))
    assert bounds.times_plain(1000, useless) < 1
    assert bounds.pays_from(useless) is None
    large = Drafting("", Sizes(2.0**30, 0.0, 0.0, 0.0))
    assert (bounds.times_plain(1000, large), bounds.pays_from(large)) == (0, None), "it does not fit"
    greedy = Drafting("", Sizes(0.0, 0.0, 0.0, 1e5))
    assert bounds.times_plain(16000, greedy) == 0, "one row of 16,000 tokens does not fit"
    assert bounds.pays_from(greedy) is None


def test_drafts_are_worth_more_the_longer_the_text() -> None:
    bounds = Roofline(Card(3.35e12, 989e12, 79), Sizes(16.4e9, 15.1e9, 7.6e9, 147_456))
    for drafting in draftings(bounds.target, Sizes(1.2e9, 1.2e9, 0.6e9, 114_688))[1:]:
        ratios = [bounds.times_plain(n, drafting) for n in (1000, 2000, 4000, 8000, 16000)]
        assert ratios == sorted(ratios)
        assert ratios[0] > 1
