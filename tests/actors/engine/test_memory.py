"""The memory plan equals what is allocated, and stays within the budget."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exspec.actors.engine import Engine
from exspec.actors.engine.kv.memory import MEBIBYTE
from exspec.actors.engine.shape.plan import fit, plan_memory
from tests import tiny

SHAPE = tiny.config(window=12, prefill_rows=4)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["plain", "exspec"])
def test_kv_is_predicted_to_the_byte(family: str, dtype: torch.dtype, method: str) -> None:
    target, draft = tiny.model(family, dtype=dtype), tiny.model(family, seed=1, dtype=dtype)
    shape = replace(SHAPE, method=method)  # type: ignore[arg-type]
    assert plan_memory(target.config, draft.config, shape, dtype).kv == tiny.kv_bytes(Engine(target, draft, shape))


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_weights_are_predicted_to_the_byte(family: str) -> None:
    model = tiny.model(family)
    plan = plan_memory(model.config, None, replace(SHAPE, method="plain"), torch.float32)
    assert plan.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_kv_of_eqspec_stays_within_the_plan() -> None:
    target, draft = tiny.model(), tiny.model(seed=1)
    shape = replace(SHAPE, method="eqspec")
    engine = Engine(target, draft, shape)
    most = 0
    for request in tiny.requests(tiny.prompts(12), 50):
        engine.submit(request)
    while engine.busy:
        engine.step()
        most = max(most, tiny.kv_bytes(engine))
    assert 0 < most <= plan_memory(target.config, draft.config, shape, torch.float32).kv


def test_a_plan_stays_within_its_budget_and_changes_no_token() -> None:
    """From the smallest budget that works to more than is needed. Pages are cut before batch rows."""
    target, draft = tiny.model(), tiny.model(seed=1)
    requests = tiny.requests(tiny.prompts(10), 12)
    reference = tiny.decode(Engine(target, draft, SHAPE), requests)
    full = plan_memory(target.config, draft.config, SHAPE, torch.float32).total
    one = replace(SHAPE, batch_size=1, window=1)
    smallest = plan_memory(target.config, draft.config, one, torch.float32).total
    shapes = []
    for step in range(13):
        budget = smallest + (full - smallest) * step // 11
        found = fit(target.config, draft.config, SHAPE, torch.float32, budget)
        assert plan_memory(target.config, draft.config, found, torch.float32).total <= budget
        assert tiny.decode(Engine(target, draft, found), requests) == reference
        shapes.append((found.batch_size, found.window, found.page_count))
    assert shapes == sorted(shapes)
    assert shapes[0] == (1, 4, 12), "slots themselves cost nothing"
    assert shapes[-1] == (4, 12, 12 * 12)
    assert any(rows == 4 and window == 12 and pages < 12 * 12 for rows, window, pages in shapes)


def test_too_small_a_budget_is_refused_and_the_smallest_is_named() -> None:
    config = tiny.model().config
    smallest = plan_memory(config, config, replace(SHAPE, batch_size=1, window=1), torch.float32).total
    fit(config, config, SHAPE, torch.float32, smallest)
    with pytest.raises(ValueError, match=rf"at least {smallest / MEBIBYTE:.1f} MiB, or a smaller capacity"):
        fit(config, config, SHAPE, torch.float32, smallest - 1)


def test_packed_weights_are_counted_twice() -> None:
    model = tiny.model()
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    plain = replace(SHAPE, method="plain")
    once, twice = (
        plan_memory(model.config, None, replace(plain, kernels=kernels), torch.float32).weights
        for kernels in ("eager", "packed")
    )
    assert twice - once == linear


HUGE = """
import exspec
import torch

tensor = torch.zeros(16 << 20)  # 64 MiB
print(*(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


def test_large_tensors_lie_on_huge_pages() -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.exists() or "[never]" in offered.read_text():
        pytest.skip("this system offers no huge pages")
    inherited = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    ran = subprocess.run([sys.executable, "-c", HUGE], env=inherited, capture_output=True, text=True, timeout=120)
    assert int(ran.stdout) > 0, ran.stderr[-2000:]
