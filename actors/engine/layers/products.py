"""Matrix products of pieces: with the same input they become one product, and their weights can be packed."""

from collections import defaultdict
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from exspec.actors.engine.layers.packed import is_plain, pack, packed_product
from exspec.actors.engine.layers.pieces import Piece, Source
from exspec.actors.engine.layers.spans import layers_of

aten = torch.ops.aten


def join_layers(model: nn.Module) -> None:
    """Let the products of a layer be merged: move the weights of linear layers with the same parent module into common
    memory, also for the caller's model."""
    for layer in layers_of(model):
        for module in layer.modules():
            join([child for child in module.children() if is_plain(child)])


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


def with_products(piece: Piece, packs: bool) -> Piece:
    """The piece with matrix products of the same tensor merged where their weights follow each other in memory, and, if
    `packs`, with packed weights."""
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
        plain = not node.kwargs and all(b.meta["val"].dim() == 1 for b in bias)
        if not isinstance(constant, Tensor) or not plain:
            continue
        matrix = constant if weight is not right else constant.t()
        packed = pack(matrix)
        given = _given(graph, weight, packed.shape)
        sources[given] = packed
        with graph.inserting_before(node):
            product = graph.call_function(packed_product, (x, given, len(matrix), *bias))
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
