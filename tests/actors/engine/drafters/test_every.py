"""What holds for every drafter in the registry, and for a new one that is registered here."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Sampling
from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.drafters.lookup import available
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.actors.engine.graphs import Eager
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.methods import drafter_of
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.plan import plan_memory
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice
from tests import tiny
from tests.actors.engine.test_graphs import Traced

NEW = "ngram"
# A number behind the name is a window: the drafter reads so many tokens of KV beside the first page of 8. A second one
# counts tokens of chosen pages.
WINDOWED = ["model 16", "eagle3 9", "clover 8", "dflash 8", "sparse 16", "sparse 8+16"]
NAMES = [*(name for name in DRAFTERS if name not in (NONE, "sparse")), *WINDOWED, NEW]
ONE_WINDOW = [name for name in NAMES if name not in WINDOWED[:-1]]  # for tests that take long
# Prompts that repeat themselves and each other, for drafters that look tokens up; and prompts that do not.
PROMPTS = [[*([7, 8, 9, 10] * 5), i % 3] for i in range(9)] + tiny.prompts(8)
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9)
SHAPE: dict[str, Any] = {"draft_tokens": 4, "attention": "auto"}


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the new drafter. It must not replace one of the product: every test here would test it instead."""
    assert NEW not in DRAFTERS
    monkeypatch.setitem(DRAFTERS, NEW, "tests.actors.engine.drafters.ngram:NGram")


class Watched(Drafter):
    """Wraps a drafter. Checks that the engine tells it every token, and that its drafts stay within the limits."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.caches = drafter, drafter.caches
        self.window, self.ahead = drafter.window, drafter.ahead
        self.tokens: dict[int, list[int]] = {}
        self.proposed = self.ended = 0

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = list(tokens)
        self.drafter.admit(slot, tokens)

    def prefill(self, batch: Batch) -> None:
        self.drafter.prefill(batch)

    def replace(self, batch: Batch) -> None:
        self.drafter.replace(batch)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        for row, sequence in enumerate(group.sequences):
            assert sequence is None or self.tokens[sequence.slot] == sequence.tokens, "a token was not passed on"
            assert sequence is not None or limits[row] == 0, "a dead row drafts nothing"
        draft = self.drafter.propose(group, limits)
        assert (draft.lengths <= torch.tensor(limits)).all()
        assert draft.tokens.shape[1] <= max(limits)
        for row, length in enumerate(draft.lengths.tolist()):
            tokens = draft.tokens[row, :length].tolist()
            assert draft.on_host is None or draft.on_host[row] == tokens
            assert all(0 <= token < tiny.VOCABULARY for token in tokens)
        self.proposed += int(draft.lengths.sum())
        return draft

    def committed(self, tokens: dict[int, list[int]]) -> None:
        for slot, new in tokens.items():
            self.tokens[slot] += new
        self.drafter.committed(tokens)

    def end(self, slot: int) -> None:
        del self.tokens[slot]
        self.drafter.end(slot)

    def learn(self, prompt: Any, completion: list[int]) -> None:
        self.ended += 1
        self.drafter.learn(prompt, completion)


def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The target."""
    return tiny.deep(4, 0.3, dtype)


def engine(
    name: str, dtype: torch.dtype = torch.float32, recorder: Any = None, **config: Any
) -> tuple[Engine, Watched]:
    watched: list[Watched] = []

    def make(context: Any) -> Drafter:
        watched.append(Watched(drafter_of(context)))
        return watched[0]

    target = model(dtype)
    name, settings = named(name)
    draft = tiny.draft_of(name, target)
    return tiny.engine(target, name, draft, make, recorder, **SHAPE | settings | config), watched[0]


def named(name: str) -> tuple[str, dict[str, Any]]:
    """The drafter of a name in NAMES, and its settings."""
    drafter, _, sizes = name.partition(" ")
    return drafter, dict(
        zip(("draft_window", "draft_chosen"), map(int, sizes.split("+")), strict=False)
    ) if sizes else {}


@cache
def reference(sampling: Sampling | None = None) -> dict[Any, list[int]]:
    return tiny.slow_decode(model(), tiny.requests(PROMPTS, 20, sampling))


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "sampling", [None, SAMPLED, Sampling(repetition_penalty=1.3)], ids=["greedy", "sampled", "penal"]
)
@pytest.mark.parametrize(
    "config",
    [
        {"attention": "gathered"},
        {"attention": "in_place"},
        {"attention": "in_place", "overlap": True},
        {"attention": "gathered", "exact": False, "bucket": 1},
        {"method": "eqspec"},
        {"attention": "gathered", "draft_length": "both"},
        {"attention": "gathered", "pages": 14},
        {"attention": "in_place", "pages": 14, "draft_from": 24},
        {"attention": "in_place", "kernels": "compiled_packed"},
        {"attention": "gathered", "batch_size": 20, "window": 20},
    ],
    ids=[
        "gathered",
        "in place",
        "overlap",
        "free",
        "eqspec",
        "lengths",
        "few pages",
        "from 24",
        "compiled",
        "dead rows",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_a_slow_loop(name: str, config: dict[str, Any], sampling: Sampling | None) -> None:
    tiny.need(config.get("attention"), config.get("kernels"))
    if name in ("early_exit", *tiny.HEADS, *WINDOWED) and config.get("method") == "eqspec":
        with pytest.raises(ValueError, match="method eqspec moves the KV"):
            engine(name, **config)
        return
    made, watched = engine(name, **config)
    assert tiny.decode(made, tiny.requests(PROMPTS, 20, sampling), shuffle=1) == reference(sampling)
    assert watched.proposed
    assert watched.ended == len(PROMPTS)


@pytest.mark.cover(1)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_equals_plain_in_the_same_shape(name: str, sampling: Sampling | None) -> None:
    rows = tiny.requests(PROMPTS, 20, sampling)
    made, _ = engine(name, torch.bfloat16)
    plain = Engine(model(torch.bfloat16), None, made.config.plain())
    assert tiny.decode(made, rows, shuffle=3) == tiny.decode(plain, rows, shuffle=4)


@pytest.mark.cover(1)
@pytest.mark.parametrize("config", [{}, {"attention": "gathered", "exact": False, "bucket": 1}], ids=["", "free"])
@pytest.mark.parametrize("name", NAMES)
def test_constraints_hold_with_every_drafter(name: str, config: dict[str, Any]) -> None:
    """Two of three rows must be one of some labels of several tokens."""
    words = [[10, 11], [10, 11, 12], [20, 7, 8, 9], [7, 8, 9]]
    label = lambda: Automaton(choice(words, chain([40, 41, tiny.ENDS[0]], Node())))  # noqa: E731
    rows = [
        replace(r, constraint=label if i % 3 else None, scored=9 * (i % 3 == 1))
        for i, r in enumerate(tiny.requests(PROMPTS, 20))
    ]
    made, watched = engine(name, **config)
    plain = Engine(model(), None, made.config.plain())
    found = tiny.decode(made, rows, shuffle=2)
    assert found == tiny.decode(plain, rows)
    assert all(found[r.id] in [[*word, 40, 41, tiny.ENDS[0]] for word in words] for r in rows if r.constraint)
    assert watched.proposed


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_room_for_one_token_draft_nothing(name: str) -> None:
    made, watched = engine(name)
    expected = {name: tokens[:1] for name, tokens in reference().items()}
    assert tiny.decode(made, tiny.requests(PROMPTS, 1)) == expected
    assert watched.proposed == 0


@pytest.mark.fast("early_exit")
@pytest.mark.parametrize("name", ONE_WINDOW)
def test_recorded_shapes_give_the_same_tokens_and_are_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    recorder = Traced()
    made, _ = engine(name, recorder=recorder, attention="gathered")
    eager, _ = engine(name, recorder=Eager(), attention="gathered")
    assert tiny.decode(made, tiny.requests(PROMPTS)) == tiny.decode(eager, tiny.requests(PROMPTS))
    buckets = tiny.CONTEXT // made.config.bucket
    assert recorder.recorded <= 3 * buckets + buckets * (1 + made.config.draft_tokens)


@pytest.mark.fast("model")
@pytest.mark.parametrize("name", ONE_WINDOW)
def test_every_drafter_is_planned_for_and_calibrated(name: str) -> None:
    """Through the registry: no other code names a drafter."""
    target = model()
    name, settings = named(name)
    draft = tiny.draft_of(name, target)
    config = tiny.config(drafter=name, **SHAPE | settings)
    assert name in available(target.config, draft and draft.config, config)
    made = Engine(target, draft, config)
    plan = plan_memory(target.config, draft and draft.config, made.config, torch.float32)
    without = plan_memory(target.config, None, made.config.plain(), torch.float32)
    assert plan.kv == tiny.kv_bytes(made)
    assert plan.total >= without.total
    rows = tiny.requests(PROMPTS, 10)
    found = calibrate(target, draft, rows, config, ("method", "drafter", "draft_tokens"), seconds=1.0)
    assert name in {c.config.drafter for c in found.candidates if c.config.drafts}
    measured = [row for row in found.table() if row["drafter"].split()[0] == name and row["measured"]]
    assert measured, "one configuration of each drafter is run"
    decoded = tiny.decode(Engine(target, draft, found.config), rows)
    assert decoded == {name: tokens[:10] for name, tokens in reference().items()}


def test_a_missing_draft_or_unknown_drafter_is_refused() -> None:
    heads = {"clover": "Clover", "eagle3": "EAGLE-3", "dflash": "DFlash"}
    needed = {"model": "a draft model"} | {name: f"a head of {title}" for name, title in heads.items()}
    for name, draft in needed.items():
        with pytest.raises(ValueError, match=f"method exspec with the drafter {name}: it needs {draft}"):
            Engine(tiny.model(), None, EngineConfig(drafter=name))
    with pytest.raises(ValueError, match=f"drafter: expected one of {', '.join(DRAFTERS)}, not 'medusa'"):
        EngineConfig(drafter="medusa")
    with pytest.raises(ValueError, match="method exspec needs a drafter; use method plain to decode without one"):
        EngineConfig(drafter="none")
