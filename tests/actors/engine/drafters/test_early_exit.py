"""Early exit: drafts equal those of a slow loop, no token is computed twice, unfit targets are refused."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.drafters.drafter import Draft
from exspec.actors.engine.drafters.early_exit import EarlyExit
from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.forward import Forward
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.shape.plan import plan_memory
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice
from exspec.actors.engine.tokens.constraint_walker import narrowed
from tests import tiny

LAYERS = 6
PROMPTS = tiny.prompts(9)
EXITS = {"exit_depth": 1, "check_depth": 3}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"attention": "in_place", "bucket": tiny.CONTEXT},
    {"exact": False, "bucket": 1},
    {"exact": False, "bucket": 1, "exit_tokens": 3, "draft_tokens": 5},
    {"exit_tokens": 1, "draft_tokens": 2},
    {"exit_depth": 2, "check_depth": 5, "draft_tokens": 7},
]


class Slow(EarlyExit):
    """Compares every draft with one that is made without any cache. seen: counts of tokens."""

    whole: PreTrainedModel
    seen: Counter[str]

    @torch.inference_mode()
    def next_token(self, tokens: list[int], depth: int) -> int:
        whole: Any = self.whole
        hidden = whole(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[depth][:, -1]
        return int(whole.lm_head(whole.model.norm(hidden)).argmax())

    def propose(self, group: Group, limits: list[int]) -> Draft:
        draft = super().propose(group, limits)
        for row, (sequence, limit) in enumerate(zip(group.sequences, limits, strict=True)):
            expected, early = self.slow(sequence.tokens if sequence else [], limit, max(limits))
            assert draft.tokens[row, : draft.lengths[row]].tolist() == expected
            assert [int(draft.counts[name][row]) for name in ("early_drafted", "early_accepted")] == early
            self.seen.update(proposed=len(expected), shown=early[0], agreed=early[1])
        return draft

    def slow(self, tokens: list[int], limit: int, count: int) -> tuple[list[int], list[int]]:
        """HiSpec as in its paper, one column at a time: the draft; how many tokens depth i saw, and agreed with."""
        (d, i), kept, shown, agreed = self.depths, list[int](), 0, 0
        ahead = max(min(self.exit_tokens, count), 1)
        for _ in range(-(-count // ahead) if limit else 0):
            if len(kept) == limit:
                break
            drafted: list[int] = []
            for _ in range(ahead):
                drafted.append(self.next_token(tokens + kept + drafted, d))
            room = limit - len(kept)
            shown += min(room, ahead)
            for token in [*drafted, -1][:room]:
                kept.append(self.next_token(tokens + kept, i))
                if kept[-1] != token:
                    break
                agreed += 1
        return kept, [shown, agreed]


def slow_engine(target: PreTrainedModel, **config: Any) -> tuple[Engine, Slow]:
    made: list[Slow] = []

    def make(context: Any) -> Slow:
        made.append(Slow.build(context))
        made[0].whole, made[0].seen = target, Counter()
        return made[0]

    return tiny.engine(target, "early_exit", None, make, **{"draft_tokens": 4, **EXITS, **config}), made[0]


@pytest.mark.parametrize("config", CONFIGS, ids=["gathered", "in place", "free", "three ahead", "one ahead", "deeper"])
def test_drafts_and_tokens_equal_a_slow_loop(config: dict[str, Any]) -> None:
    tiny.need(config.get("attention"))
    target = tiny.deep(LAYERS)
    made, drafter = slow_engine(target, **config)
    done = tiny.run(made, tiny.requests(PROMPTS), shuffle=0)
    assert {name: c.tokens for name, c in done.items()} == tiny.greedy(target, PROMPTS)
    assert drafter.seen["proposed"] > drafter.seen["shown"] / 2
    assert 0.1 < drafter.seen["agreed"] / drafter.seen["shown"] < 0.98, "checks pass and fail"
    total = tiny.total(done)
    assert (total.early_drafted, total.early_accepted) == (drafter.seen["shown"], drafter.seen["agreed"])
    assert 0 < total.early_acceptance_rate < 1
    assert 0 < total.acceptance_rate < 1
    assert total.early_accepted <= total.drafted, "all that a check keeps is proposed, and the check's own token"


@pytest.mark.cover(1)
@pytest.mark.parametrize("agreement", [0.0, 0.06, 1.0], ids=["always right", "sometimes", "never"])
@pytest.mark.parametrize("config", CONFIGS[2:4], ids=["two ahead", "three ahead"])
def test_a_draft_computes_each_accepted_token_once_per_layer(
    config: dict[str, Any], agreement: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verify forward computes it once more. Counted are writes to the KV, by layer and by the tokens of the round
    up to the written one. The last token of a draft may be the check's own, which no draft has computed."""
    made, _ = slow_engine(tiny.deep(LAYERS, agreement), **config)
    written: Counter[tuple[int, tuple[int, ...], int]] = Counter()  # by slot, tokens, layer
    fed: dict[tuple[int, int], int] = {}  # token by slot and position, as it was fed last
    starts: dict[int, int] = {}
    verifier: Any = made.target
    run, update = verifier._run, Forward.update
    here: list[tuple[int, int]] = []  # slot and position of the running forward's columns

    def watched(batch: Batch, *rest: Any, **options: Any) -> Any:
        rows = zip(batch.slots.tolist(), batch.tokens.tolist(), batch.starts.tolist(), strict=True)
        here[:] = [(slot, start + q) for slot, row, start in rows for q in range(len(row))]
        fed.update(zip(here, batch.tokens.flatten().tolist(), strict=True))
        return run(batch, *rest, **options)

    def counted(forward: Forward, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        for (slot, position), page in zip(here, (forward.write // made.config.page_size).tolist(), strict=True):
            if slot in starts and page:
                written[slot, tuple(fed[slot, p] for p in range(starts[slot], position + 1)), layer] += 1
        return update(forward, key, value, layer, *rest, **options)

    monkeypatch.setattr(verifier, "_run", watched)
    monkeypatch.setattr(Forward, "update", counted)
    checked = EXITS["check_depth"]
    for request in tiny.requests(PROMPTS, 20):
        made.submit(request)
    accepted = 0
    made.admit()
    while made.busy:
        group = made.group()
        before = {s.slot: s for s in group.sequences if s}
        starts |= {slot: s.length for slot, s in before.items()}
        made.commit(group, made.wait(made.verify(group, made.draft(group))))
        for slot, sequence in before.items():
            round_ = sequence.tokens[starts[slot] : -1]  # the pending token and what was accepted
            for end in range(1, len(round_) + 1):
                found = [written[slot, tuple(round_[:end]), layer] for layer in range(LAYERS)]
                once, twice = [1] * LAYERS, [2] * checked + [1] * (LAYERS - checked)
                last = end == len(round_)
                assert found == twice or (last and found == once), f"{end} of {len(round_)} tokens: {found}"
            accepted += len(round_) - 1
        written.clear()
        starts.clear()
        made.check()
        made.admit()
    assert accepted > 20 or agreement == 1.0


def test_each_row_is_narrowed_at_its_own_position_of_its_draft() -> None:
    """Rows are at different positions of their drafts: compared with a loop over rows and columns."""
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 40)
    must = torch.tensor([[7, 8, -1, -1], [-1, -1, -1, -1], [3, 4, 5, 6]])
    allowed = [[1, 2], [30], [9]]
    masks = torch.zeros(3, 2, dtype=torch.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= 1 << token % 32
    places = torch.tensor([[1, 2], [0, 1], [3, 4]])
    found = narrowed(logits, places, must, masks)
    for row, column in product(range(3), range(2)):
        known = [token for token in must[row].tolist() if token >= 0]
        place = int(places[row, column])
        may = [known[place]] if place < len(known) else allowed[row] if place == len(known) else list(range(40))
        assert found[row, column].isfinite().nonzero()[:, 0].tolist() == sorted(may)


@pytest.mark.parametrize("config", CONFIGS[2:4], ids=["two ahead", "three ahead"])
def test_tokens_that_a_constraint_puts_into_a_draft_are_drafted_after(config: dict[str, Any]) -> None:
    """The drafter has not proposed them."""
    last = choice([[token] for token in range(7, 60)], chain([tiny.ENDS[0]], Node()))
    label = lambda: Automaton(choice([[token] for token in range(7, 30)], chain([40, 41], last)))  # noqa: E731
    rows = [replace(r, constraint=label) for r in tiny.requests(PROMPTS, 20)]
    target = tiny.deep(LAYERS)
    made = tiny.engine(target, "early_exit", **EXITS, **config)
    found = tiny.decode(made, rows)
    assert found == tiny.decode(Engine(target, None, made.config.plain()), rows)
    assert len({tokens[3] for tokens in found.values()}) > 3, "the token after them depends on the row"


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_families_can_run_some_of_their_layers(family: str) -> None:
    changes = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    assert EarlyExit.trial(tiny.model(family, **changes), EngineConfig(drafter="early_exit")) is None


def test_a_target_whose_layers_share_more_than_hidden_states_is_refused() -> None:
    target = tiny.deep(LAYERS)
    first, *_, last = layers_of(target)
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    def add(_: Any, inputs: Any) -> Any:
        return (inputs[0] + 0.1 * calls[0], *inputs[1:])

    first.register_forward_pre_hook(count)
    last.register_forward_pre_hook(add)
    with pytest.raises(ValueError, match="early_exit: LlamaForCausalLM run in two parts has logits"):
        Engine(target, None, EngineConfig(drafter="early_exit", capacity=64, bucket=64))


def test_impossible_exit_depths_are_refused() -> None:
    with pytest.raises(
        ValueError, match="leaves at exit_depth 1 and check_depth 2; expected 0 < 1 < 2 < 2, the target"
    ):
        Engine(tiny.model(), None, EngineConfig(drafter="early_exit"))
    with pytest.raises(ValueError, match="leaves at exit_depth 4 and check_depth 4"):
        Engine(tiny.deep(LAYERS), None, EngineConfig(drafter="early_exit", exit_depth=4, check_depth=4))
    with pytest.raises(ValueError, match="exit_depth: expected a positive number, not 0"):
        EngineConfig(exit_depth=0)


def test_the_depths_that_calibration_tries_have_labels() -> None:
    """By default eighths and quarters of the layers; otherwise the depths of the config."""
    config = EngineConfig(drafter="early_exit")
    deep = tiny.model(num_hidden_layers=16).config
    tried = drafter_class("early_exit").variants(deep, config, 96)
    assert [tuple(depths.values()) for depths in tried] == [(2, 4, 2), (2, 4, 3), (4, 8, 2)]
    labels = [EarlyExit.label(replace(config, **depths)) for depths in tried]
    assert labels == ["early_exit 2/4/2", "early_exit 2/4/3", "early_exit 4/8/2"]
    asked = replace(config, exit_depth=3, check_depth=5, exit_tokens=4)
    assert [tuple(depths.values()) for depths in EarlyExit.variants(deep, asked, 96)] == [(3, 5, 4)]
    assert EarlyExit.label(config) == "early_exit"


def test_the_memory_plan_counts_hidden_states() -> None:
    target = tiny.deep(LAYERS)
    config = EngineConfig(drafter="early_exit", capacity=64, bucket=64, batch_size=2, window=2)
    plan = plan_memory(target.config, None, config, torch.float32)
    without = plan_memory(target.config, None, config.plain(), torch.float32)
    assert plan.kv - without.kv == (config.page_count + 1) * config.page_size * 32 * 4
    assert plan.weights == without.weights
