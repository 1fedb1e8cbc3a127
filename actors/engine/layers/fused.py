"""Compiled layers: layers with equal traces share one compiled function of a few kernels.

A layer is traced as a function of tensors only: its weights, its inputs and its pages of KV. Matrix products with the
same input become one product. The code compiled for a trace serves every layer with the same trace, of any model.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
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

from exspec.actors.engine.cache import cache_folder
from exspec.actors.engine.kv.attention import first_line
from exspec.actors.engine.kv.forward import Forward, Traced, forward_of
from exspec.actors.engine.layers.spans import layers_of

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
Run = Callable[..., Any]
Piece = tuple[Run, Sequence[Tensor], Any]  # compiled code, the weights that it takes, the structure of its output
aten = torch.ops.aten


class Code:
    """Compiled code, by graph and inputs, and the seconds that compilation has taken."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, Run] = {}
        self.seconds = 0.0

    @property
    def folder(self) -> Path:
        """The compiler's cache folder, kept for later processes: TORCHINDUCTOR_CACHE_DIR, or one in `cache_folder`."""
        if os.environ.get(FOLDER) in (None, default_cache_dir()):  # torch sets this default on import
            os.environ[FOLDER] = str(cache_folder() / "kernels" / "compiled")
        return Path(os.environ[FOLDER])

    def __str__(self) -> str:
        return f"{len(self.kept)} pieces compiled in {self.seconds:.0f} s, kept in {self.folder}"

    def of(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
        """The code of a graph for inputs of these shapes, compiled at the first call."""
        key = graph.code, tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        if key not in self.kept:
            self.folder.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            self.kept[key] = torch._inductor.compile(graph, list(inputs))
            self.seconds += time.perf_counter() - start
        return self.kept[key]


CODE = Code()  # of this process: engines share it


@cache
def warn_once(line: str) -> None:
    """Log a warning once per process: what falls back, and why."""
    logging.getLogger(__name__).warning(line)


@lru_cache
def compiler_trial(device: torch.device) -> str | None:
    """The reason why code cannot be compiled for the device, in one line; None if it can."""
    x = torch.ones(4, device=device)
    try:
        result = compiled(lambda x: (x * 2 + 1,))(x)[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # a compiler fails in many ways, and all of them are reasons
        return first_line(fault)
    return None if result.equal(torch.full_like(x, 3)) else "compiled code gives wrong numbers"


def compiled(function: Callable[..., Sequence[Tensor]]) -> Run:
    """The function, compiled for each shape of its tensors and each value of its other arguments."""
    pieces: dict[Hashable, Run] = {}

    def run(*arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        key = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        if key not in pieces:

            def traced(*inputs: Tensor) -> list[Tensor]:
                rest = iter(inputs)
                return list(function(*(next(rest) if isinstance(a, Tensor) else a for a in arguments)))

            pieces[key] = CODE.of(trace(traced, tensors), tensors)
        return pieces[key](*tensors)

    return run


def trace(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The function as a graph for inputs of these shapes. Raises ValueError if it uses tensors that are not inputs:
    the values of one layer would be used for all."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=False)
    fake = [mode.from_tensor(t, static_shapes=True) for t in inputs]
    with mode:
        graph = make_fx(function)(*fake)
    if constants := [node.target for node in graph.graph.nodes if node.op == "get_attr"]:
        raise ValueError(f"a layer holds tensors that are neither weights nor inputs: {constants[0]}")
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


class Region:
    """A layer's forward, compiled for each shape of its inputs. number: the layer's index in the model."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.layer, self.number, self.eager = layer, number, layer.forward
        self.weights: dict[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        self.pieces: dict[Hashable, Piece | None] = {}  # None: runs eagerly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        forward = forward_of(leaves)
        if forward is None or forward.fills_last(self.number):
            return self.eager(*args, **kwargs)
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else _plain(x) for x in leaves)
        stores = *forward.stores(self.number), forward.write
        if key not in self.pieces:
            self.pieces[key] = self._try(stores, leaves, spec)
        piece = self.pieces[key]
        if piece is None:
            return self.eager(*args, **kwargs)
        run, weights, out = piece
        return pytree.tree_unflatten(run(*weights, *stores, *(x for x in leaves if isinstance(x, Tensor))), out)

    def _try(self, stores: tuple[Tensor, ...], leaves: list[Any], spec: Any) -> Piece | None:
        """Compile the layer; None if it cannot be traced or compiled, and then it runs eagerly."""
        try:
            return self._make(stores, leaves, spec)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # tracing and compiling fail in many ways
            warn_once(f"{type(self.layer).__name__} runs eagerly, not compiled: {first_line(fault)}")
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
            flat, structure = pytree.tree_flatten(functional_call(self.layer, weights, args, kwargs))
            out.append(structure)
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
    """The part of the key for an argument that is not a tensor. The code does not depend on the `Forward` itself."""
    return Forward if isinstance(value, Forward) else value


def fuse(model: nn.Module) -> None:
    """Compile the layers of a model.

    This moves the weights of linear layers with the same parent module into common memory, also for the caller's model.
    """
    for number, layer in enumerate(layers_of(model)):
        for module in layer.modules():
            join([child for child in module.children() if type(child) is nn.Linear])
        layer.forward = Region(layer, number)


@torch.no_grad()
def join(linears: list[nn.Linear]) -> None:
    """Move the weights of linear layers with equal input size into one piece of memory, unless they already are in one.

    Call it before anything is recorded: a recording keeps the addresses of the weights that it reads.
    """
    by_input: dict[int, list[nn.Linear]] = defaultdict(list)
    for linear in linears:
        by_input[linear.in_features].append(linear)
    for alike in by_input.values():
        weights = [linear.weight for linear in alike]
        if len(alike) > 1 and _contiguous(weights) is None:
            joined, start = torch.cat([w.detach() for w in weights]), 0
            for weight in weights:
                weight.data = joined[start : start + len(weight)]
                start += len(weight)


def merge_products(graph: fx.GraphModule, weights: list[Tensor]) -> list[Tensor]:
    """Merge products x @ w.T with the same x whose weights are contiguous in memory. Returns the graph's weights."""
    numbers = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    products: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is aten.mm.default and numbers.get(_weight(node), len(weights)) < len(weights):
            products[node.args[0]].append(node)
    merged = list(weights)
    for alike in products.values():
        order = sorted((numbers[_weight(node)] for node in alike), key=lambda i: weights[i].storage_offset())
        if len(alike) > 1 and (whole := _contiguous([weights[i] for i in order])) is not None:
            merged[numbers[_weight(alike[0])]] = whole
            ordered = [next(n for n in alike if numbers[_weight(n)] == i) for i in order]
            _split(graph.graph, alike[0], ordered, [weights[i].shape[0] for i in order])
    graph.recompile()
    return merged


def _weight(product: fx.Node) -> Any:
    """The node of w in a product x @ w.T; None for any other product."""
    right = product.args[1]
    return right.args[0] if isinstance(right, fx.Node) and right.target is aten.t.default else None


def _split(graph: fx.Graph, first: fx.Node, products: list[fx.Node], sizes: list[int]) -> None:
    """Replace the results of the products by parts of the first one, which now multiplies by all weights."""
    with graph.inserting_after(first):
        parts = graph.call_function(aten.split_with_sizes.default, (first, sizes, 1))
    for i, product in reversed(list(enumerate(products))):
        with graph.inserting_after(parts):
            part = graph.call_function(getitem, (parts, i))
        product.replace_all_uses_with(part, delete_user_cb=lambda user: user is not parts)
        if product is not first:
            graph.erase_node(product)


def _contiguous(weights: list[Tensor]) -> Tensor | None:
    """Weights [N_i, D] as one tensor [sum N_i, D] if they follow each other in memory, else None."""
    first, end = weights[0], weights[0].storage_offset()
    for w in weights:
        alike = w.shape[1:] == first.shape[1:] and w.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not alike or w.storage_offset() != end or not w.is_contiguous():
            return None
        end += w.numel()
    rows = sum(len(w) for w in weights)
    return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())
