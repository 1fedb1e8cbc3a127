"""The Triton operator on CPU tensors, in Triton's interpreter. Whatever else imports Triton in this process is not
affected: only a copy of the kernel's module is interpreted."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

KERNEL = "exspec.actors.engine.kv.paged_kernel"


@cache
def kernel() -> Any:
    """A copy of the kernel's module that runs in the interpreter. Skips the test without Triton."""
    triton = pytest.importorskip("triton")
    found = importlib.util.find_spec(KERNEL)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # read by triton.jit
        found.loader.exec_module(module)
    return module


@contextmanager
def _interpreter() -> Iterator[None]:
    """Works around three limits: the interpreter takes reductions only as Python functions, it multiplies bfloat16 as
    if it were integers, and the bits of a row of its products depend on the row's place on some CPUs."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        rows = [np.matmul(row[None], b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)

    with (
        patch.object(tl, "max", getattr(tl.max, "fn", tl.max)),
        patch.object(tl, "sum", getattr(tl.sum, "fn", tl.sum)),
        patch.object(Builder, "create_dot", dot),
    ):
        yield


def weigh(*given: Any) -> tuple[Tensor, Tensor]:
    """The operator in place, and the pages' weights."""
    with _interpreter():
        return kernel().weigh(*given)  # type: ignore[no-any-return]


def attend(*given: Any) -> Tensor:
    """The operator in place."""
    with _interpreter():
        return kernel().attend(*given)  # type: ignore[no-any-return]
