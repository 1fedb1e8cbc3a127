"""Attention over pages: the operators against an oracle, and what a result in place may not depend on.

The operator in place is C++ on a CPU and Triton on a GPU. Here, Triton's interpreter runs the latter ("triton").
"""

import subprocess
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from exspec.actors.engine.kv import attention
from exspec.actors.engine.kv.tiling import tiling
from tests.actors.engine import interpreter

CPU = torch.device("cpu")
WORST = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    attention.load_kernels()


class Example:
    """Rows of random KV of the lengths given, their pages scattered over the stores; what is nobody's is random too."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        width: int,
        dtype: torch.dtype = torch.float32,
        size: int = 64,
        page: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.spans, self.width, self.page, self.heads, self.scale = spans, width, page, heads, size**-0.5
        n = -(-(max(end for _, end in spans) + width) // page)
        normal = lambda *shape: torch.randn(*shape, generator=random).to(dtype)  # noqa: E731
        self.keys, self.values = (normal(len(spans) * n + 1, page, kv_heads, size) for _ in range(2))
        self.table = 1 + torch.randperm(len(spans) * n, generator=random).view(len(spans), n)
        self.query = normal(len(spans), width, self.heads, size).transpose(1, 2)

    @property
    def page_table(self) -> Tensor:
        return torch.cat([torch.tensor(self.spans), self.table], dim=1)[:, None, None].int()

    def live(self) -> Tensor:
        columns = torch.arange(self.width)
        return torch.stack([(s + columns >= 0) & (s + columns < e) for s, e in self.spans])  # [R, Q]

    def attend(self, name: str = "attend_in_place", window: int = 0, softcap: float = 0.0) -> Tensor:
        operator = interpreter.attend if name == "triton" else getattr(torch.ops.exspec, name)
        tensors = (self.query, self.keys, self.values, self.page_table)
        return operator(*tensors, self.scale, window, softcap)  # type: ignore[no-any-return]

    def page_weights(self, window: int, softcap: float) -> Tensor:
        """[R, n] in float64, zeros where rows are dead."""
        count = self.table.shape[1]
        marked = copy(self)  # values that tell the page: their mean is the share of each page
        marked.values = torch.zeros(*self.values.shape[:3], count)
        for row in self.table:
            marked.values[row] = torch.eye(count)[:, None, None]
        expected = marked.oracle(window, softcap).sum(2)  # [R, Q, n]
        found = torch.zeros(len(self.table), count, dtype=torch.float64)
        for r, live in enumerate(self.live()):
            if live.any():
                columns = live.nonzero()[:, 0]
                found[r] = expected[r, columns[0]] + expected[r, columns[-1]]
        return found

    def oracle(self, window: int = 0, softcap: float = 0.0) -> Tensor:
        """[R, Q, Hq, D] in float64, zeros where columns are dead."""
        rows, heads, width, _ = self.query.shape
        expected = torch.zeros(rows, width, heads, self.values.shape[-1], dtype=torch.float64)
        for r, q in self.live().nonzero().tolist():
            position = self.spans[r][0] + q
            columns = range(max(0, position - window + 1) if window else 0, position + 1)
            cells = [(int(self.table[r, s // self.page]), s % self.page) for s in columns]
            for h in range(heads):
                kv = h // (heads // self.keys.shape[2])
                key = torch.stack([self.keys[page, offset, kv] for page, offset in cells]).double()
                value = torch.stack([self.values[page, offset, kv] for page, offset in cells]).double()
                scores = key @ self.query[r, h, q].double() * self.scale
                scores = softcap * (scores / softcap).tanh() if softcap else scores
                expected[r, q, h] = scores.softmax(0) @ value
        return expected


both = pytest.mark.parametrize("name", ["attend_in_place", "attend_gathered"])
every = pytest.mark.parametrize("name", ["attend_in_place", "attend_gathered", "triton"])
in_place = pytest.mark.parametrize("name", ["attend_in_place", pytest.param("triton", marks=pytest.mark.slow)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
RAGGED = [(0, 6), (1, 7), (15, 21), (60, 64), (130, 136), (-3, 2), (9, 0), (40, 41)]


@dtypes
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (20, 0.0), (70, 0.0), (0, 1.5), (20, 1.5)])
@every
def test_attention_equals_the_oracle(name: str, window: int, softcap: float, dtype: torch.dtype) -> None:
    example = Example(RAGGED, 6, dtype)
    found = example.attend(name, window, softcap)
    assert found.is_contiguous()
    assert found.dtype == dtype
    live = example.live()
    assert torch.allclose(found[live].double(), example.oracle(window, softcap)[live], atol=WORST[dtype], rtol=0)
    assert found.isfinite().all(), "also in dead columns"


@dtypes
@pytest.mark.parametrize("size", [8, 16, 32, 40, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("width", "page"), [(1, 16), (6, 5), (40, 32)])
@in_place
def test_every_head_and_page_size(name: str, size: int, width: int, page: int, dtype: torch.dtype) -> None:
    example = Example([(0, width), (70, 70 + width)], width, dtype, size, page)
    for window in (0, 9):
        expected = example.oracle(window)
        for tested in (name, "attend_gathered"):
            assert torch.allclose(example.attend(tested, window).double(), expected, atol=WORST[dtype], rtol=0), tested


@pytest.mark.cover(2)
@dtypes
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("size", [40, 64, 80, 128])
@pytest.mark.parametrize(
    ("name", "threads"),
    [("attend_in_place", 1), ("attend_in_place", 2), pytest.param("triton", 1, marks=pytest.mark.slow)],
)
def test_a_position_depends_only_on_its_sequence(
    name: str, threads: int, size: int, window: int, dtype: torch.dtype
) -> None:
    """Not on the other rows, the number of rows or pages, its own pages, the columns beside it or later KV."""
    whole = Example([(0, 230), (0, 200)], 230, dtype, size)
    torch.set_num_threads(threads)
    expected = whole.attend(name, window)
    slow = name == "triton"
    for width in (1, 6, 50) if slow else (1, 2, 3, 6, 32, 50, 100):
        for start in (0, 63, 128 - width // 2) if slow else (0, 1, 17, 63, 64, 100, 128 - width // 2, 200 - width):
            part = Example([(start, start + width), (9, 0), (start, start + width)], width, dtype, size)
            part.table = torch.stack([whole.table[0], whole.table[1], whole.table[1]])[:, : -(-(start + width) // 16)]
            moved = torch.randperm(len(whole.keys), generator=torch.Generator().manual_seed(start))
            part.keys, part.values = whole.keys[moved], whole.values[moved]
            part.table = torch.argsort(moved)[part.table]
            part.query = whole.query[[0, 1, 1], :, start : start + width]
            found = part.attend(name, window)
            for row, origin in ((0, 0), (2, 1)):
                assert torch.equal(found[row], expected[origin, start : start + width]), (width, start, row)


@dtypes
@pytest.mark.parametrize(("size", "heads", "width"), [(32, 8, 1), (32, 8, 6), (40, 16, 3), (128, 8, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (33, 1.5)])
@pytest.mark.parametrize("threads", [2, 16])
def test_a_row_alone_equals_the_row_in_a_large_batch(
    threads: int, window: int, softcap: float, size: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    """In a large batch, a CPU reads several KV heads of a row together: all 8, or 3, 3 and 2 with 16 threads."""
    spans = [(17 * i, 17 * i + width) for i in range(24)]
    whole = Example(spans, width, dtype, size, heads=heads, kv_heads=8)
    torch.set_num_threads(threads)
    found = whole.attend(window=window, softcap=softcap)
    torch.set_num_threads(1)
    assert torch.allclose(found.double(), whole.oracle(window, softcap), atol=WORST[dtype], rtol=0)
    for row, span in enumerate(spans):
        alone = Example([span], width, dtype, size, heads=heads, kv_heads=8)
        alone.keys, alone.values, alone.table = whole.keys, whole.values, whole.table[row : row + 1]
        alone.query = whole.query[row : row + 1]
        assert torch.equal(alone.attend(window=window, softcap=softcap)[0], found[row]), row


@pytest.mark.parametrize("name", ["attend_in_place", "triton"])
def test_later_kv_and_dead_columns_are_never_read(name: str) -> None:
    example = Example([(50, 53), (-2, 1)], 6)
    expected = example.attend(name)
    first, offset = divmod(53, example.page)
    for store in (example.keys, example.values):
        store[example.table[0, first], offset:] = torch.nan
        store[example.table[0, first + 1 :]] = torch.nan
        store[example.table[1, 0], 1:] = torch.nan
        store[0] = torch.nan
    example.query[0, :, 3:] = torch.nan
    example.query[1, :, :2] = torch.nan
    assert torch.equal(example.attend(name), expected)


@every
def test_large_scores_stay_finite(name: str) -> None:
    example = Example(RAGGED, 6)
    example.query *= 1e4
    live = example.live()
    assert torch.allclose(example.attend(name)[live].double(), example.oracle()[live], atol=1e-5)


@dtypes
@every
def test_a_rows_result_does_not_depend_on_other_rows_of_the_same_shape(name: str, dtype: torch.dtype) -> None:
    """Nor on its own pages and its place among the rows. Attention over gathered pages promises only this."""
    example = Example([(3, 9), (50, 56), (100, 106)], 6, dtype)
    expected = example.attend(name)
    other = Example([(50, 56), (100, 104), (9, 0)], 6, dtype)
    other.table = other.table.flip(0, 1)[:, : example.table.shape[1]]
    other.query.mul_(-1)[0] = example.query[1]
    for store, source in ((other.keys, example.keys), (other.values, example.values)):
        store.neg_()[other.table[0]] = source[example.table[1]]
    assert torch.equal(other.attend(name)[0], expected[1])


@both
def test_a_trace_has_one_call(name: str) -> None:
    example = Example(RAGGED, 6, torch.bfloat16)
    operator = getattr(torch.ops.exspec, name)
    arguments = (example.query, example.keys, example.values, example.page_table)
    traced = make_fx(lambda *tensors: operator(*tensors, 0.125, 20))(*arguments)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [operator.default]
    assert torch.equal(traced(*arguments), operator(*arguments, 0.125, 20))
    torch.library.opcheck(operator.default, (*arguments, 0.125, 20), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("where", ["exspec_in_place", "exspec_gathered", "triton"])
def test_transformers_can_call_each(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "triton":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, where, attention.paged_attention(interpreter.attend))
    example = Example(RAGGED, 6)
    arguments = (torch.nn.Identity(), example.query, example.keys, example.values, example.page_table)
    attend = ALL_ATTENTION_FUNCTIONS[where]
    found, weights = attend(*arguments, dropout=0.0, scaling=None, is_causal=True)
    assert weights is None
    live = example.live()
    assert torch.allclose(found[live].double(), example.oracle()[live], atol=3e-6)
    found, _ = attend(*arguments, scaling=0.125, sliding_window=20, softcap=1.5, s_aux=None)
    assert torch.allclose(found[live].double(), example.oracle(20, 1.5)[live], atol=3e-6)
    for name in ("s_aux", "position_bias"):
        with pytest.raises(TypeError, match=name):
            attend(*arguments, **{name: example.query})


@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("page", [1, 16, 32])
@dtypes
def test_the_trial_passes_here(dtype: torch.dtype, page: int, size: int) -> None:
    assert attention.trial(CPU, dtype, 4, 2, size, page) is None


@pytest.mark.slow
@dtypes
def test_the_trial_of_a_gpu_passes_in_the_interpreter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_operator(monkeypatch, interpreter.attend)
    assert attention.trial.__wrapped__(CPU, dtype, 4, 2, 64, 16) is None


def test_the_trial_reaches_a_second_split_on_a_gpu() -> None:
    longest = max(longest for *_, longest in attention._cases(16))
    assert longest > 2 * max(tiling(size, dtype).split for size in (8, 64, 256) for dtype in WORST)


def test_the_trial_names_an_unsupported_dtype() -> None:
    assert "takes float32 and bfloat16" in str(attention.trial(CPU, torch.float64, 4, 2, 64, 16))


def test_the_trial_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_operator(monkeypatch, lambda *given: attention.attend_gathered(*given) * 1.001)
    assert "away from attention over copies" in str(attention.trial(CPU, torch.float32, 8, 2, 64, 16))


def _replace_operator(monkeypatch: pytest.MonkeyPatch, operator: Callable[..., Tensor]) -> None:
    """Make the trial test another operator in place."""
    gathered = SimpleNamespace(default=attention.attend_gathered)
    operators = SimpleNamespace(attend_in_place=SimpleNamespace(default=operator), attend_gathered=gathered)
    monkeypatch.setattr(torch.ops, "exspec", operators)


BROKEN = "#!/bin/sh\necho a warning >&2\necho no such instruction >&2\nexit 1\n"


@pytest.mark.parametrize(("script", "reason"), [(None, "No such file"), (BROKEN, "no such instruction")])
def test_the_trial_says_why_there_is_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str
) -> None:
    compiler = tmp_path / "compiler"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(attention, "load_kernels", attention.load_kernels.__wrapped__)
    found = str(attention.trial.__wrapped__(CPU, torch.float32, 4, 2, 64, 16))
    assert reason in found
    assert "\n" not in found
    assert not list((tmp_path / "cache" / "kernels").iterdir()), "an unfinished file is left"


def test_a_row_that_ends_past_its_pages_is_refused() -> None:
    example = Example([(0, 6)], 6)
    example.spans = [(16 * example.table.shape[1], 16 * example.table.shape[1] + 1)]
    with pytest.raises(RuntimeError, match="past the pages of its table"):
        example.attend()


def test_the_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(words: list[str], **options: Any) -> Any:
        assert words[1:] == ["--version"]
        return real(words, **options)

    monkeypatch.setattr(subprocess, "run", run)
    attention.load_kernels.__wrapped__()


@pytest.mark.parametrize("name", ["weigh_in_place", "weigh_gathered", "triton"])
@pytest.mark.parametrize("dtype", WORST, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 1.5)], ids=["", "window", "softcap"])
@pytest.mark.parametrize("page", [1, 3, 16, 100])
def test_page_weights_equal_the_oracle(name: str, dtype: torch.dtype, window: int, softcap: float, page: int) -> None:
    """Those of the first and the last live column, added over heads. The result has the bits that it has without."""
    example = Example([(-2, 3), (0, 5), (90, 96), (9, 0), (17, 18)], 6, dtype, size=16, page=page)
    tensors = (example.query, example.keys, example.values, example.page_table, example.scale, window, softcap)
    weigh = interpreter.weigh if name == "triton" else getattr(torch.ops.exspec, name)
    result, weights = weigh(*tensors)
    assert torch.equal(result, example.attend(name.replace("weigh", "attend"), window, softcap))
    assert (weights.double() - example.page_weights(window, softcap)).abs().max() < 8 * WORST[dtype]
