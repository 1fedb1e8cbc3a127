"""Products of packed weights: equal to the usual ones, and a row's bits depend on nothing but the row."""

from typing import Any

import pytest
import torch
from torch import nn

from exspec.actors.engine.layers import packed
from exspec.actors.engine.layers.packed import PackedLinear, pack, packed_product


@pytest.fixture(autouse=True)
def _kernel() -> None:
    assert packed.trial() is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (7, 31), (64, 32), (100, 33), (256, 4100)])
def test_a_row_has_the_same_bits_among_any_others(depth: int, width: int, bias: bool, threads: int) -> None:
    torch.manual_seed(depth)
    linear = nn.Linear(depth, width, bias=bias)
    weight = pack(linear.weight)
    x = torch.randn(200, depth)
    whole = packed_product(x, weight, width, linear.bias)  # by one thread
    torch.set_num_threads(threads)
    for rows in [*range(1, 27), 95, 96, 97, 150]:
        for first in (0, 50):
            part = packed_product(x[first : first + rows], weight, width, linear.bias)
            assert torch.equal(part, whole[first : first + rows]), rows
    expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    assert torch.allclose(whole.double(), expected, atol=1e-4, rtol=0)


def test_strides_of_rows_and_weights_do_not_matter() -> None:
    x, weight = torch.randn(40, 9), torch.randn(24, 70)  # columns, and the weight of a Conv1D
    expected = packed_product(x.t().contiguous()[:, :24], pack(weight.t().contiguous()), 70)
    assert torch.equal(packed_product(x[:24].t(), pack(weight.t()), 70), expected)


def test_a_layer_takes_batches() -> None:
    linear = nn.Linear(12, 5)
    x = torch.randn(2, 3, 12)
    assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "width", "bias"),
    [((3, 9), 33, None), ((3, 8), 65, None), ((3, 8), 33, (32,)), ((2, 3, 8), 33, None)],
)
def test_other_shapes_are_refused(x: tuple[int, ...], width: int, bias: Any) -> None:
    weight = pack(torch.randn(33, 8))
    with pytest.raises(RuntimeError, match=r"fit the|float32 rows"):
        packed_product(torch.randn(x), weight, width, None if bias is None else torch.randn(bias))


def test_the_trial_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_product
    monkeypatch.setattr(packed, "packed_product", lambda *given: right(*given) * 1.01)
    assert "away from the usual one" in str(packed.trial.__wrapped__())


def test_without_the_kernel_onednn_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "trial", lambda: "no compiler")
    monkeypatch.setattr(packed, "_PACKED", {})
    linear = nn.Linear(64, 48)
    x = torch.randn(5, 64)
    layer = PackedLinear(linear)
    assert layer.weight.is_mkldnn
    assert torch.allclose(layer(x), linear(x), atol=1e-5)
