"""Programs: whole functions of the engine, such as a verify or a draft, compiled for each shape of their arguments.

A function is traced with all that it calls, so that no Python of the model runs later. The trace is cut into pieces: at
the beginning and end of each layer, where a layer has written its keys and values, and around the choice of tokens.
Pieces that read alike share compiled code, so layers that are alike are compiled once. And a piece has the same bits in
every program that contains it: whether a forward runs to its end or stops, or which drafter reads its states.
"""

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch import _guards as guards
from torch._inductor import config as compiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from exspec.actors.engine.cache import cache_folder
from exspec.actors.engine.faults import first_line, warn_once
from exspec.actors.engine.graphs import Recorder, key_of, mapped, tensors_of
from exspec.actors.engine.layers.pieces import Piece, Trace, needed, split, trace
from exspec.actors.engine.layers.products import with_products

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
OPTIONS: dict[str, Any] = {"size_asserts": False}  # a packed weight has no strides
if hasattr(compiler, "deterministic"):  # older releases of torch lack it
    OPTIONS["deterministic"] = True  # on a GPU, a measurement would choose the order in which a kernel adds up
Run = Callable[[list[Tensor]], Sequence[Any]]  # compiled code: it empties the list that it is given


class OutOfTimeError(Exception):
    """A deadline passed before something was measured or compiled."""


class Code:
    """Compiled code, by graph and inputs, and the seconds that tracing and compiling have taken.

    deadline: a value of time.monotonic; after it, new code raises OutOfTimeError.
    """

    def __init__(self) -> None:
        self.kept: dict[Hashable, Run] = {}
        self.seconds, self.deadline = 0.0, math.inf

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Compile until the deadline."""
        self.deadline, before = deadline, self.deadline
        try:
            yield
        finally:
            self.deadline = before

    @property
    def folder(self) -> Path:
        """The compiler's cache folder, kept for later processes: TORCHINDUCTOR_CACHE_DIR, or one in `cache_folder`."""
        if os.environ.get(FOLDER) in (None, default_cache_dir()):  # torch sets this default on import
            os.environ[FOLDER] = str(cache_folder() / "kernels" / "compiled")
        return Path(os.environ[FOLDER])

    def __str__(self) -> str:
        return f"{len(self.kept)} pieces compiled in {self.seconds:.0f} s, kept in {self.folder}"

    def of(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
        """The code of a graph for inputs of these shapes, compiled at the first call. inputs: without values."""
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        threads = torch.get_num_threads()
        key = graph.code, shapes, threads
        if key not in self.kept:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            from torch._inductor.compile_fx import compile_fx_inner  # half a second, which other kernels save

            self.folder.mkdir(parents=True, exist_ok=True)
            # Without a context the compiler would not read its cache on disk.
            context = guards.TracingContext(guards.detect_fake_mode(inputs))
            with guards.tracing(context), compiler.patch(OPTIONS | {"cpp.threads": threads}):
                self.kept[key] = compile_fx_inner(graph, list(inputs))
        return self.kept[key]


CODE = Code()  # of this process: engines share it


def running() -> float:
    """Seconds of this process without those of compiling, from an arbitrary start."""
    return time.perf_counter() - CODE.seconds


@lru_cache
def compiler_trial(device: torch.device) -> str | None:
    """The reason why code cannot be compiled for the device, in one line; None if it can."""
    x = torch.ones(4, device=device)
    try:
        (result,) = program(lambda x: (x * 2 + 1,), (x,))(x)
        right = result.equal(torch.full_like(x, 3))
    except (torch.OutOfMemoryError, OutOfTimeError):
        raise
    except Exception as fault:  # a compiler fails in many ways, and all of them are reasons
        return first_line(fault)
    return None if right else "compiled code gives wrong numbers"


class Compiled:
    """Compiles functions; `recorder` then records the programs. packs: see `program`."""

    records = True

    def __init__(self, recorder: Recorder, packs: bool) -> None:
        self.recorder, self.packs = recorder, packs

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled at the first call with each shape. If it cannot be compiled, it runs as it is."""
        kept: dict[Hashable, Callable[..., Any]] = {}

        @torch.inference_mode()
        def run(*arguments: Any) -> Any:
            arguments = mapped(arguments, Tensor.contiguous)
            key = key_of(arguments)
            if key not in kept:
                function(*arguments)  # some modules keep tensors that they make, and must not keep those of a trace
                kept[key] = self._try(function, arguments)
            return kept[key](*arguments)

        return self.recorder.wrap(run)

    def _try(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        start = time.perf_counter()
        try:
            return program(function, arguments, self.packs)
        except (torch.OutOfMemoryError, OutOfTimeError):
            raise
        except Exception as fault:  # tracing and compiling fail in many ways
            name = getattr(function, "__qualname__", type(function).__name__)
            warn_once(f"{name} runs eagerly, not compiled: {first_line(fault)}")
            return function
        finally:
            CODE.seconds += time.perf_counter() - start


class Step(NamedTuple):
    """A compiled piece. inputs: the numbers of its inputs among the program's values; its outputs are the next values.
    last: the values that no later step needs."""

    run: Run
    inputs: list[int]
    last: list[int]


class Program:
    """A function compiled for one shape of its arguments.

    constants: the tensors that it reads beside its arguments. results: what it returns, with a number in place of each
    tensor.
    """

    def __init__(self, constants: list[Tensor], steps: list[Step], results: Any) -> None:
        self.constants, self.steps, self.results = constants, steps, results

    def __call__(self, *arguments: Any) -> Any:
        values: list[Any] = [*self.constants, *tensors_of(arguments)]
        for run, inputs, last in self.steps:
            values += run([values[i] for i in inputs])
            for i in last:
                values[i] = None
        return mapped(self.results, values.__getitem__, int)


def program(function: Callable[..., Any], arguments: tuple[Any, ...], packs: bool = False) -> Program:
    """Compile a function for arguments of these shapes, and for these values of arguments that are not tensors.

    packs: hold the weights of linear layers a second time, packed. Raises what tracing and compiling raise.
    """
    traced = trace(function, arguments)
    pieces = pieces_of(traced, packs)
    sources = [source for piece in pieces for source in piece.inputs]
    constants = list({id(source): source for source in sources if isinstance(source, Tensor)}.values())
    placed: list[Any] = [*map(id, constants), *(node for node in traced.module.graph.nodes if node.op == "placeholder")]
    placed += [node for piece in pieces for node in piece.outputs]
    numbers = {value: i for i, value in enumerate(placed)}
    steps, needs = [], {numbers[node] for node in traced.nodes}
    for piece in reversed(pieces):
        inputs = [numbers[id(s) if isinstance(s, Tensor) else s] for s in piece.inputs]
        last = [i for i in dict.fromkeys(inputs) if i not in needs and i >= len(constants)]
        needs.update(inputs)
        steps.append(Step(_code(piece), inputs, last))
    order = iter(traced.nodes)
    return Program(constants, steps[::-1], mapped(traced.results, lambda _: numbers[next(order)]))


def pieces_of(traced: Trace, packs: bool) -> list[Piece]:
    """The pieces that a program runs, with their products merged and, if `packs`, packed."""
    return [with_products(piece, packs) for piece in needed(split(traced.module), set(traced.nodes))]


def _code(piece: Piece) -> Run:
    if not piece.compiles:
        return lambda given: piece.graph(*given)
    return CODE.of(piece.graph, [n.meta["val"] for n in piece.graph.graph.nodes if n.op == "placeholder"])
