"""Graphs of tensor parallel layers. One process stands for a rank of two: nothing is exchanged."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusion_backend
from capture import ALWAYS, Recorder, calls_of, fused_calls
from fusion_backend import Options, fuse
from fusion_backend.compat.sharding import name_of, options_of

X = torch.randn(2, 4, 8)
SHARDED = (ColwiseParallel(), RowwiseParallel())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def recorded(mesh, first, last, options=None, function=None):
    """The recorder of a gated MLP whose layers are split so."""
    model = Gated()
    parallelize_module(model, mesh, {"gate": first, "up": first, "down": last})
    recorder = Recorder() if options is None else Recorder(options)
    called = model if function is None else functools.partial(function, model)
    torch.compile(called, backend=recorder)(X)
    return recorder


def conversions(graph_module, name):
    """Calls of ``to_local`` and the like, which are functions until 2.13, with their options."""
    calls = (node for node in graph_module.graph.nodes if name_of(node.target) == name)
    return [(node, options_of(node.target, node.kwargs)) for node in calls]


@pytest.mark.parametrize("spelling", ["prim_from_local", "prim from_local"])
def test_a_function_that_is_made_for_a_conversion_is_read_as_the_conversion(spelling):
    def made(mesh, placements, *args_as_value, **kwargs_as_value):
        args_as_value = [mesh, placements, *args_as_value]

        def call(x):
            return DTensor.from_local(x, *args_as_value, **kwargs_as_value)

        call.__name__ = spelling
        return call

    assert name_of(made(None, ())) == "from_local"
    assert options_of(made(None, (), run_check=True), {}) == {"run_check": True}
    assert options_of(made(None, (), True), {}) == {"2": True}


def test_a_site_has_the_sizes_of_one_rank(mesh):
    recorder = recorded(mesh, *SHARDED)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.plan) == ("gated", "silu(g) * u", "rows")
    assert str(site.shape) == "8×8→8→8"
    assert [fused_calls(graph) for graph in recorder.after] == [1]


def test_what_both_layers_read_is_converted_once_and_its_gradient_is_partial(mesh):
    (graph,) = recorded(mesh, *SHARDED).after
    ((opened, options),) = (each for each in conversions(graph, "to_local") if each[1])
    partial = options["grad_placements"]
    assert [placement.is_partial() for placement in partial] == [True]
    (call,) = calls_of(graph, torch.ops.fusedmlp.mlp.default)
    assert call.args[0] is opened


def test_the_last_bias_is_divided_and_the_result_reduced_once(mesh):
    (graph,) = recorded(mesh, *SHARDED).after
    (share,) = calls_of(graph, torch.ops.fusedmlp.share.default)
    assert share.args[1] == 2
    ((reduced, _),) = conversions(graph, "redistribute")
    assert [each.is_partial() for each in reduced.args[0].meta["example_value"].placements] == [
        True
    ]


def test_layers_that_stay_sharded_between_are_fused(mesh):
    first = ColwiseParallel(use_local_output=False)
    (site,) = recorded(mesh, first, RowwiseParallel()).sites
    assert (site.activation, site.plan) == ("silu(g) * u", "rows")


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())),
        (ColwiseParallel(output_layouts=Replicate()), ColwiseParallel()),
        (RowwiseParallel(input_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())),
    ],
)
def test_values_that_move_between_the_layers_are_a_reason(mesh, first, last):
    recorder = recorded(mesh, first, last)
    assert [site.reason for site in recorder.sites] == ["sharding"]
    assert [graph.code for graph in recorder.after] == [graph.code for graph in recorder.before]


def test_policy_never_leaves_the_graph_as_it_is(mesh):
    recorder = recorded(mesh, *SHARDED, Options(policy="never"))
    assert [site.reason for site in recorder.sites] == ["policy"]
    assert [graph.code for graph in recorder.after] == [graph.code for graph in recorder.before]


def test_what_ranks_exchange_does_not_depend_on_the_plan(mesh):
    """Ranks may plan differently: what is legal is put alike, fused or not."""
    recorder = recorded(mesh, *SHARDED, Options(policy="auto", calibrate=False))
    (site,) = recorder.sites
    assert (site.plan, site.reason) == (None, "not-faster")
    (graph,) = recorder.after
    with_options = [options for _, options in conversions(graph, "to_local") if options]
    assert len(with_options) == 1


def test_layers_of_no_site_stay_as_they_are(mesh):
    def beside(model, x):
        return model(x), model.up(x)

    recorder = recorded(mesh, *SHARDED, function=beside)
    (graph,) = recorder.after
    sharded = [node for node in graph.graph.nodes if node.name.startswith("linear")]
    kinds = {type(node.meta["example_value"]).__name__ for node in sharded}
    assert kinds == {"DTensor"}


def test_a_hidden_value_that_is_returned_is_a_reason(mesh):
    def hidden(model, x):
        h = F.silu(model.gate(x)) * model.up(x)
        return model.down(h), h

    recorder = recorded(mesh, *SHARDED, function=hidden)
    assert [site.rewritten for site in recorder.sites] == [False]
    assert [graph.code for graph in recorder.after] == [graph.code for graph in recorder.before]


def test_explain_speaks_of_one_rank(mesh):
    model = Gated()
    names = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, names)
    report = fusion_backend.explain(model, X, options={"fusedmlp.policy": "always"})
    assert [str(site.shape) for site in report.sites] == ["8×8→8→8"]
    assert [site.fused for site in report.sites] == [True]


def test_one_reduction_forward_and_one_backward(mesh):
    """Unfused, the layers of a pair reduce the gradient of their input each for itself."""
    model, graphs = Gated(), []
    names = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, names)

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    def backend(graph_module, example_inputs):
        fused = fuse(graph_module, example_inputs, ALWAYS).graph_module
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(fused, example_inputs)

    x = X.clone().requires_grad_()
    torch.compile(model, backend=backend)(x).sum().backward()
    reductions = [
        sum("all_reduce" in str(node.target) for node in graph.graph.nodes) for graph in graphs
    ]
    assert reductions == [1, 1]
