"""The pieces of a program: a function's trace, cut into parts whose graphs do not depend on where they come from."""

from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from exspec.actors.engine.graphs import mapped, tensors_of
from exspec.actors.engine.layers.cuts import CUT, cut, tracing
from exspec.actors.engine.layers.spans import layers_of

aten = torch.ops.aten
Source = fx.Node | Tensor  # an argument or a value of an earlier piece, or a constant


class Piece(NamedTuple):
    """A part of a trace. inputs: where its inputs come from. outputs: its values that are used elsewhere. compiles:
    whether it is compiled."""

    graph: fx.GraphModule
    inputs: list[Source]
    outputs: list[fx.Node]
    compiles: bool


class Trace(NamedTuple):
    """A function as a graph. results: what it returned. nodes: those of the tensors in its results, in order."""

    module: fx.GraphModule
    results: Any
    nodes: list[fx.Node]


def trace(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Trace:
    """The function as a graph for arguments of these shapes.

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
    return Trace(module, results[0], list(module.graph.output_node().args[0]))  # type: ignore[arg-type]


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
    number = home[nodes[0]]
    inputs: dict[int, tuple[Source, list[fx.Node]]] = {}
    for node in nodes:
        for x in node.all_input_nodes:
            if home.get(x) != number:
                source = getattr(module, str(x.target)) if x.op == "get_attr" else x
                inputs.setdefault(id(source), (source, []))[1].append(x)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for i, (_, uses) in enumerate(inputs.values()):
        made.update(dict.fromkeys(uses, graph.placeholder(f"x{i}")))
        made[uses[0]].meta = dict(uses[0].meta)
    for node in nodes:
        arguments, options = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        changed = _own(node, home) if compiles and _mutates(node) else None
        operator: Any = _functional(node.target) if changed else node.target
        made[node] = graph.call_function(operator, arguments, options)
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
    same: list[Any] = [node.args[0]]
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


def cut_layers(model: nn.Module) -> None:
    """From now on, cut traces where a layer of the model begins and ends."""
    for layer in layers_of(model):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: cut(next(tensors_of((*args, *kwargs.values())))), with_kwargs=True
        )
        layer.register_forward_hook(lambda _, __, out: cut(next(tensors_of(out if isinstance(out, tuple) else (out,)))))
