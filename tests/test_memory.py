"""What training keeps for the backward pass, and what it computes again instead."""

from __future__ import annotations

import copy
import functools
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from capture import without_cpp_compiler
from fusion_backend import Options, fuse
from fusion_backend.compat import patches
from repetition import slow_but

ROWS, WIDTH, HIDDEN = 32, 160, 320  # wider than those MLPs of which x alone is kept anyway


class Mlp(nn.Module):
    def __init__(self, gated: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        up = self.up(x)
        hidden = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return self.down(self.dropout(hidden))


@dataclass
class Partitioned:
    """A backend that fuses a graph, and keeps what is traced forward and backward."""

    options: Options | None
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    plans: list[str | None] = field(default_factory=list)

    def __call__(self, graph_module: Any, example_inputs: Any) -> Any:
        if self.options is not None:
            result = fuse(graph_module, example_inputs, self.options)
            self.plans.extend(site.plan for site in result.sites)
            graph_module = result.graph_module
        compiled = aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            partition_fn=min_cut_rematerialization_partition,
        )
        with patches.drawing_once(), patches.pricing_our_products():
            return compiled(graph_module, example_inputs)

    def _keep(self, graph_module: Any, example_inputs: Any) -> Any:
        self.graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    @property
    def kept(self) -> int:
        """How many bytes the forward pass hands to the backward pass, beside inputs."""
        graph = self.graphs[0].graph
        inputs = set(graph.find_nodes(op="placeholder"))
        _, *saved = graph.output_node().args[0]
        values = [node.meta["val"] for node in saved if node not in inputs]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))

    def calls(self, name: str) -> int:
        """How often the backward pass calls operators with a name."""
        return sum(name in str(node.target) for node in self.graphs[1].graph.nodes)


def trained(function, model, options):
    """The graphs of one step, whose result and gradients are eager's."""
    torch._dynamo.reset()
    backend = Partitioned(options)
    model, expected = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH)
    torch.compile(functools.partial(function, model), backend=backend)(x).sin().sum().backward()
    expected(x).sin().sum().backward()
    found, exact = ([p.grad for p in each.parameters()] for each in (model, expected))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    return backend


def called(model, x):
    return model(x)


ALWAYS = Options(policy="always")
RECOMPUTE = Options(policy="always", recompute=True)


@torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)  # finds no graph of an earlier run
def test_graphs_that_recompute_are_cached_apart():
    model, x = Mlp(), torch.randn(ROWS, WIDTH)

    def saved_bytes(recompute: bool) -> int:
        torch.compiler.reset()
        options = {"fusedmlp.policy": "always", "fusedmlp.recompute": recompute}
        compiled = torch.compile(model, backend="fusedmlp", options=options)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        compiled(x).sum().backward()  # what is kept is cached once the backward pass is compiled
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(x)
        return sum(sizes)

    kept, again, kept_after = map(saved_bytes, (False, True, False))
    assert again < kept - 2 * ROWS * HIDDEN  # 4 bytes each; a bias is kept instead
    assert kept_after == kept


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("plan", ["rows", "onednn", "reference"])
def test_recompute_keeps_nothing_but_the_input(gated, plan):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Mlp(gated))
    before = 4 * ROWS * WIDTH  # what tanh returns, of which its derivative is, too
    if plan == "rows":
        kept, again = (trained(called, model, options) for options in (ALWAYS, RECOMPUTE))
    else:
        with without_cpp_compiler():
            kept, again = (trained(called, model, options) for options in (ALWAYS, RECOMPUTE))
    assert again.kept == before, (again.plans, again.kept)
    assert kept.kept >= before + 4 * ROWS * HIDDEN * (1 + gated)


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("gated", [False, True])
def test_recompute_within_a_checkpoint_computes_nothing_twice(gated):
    model = Mlp(gated)
    once, both = (trained(checkpointed, model, options) for options in (ALWAYS, RECOMPUTE))
    assert once.kept == both.kept == 0
    assert once.calls("rows") == both.calls("rows") == 2  # what is kept, and the gradients


def saving(*operators):
    def policy(context, operator, *args, **kwargs):
        saved = operator in operators
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("bias", [False, True])
def test_a_policy_that_saves_products_saves_those_of_fused_sites(bias):
    product = torch.ops.aten.addmm.default if bias else torch.ops.aten.mm.default
    other = torch.ops.aten.mm.default if bias else torch.ops.aten.addmm.default
    model = Mlp()
    if not bias:
        model.up, model.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def region(context_fn):
        def function(model, x):
            return checkpoint(model, x, use_reentrant=False, context_fn=context_fn)

        return trained(function, model, ALWAYS)

    assert region(saving(product)).kept >= 4 * ROWS * HIDDEN
    assert region(saving(other)).kept == 0


def test_a_policy_is_honoured_without_a_compiler():
    layers = [torch.randn(s, requires_grad=True) for s in ((HIDDEN, WIDTH), (WIDTH, HIDDEN))]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    runs = []

    def mlp(x):
        up, down = layers
        runs.append(1)
        what = (None, None, up, None, down, None, [], "gelu(x)", "reference")
        return torch.ops.fusedmlp.mlp(x, *what)

    saved = []
    for product in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        with FlopCounterMode(display=False) as counter:
            y = checkpoint(mlp, x, use_reentrant=False, context_fn=saving(product))
            y.sum().backward()
        saved.append(counter.get_total_flops())
    forward = 2 * 2 * ROWS * WIDTH * HIDDEN
    assert saved == [3 * forward, 4 * forward]


@pytest.mark.parametrize("gated", [False, True])
def test_products_of_operators_are_counted(gated):
    model, x = Mlp(gated), torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        model(x).sum().backward()
    graph = fuse(torch.fx.symbolic_trace(model), [x], ALWAYS)
    assert [site.plan for site in graph.sites] == ["rows"]
    with FlopCounterMode(display=False) as counter:
        graph.graph_module(x).sum().backward()
    assert counter.get_total_flops() == expected.get_total_flops()


def test_products_of_triton_kernels_are_counted():
    flops = pytest.importorskip("fusion_backend.kernels.codegen.flops")
    x, y = torch.empty(ROWS, WIDTH, device="meta"), torch.empty(ROWS, HIDDEN, device="meta")
    up, down = (torch.empty(s, device="meta") for s in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)))
    layer = 2 * ROWS * WIDTH * HIDDEN
    first = {"x": x, "weight_gate": up, "weight_up": up, "postact": y}
    assert flops.flops_of_arguments(first) == 2 * layer
    hidden = {"grad_output": x, "weight_down": down, "preact_up": y}
    assert flops.flops_of_arguments(hidden) == layer
    narrow = {"x": x, "grad_output": x, "weight_up": up, "weight_down": down, "grad_x": x}
    assert flops.flops_of_arguments(narrow) == 5 * layer
    assert flops.flops_of_arguments({**narrow, "grad_preact": None}) == 3 * layer


@pytest.mark.usefixtures("rows_by_reference")
@pytest.mark.parametrize("budget", slow_but([0.0, 1.0], [0.0, 0.5, 1.0]))
def test_a_budget_for_activations_keeps_the_mask_of_a_dropout(budget):
    """The gradient tells how the result changes under the same mask, so its mask is the same."""
    model = nn.Sequential(Mlp(dropout=0.5), nn.LayerNorm(WIDTH), Mlp(dropout=0.5))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    backend = Partitioned(ALWAYS)
    compiled = torch.compile(model, backend=backend)

    def result(x):
        torch.manual_seed(3)
        with functorch_config.patch(activation_memory_budget=budget):
            return compiled(x)

    y = result(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert backend.plans == ["rows", "rows"]
    step = 1e-3 * gradient / gradient.norm()
    change = (result(x + step).square() - result(x - step).square()).sum()
    torch.testing.assert_close(change, 2 * (gradient * step).sum(), rtol=0.02, atol=0.0)


def test_a_smaller_budget_keeps_less_and_prices_fused_products():
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    kept, calls = [], []
    for budget in (1.0, 0.7, 0.0):
        with functorch_config.patch(activation_memory_budget=budget):
            backend = trained(called, model, ALWAYS)
        kept.append(backend.kept)
        calls.append(backend.calls("rows_saving"))
    assert kept[0] > kept[1] > kept[2]
    assert calls[0] == 0 < calls[2]
    assert calls[1] < calls[2]
