"""A target on several devices gives the tokens of one device, bit for bit, while each device works on another round."""

import copy
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from exspec.actors.adapter import adapt
from exspec.actors.engine import Completion, Engine, Request, Sampling
from exspec.actors.engine.drafters.lookup import available
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.kv.split import LAYERS, Lane, Split, SplitModel, Stage, place
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.methods import drafter_of
from exspec.actors.engine.shape.calibration import calibrate
from exspec.actors.engine.shape.plan import balanced, device_plans, fit, plan_memory
from exspec.actors.exactness import check_forward
from tests import tiny
from tests.actors.engine.test_adapters import folders
from tests.actors.engine.test_graphs import Traced

CPU = torch.device("cpu")
PROMPTS = tiny.prompts(14)
SPLITS = ((3, 3), (1, 5), (5, 1), (2, 3, 1), (1, 1, 2, 2), (1, 1, 1, 1, 1, 1))
MORE = {
    "gemma2": transformers.Gemma2Config(**tiny._COMMON, **tiny._SHAPE, head_dim=8, sliding_window=None),
    "opt": transformers.OPTConfig(
        **tiny._COMMON, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "mixtral": transformers.MixtralConfig(**tiny._COMMON, **tiny._SHAPE, num_local_experts=4, sliding_window=None),
}


def split(model: PreTrainedModel, *layers: int) -> PreTrainedModel:
    """A copy of a model on as many CPU devices."""
    made = copy.deepcopy(model)
    place(made, Split((CPU,) * len(layers), layers))
    return made


def same(engine: Engine) -> Callable[[Sequence[Request]], dict[Any, Any]]:
    """Decodes requests, and gives what must not change."""

    def of(done: Completion) -> Any:
        return done.tokens, done.finish_reason, done.stopped_by, done.scores, done.logprobs

    return lambda requests: {name: of(done) for name, done in tiny.run(engine, requests, shuffle=3).items()}


def rows() -> list[Request]:
    """Greedy, sampled, penalised, constrained and scored rows, with and without log-probabilities."""
    found = tiny.requests(PROMPTS, 14)
    samplings = [Sampling(0.9, seed=i, top_k=9 * (i % 2), repetition_penalty=1.2 if i % 3 else 1.0) for i in range(4)]
    found[:4] = [replace(r, sampling=s) for r, s in zip(found, samplings, strict=False)]
    found[4:6] = [replace(r, logprobs=i * 2) for i, r in enumerate(found[4:6])]
    found[6:8] = [replace(r, bad_words=((7,), (9, 11)), min_new_tokens=5) for r in found[6:8]]
    return found


@pytest.mark.parametrize("layers", SPLITS, ids=str)
@pytest.mark.parametrize("drafter", ["none", "model", "suffix"])
def test_any_split_gives_the_tokens_of_one_device(drafter: str, layers: tuple[int, ...]) -> None:
    target, draft = tiny.deep(6), tiny.model(seed=1) if drafter == "model" else None
    shape: dict[str, Any] = {"method": "plain"} if drafter == "none" else {"drafter": drafter}
    shape |= {"window": 14, "batch_size": 2, "bucket": tiny.CONTEXT}
    engines = [Engine(model, draft, tiny.config(**shape)) for model in (target, split(target, *layers))]
    assert (engines[1].config.devices, engines[1].config.overlap) == (len(layers), True)
    whole, parts = (same(engine)(rows()) for engine in engines)
    assert parts == whole


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_dtypes(dtype: torch.dtype, attention: str) -> None:
    tiny.need(attention)
    target, draft = tiny.deep(6, dtype=dtype), tiny.model(seed=1, dtype=dtype)
    shape = tiny.config(attention=attention, window=14)
    whole, parts = (same(Engine(model, draft, shape))(rows()) for model in (target, split(target, 2, 2, 2)))
    assert parts == whole


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *MORE])
def test_families_keep_every_bit(family: str) -> None:
    """The logits of a prefill and a verify, and the KV."""
    if family in MORE:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MORE[family]).eval()
    else:
        model = tiny.model(family)
    tokens = torch.randint(0, tiny.VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(1))
    found = []
    for made in (model, split(model, 1, 1)):
        pages = Pages(3, 12, 8, 8, 32, CPU)
        for slot in range(3):
            pages.begin(slot, [], 0, 24, 0)
        parts = Split.of(made)
        cached = SplitModel(made, parts, pages, GATHERED) if parts else PagedModel(made, pages, GATHERED)
        slots = torch.tensor([2, 0, 1])
        cached.fill(Batch(slots, tokens, torch.zeros(3, dtype=torch.long), 24))
        logits = cached.forward(Batch(slots, tokens[:, :4], torch.tensor([6, 5, 2]), 24))
        cached.check({})
        by_layer = cached.stages if isinstance(cached, SplitModel) else [cached, cached]
        found.append([logits, *(kv for n, s in enumerate(by_layer) for kv in (s.keys[n], s.values[n]))])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_the_check_of_a_model_at_load_passes() -> None:
    check_forward(split(tiny.model("gpt2"), 1, 1), "gpt2")
    check_forward(split(tiny.model("llama"), 1, 1), "llama")


def test_only_the_stages_move_what_their_layers_read() -> None:
    """The model's own forward moves it too, by hooks, where devices differ. These two do in name only."""
    target = copy.deepcopy(tiny.deep(6))
    place(target, Split((CPU, torch.device("cpu", 0)), (2, 4)))
    hooked = [layer._forward_pre_hooks for layer in layers_of(target)]
    assert all(hooked)
    assert layers_of(target)[-1]._forward_hooks
    assert tiny.greedy(target, PROMPTS[:3], 8) == tiny.greedy(tiny.deep(6), PROMPTS[:3], 8)
    engine = Engine(target, None, tiny.config(method="plain"))
    assert isinstance(engine.target, SplitModel)
    found = [m for stage in engine.target.stages for gate in layers_of(stage.model) for m in gate.modules()]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in found)
    assert tiny.decode(engine, tiny.requests(PROMPTS, 8)) == tiny.greedy(tiny.deep(6), PROMPTS, 8)


def test_every_device_works_on_another_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three devices waits for the others to work at the same time; in turns, they would wait for ever."""
    meeting, met, seen = threading.Barrier(3), [], threading.local()
    run = Stage.run

    def watched(stage: Stage, given: Tensor, *rest: Any) -> Any:
        seen.calls = getattr(seen, "calls", 0) + 1
        if 0 <= seen.calls - 42 + stage.part.start // 2 < 3:  # a later device has had fewer calls
            meeting.wait(60)
            met.append(stage.part.start)
        return run(stage, given, *rest)

    monkeypatch.setattr(Stage, "run", watched)
    target = tiny.deep(6)
    shape: dict[str, Any] = {"method": "plain", "batch_size": 2, "window": 10, "bucket": tiny.CONTEXT}
    engine = Engine(split(target, 2, 2, 2), None, tiny.config(**shape))
    requests = tiny.requests([[i + 1, i + 2] for i in range(8)], 40, ignore_end=True)
    for request in requests:
        engine.submit(request)
    found = {done.id: done.tokens for done in engine.run()}
    assert sorted(met) == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    whole = Engine(target, None, tiny.config(**shape))
    assert found == tiny.decode(whole, requests)


@pytest.mark.parametrize("layers", [(3, 3), (2, 2, 2)], ids=str)
def test_preempted_rows_keep_their_tokens(layers: tuple[int, ...]) -> None:
    target, draft = tiny.deep(6), tiny.model(seed=1)
    requests = tiny.requests(tiny.prompts(10, seed=3), 30)
    shape = tiny.config(pages=13, page=8, window=10, batch_size=2, bucket=tiny.CONTEXT)
    engine = Engine(split(target, *layers), draft, shape)
    preempted: list[Any] = []
    preempt = engine.pool._preempt
    engine.pool._preempt = lambda s: (preempted.append(s), preempt(s))[1]  # type: ignore[method-assign, func-returns-value]
    assert tiny.decode(engine, requests, shuffle=1) == tiny.decode(Engine(target, draft, shape), requests)
    assert preempted


def test_adapters_by_row_and_given_completions(tmp_path: Path) -> None:
    target = tiny.deep(6)
    adapt(target, folders(target, tmp_path))
    requests = [replace(r, adapter=i % 3) for i, r in enumerate(tiny.requests(PROMPTS, 12))]
    given = [replace(r, id=("given", r.id), given=[3, 9, 27, 20, 60, 1][: 2 + i % 5], logprobs=2) for i, r in
             enumerate(requests[:7])]  # fmt: skip
    shape = tiny.config(method="plain", columns=4, window=14, batch_size=2, bucket=tiny.CONTEXT)
    whole, parts = (same(Engine(m, None, shape))([*requests, *given]) for m in (target, split(target, 2, 2, 2)))
    assert parts == whole
    plain = same(Engine(target, None, shape))([replace(r, adapter=0) for r in requests])
    assert any(plain[r.id] != whole[r.id] for r in requests), "the adapters change nothing"


def test_recorded_stages_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device records its own functions, and one thread calls all of them, as for GPUs."""

    class Called(Lane):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.thread = None

    monkeypatch.setattr("exspec.actors.engine.kv.split.Lane", Called)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)  # as in `test_graphs`
    target, draft = tiny.deep(6), tiny.model(seed=1)
    shape = tiny.config(window=12, batch_size=2, bucket=tiny.CONTEXT)
    requests, recorder = tiny.requests(PROMPTS, 12), Traced()
    found = tiny.decode(Engine(split(target, 2, 4), draft, shape, recorder=recorder), requests)
    assert found == tiny.decode(Engine(target, draft, shape), requests)
    assert recorder.played > 10 * recorder.recorded > 0


@pytest.mark.parametrize("fills", [True, False])
def test_what_a_device_raises_reaches_the_caller(fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Stage.run

    def fails(stage: Stage, given: Tensor, located: Any, filling: bool) -> Any:
        if stage.part.start and filling == fills:
            raise torch.OutOfMemoryError("device 1 is full")
        return run(stage, given, located, filling)

    monkeypatch.setattr(Stage, "run", fails)
    engine = Engine(split(tiny.deep(6), 3, 3), None, tiny.config(method="plain"))
    engine.submit(Request(0, list(range(1, 20))))
    with pytest.raises(torch.OutOfMemoryError, match="device 1 is full"):
        engine.run()
    assert isinstance(engine.target, SplitModel)
    with pytest.raises(torch.OutOfMemoryError, match="device 1 is full"):
        engine.target.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_requests_shapes_and_splits(seed: int) -> None:
    rng = random.Random(seed)
    target, draft = tiny.deep(6), tiny.model(seed=1)
    count = rng.randint(2, 6)
    cuts = sorted(rng.sample(range(1, 6), count - 1))
    layers = [b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    requests = [
        replace(request, max_new_tokens=rng.randint(1, 30), logprobs=rng.choice([None, None, 2]))
        for request in tiny.requests(tiny.prompts(rng.randint(1, 20), seed=seed), 8)
    ]
    shape: dict[str, Any] = {
        "batch_size": rng.randint(1, 4), "window": rng.randint(4, 20), "draft_tokens": rng.randint(1, 4),
        "bucket": rng.choice([32, tiny.CONTEXT]), "prefill_rows": rng.randint(1, 3), "page": 8,
        "pages": rng.choice([None, 13, 20]), "drafter": rng.choice(["model", "suffix"]),
        "overlap": rng.choice([None, True, False]),
    }  # fmt: skip
    shape |= {"method": "plain"} if rng.random() < 0.3 else {}
    config = tiny.config(**shape)
    whole, parts = (same(Engine(m, draft, config))(requests) for m in (target, split(target, *layers)))
    assert parts == whole, (layers, shape)


def test_the_memory_of_each_device_is_predicted() -> None:
    target, draft = split(tiny.deep(6), 2, 4), tiny.model(seed=1)
    config = tiny.config(window=12, prefill_rows=4)
    first, second = device_plans(target.config, draft.config, config, torch.float32)
    engine = Engine(target, draft, config)
    assert isinstance(engine.target, SplitModel)
    held = [sum(kv.nbytes for kv in (*stage.keys, *stage.values)) for stage in engine.target.stages]
    (cached,) = engine.drafter.caches
    assert isinstance(cached, PagedModel)
    assert [first.kv, second.kv] == [held[0] + sum(kv.nbytes for kv in (*cached.keys, *cached.values)), held[1]]
    model = tiny.deep(6)
    layers = [sum(t.nbytes for t in layer.parameters()) for layer in model.model.layers]
    assert second.weights == sum(layers[2:])
    whole = device_plans(model.config, draft.config, replace(config, devices=2, overlap=True), torch.float32)[0]
    assert first.weights + second.weights == whole.weights
    assert first.kv + second.kv == whole.kv


def test_layers_are_balanced_by_memory() -> None:
    target, same_size, small = tiny.deep(6), tiny.deep(6), tiny.model()
    alone = balanced(target.config, None, 3, torch.float32, tiny.CONTEXT)
    beside = balanced(target.config, same_size.config, 3, torch.float32, tiny.CONTEXT)
    assert sum(alone) == sum(beside) == 6
    assert beside[0] <= balanced(target.config, small.config, 3, torch.float32, tiny.CONTEXT)[0] <= alone[0]
    assert beside == (1, 3, 2)
    assert max(alone) - min(alone[1:]) <= 1


def test_a_device_that_holds_less_is_rejected_with_the_plan() -> None:
    target, draft = split(tiny.deep(6), 2, 4), tiny.model(seed=1)
    config = tiny.config(window=12)
    least = plan_memory(target.config, draft.config, replace(config, batch_size=1, window=1), torch.float32).total
    fitted = fit(target.config, draft.config, config, torch.float32, least)
    assert (fitted.batch_size, fitted.devices) == (1, 2)
    assert plan_memory(target.config, draft.config, fitted, torch.float32).total <= least
    with pytest.raises(ValueError, match=r"on each device \(device 0: .* MiB .*; device 1: .* MiB .*\)"):
        fit(target.config, draft.config, config, torch.float32, least - 1)


def test_what_does_not_work_on_several_devices_is_refused() -> None:
    target, config = split(tiny.deep(6), 3, 3), tiny.config()
    with pytest.raises(ValueError, match="eqspec moves the KV of whole rows; expected exspec or plain"):
        Engine(target, tiny.model(), replace(config, method="eqspec"))
    assert available(target.config, tiny.model(seed=1).config, config) == ["model", "suffix"]
    with pytest.raises(ValueError, match="it reads the target's layers, which lie on several devices"):
        Engine(target, None, replace(config, drafter="early_exit"), drafter=drafter_of)
    with pytest.raises(ValueError, match="its 6 layers cannot be split over 7 devices; expected at most 6"):
        balanced(tiny.deep(6).config, None, 7, torch.float32, 64)
    with pytest.raises(ValueError, match=r"expected one layer or more per device, 6 together, not 3 \+ 4"):
        place(tiny.deep(6), Split((CPU, CPU), (3, 4)))
    quantized = tiny.deep(6).config
    quantized.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ValueError, match="its weights are quantized; expected a target on one device"):
        balanced(quantized, None, 2, torch.float32, 64)


def test_calibration_keeps_tokens_and_makes_room_for_all_rounds() -> None:
    target, draft = split(tiny.deep(6), 2, 2, 2), tiny.model(seed=1)
    requests = tiny.requests(PROMPTS, 12)
    found = calibrate(target, draft, requests, tiny.config(window=24), ("method", "batch_size", "window"), 3.0, 2**28)
    assert found.config.devices == 3
    assert found.config.window == 5 * found.config.batch_size
    assert len([c for c in found.candidates if c.turns]) >= 2, "nothing raced"
    assert getattr(target.config, LAYERS) == [2, 2, 2]
    assert tiny.decode(Engine(target, draft, found.config), requests) == tiny.greedy(tiny.deep(6), PROMPTS, 12)


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_embeddings_keep_every_bit(attention: str) -> None:
    tiny.need(attention)
    target = tiny.deep(6)
    shape = tiny.config(method="plain", columns=4, attention=attention, embeds=True, window=12, batch_size=2)
    requests = [Request(i, prompt[:1], given=[*prompt[1:], 0]) for i, prompt in enumerate(PROMPTS)]
    found = [tiny.run(Engine(model, None, shape), requests) for model in (target, split(target, 2, 3, 1))]
    assert all((found[0][i].state == found[1][i].state).all() for i in range(len(PROMPTS)))
