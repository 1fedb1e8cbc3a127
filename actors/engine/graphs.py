"""CUDA graphs: a forward is recorded once for each shape and replayed, with one launch instead of hundreds.

A recorded function takes tensors, None, samplers, plain values, and tuples of these. Its tensors are copied into fixed
buffers. The other arguments and the tensors' shapes are the key of a recording. The function must not wait for the
device, and running it twice must have the same effect as running it once: the KV columns that a forward writes depend
only on its arguments.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from exspec.actors.engine.tokens.sampling import Sampler

Play = Callable[[], Any]


class Eager:
    """Records nothing."""

    records = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


class Recordings:
    """Records functions of fixed shapes. record: runs a function without arguments and returns one that replays it."""

    records = True

    def __init__(self, record: Callable[[Play], Play]) -> None:
        self.record = record

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded at the first call with each shape."""
        kept: dict[Hashable, tuple[list[Any], Play]] = {}

        @torch.inference_mode()
        def recorded(*arguments: Any) -> Any:
            key = tuple(map(key_of, arguments))
            if key not in kept:
                buffers = [mapped(a, Tensor.clone) for a in arguments]
                kept[key] = (buffers, self.record(lambda: function(*buffers)))
            buffers, play = kept[key]
            for buffer, value in zip(tensors_of(buffers), tensors_of(arguments), strict=True):
                buffer.copy_(value)
            return mapped(play(), Tensor.clone)  # the next replay overwrites the recording's own output

        return recorded


class Recorder(Protocol):
    """Makes functions of fixed shapes cheap to call. records: whether it keeps a function's tensors and the decisions
    that the function's Python has made."""

    records: bool

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]: ...


class CudaGraphs(Recordings):
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._record)
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.pool: Any = None

    def _record(self, run: Play) -> Play:
        with torch.cuda.device(self.device):
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):  # libraries choose kernels and allocate workspaces outside a graph
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(self.side)
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                output = run()

        def play() -> Any:
            with torch.cuda.device(self.device):
                graph.replay()
            return output

        return play


class HostCopy:
    """Copies tensors to the host in the background. `wait` waits only for work that was launched before the copy."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.event = tensors, None
        if tensors[0].device.type == "cuda":
            self.tensors = tuple(_to_host(tensor) for tensor in tensors)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self.event is not None:
            self.event.synchronize()
        return [tensor.cpu() for tensor in self.tensors]


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def key_of(value: Any) -> Hashable:
    """The shapes of an argument's tensors, and its other values."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Sampler):
        return tuple((name, key_of(v)) for name, v in value.state.items())
    return tuple(map(key_of, value)) if isinstance(value, tuple) else value


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """An argument or result with each tensor, or each part of another kind, changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Sampler):
        return Sampler.of_state({name: mapped(v, change, kind) for name, v in value.state.items()})
    if isinstance(value, tuple):
        parts = (mapped(v, change, kind) for v in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Sampler):
            yield from tensors_of(value.state.values())
        elif isinstance(value, tuple):
            yield from tensors_of(value)
