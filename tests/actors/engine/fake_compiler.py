"""Inductor for a GPU that is absent: it lowers pieces to Triton's code, which Triton then compiles for the GPU's type.

What Inductor asks of the device is answered here.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import _guards as guards
from torch._dynamo import device_interface
from torch._inductor import config as compiler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache, _load_triton_kernel_from_source
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton, triton_backend, triton_hash_with_backend

from exspec.actors.engine.layers import programs
from tests.actors.engine.fake_cuda import CUDA, Uncompiled

CAPABILITY = 90
H100 = {
    "multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip


class Lowered(Uncompiled):
    """Lowers every piece with the compiler's real options. kernels: the code of Triton's kernels, and their names."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, str] = {}
        self.graphs: set[Any] = set()

    def of(self, graph: Any, inputs: Any) -> Any:
        key = graph.code, tuple((t.shape, t.stride(), t.dtype) for t in inputs)
        if key not in self.graphs:
            self.graphs.add(key)
            context = guards.TracingContext(guards.detect_fake_mode(inputs))
            options = programs.OPTIONS | {"fx_graph_cache": False}
            with _disable_current_modes(), guards.tracing(context), compiler.patch(options):
                compile_fx_inner(graph, list(inputs))
        return super().of(graph, inputs)

    def compile(self) -> Iterator[tuple[str, Any]]:
        """Compile each kernel for the GPU's type; gives its name and Inductor's object with the results."""
        PyCodeCache.cache_clear()  # some kernels of other models are the same
        with patch.object(triton_helpers, "set_driver_to_gpu"):
            for source, name in self.kernels.items():
                kernel = _load_triton_kernel_from_source(name, source)
                kernel.precompile(warm_cache_only=True)
                yield name, kernel


class _Driver:
    """Triton's driver of the absent GPU."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


@contextmanager
def lowering() -> Iterator[Lowered]:
    """Pieces that programs compile inside are lowered. Use it inside `rehearsing`."""
    from triton.runtime import driver

    code = Lowered()
    shown = SimpleNamespace(name="NVIDIA H100", minor=0, gcnArchName="", total_memory=80 * 2**30, **H100)
    answers = {
        "get_device_properties": shown, "get_compute_capability": CAPABILITY, "current_device": 0,
        "is_available": True, "is_bf16_supported": True,
    }  # fmt: skip

    def record(_: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:  # noqa: ARG001
        code.kernels[source] = name
        return MagicMock()

    with ExitStack() as stack:
        for name, value in answers.items():
            answer = staticmethod(lambda *_, value=value, **__: value)
            stack.enter_context(patch.object(device_interface.CudaInterface, name, answer))
        for answered in ("get_device_properties", "get_device_capability", "current_device"):
            value = {"get_device_capability": (9, 0)}.get(answered, answers.get(answered))
            stack.enter_context(patch.object(torch.cuda, answered, lambda *_, value=value, **__: value))
        stack.enter_context(patch.dict(device_interface.caching_worker_device_properties, {"cuda": [shown]}))
        stack.enter_context(patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}))
        properties = DeviceProperties(type="cuda", index=0, cc=CAPABILITY, **H100)  # type: ignore[arg-type]
        stack.enter_context(patch.object(DeviceProperties, "create", lambda _: properties))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True))
        stack.enter_context(patch.object(AsyncCompile, "triton", record))
        stack.enter_context(patch.object(programs, "CODE", code))
        stack.enter_context(patch.object(driver, "_active", _Driver()))
        for kept in (has_triton, triton_backend, triton_hash_with_backend):
            kept.cache_clear()
            stack.callback(kept.cache_clear)
        yield code
