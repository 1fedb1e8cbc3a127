"""Where the trace of a function is cut into pieces: see `programs.py`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

_LIBRARY = torch.library.Library("exspec", "FRAGMENT")
_LIBRARY.define("cut(Tensor x, bool compiles=True) -> ()")
_LIBRARY.impl("cut", lambda x, compiles=True: None, "CompositeExplicitAutograd")  # noqa: ARG005
CUT = has_side_effect(torch.ops.exspec.cut.default)


class _Tracing(threading.local):
    on = False


_TRACING = _Tracing()  # of this thread


@contextmanager
def tracing() -> Iterator[None]:
    """Functions that run inside are being traced."""
    _TRACING.on = True
    try:
        yield
    finally:
        _TRACING.on = False


def traced() -> bool:
    """Whether the caller is being traced."""
    return _TRACING.on


def cut(x: Tensor, *, compiles: bool = True) -> None:
    """End a piece, if the caller is being traced. x: any tensor of it. compiles: whether it is worth compiling what
    follows."""
    if _TRACING.on:
        torch.ops.exspec.cut(x, compiles)
