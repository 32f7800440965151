"""A recording backend: the graphs that Dynamo hands over, and what fuse() makes of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusion_backend import Options, Site, fuse
from fusion_backend.fusion.nested_graphs import nested_graphs
from fusion_backend.kernels import reference
from fusion_backend.kernels.cpu_rows import family as rows
from fusion_backend.kernels.cpu_rows import launch, support
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import Weights

ALWAYS = Options(policy="always")


@dataclass
class Recorder:
    """A backend that keeps each graph before and after the rewrite, and runs it eagerly."""

    options: Options = ALWAYS
    before: list[GraphModule] = field(default_factory=list)
    after: list[GraphModule] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        result = fuse(graph_module, example_inputs, self.options)
        self.before.append(graph_module)
        self.after.append(result.graph_module)
        self.sites.extend(result.sites)
        return result.graph_module.forward


def record(
    model: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> tuple[Recorder, Any]:
    """Compile a model with a recorder, run it once; the recorder and the result."""
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, dynamic=dynamic)
    return recorder, compiled(*args, **kwargs)


def sites_of(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """The sites of a model, under the policy that fuses all that is legal."""
    return record(model, *args, **kwargs)[0].sites


def only_site(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Site:
    """The site of a model that has exactly one."""
    (site,) = sites_of(model, *args, **kwargs)
    return site


def record_as_eager(model: Callable[..., Any], x: torch.Tensor) -> Recorder:
    """The recorder of a call without gradients, which fused something and gave eager's result."""
    with torch.no_grad():
        expected = model(x.clone())
        recorder, result = record(model, x.clone())
    assert recorder.sites
    torch.testing.assert_close(result, expected)
    if isinstance(result, torch.Tensor):
        assert result.stride() == expected.stride()
    return recorder


def trained(function, model, *args):
    """The result, and the gradients of every parameter."""
    model.zero_grad()
    result = function(*args)
    (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).mean().backward()
    return result, [parameter.grad for parameter in model.parameters()]


def check_as_eager(model, *args, activation, form="plain", dynamic=None):
    """One site, of this activation, is fused; the result and all gradients are eager's."""
    reference, recorders = copy.deepcopy(model), []

    def recorded(*given):
        recorder, result = record(model, *given, dynamic=dynamic)
        recorders.append(recorder)
        return result

    found = trained(recorded, model, *args)
    (recorder,) = recorders
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == (form, activation, True)
    assert [fused_calls(graph) for graph in recorder.after] == [1]
    torch.testing.assert_close(found, trained(reference, reference, *args))
    return site


def fused_calls(graph_module: GraphModule, target: Any = None) -> int:
    """How often a graph, with those nested in it, calls a fused operator: ``mlp`` by default."""
    return len(calls_of(graph_module, torch.ops.fusedmlp.mlp.default if target is None else target))


def calls_of(graph_module: GraphModule, target: Any) -> list[Node]:
    """The calls of an operator in a graph and in those nested in it."""
    graphs = (nested.graph for nested in nested_graphs(graph_module))
    return [call for g in graphs for call in g.find_nodes(op="call_function", target=target)]


@contextmanager
def without_cpp_compiler() -> Iterator[None]:
    """Sites and chains on a CPU are planned as on a machine without a C++ compiler."""
    missing = mock.Mock(return_value="there is no C++ compiler")
    with mock.patch.object(rows, "cannot_run", missing):
        yield


@contextmanager
def with_rows_by_reference() -> Iterator[None]:
    """The family ``rows`` can be had and is called, but ATen's operators compute its results."""
    with (
        mock.patch.object(support, "why_not_compiled", mock.Mock(return_value=None)),
        mock.patch.object(launch, "run", _layers_by_reference),
        mock.patch.object(rows.Rows, "run_saving", Family.run_saving),
        mock.patch.object(rows.Rows, "gradients", return_value=None),
        mock.patch.object(rows.Rows, "saves", return_value="preact"),
    ):
        yield


def _layers_by_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    around: tuple[Tensor | None, Norm | None],
    activations: Sequence[str],
    gated: bool,
) -> Tensor:
    """``launch.run``."""
    residual, norm = around
    rows, functions = x if norm is None else norm(x), [*map(parse, activations)]
    if gated or operands:
        gate = (weights[0], biases[0]) if gated else (None, None)
        layers = itertools.chain.from_iterable(zip(weights[gated:], biases[gated:], strict=True))
        y = reference.forward(rows, Weights(*gate, *layers), functions[0], operands)
    else:
        y = reference.chain(rows, weights, biases, functions)
    return y if residual is None else y + residual
