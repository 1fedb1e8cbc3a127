"""The Triton operator beyond the tests of `test_attention.py`: splits, what is launched, what the compiler makes of it,
and whole requests. Nothing here needs a GPU."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from exspec.actors.engine import Engine
from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.actors.engine.kv import attention
from exspec.actors.engine.kv.tiling import Tiling, tiling
from tests import tiny
from tests.actors.engine import interpreter
from tests.actors.engine.test_attention import WORST, Example

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _triton() -> None:
    pytest.importorskip("triton")


def small(size: int, dtype: torch.dtype) -> Tiling:
    """Sizes with which short rows have several tiles, steps and splits."""
    return tiling(size, dtype)._replace(rows=16, tokens=16, split=32)


@pytest.fixture
def _small_splits() -> Iterator[None]:
    with patch.object(interpreter.kernel(), "tiling", small):
        yield


SPANS = st.tuples(st.integers(-3, 90), st.integers(0, 9))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(SPANS, min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([8, 16, 24, 40]),
    st.sampled_from([1, 2, 16, 32]),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1)]),
    st.sampled_from([0, 1, 9, 33]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_shape_equals_the_oracle(
    rows: list[tuple[int, int]], width: int, size: int, page: int, heads: tuple[int, int], window: int, softcap: float,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    spans = [(start, start + min(live, width) if live else 0) for start, live in rows]
    example = Example(spans, width, dtype, size, page, *heads)
    with patch.object(interpreter.kernel(), "tiling", small):
        found = example.attend("triton", window, softcap)
    live = example.live()
    assert torch.allclose(found[live].double(), example.oracle(window, softcap)[live], atol=WORST[dtype], rtol=0)
    assert found[~live].eq(0).all()


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 40), (torch.bfloat16, 0)], ids=str)
def test_a_position_depends_on_no_split_tile_or_page(dtype: torch.dtype, window: int) -> None:
    """Bit for bit. The other rows, R, Q, n, the column and the pages' numbers change."""
    whole = Example([(0, 70), (0, 64)], 70, dtype, 16)
    expected = whole.attend("triton", window)
    for start, width in [(0, 1), (31, 1), (32, 6), (61, 7), (30, 33)]:
        part = Example([(9, 0), (start, start + width)], width, dtype, 16)
        moved = torch.randperm(len(whole.keys), generator=torch.Generator().manual_seed(start))
        part.keys, part.values = whole.keys[moved], whole.values[moved]
        part.table = torch.argsort(moved)[whole.table.flip(0)][:, : -(-(start + width) // 16)]
        part.query = whole.query[[1, 0], :, start : start + width]
        assert torch.equal(part.attend("triton", window)[1], expected[0, start : start + width]), (start, width)


@pytest.mark.usefixtures("_small_splits")
def test_memory_that_no_split_wrote_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits before a window and past a row's end return at once. New memory holds NaN here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    example = Example([(90, 96), (3, 9), (-2, 1), (9, 0)], 6, size=16)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = example.attend("triton", 20)
    finally:
        torch.use_deterministic_algorithms(False)
    live = example.live()
    assert torch.allclose(found[live].double(), example.oracle(20)[live], atol=3e-6)
    assert found[~live].eq(0).all()


def test_queries_of_any_layout_are_read() -> None:
    example = Example([(3, 9), (0, 6)], 6, size=16)
    expected = example.attend("triton")
    for query in (example.query.contiguous(), example.query.mT.contiguous().mT, torch.cat([example.query] * 2, -1)):
        example.query = query[..., :16]
        assert torch.equal(example.attend("triton"), expected)


class Launch(NamedTuple):
    """A launch of a kernel: its arguments by name, and options of the compiler."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name.isupper()}


class Recorder:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            arguments = dict(zip(names, given, strict=False)) | {n: v for n, v in named.items() if n in names}
            options = {n: v for n, v in named.items() if n not in names}
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return launch


def launches(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, width: int, softcap: float = 0.0, window: int = 0,
    rows: int = 8, pages: int = 40, weighs: bool = False,
) -> list[Launch]:  # fmt: skip
    """What the operator launches. The tensors have no values, so it cannot wait for them."""
    module: Any = importlib.import_module(interpreter.KERNEL)
    kernels = {name: Recorder(getattr(module, name)) for name in ("attend_split", "merge_splits")}
    query = torch.empty(rows, width, heads, size, dtype=dtype, device="meta").transpose(1, 2)
    store = torch.empty(pages * rows, 32, kv_heads, size, dtype=dtype, device="meta")
    table = torch.empty(rows, 1, 1, 2 + pages, dtype=torch.int32, device="meta")
    with patch.multiple(module, **kernels):
        arguments = query, store, store, table, size**-0.5, window, softcap
        result = module.weigh(*arguments)[0] if weighs else module.attend(*arguments)
    assert (result.shape, result.dtype) == ((rows, width, heads, size), dtype)
    return [launch for kernel in kernels.values() for launch in kernel.launches]


def test_launches_depend_on_shapes_alone() -> None:
    first, second = launches(torch.bfloat16, 32, 8, 128, 6)
    assert first.grid == (8 * 8, 3), "a tile of 24 queries for each row and KV head; 1280 tokens are 3 splits"
    assert second.grid == (8 * 6 * 32,)
    assert launches(torch.bfloat16, 32, 8, 128, 32)[0].grid == (8 * 8 * 4, 3), "four tiles"


def test_the_same_code_serves_every_batch() -> None:
    """And every number of columns: only arguments that the compiler does not specialise on differ."""
    expected = launches(torch.bfloat16, 32, 8, 128, 6)
    for width, rows, pages, window in [(1, 8, 40, 0), (9, 1, 40, 0), (128, 4, 16, 0), (6, 64, 1, 48)]:
        found = launches(torch.bfloat16, 32, 8, 128, width, window=window, rows=rows, pages=pages)
        for one, other in zip(found, expected, strict=True):
            assert (one.constants, one.options) == (other.constants, other.options)
            free = {p.name for p in one.kernel.params if p.do_not_specialize}
            whole = {name for name, value in one.arguments.items() if type(value) is int and not name.isupper()}
            assert whole == free


MODELS = {
    "Qwen3-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "GPT-2": (12, 12, 64),
    "Gemma-2-9B": (16, 8, 256),
    "Phi-3-mini": (32, 32, 96),
}
SHARED = {80: 163, 90: 227, 100: 227}  # KiB that a block may have, by compute capability
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


def compiled(launch: Launch, capability: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Registers, bytes that spill and shared memory in KiB of a launched kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {int: "i32", float: "fp32"}
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate((name, launch.arguments[name]) for name in launch.kernel.arg_names):
        if name.isupper():
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = kinds[type(value)]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    with triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    log = capsys.readouterr().out
    used = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", log, re.DOTALL)
    assert used is not None, log
    stored, loaded, registers = map(int, used.groups())
    return {"registers": registers, "spilled": stored + loaded, "shared": -(-made.metadata.shared // 1024)}


@pytest.mark.fast("90-bf16-Qwen3-8B-", slow=2)
@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighs"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=TYPES.get)
@pytest.mark.parametrize("capability", SHARED)
def test_it_compiles_without_spills(
    capability: int, dtype: torch.dtype, model: str, weighs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One compiled kernel serves every Q, see `test_the_same_code_serves_every_batch`."""
    softcap = 50.0 if model.startswith("Gemma") else 0.0
    for launch in launches(dtype, *MODELS[model], 6, softcap, weighs=weighs):
        found = compiled(launch, capability, tmp_path, capsys)
        # In float32, products take more registers, and the weights of pages do not always find one.
        assert found["spilled"] <= (32 if weighs and dtype == torch.float32 else 0), found
        assert found["shared"] <= SHARED[capability], found


def test_the_trial_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, interpreter.KERNEL, raising=False)
    assert "triton" in str(attention.trial.__wrapped__(CUDA, torch.bfloat16, 4, 2, 64, 16))


TRUNK = [3 + i % 50 for i in range(24)]
PROMPTS = [[*TRUNK, 7, 9], [*TRUNK, 8], [*TRUNK[:9], 30, 31, 30, 31, 30], [11, 12]]


def engine(drafter: str, family: dict[str, Any]) -> Engine:
    """Few pages, so that a sequence is preempted."""
    target = tiny.model(**family) if family else tiny.deep(4, 0.3)
    draft = None if drafter == "none" else tiny.draft_of(drafter, target)
    method = {"method": "plain"} if drafter == "none" else {"drafter": drafter}
    shape = {"batch_size": 2, "window": 3, "pages": 6, "capacity": 48, "attention": "in_place", "prefill_rows": 2}
    return Engine(target, draft, tiny.config(**shape | method))


@pytest.mark.fast("model-window")
@pytest.mark.parametrize("family", [{}, {"family": "mistral", "sliding_window": 9}], ids=["all", "window"])
@pytest.mark.parametrize(
    "drafter", [pytest.param(n, marks=pytest.mark.rare) if n in ("eagle3", "dflash") else n for n in DRAFTERS]
)
def test_requests_decode_to_the_tokens_of_the_cpu(
    drafter: str, family: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every drafter, shared prefixes, sliding windows and preemption."""
    tiny.need("in_place")
    if family and drafter in ("early_exit", "eagle3", "dflash"):
        family = family | {"num_hidden_layers": 4}
    rows = tiny.requests(PROMPTS, 9)
    expected = tiny.decode(engine(drafter, family), rows)
    calls = []
    counted = lambda *given: (calls.append(1), interpreter.attend(*given))[1]  # noqa: E731
    weighing = attention.paged_attention(counted, interpreter.weigh)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "exspec_in_place", weighing)
    monkeypatch.setattr(interpreter.kernel(), "tiling", small)
    made = engine(drafter, family)
    preempted: list[Any] = []
    preempt = made.pool._preempt
    monkeypatch.setattr(made.pool, "_preempt", lambda sequence: (preempted.append(sequence), preempt(sequence))[1])
    assert tiny.decode(made, rows) == expected
    assert calls
    assert preempted or drafter in ("none", "sparse"), "these may end in time"
    assert made.statistics.cached_tokens > 0
