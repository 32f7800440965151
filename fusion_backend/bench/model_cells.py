"""The MLPs of a model as cells: one for each different one among its legal sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.bench.cells import FORMS, PRECISIONS, Cell
from fusion_backend.errors import CommandError
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.instruments.explanation import explain


def cells_of(model: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Cell, ...]:
    """The different MLPs of one call of a model, in inference.

    Args:
        model: a module or function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        CommandError: there is no MLP that may be fused.
        ExplainError: the model fails under ``torch.compile``.
    """
    with torch.no_grad():
        explanation = explain(model, *args, options={"fusedmlp.policy": "always"}, **kwargs)
    cells = [cell for pair in explanation.graphs for cell in _cells(pair.after)]
    if not cells:
        raise CommandError("the model has no MLP to measure: `fusedmlp explain` says why")
    return tuple(dict.fromkeys(cells))


def _cells(graph_module: GraphModule) -> Iterator[Cell]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.fusedmlp.mlp.default:
                    yield _cell(node)


def _cell(node: Node) -> Cell:
    x, down = tensor_of(node.args[0]), tensor_of(node.args[5])
    assert x is not None
    assert down is not None
    activation = str(node.args[8])
    names = {expression: name for name, expression in FORMS.items()}
    dtypes = {dtype: name for name, dtype in PRECISIONS.items()}
    return Cell(
        form=names.get(activation, activation),
        rows=x.numel() // x.shape[-1],
        width=x.shape[-1],
        hidden=down.shape[1],
        precision=dtypes[x.dtype],
        bias=node.args[4] is not None,
        out=down.shape[0],
    )
