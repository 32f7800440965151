"""Replacing a site by one call of the fused operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.compat.tracing import FakeTensor
from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.example_results import check_same, returned
from fusion_backend.fusion.gradient_paths import with_gradients
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.prenorms import Prenorm
from fusion_backend.fusion.residuals import Residual
from fusion_backend.fusion.shapes import ResultShape, operand_shape, result_shape
from fusion_backend.fusion.sources import Source
from fusion_backend.fusion.towers import parameters_of
from fusion_backend.fusion.transaction import transaction
from fusion_backend.fusion.views.convolutions import (
    features_last,
    features_second,
    is_channels_last,
)
from fusion_backend.fusion.views.effects import measures
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.fusion.views.operand import Entering
from fusion_backend.fusion.views.slices import SliceView
from fusion_backend.patterns import TOWERS

_LARGEST_SEED = 2**63 - 1


def rewrite(
    graph: Graph,
    match: Match,
    plan: str,
    residual: Residual | None = None,
    prenorm: Prenorm | None = None,
) -> Node:
    """Replace a legal site by ``torch.ops.fusedmlp.mlp`` or ``.chain``; returns the new call.

    Of a site that is fused up to its hidden value, ``activated_linear`` takes the place of that. A
    norm is computed within, and a residual added: the call takes the place of the sum. The calls of
    the site are erased as far as nothing else uses them.

    If anything is raised the graph is as it was before.

    Raises:
        RewriteError: the call would return another shape or dtype than what it takes the place of.
    """
    with transaction(graph), graph.inserting_before(match.result):
        call, result = _built(graph, match, plan, residual, prenorm)
    replaced = match.result if residual is None else residual.sum
    replaced.replace_all_uses_with(result)
    also = frozenset[Node]() if residual is None else residual.nodes
    _erase(graph, match.nodes | also | ({prenorm.node} if prenorm else set()))
    return call


def rewrite_together(graph: Graph, matches: Sequence[Match], plan: str) -> Node:
    """Replace legal sites of one input by ``torch.ops.fusedmlp.towers``; returns the new call.

    It stands where the first of them ends, of which ``towers.can_join`` holds with each other one.
    If anything is raised the graph is as it was before, but for parameters that it fetches there.

    Raises:
        RewriteError: as :func:`rewrite`.
    """
    # Autograd adds the gradients of x in the order of the first layers, the last one first.
    matches = sorted(matches, key=lambda match: match.sources[0].linear.node)
    first = min(match.result for match in matches)
    for match in matches:
        for node in parameters_of(match):
            if node.op == "get_attr" and first < node:
                first.prepend(node)
    with transaction(graph), graph.inserting_before(first):
        call, results = _built_together(graph, matches, first, plan)
    for match, result in zip(matches, results, strict=True):
        match.result.replace_all_uses_with(result)
    _erase(graph, frozenset[Node]().union(*(match.nodes for match in matches)))
    return call


def _built_together(
    graph: Graph, matches: Sequence[Match], first: Node, plan: str
) -> tuple[Node, list[Node]]:
    """The new call, and the nodes that take the places of the sites' results."""
    layers = [layer for match in matches for layer in match.layers]
    weights, biases = zip(*(_parameters(graph, Source(layer)) for layer in layers), strict=True)
    activations = [str(expression) for match in matches for expression in match.expressions]
    counts = [len(match.layers) for match in matches]
    x = matches[0].sources[0].linear.input
    call = graph.call_function(
        getattr(torch.ops.fusedmlp, TOWERS.becomes).default,
        (x, list(weights), list(biases), activations, counts, plan),
    )
    key = _example_key(first)
    values = list(returned(call, _tensor(first)))
    call.meta = {**first.meta, key: values}
    results = []
    for i, (match, value) in enumerate(zip(matches, values, strict=True)):
        old = match.result
        item = graph.call_function(operator.getitem, (call, i))
        item.meta = {**old.meta, _example_key(old): value}
        result = _shaped(graph, item, result_shape(match), 0)
        check_same(_tensor(result), _tensor(old))
        result.meta = dict(old.meta)
        results.append(result)
    return call, results


def _built(
    graph: Graph, match: Match, plan: str, residual: Residual | None, prenorm: Prenorm | None
) -> tuple[Node, Node]:
    """The new call, and the node that takes the place of the site's result."""
    old = match.result
    x = match.sources[0].linear.input if prenorm is None else prenorm.input
    x = _features_last(graph, x, match.down.positions)
    shape = result_shape(match)
    if shape == "flatten":  # before the call, so that what it returns is not a view
        x, shape = _call(graph, torch.ops.aten.flatten.using_ints, x, 0, -2), "same"
    if isinstance(match, Chain):
        call = _chain(graph, match, x, plan)
    else:
        call = _mlp(graph, match, x, plan)
    if prenorm is not None:
        call.kwargs = {**call.kwargs, **prenorm.arguments}
    if residual is not None:
        call.update_kwarg("residual", residual.node)
    call.meta = {**old.meta, _example_key(old): returned(call, _tensor(old))}
    result = _shaped(graph, call, shape, match.down.positions)
    check_same(_tensor(result), _tensor(old))
    result.meta = dict(old.meta)
    return call, result


def _mlp(graph: Graph, match: Match, x: Node, plan: str) -> Node:
    reached = with_gradients(match)
    passing = [source.node in reached for source in match.sources]
    weights: list[tuple[Node | None, Node | None]] = []
    if all(passing):
        weights.extend(_halves(graph, match.sources))
    if not weights:
        for source, passes in zip(match.sources, passing, strict=True):
            weights.append(_parameters(graph, source, passes))
    x = x if any(passing) else _detached(graph, x)
    if len(weights) == 1:
        weights.insert(0, (None, None))
    down = _parameters(graph, Source(match.down)) if match.part is None else ()
    return graph.call_function(
        _operator(match),
        (
            x,
            *weights[0],
            *weights[1],
            *down,
            _operands(graph, match, reached),
            str(match.expression),
            plan,
        ),
    )


def _operator(match: Match) -> Callable[..., Any]:
    """What the form says that it becomes."""
    assert match.form is not None  # a legal site has one
    return getattr(torch.ops.fusedmlp, match.form.becomes).default  # type: ignore[no-any-return]


def _chain(graph: Graph, match: Chain, x: Node, plan: str) -> Node:
    sites = [link.match for link in match.links]
    flat = [site is not None and site.sources[0].node not in with_gradients(site) for site in sites]
    # No gradient reaches a layer before an activation that passes none on.
    before = [any(flat[i:]) for i in range(len(flat) + 1)]
    weights, biases = zip(
        *(
            _parameters(graph, Source(layer), not stopped)
            for layer, stopped in zip(match.layers, before, strict=True)
        ),
        strict=True,
    )
    x = _detached(graph, x) if any(flat) else x
    activations = [str(expression) for expression in match.expressions]
    norms = [each for norm in match.norms for each in (norm.weight, norm.bias)]
    inner: dict[str, Any] = {"steps": match.steps, "norms": norms} if match.steps else {}
    given = (x, list(weights), list(biases), activations, plan)
    return graph.call_function(_operator(match), given, inner)


def _operands(graph: Graph, match: Match, reached: frozenset[Node]) -> list[Node]:
    nodes = [_operand(graph, match, operand) for operand in match.operands]
    if result_shape(match) == "flatten":
        nodes = [
            _call(graph, torch.ops.aten.flatten.using_ints, node, 0, -2)
            if operand.kind == "elementwise"
            else node
            for operand, node in zip(match.operands, nodes, strict=True)
        ]
    return [
        node if operand.node in reached or operand.kind == "seed" else _detached(graph, node)
        for operand, node in zip(match.operands, nodes, strict=True)
    ]


def _detached(graph: Graph, node: Node) -> Node:
    """What autograd finds no way to in eager either."""
    return _call(graph, torch.ops.aten.detach.default, node)


def _operand(graph: Graph, match: Match, operand: Entering) -> Node:
    """The node that the operator reads: a view of the operand, or a new seed."""
    if operand.kind == "seed":
        return _seed(graph, operand.node)
    node = operand.node
    if operand.kind == "elementwise":
        if operand.part is not None:
            bounds = (operand.part.start, operand.part.stop, operand.part.step)
            node = _call(graph, torch.ops.aten.slice.Tensor, node, match.down.feature_dim, *bounds)
        shape, positions = operand_shape(match, operand), match.down.positions
        if shape == "channels":
            return _features_last(graph, node, positions)
        return _reshaped(graph, node, shape)
    tensor = tensor_of(node)
    is_view = tensor is not None and tensor.dim() > 1
    return _call(graph, torch.ops.aten.flatten.using_ints, node) if is_view else node


def _seed(graph: Graph, dropout: Node) -> Node:
    """A random number, drawn where the dropout drew its own, of the generator that it drew of."""
    source = dropout.all_input_nodes[0]
    value = tensor_of(source)
    assert value is not None
    options: dict[str, Any] = {"dtype": torch.int64, "device": value.device}
    with graph.inserting_before(dropout):
        seed = graph.call_function(torch.ops.aten.randint.low, (0, _LARGEST_SEED, []), options)
    with _mode_of(value):
        seed.meta[_example_key(source)] = value.new_empty((), dtype=torch.int64)
    return seed


def _parameters(graph: Graph, source: Source, passes: bool = True) -> tuple[Node, Node | None]:
    """Weight ``(features, in)`` and bias ``(features,)`` of a projection, as nodes; no copies.

    ``passes``: whether a gradient reaches them.
    """
    layer, part = source.linear, source.part
    weight, bias = layer.weight, layer.bias
    if not passes:
        weight = _detached(graph, weight)
        bias = None if bias is None else _detached(graph, bias)
    if layer.transposed:
        weight = _call(graph, torch.ops.aten.t.default, weight)
    if layer.positions:
        kernel = list(range(2, 2 + layer.positions))
        weight = _call(graph, torch.ops.aten.squeeze.dims, weight, kernel)
    return _rows(graph, weight, part), _rows(graph, bias, part)


def _halves(graph: Graph, sources: Sequence[Source]) -> list[tuple[Node | None, Node | None]]:
    """Weights and biases of a pair that are the halves of one layer's; empty for other sources.

    They are split at once: so the gradients of the halves become that of the whole by being put
    side by side, where each of two slices would add one of the whole's size.
    """
    parts = [source.part for source in sources if source.part is not None]
    if len(parts) != 2 or len({source.linear.node for source in sources}) != 1:
        return []
    layer, half = sources[0].linear, parts[0].features
    halves = [(0, half, 1), (half, 2 * half, 1)]
    order = [(part.start, part.stop, part.step) for part in parts]
    if sorted(order) != halves or layer.out_features != 2 * half:
        return []
    weight, bias = _parameters(graph, Source(layer))
    assert weight is not None
    weights = _split(graph, weight, half)
    biases = [None, None] if bias is None else _split(graph, bias, half)
    return [(weights[i], biases[i]) for i in map(halves.index, order)]


def _split(graph: Graph, node: Node, half: int) -> list[Node | None]:
    """The halves of a weight or bias."""
    pair = graph.call_function(torch.ops.aten.split_with_sizes.default, (node, [half, half]))
    value = tensor_of(node)
    assert value is not None
    with _mode_of(value), torch.no_grad():
        views = value.split_with_sizes([half, half])
    key = _example_key(node)
    pair.meta[key] = views
    halves = [graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
    for found, view in zip(halves, views, strict=True):
        found.meta[key] = view
    return [*halves]


def _features_last(graph: Graph, node: Node, positions: int) -> Node:
    """The input of a layer, or an operand, as the operator takes it: with its features last."""
    given = tensor_of(node)
    if not positions or given is None:
        return node
    x = _call(graph, torch.ops.aten.permute.default, node, list(features_last(positions)))
    # A convolution whose weight is channels-last copies an input that is not, as this does.
    return x if is_channels_last(given) else _call(graph, torch.ops.aten.contiguous.default, x)


def _rows(graph: Graph, node: Any, part: SliceView | None) -> Any:
    if part is None or node is None:
        return node
    bounds = (0, part.start, part.stop, part.step)
    return _call(graph, torch.ops.aten.slice.Tensor, node, *bounds)


def _reshaped(graph: Graph, node: Node, shape: ResultShape | None) -> Node:
    if shape == "same":
        return node
    if shape == "flatten":
        return _call(graph, torch.ops.aten.flatten.using_ints, node, 0, -2)
    return _call(graph, torch.ops.aten.reshape.default, node, list(shape or ()))


def _shaped(graph: Graph, call: Node, shape: ResultShape | None, positions: int) -> Node:
    if shape == "same":
        return call
    if shape in ("channels", "channels copied"):
        order = list(features_second(positions))
        result = _call(graph, torch.ops.aten.permute.default, call, order)
        if shape == "channels":
            return result
        contiguous = {"memory_format": torch.contiguous_format}
        return _call(graph, torch.ops.aten.clone.default, result, **contiguous)
    if shape == "one position":
        result = _call(graph, torch.ops.aten.flatten.using_ints, call, 0, -2)
        for _ in range(positions):
            result = _call(graph, torch.ops.aten.unsqueeze.default, result, -1)
        return result
    return _call(graph, torch.ops.aten.reshape.default, call, list(shape or ()))


def _call(graph: Graph, target: Any, *arguments: Any, **others: Any) -> Node:
    """A call of a view operator, or of a copy, with its example value."""
    node = graph.call_function(target, arguments, others)
    node.meta.update(_traced(node))
    return node


def _traced(node: Node) -> dict[str, Any]:
    """The example value of a new view, from that of its operand: later sites read it."""
    operand = node.args[0]
    value = tensor_of(operand)
    assert isinstance(operand, Node)
    assert value is not None
    with _mode_of(value), torch.no_grad():
        view = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return {_example_key(operand): view}


def _example_key(node: Node) -> str:
    return "example_value" if "example_value" in node.meta else "val"


def _tensor(node: Node) -> torch.Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # a legal site, and what is built for it, have example values
    return tensor


def _mode_of(value: torch.Tensor) -> AbstractContextManager[Any]:
    return value.fake_mode if isinstance(value, FakeTensor) else nullcontext()


def _erase(graph: Graph, nodes: frozenset[Node]) -> None:
    """Erase the calls of a rewritten site, last first; those that something else reads stay."""
    for node in sorted(nodes, reverse=True):
        for user in tuple(node.users):
            if measures(user) and not user.users:
                graph.erase_node(user)  # a size that was taken of a hidden value
        if not node.users:
            graph.erase_node(node)
