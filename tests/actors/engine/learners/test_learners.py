"""Learners: they judge drafts as the engine makes them, and their losses are the papers'."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from exspec.actors.engine import Request
from exspec.actors.engine.drafters.head import proposed
from exspec.actors.engine.drafters.lookup import head_of, learner_class
from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.actors.engine.learners import dflash, eagle3
from exspec.actors.engine.learners.dflash import pace
from exspec.actors.engine.learners.learner import Growth, Learner, Lesson, copy_norm, runs
from exspec.actors.engine.learners.model import ModelLearner
from exspec.jobs.training.examples import Example, TargetStates, padded
from exspec.jobs.training.trainer import Trainer
from tests import tiny

K = 3
TRAINED = [name for name in DRAFTERS if learner_class(name)]
every = pytest.mark.parametrize("drafter", TRAINED)


SCALED: dict[str, dict[str, Any]] = {  # families whose logits are scaled or capped
    "granite": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "sliding_window": 96, "head_dim": 8},
}  # fmt: skip


def of_family(family: str, layers: int) -> Any:
    if family not in SCALED:
        return tiny.model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": layers})
    shape = {k: v for k, v in tiny.FAMILIES["llama"].to_dict().items() if k not in ("model_type", "head_dim")}
    config = AutoConfig.for_model(family, **shape | {"num_hidden_layers": layers} | SCALED[family])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def texts(target: Any, count: int = 24, new: int = 14) -> list[Example]:
    """Prompts of at least two tokens, and what the target writes after them, past every end."""
    rows = [prompt for prompt in tiny.prompts(2 * count) if len(prompt) > 1][:count]
    engine = tiny.engine(target, batch_size=8, window=8)
    found = tiny.decode(engine, [Request(i, p, new, ignore_end=True) for i, p in enumerate(rows)])
    return [(prompt, found[i]) for i, prompt in enumerate(rows)]


def lesson_of(target: Any, learner: Learner, rows: list[Example]) -> Lesson:
    tokens, text, own = padded(rows)
    return Lesson(tokens, text, own, TargetStates(target, learner.layers, 64).of(tokens))


def new(target: Any, drafter: str) -> Learner:
    """A learner that has not learned yet. A draft model has one layer: with two it is nearly the target."""
    kind = learner_class(drafter)
    assert kind is not None
    torch.manual_seed(0)
    target.requires_grad_(False)
    layers = 1 if drafter == "model" else None
    return kind(target, kind.grow(target, Growth(K, layers)).float(), K)


def taught(target: Any, drafter: str, rows: list[Example], steps: int) -> Learner:
    """A learner after some steps on all rows."""
    learner = new(target, drafter)
    lesson = lesson_of(target, learner, rows)
    Trainer(learner, lambda *_: lesson, 1000, steps).run(lambda _: None)
    return learner


def written(learner: Learner, folder: Path) -> Any:
    """The learner's model, saved and loaded."""
    learner.save(folder, torch.float32)
    values = json.loads((folder / "config.json").read_text())
    drafter = head_of(values)
    if drafter is None:
        return AutoModelForCausalLM.from_pretrained(folder)
    return drafter.load(folder, torch.float32, "cpu", False)


@every
def test_a_learner_judges_drafts_as_the_engine_makes_them(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From which tokens are right at every place follow the rounds of the engine and the lengths that it accepts."""
    monkeypatch.setattr(dflash, "ANCHORS", 1.0)
    target = tiny.deep(5, 0.3)
    rows = texts(target)
    learner = taught(target, drafter, rows, 250 if drafter == "dflash" else 60)
    engine = tiny.engine(target, drafter, written(learner, tmp_path), draft_tokens=K)
    done = tiny.run(engine, [Request(i, p, len(c), ignore_end=True) for i, (p, c) in enumerate(rows)])
    accepted = 0
    for i, (prompt, completion) in enumerate(rows):
        with torch.no_grad():
            outcome = learner.outcome(lesson_of(target, learner, [(prompt, completion)]))
        assert len(outcome.right) == len(completion), "a place for each token"
        place, rounds, kept = 0, 0, 0
        while place < len(completion):
            right = (outcome.right & outcome.known)[place].tolist()
            length = next((n for n, hit in enumerate(right) if not hit), K)
            length = min(length, len(completion) - place - 1)
            place, rounds, kept = place + length + 1, rounds + 1, kept + length
        found = done[i].statistics
        assert (found.rounds, found.accepted) == (rounds, kept)
        accepted += kept
    assert 0.1 < accepted / sum(len(c) for _, c in rows) < 0.72, "drafts of every length"


@pytest.mark.parametrize(("total", "count"), [(1, 1), (2, 1), (3, 2), (6, 2), (8, 2), (12, 3)])
def test_a_draft_model_has_a_quarter_of_the_layers_but_at_least_two(total: int, count: int) -> None:
    made = ModelLearner.grow(tiny.model(num_hidden_layers=total), Growth(K))
    assert made.config.num_hidden_layers == count


@every
def test_training_changes_the_drafter_and_not_the_target(drafter: str) -> None:
    target = tiny.deep(5, 0.3)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    first, later = (taught(target, drafter, texts(target, 6), steps) for steps in (1, 100))
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert not any(module._forward_hooks for module in target.modules())
    losses = [learner.outcome(lesson_of(target, learner, texts(target, 6))).loss for learner in (first, later)]
    assert losses[1] < 0.9 * losses[0]


@every
def test_what_is_after_a_text_is_not_learned(drafter: str) -> None:
    target = tiny.deep(5, 0.3)
    short, long = texts(target, 2)
    learner = taught(target, drafter, [short, long], 2)
    learner.model.eval()
    lesson = lesson_of(target, learner, [(short[0], short[1][:6]), long])
    tokens = lesson.tokens.clone()
    end = len(short[0]) + 6
    tokens[0, end:] = 7
    found = []
    for each in (lesson.tokens, tokens):
        torch.manual_seed(1)
        found.append(learner.outcome(lesson._replace(tokens=each)))
    assert torch.equal(found[0].loss, found[1].loss)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@every
def test_a_drafter_grows_from_every_family(drafter: str, family: str, tmp_path: Path) -> None:
    target = of_family(family, 4)
    rows = texts(target, 6)
    learner = taught(target, drafter, rows, 2)
    engine = tiny.engine(target, drafter, written(learner, tmp_path), draft_tokens=K)
    found = tiny.decode(engine, [Request(i, p, len(c), ignore_end=True) for i, (p, c) in enumerate(rows)])
    assert found == {i: c for i, (_, c) in enumerate(rows)}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_hidden_states_are_those_of_transformers(family: str) -> None:
    target = of_family(family, 3)
    rows = texts(target, 7)
    tokens, real, _ = padded(rows)
    found = TargetStates(target, (1, 2), 64).of(tokens)
    expected = target(input_ids=tokens, output_hidden_states=True).hidden_states
    assert torch.allclose(found[real], torch.cat(expected[1:3], dim=-1)[real], atol=1e-4)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *SCALED])
def test_what_is_wanted_are_the_logits_of_the_target(family: str) -> None:
    """And a draft model that is a copy of the target has the least loss: the entropy of the target's distribution."""
    target = of_family(family, 3)
    target.requires_grad_(False)
    learner = ModelLearner(target, ModelLearner.grow(target, Growth(K, layers=3)), K)
    learner.model.eval()
    lesson = lesson_of(target, learner, [(list(range(1, 9)), [9])])
    logits = target(lesson.tokens).logits
    assert torch.allclose(learner.wanted(lesson.states[0]), logits[0], atol=1e-3)
    assert not target.base_model._forward_hooks
    likely = logits[0, :-1].softmax(-1)
    entropy = -(likely * likely.log()).sum(-1).mean()
    assert learner.outcome(lesson).loss.item() == pytest.approx(entropy.item(), abs=1e-4)


def test_the_weights_of_a_block_are_those_of_the_paper() -> None:
    chances = torch.tensor([0.9, 0.1, 0.6])
    q = [0.5 * chance + 0.5 for chance in chances.tolist()]
    products = [q[0], q[0] * q[1], q[0] * q[1] * q[2]]
    whole = pace(chances, torch.ones(3, dtype=torch.bool))
    assert whole.tolist() == pytest.approx([sum(products), sum(products[1:]), products[2]])
    cut = pace(chances, torch.tensor([True, True, False]))
    assert cut.tolist() == pytest.approx([sum(products[:2]), products[1], 0.0]), "the text ends after two tokens"


def test_runs_are_of_tokens_that_follow_each_other() -> None:
    right = torch.tensor([[False, True, True, False, True]])
    own = torch.tensor([[False, True, True, True, True]])
    found, known = runs(right, own, 3)
    assert found.tolist() == [[True, True, False], [True, False, True], [False, True, False], [True, False, False]]
    assert known.tolist() == [[True, True, True], [True, True, True], [True, True, False], [True, False, False]]


def test_a_new_head_of_eagle_proposes_what_the_target_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary the head has only the most frequent tokens."""
    monkeypatch.setattr(eagle3, "PROPOSED", 3)
    counts = Counter({7: 9, 60: 4, 11: 5, 3: 1})
    target = tiny.deep(5)
    head: Any = eagle3.Eagle3Learner.grow(target, Growth(K, counts=counts))
    assert proposed(head).tolist() == [7, 11, 60]
    eagle3.Eagle3Learner(target, head, K).save(tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].nonzero().flatten().tolist() == [7, 11, 60]
    assert torch.equal(tensors["d2t"], head.d2t)


def test_a_head_that_lacks_tokens_learns_the_others() -> None:
    """What it cannot propose has no loss, and its drafts are wrong there."""
    target = tiny.deep(5, 0.3)
    rows = texts(target, 6)
    used = sorted({token for _, completion in rows for token in completion})
    config = dflash.DFlashLearner.grow(target, Growth(K)).config
    config.draft_vocab_size, config.scores = len(used) // 2, True
    head: Any = dflash.DFlashHead(config)
    head.d2t.copy_(torch.tensor(used[::2][: len(head.d2t)]) - torch.arange(len(head.d2t)))
    target.requires_grad_(False)
    learner = dflash.DFlashLearner(target, head, K)
    lesson = lesson_of(target, learner, rows)
    lesson = lesson._replace(text=lesson.own)  # nothing predicts the random tokens of these prompts
    first = learner.outcome(lesson).loss
    assert first.isfinite()
    Trainer(learner, lambda *_: lesson, 1000, 150).run(lambda _: None)
    outcome = learner.outcome(lesson)
    assert outcome.loss < 0.7 * first
    assert 0.2 < (outcome.right & outcome.known)[:, 0].float().mean() < 0.8


@pytest.mark.parametrize(("layers", "read"), [(4, [1, 2, 3]), (6, [1, 3, 5]), (12, [2, 6, 9])])
def test_a_new_head_of_eagle_reads_three_layers(layers: int, read: list[int]) -> None:
    head: Any = eagle3.Eagle3Learner.grow(tiny.deep(layers), Growth(K))
    assert head.config.aux_layers == read


def test_a_norm_that_computes_something_else_is_not_copied() -> None:
    """Gemma's has the same tensor, but adds one to it."""
    ours = LlamaRMSNorm(8)
    with torch.no_grad():
        norms = [LlamaRMSNorm(8), GemmaRMSNorm(8)]
        for norm in norms:
            norm.weight.uniform_(0.2, 0.6)
    copy_norm(norms[1], ours)
    assert ours.weight.eq(1).all()
    copy_norm(norms[0], ours)
    assert torch.equal(ours.weight, norms[0].weight)
