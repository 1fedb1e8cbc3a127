"""Programs: whole functions of the engine, such as a verify or a draft, compiled once for each shape of their arguments.

A function is traced with all that it calls, so that no Python of the model runs later. The trace is cut into pieces: at
the beginning and end of each layer, where a layer has written its keys and values, and around the choice of tokens.
Pieces that read alike share compiled code, so layers that are alike are compiled once. And a piece has the same bits in
every program that contains it: whether a forward runs to its end or stops, or which drafter reads its states.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config as compiler
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx.experimental.proxy_tensor import make_fx

from exspec.actors.engine.cache import cache_folder
from exspec.actors.engine.graphs import Recorder, key_of, mapped, tensors_of
from exspec.actors.engine.kv.attention import first_line
from exspec.actors.engine.layers.cuts import CUT, cut, tracing
from exspec.actors.engine.layers.packed import pack, packed_product
from exspec.actors.engine.layers.spans import layers_of

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
OPTIONS: dict[str, Any] = {"size_asserts": False}  # a packed weight has no strides
if hasattr(compiler, "deterministic"):  # older releases of torch lack it
    OPTIONS["deterministic"] = True  # on a GPU, a measurement would choose the order in which a kernel adds up
Run = Callable[[list[Tensor]], Sequence[Any]]  # compiled code: it empties the list that it is given
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
        """The code of a graph for inputs of these shapes, compiled at the first call. inputs: without values."""
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        key = graph.code, shapes, torch.get_num_threads()
        if key not in self.kept:
            self.folder.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            with compiler.patch(OPTIONS):
                self.kept[key] = compile_fx_inner(graph, list(inputs))  # type: ignore[assignment]
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
        (result,) = program(lambda x: (x * 2 + 1,), (x,))(x)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # a compiler fails in many ways, and all of them are reasons
        return first_line(fault)
    return None if result.equal(torch.full_like(x, 3)) else "compiled code gives wrong numbers"


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
                kept[key] = self._try(function, arguments)
            return kept[key](*arguments)

        return self.recorder.wrap(run)

    def _try(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            return program(function, arguments, self.packs)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # tracing and compiling fail in many ways
            name = getattr(function, "__qualname__", type(function).__name__)
            warn_once(f"{name} runs eagerly, not compiled: {first_line(fault)}")
            return function


def cut_layers(model: nn.Module) -> None:
    """Cut programs at the model's layers, and let the products of a layer be merged.

    This moves the weights of linear layers with the same parent module into common memory, also for the caller's model.
    """
    for layer in layers_of(model):
        for module in layer.modules():
            join([child for child in module.children() if type(child) is nn.Linear])
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: cut(next(tensors_of((*args, *kwargs.values())))), with_kwargs=True
        )
        layer.register_forward_hook(lambda _, __, out: cut(next(tensors_of(out if isinstance(out, tuple) else (out,)))))


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


Source = fx.Node | Tensor  # an argument or a value of an earlier piece, or a constant


class Piece(NamedTuple):
    """A part of a trace. inputs: where its inputs come from. outputs: its values that are used elsewhere. compiles:
    whether it is compiled."""

    graph: fx.GraphModule
    inputs: list[Source]
    outputs: list[fx.Node]
    compiles: bool

    def code(self) -> Run:
        if not self.compiles:
            return lambda given: self.graph(*given)  # type: ignore[no-any-return]
        return CODE.of(self.graph, [n.meta["val"] for n in self.graph.graph.nodes if n.op == "placeholder"])


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

    packs: hold the weights of linear layers a second time, in oneDNN's layout. Raises what tracing and compiling raise.
    """
    module, results, given = trace(function, arguments)
    wanted = [node for node in given if isinstance(node, fx.Node)]
    pieces = [with_products(piece, packs) for piece in needed(split(module), set(wanted))]
    sources = [source for piece in pieces for source in piece.inputs]
    constants = list({id(source): source for source in sources if isinstance(source, Tensor)}.values())
    placed: list[Any] = [*map(id, constants), *(node for node in module.graph.nodes if node.op == "placeholder")]
    placed += [node for piece in pieces for node in piece.outputs]
    numbers = {value: i for i, value in enumerate(placed)}
    steps, needs = [], {numbers[node] for node in wanted}
    for piece in reversed(pieces):
        inputs = [numbers[id(s) if isinstance(s, Tensor) else s] for s in piece.inputs]
        last = [i for i in dict.fromkeys(inputs) if i not in needs and i >= len(constants)]
        needs.update(inputs)
        steps.append(Step(piece.code(), inputs, last))
    order = iter(given)
    return Program(constants, steps[::-1], mapped(results, lambda _: numbers[next(order)]))


def trace(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[fx.GraphModule, Any, list[fx.Node]]:
    """The function as a graph for arguments of these shapes; what it returns; and the nodes of the tensors in it.

    Raises an exception of torch if the function decides by a tensor's value.
    """
    results: list[Any] = []

    def run(*inputs: Tensor) -> list[Tensor]:
        rest = iter(inputs)
        results[:] = (function(*mapped(arguments, lambda _: next(rest))),)
        return list(tensors_of(results))

    traced = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
    with tracing():
        module = traced(*tensors_of(arguments))
    return module, results[0], list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def split(module: fx.GraphModule) -> list[Piece]:
    """The pieces of a trace, in order."""
    nodes: list[list[fx.Node]] = [[]]
    compiles = [True]
    home: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.target is CUT:
            nodes.append([])
            compiles.append(node.args[1:] != (False,))
        elif node.op == "call_function":
            # A part of a tuple belongs to the tuple's piece: only tensors go from piece to piece.
            home[node] = home[node.args[0]] if node.target is getitem else len(nodes) - 1
            nodes[home[node]].append(node)
    return [_piece(module, alike, home, worth) for alike, worth in zip(nodes, compiles, strict=True) if alike]


def _piece(module: fx.GraphModule, nodes: list[fx.Node], home: dict[fx.Node, int], compiles: bool) -> Piece:
    """Nodes of a trace as a graph of its own, whose names do not depend on where it comes from.

    Operations in place become others where the tensor is the piece's own: the compiler does not know all of them.
    """
    number, inputs = home[nodes[0]], {}
    for node in nodes:
        for x in node.all_input_nodes:
            if home.get(x) != number:
                source = getattr(module, str(x.target)) if x.op == "get_attr" else x
                inputs.setdefault(id(source), (source, []))[1].append(x)
    graph, made = fx.Graph(), {}
    for i, (_, uses) in enumerate(inputs.values()):
        made.update(dict.fromkeys(uses, graph.placeholder(f"x{i}")))
        made[uses[0]].meta = dict(uses[0].meta)
    for node in nodes:
        arguments, options = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        changed = _own(node, home) if compiles and _mutates(node) else None
        made[node] = graph.call_function(_functional(node.target) if changed else node.target, arguments, options)
        made[node].meta = dict(node.meta)
        if changed:
            made.update((n, made[node]) for n in changed)
    outputs = [node for node in nodes if any(home.get(user) != number for user in node.users)]
    graph.output([made[node] for node in outputs])
    sources = [source for source, _ in inputs.values()]
    return Piece(fx.GraphModule({}, fx_graph_cse(graph) if compiles else graph), sources, outputs, compiles)


def _own(node: fx.Node, home: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes that stand for the tensor to which an operation writes, if its piece has made it; else none.

    Raises ValueError if a view of that tensor exists.
    """
    same = [node.args[0]]
    while _mutates(same[-1]):
        same.append(same[-1].args[0])
    if home.get(same[-1]) != home[node] or getattr(same[-1].target, "is_view", False):
        return []
    if any(getattr(user.target, "is_view", False) for x in same for user in x.users):
        raise ValueError(f"{node.target} writes to a tensor that has views")
    return same


def _functional(operator: Any) -> Any:
    """The operator that returns what this one writes: mul for mul_."""
    packet = getattr(aten, operator.overloadpacket.__name__.removesuffix("_"))
    return getattr(packet, operator._overloadname)


def needed(pieces: list[Piece], wanted: set[fx.Node]) -> list[Piece]:
    """The pieces that lead to the wanted values or write to tensors that they were given.

    A fill needs no more of its last layer than keys and values; they are written by the same code as in a forward.
    """
    kept = []
    for piece in reversed(pieces):
        if not wanted.isdisjoint(piece.outputs) or any(map(_writes, piece.graph.graph.nodes)):
            kept.append(piece)
            wanted.update(source for source in piece.inputs if isinstance(source, fx.Node))
    return kept[::-1]


def _writes(node: fx.Node) -> bool:
    """Whether an operation writes to a tensor that its graph was given."""
    if not _mutates(node):
        return False
    while node.op == "call_function" and (_mutates(node) or getattr(node.target, "is_view", False)):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def with_products(piece: Piece, packs: bool) -> Piece:
    """The piece with matrix products of the same tensor merged where their weights follow each other in memory, and, if
    `packs`, with weights in oneDNN's layout."""
    graph = piece.graph.graph
    sources = dict(zip((n for n in graph.nodes if n.op == "placeholder"), piece.inputs, strict=True))
    merge_products(graph, sources)
    if packs and piece.compiles:
        pack_products(graph, sources)
    for node in reversed(graph.nodes):
        if not node.users and (node in sources or node.target is aten.permute.default):
            graph.erase_node(node)
    inputs = [sources[node] for node in graph.nodes if node.op == "placeholder"]
    return piece._replace(graph=fx.GraphModule({}, graph), inputs=inputs)


def merge_products(graph: fx.Graph, sources: dict[fx.Node, Source]) -> None:
    """Merge products x @ w.T with the same x and constants w that follow each other in memory."""
    products: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.mm.default and isinstance(sources.get(_weight(node)), Tensor):
            products[node.args[0]].append(node)
    for alike in products.values():
        start = {node: sources[_weight(node)].storage_offset() for node in alike}  # type: ignore[union-attr]
        ordered = sorted(alike, key=start.__getitem__)
        weights: list[Any] = [sources[_weight(node)] for node in ordered]
        if len(alike) > 1 and (whole := _contiguous(weights)) is not None:
            given = _given(graph, _weight(alike[0]), whole.shape)
            sources[given] = whole
            with graph.inserting_before(alike[0]):
                alike[0].args = (alike[0].args[0], graph.call_function(aten.permute.default, (given, [1, 0])))
            _split(graph, alike[0], ordered, [len(w) for w in weights])


def pack_products(graph: fx.Graph, sources: dict[fx.Node, Source]) -> None:
    """Replace products with constant weights by products with packed weights."""
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, x, right = node.args
        weight = _weight(node) or right
        constant = sources.get(weight)
        if not isinstance(constant, Tensor) or constant.dim() != 2 or len(bias) and bias[0].meta["val"].dim() != 1:
            continue
        packed = pack(constant if weight is not right else constant.t())
        given = _given(graph, weight, packed.shape)
        sources[given] = packed
        with graph.inserting_before(node):
            product = graph.call_function(packed_product, (x, given, *bias))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _given(graph: fx.Graph, like: fx.Node, shape: torch.Size) -> fx.Node:
    """A new input of a graph, of this shape, before the others."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(f"of_{first.name}")
    node.meta["val"] = like.meta["val"].new_empty(shape)
    return node


def _weight(product: fx.Node) -> Any:
    """The node of w in a product x @ w.T; None for any other product."""
    right: Any = product.args[-1]
    return right.args[0] if right.target is aten.permute.default else None  # of a matrix


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
