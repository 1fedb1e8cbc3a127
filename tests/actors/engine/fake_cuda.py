"""CUDA tensors without a GPU: they have shapes, dtypes and a device, but no values.

Torch built for CPUs needs a device guard for them, which is compiled here. `Rehearsal` fails at an operation that a GPU
would reject or that would make Python wait for it. Host tensors that Python reads are zeros.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exspec.actors.engine.drafters import early_exit, head
from exspec.actors.engine.graphs import Play, Recordings
from exspec.actors.engine.layers import programs
from exspec.actors.exactness import WAITING_OPERATIONS

M = TypeVar("M", bound=nn.Module)
CUDA = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@cache
def load_guard() -> str | None:
    """Let this process use fake CUDA tensors. Returns the reason why it cannot, or None."""
    if torch.backends.cuda.is_built():
        return None
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        command = [os.environ.get("CXX") or "c++", "-std=c++20", "-fPIC", "-shared", f"-I{root / 'include'}"]
        command += [str(source), f"-L{root / 'lib'}", "-lc10", "-o", str(built)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as fault:
            return f"no device guard can be compiled: {fault}"
        torch.ops.load_library(built)
    return None


def sized(values: Any, device: str) -> list[Tensor]:
    """The tensors among the values that lie on this kind of device and are more than a number."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.device.type == device and t.dim()]


class Rehearsal(TorchDispatchMode):
    """Fails at an operation that waits for the device or mixes devices. recording: whether all tensors must be on the
    device, as in a CUDA graph. seen: the names of all operations on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = False
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":
            return function(*args, **kwargs)
        with self:  # without gradients, composed operations arrive whole
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        name = function.overloadpacket.__name__
        on_device, on_host = (sized((args, kwargs), kind) for kind in ("cuda", "cpu"))
        if any(isinstance(t, Tensor) and t.is_cuda for t in tree_leaves((args, kwargs))):
            self.seen.add(name)
            assert name not in WAITING_OPERATIONS, f"{name} waits for the device"
            masks = [t for t in on_device if t.dtype == torch.bool]
            by_mask = name in ("index", "index_put", "index_put_") and any(
                index is mask for index in tree_leaves(args[1]) for mask in masks
            )
            assert not by_mask, f"{name} by a mask waits for the device"
        result = function(*args, **kwargs)
        copies = name in ("copy_", "_to_copy")
        assert not (on_device and on_host) or copies, f"{name} takes tensors of both devices"
        if copies and on_device and sized(result, "cpu"):
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            assert not waits, f"{name} to the host waits for the device"
        if self.recording:
            assert not on_host, f"{name} reads the host in a recording"
            assert not sized(result, "cpu"), f"{name} gives a host tensor in a recording"
        return result

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def recorder(self) -> Recordings:
        """Stands in for CUDA graphs: it runs functions with all tensors on the device."""

        def record(run: Play) -> Play:
            def play() -> Any:
                with self.recorded():
                    return run()

            return play

        return Recordings(record)


class Uncompiled(programs.Code):
    """Runs pieces as they are. Fails at an operation that the compiler refuses, since tracing should have split it."""

    pieces = 0

    def of(self, graph: Any, inputs: Any) -> Any:  # noqa: ARG002
        self.pieces += 1
        targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
        refused = [str(t) for t in targets if t in decompositions and t not in lowerings]
        assert not refused, f"the compiler refuses {', '.join(refused)}"
        return lambda given: graph(*given)


def placed(make: Callable[[], M]) -> M:
    """A model that is made on the host, with its weights on the device."""
    with unset_fake_temporarily():
        made = make()
    move(made, CUDA)
    return made


def move(model: nn.Module, device: torch.device) -> None:
    """Replace a model's tensors by ones on a device."""
    moved: dict[int, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    new = torch.empty_like(tensor, device=device)
                    kept = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
                    tensors[name] = moved.setdefault(id(tensor), kept)  # type: ignore[assignment]


def no_fallback(line: str) -> None:
    raise AssertionError(line)


def _read(tensor: Tensor) -> Any:
    assert tensor.device.type == "cpu", "the host reads a tensor of the device"
    return np.zeros(tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))


@contextmanager
def rehearsing() -> Iterator[tuple[Rehearsal, Uncompiled]]:
    """Tensors made inside have no values. What decides by values at start-up is taken to succeed."""
    rehearsal, code = Rehearsal(), Uncompiled()
    works: Callable[..., None] = lambda *_: None  # noqa: E731
    with ExitStack() as stack:
        for place, name, value in (
            (FakeTensor, "numpy", _read),
            (FakeTensor, "tolist", lambda tensor: _read(tensor).tolist()),
            (torch.cuda, "Event", MagicMock()),
            (torch.cuda, "current_stream", MagicMock()),
            (early_exit, "spans_trial", works),
            (head, "spans_trial", works),
            (programs, "CODE", code),
            (programs, "warn_once", no_fallback),
        ):
            stack.enter_context(patch.object(place, name, value, create=True))
        for name in ("kv.trial.trial", "methods.compiler_trial"):
            stack.enter_context(patch(f"exspec.actors.engine.{name}", works))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(rehearsal)
        yield rehearsal, code
