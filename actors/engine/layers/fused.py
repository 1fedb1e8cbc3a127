"""The layers of a model as compiled code: one piece for all layers that are alike, of a few kernels.

A layer is traced as a function of tensors alone: its weights, its inputs and its pages of KV. Products of matrices that
share an input become one. What is compiled of a trace serves every layer whose trace reads the same, whatever family
of models it is of.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import detect_fake_mode
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from exspec.actors.engine.kv.attention import cache_folder, first_line
from exspec.actors.engine.kv.forward import Forward, Traced, forward_of
from exspec.actors.engine.layers.spans import layers_of

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
Run = Callable[..., Any]
Piece = tuple[Run, Sequence[Tensor], Any]  # what runs, the weights that it takes, and the structure of what it gives
aten = torch.ops.aten


class Code:
    """What was compiled, by what it was compiled of, and the seconds that it took."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, Run] = {}
        self.seconds = 0.0

    @property
    def folder(self) -> Path:
        """Where the compiler keeps what it makes, for the next process: TORCHINDUCTOR_CACHE_DIR, or one of our own."""
        if os.environ.get(FOLDER) in (None, default_cache_dir()):  # which torch itself sets when it is imported
            os.environ[FOLDER] = str(cache_folder() / "compiled")
        return Path(os.environ[FOLDER])

    def __str__(self) -> str:
        return f"{len(self.kept)} pieces compiled in {self.seconds:.0f} s, kept in {self.folder}"

    def of(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
        key = graph.code, tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        if key not in self.kept:
            self.folder.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            self.kept[key] = torch._inductor.compile(graph, list(inputs))
            self.seconds += time.perf_counter() - start
        return self.kept[key]


CODE = Code()  # of this process: engines of one shape share it


@contextmanager
def compiled_by(code: Code) -> Iterator[None]:
    """Whatever is met within is compiled by `code`."""
    global CODE
    before, CODE = CODE, code
    try:
        yield
    finally:
        CODE = before


@cache
def warn_once(line: str) -> None:
    """Log a line once in a process: what falls back, and why."""
    logging.getLogger(__name__).warning(line)


@lru_cache
def compiler_trial(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device, in one line; None where it can."""
    x = torch.ones(4, device=device)
    try:
        found = compiled(lambda x: (x * 2 + 1,))(x)[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # a compiler fails in many ways, and each is an answer
        return first_line(fault)
    return None if found.equal(torch.full_like(x, 3)) else "what was compiled gives wrong numbers"


def compiled(function: Callable[..., Sequence[Tensor]]) -> Run:
    """The function of tensors and plain values, compiled for each shape and value it meets."""
    made: dict[Hashable, Run] = {}

    def run(*arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        key = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        if key not in made:

            def traced(*inputs: Tensor) -> list[Tensor]:
                rest = iter(inputs)
                return list(function(*(next(rest) if isinstance(a, Tensor) else a for a in arguments)))

            made[key] = CODE.of(trace(traced, tensors), tensors)
        return made[key](*tensors)

    return run


def trace(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The function as a graph for inputs of these shapes. Raises ValueError where it holds tensors that are no inputs:
    their values would be taken for those of all layers."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=False)
    fake = [mode.from_tensor(t, static_shapes=True) for t in inputs]
    with mode:
        graph = make_fx(function)(*fake)
    if held := [node.target for node in graph.graph.nodes if node.op == "get_attr"]:
        raise ValueError(f"a layer holds tensors that are neither weights nor inputs: {held[0]}")
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


class Region:
    """A layer's forward, compiled for each shape that it meets. `place` is the layer's number."""

    def __init__(self, layer: nn.Module, place: int) -> None:
        self.layer, self.place, self.eager = layer, place, layer.forward
        self.weights: dict[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        self.made: dict[Hashable, Piece | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        forward = forward_of(leaves)
        if forward is None or forward.fills_last(self.place):
            return self.eager(*args, **kwargs)
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else _plain(x) for x in leaves)
        stores = *forward.stores(self.place), forward.write
        if key not in self.made:
            self.made[key] = self._made(stores, leaves, spec)
        made = self.made[key]
        if made is None:
            return self.eager(*args, **kwargs)
        run, weights, out = made
        return pytree.tree_unflatten(run(*weights, *stores, *(x for x in leaves if isinstance(x, Tensor))), out)

    def _made(self, stores: tuple[Tensor, ...], leaves: list[Any], spec: Any) -> Piece | None:
        """None where this family's layer is none that can be traced or compiled: it runs as it is then."""
        try:
            return self._make(stores, leaves, spec)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # tracing and compiling fail in many ways
            warn_once(f"{type(self.layer).__name__} runs as it is, not compiled: {first_line(fault)}")
            return None

    def _make(self, stores: tuple[Tensor, ...], leaves: list[Any], spec: Any) -> Piece:
        out: list[Any] = []

        def run(*inputs: Tensor) -> list[Tensor]:
            weights = dict(zip(self.weights, inputs, strict=False))
            keys, values, write, *others = inputs[len(weights) :]
            rest = iter(others)
            seen = Traced(keys, values, write)
            filled = [next(rest) if isinstance(x, Tensor) else seen if isinstance(x, Forward) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            flat, found = pytree.tree_flatten(functional_call(self.layer, weights, args, kwargs))
            out.append(found)
            return flat

        others = [*stores, *(x for x in leaves if isinstance(x, Tensor))]
        self.layer.forward = self.eager
        try:
            graph = trace(run, [*self.weights.values(), *others])
        finally:
            self.layer.forward = self
        weights = merge_products(graph, list(self.weights.values()))
        return CODE.of(graph, [*weights, *others]), weights, out[0]


def _plain(value: Any) -> Any:
    """What a compiled piece depends on of an argument that is no tensor: of a forward nothing."""
    return Forward if isinstance(value, Forward) else value


def fuse(model: nn.Module) -> None:
    """Compile the layers of a model.

    Linear layers side by side lie in one piece of memory from now on, of which their weights, the caller's, are parts.
    """
    for place, layer in enumerate(layers_of(model)):
        for module in layer.modules():
            join([child for child in module.children() if type(child) is nn.Linear])
        layer.forward = Region(layer, place)


@torch.no_grad()
def join(linears: list[nn.Linear]) -> None:
    """Lay the weights of linear layers with inputs of one size in one piece of memory, unless they lie so already.

    It is done before anything is recorded: a recording keeps the places of the weights that it reads.
    """
    by_input: dict[int, list[nn.Linear]] = defaultdict(list)
    for linear in linears:
        by_input[linear.in_features].append(linear)
    for alike in by_input.values():
        weights = [linear.weight for linear in alike]
        if len(alike) > 1 and _in_a_row(weights) is None:
            joined, start = torch.cat([w.detach() for w in weights]), 0
            for weight in weights:
                weight.data = joined[start : start + len(weight)]
                start += len(weight)


def merge_products(graph: fx.GraphModule, weights: list[Tensor]) -> list[Tensor]:
    """Make one product of those x @ w.T that share x and whose weights lie in a row. Returns the weights as the graph
    takes them then."""
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    products: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is aten.mm.default and places.get(_weight(node), len(weights)) < len(weights):
            products[node.args[0]].append(node)
    taken = list(weights)
    for alike in products.values():
        numbers = sorted((places[_weight(node)] for node in alike), key=lambda i: weights[i].storage_offset())
        if len(alike) > 1 and (whole := _in_a_row([weights[i] for i in numbers])) is not None:
            taken[places[_weight(alike[0])]] = whole
            order = [next(n for n in alike if places[_weight(n)] == i) for i in numbers]
            _split(graph.graph, alike[0], order, [weights[i].shape[0] for i in numbers])
    graph.recompile()
    return taken


def _weight(product: fx.Node) -> Any:
    """w of x @ w.T; None of any other product."""
    right = product.args[1]
    return right.args[0] if isinstance(right, fx.Node) and right.target is aten.t.default else None


def _split(graph: fx.Graph, first: fx.Node, products: list[fx.Node], sizes: list[int]) -> None:
    """Let the first product be of all weights, and the results of all be parts of its own."""
    with graph.inserting_after(first):
        parts = graph.call_function(aten.split_with_sizes.default, (first, sizes, 1))
    for i, product in reversed(list(enumerate(products))):
        with graph.inserting_after(parts):
            part = graph.call_function(getitem, (parts, i))
        product.replace_all_uses_with(part, delete_user_cb=lambda user: user is not parts)
        if product is not first:
            graph.erase_node(product)


def _in_a_row(weights: list[Tensor]) -> Tensor | None:
    """Weights [N_i, D] as one [sum N_i, D] where they follow each other in memory; None where they do not."""
    first, end = weights[0], weights[0].storage_offset()
    for w in weights:
        alike = w.shape[1:] == first.shape[1:] and w.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not alike or w.storage_offset() != end or not w.is_contiguous():
            return None
        end += w.numel()
    rows = sum(len(w) for w in weights)
    return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())
