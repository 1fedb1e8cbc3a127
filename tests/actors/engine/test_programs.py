"""Programs: what a trace becomes, what is left out, and that a token never depends on the program that computed it."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from exspec.actors.engine import Engine, Sampling
from exspec.actors.engine.graphs import Eager
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.layers import programs
from exspec.actors.engine.layers.cuts import cut
from exspec.actors.engine.layers.packed import _PACKED, packed_product
from exspec.actors.engine.layers.pieces import trace
from exspec.actors.engine.layers.products import join
from exspec.actors.engine.layers.programs import Compiled, OutOfTimeError, pieces_of, program
from exspec.actors.engine.tokens.constraint import Automaton, Node, chain, choice
from tests import tiny

aten = torch.ops.aten
MIXED = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_k=9, top_p=0.9, seed=4),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.7, min_p=0.1, frequency_penalty=0.5, seed=5),
]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    tiny.need("in_place", "compiled")
    with torch.inference_mode():
        yield


def targets(function: Any, *arguments: Any, packs: bool = False) -> list[list[Any]]:
    """The operations of each piece that a program of the function runs."""
    pieces = pieces_of(trace(function, arguments), packs)
    return [[node.target for node in p.graph.graph.nodes if node.op == "call_function"] for p in pieces]


def test_pieces_that_lead_nowhere_are_dropped_and_writes_are_kept() -> None:
    store, x = torch.zeros(4), torch.ones(4)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        cut(y)
        store.view(2, 2).view(-1).mul_(0).add_(y)  # a write through views
        cut(y)
        (y * 5).exp_()
        cut(y)
        return y * 2

    assert [len(piece) for piece in targets(function, x)] == [1, 4, 1]
    made = program(function, (x,))
    assert not store.any(), "a trace writes nothing"
    assert made(x).equal(torch.full((4,), 4.0))
    assert store.equal(torch.full((4,), 2.0))


def test_pieces_run_in_the_order_of_the_function() -> None:
    """The first reads what the second overwrites, although no value goes from one to the other."""
    store = torch.ones(3)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        before = store * 1
        cut(x)
        store.copy_(x)
        cut(x)
        return before, store + 1

    made = program(function, (torch.zeros(3),))
    for value, last in ((5.0, 1.0), (7.0, 5.0)):
        before, after = made(torch.full((3,), value))
        assert before.equal(torch.full((3,), last))
        assert after.equal(torch.full((3,), value + 1))


def test_a_write_to_an_own_tensor_with_views_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        row = y[0]
        y.log1p_()
        return row + 1

    with pytest.raises(ValueError, match="writes to a tensor that has views"):
        program(function, (torch.ones(2, 2),))


def test_a_function_that_reads_a_value_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def decides(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x

    programs.warn_once.cache_clear()
    run = Compiled(Eager(), packs=False).wrap(decides)
    assert run(torch.ones(3)).equal(torch.full((3,), 2.0))
    assert run(-torch.ones(3)).equal(-torch.ones(3)), "the decision is not kept"
    assert "decides runs eagerly, not compiled" in caplog.text


def test_a_model_that_keeps_tensors_keeps_none_of_a_trace() -> None:
    """In transformers, the rotary factors of a longrope model are kept by each forward."""
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny.model(rope_parameters={**factors, "original_max_position_embeddings": tiny.CONTEXT, "factor": 2.0})
    programs.warn_once.cache_clear()
    engine = tiny.engine(target, method="plain", attention="in_place", kernels="compiled")
    rows = tiny.prompts(5)
    assert tiny.decode(engine, tiny.requests(rows, 9)) == tiny.greedy(target, rows, 9)
    assert not programs.warn_once.cache_info().currsize, "something ran eagerly"


def test_another_shape_or_plain_value_is_another_program() -> None:
    run = Compiled(Eager(), packs=False).wrap(lambda x, n: x * n)
    assert [run(torch.ones(2), 3).sum(), run(torch.ones(4), 3).sum(), run(torch.ones(2), 5).sum()] == [6, 12, 10]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_products_of_the_same_tensor_become_one(packs: bool, bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(8, n, bias=bias) for n in (6, 4, 10)]
    join(linears)
    x = torch.randn(5, 8)
    function = lambda x: tuple(linear(x) for linear in linears)  # noqa: E731
    expected = function(x)
    ((*found,),) = targets(function, x, packs=packs)
    products = [t for t in found if t in (aten.mm.default, aten.addmm.default, packed_product)]
    kind = packed_product if packs else aten.addmm.default if bias else aten.mm.default
    assert products == [kind] * (3 if bias else 1)
    for one, other in zip(program(function, (x,), packs)(x), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kernels", ["compiled", "compiled_packed"])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_fill_writes_the_kv_of_a_forward_without_its_last_half_layer(kernels: Any, remembers: bool) -> None:
    tiny.need("in_place", kernels)
    target, made = tiny.model(dtype=torch.bfloat16), []
    for name in ("fill", "forward"):
        engine = tiny.engine(target, method="plain", attention="in_place", kernels=kernels)
        if remembers:
            engine.target.remember([1])
        for slot in range(2):
            engine.pool.store.begin(slot, [], 0, 16, 0)
        tokens = torch.arange(16).view(2, 8) + 3
        batch = Batch(torch.arange(2), tokens, torch.tensor([0, 5]), engine.config.capacity)
        getattr(engine, {"fill": "fill", "forward": "_forward"}[name])(batch)
        made.append((engine, batch))
    (filled, batch), (forwarded, _) = made
    stores = [
        engine.target.keys + engine.target.values + [*engine.target.states.values()] for engine in (filled, forwarded)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*stores, strict=True))
    assert all(store.any() for store in stores[0])
    fill, forward = (targets(function, batch) for function in (filled.target.fill, filled.target.forward))
    assert len(fill) == len(forward) - 2, "neither the second half of the last layer nor the head"
    assert fill == forward[:-2]


@pytest.mark.cover(2)
@pytest.mark.parametrize("kernels", ["compiled", "compiled_packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_every_kind_of_sampling_share_rounds(dtype: torch.dtype, kernels: Any) -> None:
    """A row's tokens do not depend on the features that its neighbours use, on drafts or on the order."""
    tiny.need("in_place", kernels)
    target = tiny.model(dtype=dtype)
    words = lambda: Automaton(choice([[10, 11], [10, 11, 12], [20]], chain([40, 41, tiny.ENDS[0]], Node())))  # noqa: E731
    rows: list[Any] = []
    for i, prompt in enumerate(tiny.prompts(15)):
        (request,) = tiny.requests([prompt], 14, MIXED[i % len(MIXED)])
        rows.append(type(request)(**{**vars(request), "id": i, "constraint": words if i % 4 == 3 else None}))
    shape: dict[str, Any] = {"attention": "in_place", "kernels": kernels, "prefill_rows": 3}
    programs.warn_once.cache_clear()
    plain = {}
    for row in rows:  # each alone
        plain |= tiny.decode(tiny.engine(target, method="plain", columns=4, **shape), [row])
    for right, shuffle in ((0.0, 1), (0.7, 2), (1.0, 3)):
        assert tiny.decode(tiny.engine(target, tiny.Scripted(plain, right), **shape), rows, shuffle) == plain
    assert not programs.warn_once.cache_info().currsize, "something ran eagerly"


def test_engines_share_programs_code_and_packed_weights() -> None:
    tiny.need("in_place", "compiled_packed")
    gc.collect()  # the packed weights of other tests
    target = tiny.model()
    engines = [tiny.engine(target, method="plain", attention="in_place", kernels="compiled_packed") for _ in range(2)]
    before = []
    for engine in engines:
        assert isinstance(engine, Engine)
        tiny.decode(engine, tiny.requests(tiny.prompts(3), 4))
        before.append((len(programs.CODE.kept), {*map(id, _PACKED.values())}))
    assert before[0] == before[1]


def test_after_the_deadline_nothing_is_compiled_and_nothing_falls_back() -> None:
    run = Compiled(Eager(), False).wrap(lambda x: x * 3 + 2)
    with programs.CODE.until(time.monotonic() - 1), pytest.raises(OutOfTimeError):
        run(torch.ones(5))
    compiled = len(programs.CODE.kept)
    assert run(torch.ones(5)).equal(torch.full((5,), 5.0))
    assert len(programs.CODE.kept) == compiled + 1


def test_another_process_finds_the_code_on_disk_for_the_same_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lowering the graph again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits(threads: int) -> int:
        monkeypatch.setattr(programs.CODE, "kept", {})  # as in a new process
        counters["inductor"].clear()
        torch.set_num_threads(threads)
        assert program(lambda x: x * 7 + 2, (torch.ones(6),))(torch.ones(6)).equal(torch.full((6,), 9.0))
        return counters["inductor"]["fxgraph_cache_hit"]

    assert [hits(threads) for threads in (1, 1, 2, 2)] == [0, 1, 0, 1]
