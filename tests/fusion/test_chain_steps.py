"""Norms and values that are read again within a chain: what is matched, and what stands in the way.

Chains are planned for an H100 and computed by the reference, since no CPU runs their kernel.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from fusion_backend import fuse
from fusion_backend.fusion import decisions
from fusion_backend.options import Options
from fusion_backend.planning.planner import plan

X = torch.randn(5, 32)
TARGET = torch.ops.fusedmlp.chain.default


class Net(nn.Module):
    """Layers and norms of one width; ``body(self, x)`` says how they follow each other."""

    def __init__(self, body, width=32, norm=nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(norm(width) for _ in range(3))
        for parameter in self.norms.parameters():
            nn.init.normal_(parameter)
        self.body = body

    def forward(self, x):
        return self.body(self.layers, self.norms, x)


class Joining(Net):
    """The same, but the third layer takes 64 features and the first 32 beside some of 32."""

    def __init__(self, body) -> None:
        super().__init__(body)
        self.layers[2] = nn.Linear(64, 32)


def captured(model, x) -> GraphModule:
    with torch.no_grad():
        return torch.export.export(model, (x,)).module()


def fused(model, x=X, **options):
    """The sites of a model, and its graph after fusion, which runs here."""
    options = {"policy": "always", **options}
    with torch.no_grad():
        result = fuse(captured(model, x), (x,), Options(**options), target="h100")
    for call in result.graph_module.graph.find_nodes(op="call_function", target=TARGET):
        call.args = (*call.args[:4], "reference")
    result.graph_module.recompile()
    return result.sites, result.graph_module


def steps_of(graph_module: GraphModule) -> list[str]:
    calls = graph_module.graph.find_nodes(op="call_function", target=TARGET)
    return [str(call.kwargs.get("steps", "")) for call in calls]


def normed(layers, norms, x):
    hidden = torch.tanh(norms[0](layers[0](x)))
    return layers[2](torch.tanh(norms[1](layers[1](hidden))))


def norm_after_activation(layers, norms, x):
    hidden = norms[0](F.gelu(layers[0](x)))
    return layers[2](norms[1](F.silu(layers[1](hidden))))


def prenorm_blocks(layers, norms, x):
    hidden = x + layers[1](F.gelu(layers[0](norms[0](x))))
    return hidden + layers[3](F.gelu(layers[2](norms[1](hidden))))


def postnorm_blocks(layers, norms, x):
    hidden = norms[0](x + layers[1](F.relu(layers[0](x))))
    return hidden + layers[3](F.relu(layers[2](hidden)))


def skips(layers, norms, x):
    hidden = torch.tanh(layers[0](x)) + x
    hidden = torch.tanh(layers[1](hidden)) + hidden
    return layers[2](hidden)


def residual_in_activation(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))) + x)
    return layers[2](hidden)


def gating(layers, norms, x):
    hidden = torch.tanh(layers[0](x))
    return layers[2](torch.sigmoid(layers[1](hidden)) * hidden)


def scaled(layers, norms, x):
    hidden = torch.add(x, layers[1](F.relu(layers[0](norms[0](x)))), alpha=0.5)
    return layers[2](F.relu(hidden))


def in_place(layers, norms, x):
    hidden = layers[0](x)
    hidden += layers[2](F.relu(layers[1](norms[0](hidden)), inplace=True))
    return layers[3](norms[1](hidden))


def silu_by_hand(layers, norms, x):
    hidden = norms[0](layers[0](x))
    hidden = layers[1](hidden * torch.sigmoid(hidden))
    return layers[2](F.relu(hidden))


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (normed, "linear; layer_norm(1e-05); activation; linear; layer_norm(1e-05); "
                 "activation; linear"),
        (norm_after_activation, "linear; activation; layer_norm(1e-05); linear; activation; "
                                "layer_norm(1e-05); linear"),
        (prenorm_blocks, "layer_norm(1e-05); linear; activation; linear; activation(0); "
                         "layer_norm(1e-05); linear; activation; linear; activation(5)"),
        (postnorm_blocks, "linear; activation; linear; activation(0); layer_norm(1e-05); linear; "
                          "activation; linear; activation(5)"),
        (skips, "linear; activation; activation(0); linear; activation; activation(3); linear"),
        (residual_in_activation, "linear; activation; linear; activation(0); activation; linear"),
        (gating, "linear; activation; linear; activation; activation(2); linear"),
        (scaled, "layer_norm(1e-05); linear; activation; linear; activation(0); activation; "
                 "linear"),
        (in_place, "linear; layer_norm(1e-05); linear; activation; linear; activation(1); "
                   "layer_norm(1e-05); linear"),
        (silu_by_hand, "linear; layer_norm(1e-05); activation; linear; activation; linear"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_is_one_chain_and_what_it_computes(body, steps):
    model = Net(body)
    (site,), graph_module = fused(model)
    assert (site.form, site.plan, site.steps) == ("chain", "chain", steps)
    assert steps_of(graph_module) == [steps]
    torch.testing.assert_close(graph_module(X), model(X), atol=2e-6, rtol=1e-5)


def test_an_rms_norm_is_a_step():
    model = Net(normed, norm=nn.RMSNorm)
    (site,), graph_module = fused(model)
    assert "rms_norm(" in site.steps
    torch.testing.assert_close(graph_module(X), model(X), atol=2e-6, rtol=1e-5)


def test_more_leading_dimensions_are_rows():
    model, x = Net(prenorm_blocks), torch.randn(2, 3, 32)
    _, graph_module = fused(model, x)
    assert len(steps_of(graph_module)) == 1
    torch.testing.assert_close(graph_module(x), model(x), atol=2e-6, rtol=1e-5)


def test_a_sum_that_is_laid_out_otherwise_stays_outside():
    model, x = Net(postnorm_blocks), torch.randn(2, 32, 3).transpose(1, 2)
    (site,), graph_module = fused(model, x)
    assert site.steps.endswith("activation(5)")  # of values of the chain, which are contiguous
    torch.testing.assert_close(graph_module(x), model(x), atol=2e-6, rtol=1e-5)

    def one_sum(layers, norms, x):
        return x + layers[2](F.relu(layers[1](F.relu(layers[0](x)))))

    model = Net(one_sum)
    assert model(x).stride() != model(x).contiguous().stride()
    (site,), graph_module = fused(model, x)
    assert (site.steps, site.rewritten) == ("", True)
    assert graph_module(x).stride() == model(x).stride()
    torch.testing.assert_close(graph_module(x), model(x), atol=2e-6, rtol=1e-5)


def joined(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.cat([x, hidden], -1))))


def joined_behind(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.concat((hidden, x), dim=x.dim() - 1))))


def joined_before_a_norm(layers, norms, x):
    hidden = torch.tanh(norms[0](layers[0](x)))
    return layers[3](norms[1](layers[2](torch.cat([hidden, x], axis=-1))))


def joined_behind_a_norm(layers, norms, x):
    hidden = F.silu(norms[1](layers[0](norms[0](x))))
    return layers[1](F.silu(layers[2](torch.cat([x, hidden], -1))))


def joined_to_a_norm(layers, norms, x):
    normed = norms[0](x)
    hidden = F.silu(layers[1](F.silu(layers[0](normed))))
    return layers[2](torch.cat([normed, hidden], -1))


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (joined, "linear; activation; linear; activation; linear(0, x); activation; linear"),
        (joined_behind, "linear; activation; linear; activation; linear(x, 0); activation; linear"),
        (joined_before_a_norm, "linear; layer_norm(1e-05); activation; linear(x, 0); "
                               "layer_norm(1e-05); linear"),
        (joined_behind_a_norm, "layer_norm(1e-05); linear; layer_norm(1e-05); activation; "
                               "linear(0, x); activation; linear"),
        (joined_to_a_norm, "linear; activation; linear; activation; linear(0, x)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_a_layer_may_read_the_input_beside_another_value(body, steps, leading):
    model, x = Joining(body), torch.randn(*leading, 32)
    (site,), graph_module = fused(model, x)
    assert (site.form, site.plan, site.steps) == ("chain", "chain", steps)
    assert site.detail.endswith("concatenates its input and 1 of its values within")
    torch.testing.assert_close(graph_module(x), model(x), atol=2e-6, rtol=1e-5)


def test_an_activation_at_the_end_belongs_to_a_chain_with_steps():
    def joined_and_activated_last(layers, norms, x):
        return torch.sigmoid(joined(layers, norms, x))

    model = Joining(joined_and_activated_last)
    (site,), graph_module = fused(model)
    assert site.steps.endswith("; linear(0, x); activation; linear; activation")
    assert not [node for node in graph_module.graph.nodes if "sigmoid" in node.name]
    torch.testing.assert_close(graph_module(X), model(X), atol=2e-6, rtol=1e-5)


def test_an_activation_at_the_end_of_a_chain_without_steps_stays_outside():
    """As one of several towers, or in training, the chain could have no steps."""

    def plain(layers, norms, x):
        return torch.sigmoid(layers[3](F.relu(layers[1](F.relu(layers[0](x))))))

    (site,), graph_module = fused(Net(plain))
    assert (site.form, site.steps) == ("chain", "")
    assert [node for node in graph_module.graph.nodes if "sigmoid" in node.name]


def test_several_layers_may_read_the_input():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 16)
            self.layers = nn.ModuleList(nn.Linear(48, 16) for _ in range(3))

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            for layer in self.layers:
                hidden = torch.tanh(layer(torch.cat([x, hidden], -1)))
            return hidden

    model = Several()
    (site,), graph_module = fused(model)
    assert (site.chain, site.steps.count("linear(0, x); activation")) == ((16, 16, 16), 3)
    torch.testing.assert_close(graph_module(X), model(X), atol=2e-6, rtol=1e-5)


def joined_to_a_value_within(layers, norms, x):
    first = F.relu(layers[0](x))
    hidden = F.relu(layers[1](first))
    return layers[3](F.relu(layers[2](torch.cat([first, hidden], -1))))


def test_a_value_that_is_concatenated_may_be_the_input_of_a_chain():
    sites, graph_module = fused(Joining(joined_to_a_value_within))
    assert [site.form for site in sites] == ["activated", "chain"]
    assert steps_of(graph_module) == ["linear; activation; linear(0, x); activation; linear"]


def joined_to_another_tensor(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.cat([x.flip(0), hidden], -1))))


def joined_to_a_copy(layers, norms, x):
    before = x.clone()
    x.mul_(2.0)
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.cat([before, hidden], -1))))


def joined_along_rows(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.cat([x, hidden], 0).reshape(5, 64))))


def joined_to_two_halves(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    parts = [x[..., :16], hidden, x[..., 16:]]
    return layers[3](F.relu(layers[2](torch.cat(parts, -1))))


def joined_and_returned(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    both = torch.cat([x, hidden], -1)
    return layers[3](F.relu(layers[2](both))), both


def joined_and_activated(layers, norms, x):
    hidden = layers[1](F.relu(layers[0](x)))
    return layers[3](F.relu(layers[2](F.relu(torch.cat([x, hidden], -1)))))


def joined_to_itself(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    return layers[3](F.relu(layers[2](torch.cat([hidden, hidden], -1))))


def joined_to_what_is_written_to(layers, norms, x):
    hidden = F.relu(layers[1](F.relu(layers[0](x))))
    x.mul_(2.0)
    return layers[3](F.relu(layers[2](torch.cat([x, hidden], -1))))


@pytest.mark.parametrize(
    "body",
    [
        joined_to_another_tensor,
        joined_to_a_copy,
        joined_along_rows,
        joined_to_two_halves,
        joined_and_returned,
        joined_and_activated,
        joined_to_itself,
        joined_to_what_is_written_to,
    ],
)
def test_what_else_stands_beside_a_value_is_concatenated_outside(body):
    model = Joining(body)
    sites, graph_module = fused(model)
    assert [site for site in sites if site.steps] == []
    assert [node for node in graph_module.graph.nodes if "cat" in node.name]


def test_without_a_kernel_what_is_concatenated_is_the_reason():
    with torch.no_grad():
        sites = fuse(captured(Joining(joined), X), (X,), Options(policy="always")).sites
    assert [(site.form, site.reason) for site in sites] == [
        ("plain", None),
        ("plain", "non-pointwise"),
        ("plain", None),
    ]


def residual_of_what_was_copied(layers, norms, x):
    value = torch.sin(x)
    hidden = layers[1](F.relu(layers[0](value.clone())))
    value.mul_(2.0)
    return layers[3](F.relu(layers[2](value + hidden)))


def test_a_value_that_was_written_to_is_not_the_copy_that_a_chain_begins_with():
    """In Dynamo's graphs what is written to keeps its name."""
    model, kept = Net(residual_of_what_was_copied), []

    def backend(graph_module, inputs):
        kept.extend(fuse(graph_module, inputs, Options(policy="always"), target="h100").sites)
        return graph_module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(X)
    assert [site.steps for site in kept if site.rewritten] == ["", ""]


def residual_of_a_copy(layers, norms, x):
    value = x.t().contiguous().t().contiguous()
    return layers[2](F.relu(layers[1](F.relu(layers[0](value))) + value))


def test_a_copy_of_the_input_may_be_read_again():
    (site,), _ = fused(Net(residual_of_a_copy))
    assert "activation(0)" in site.steps


def returns_a_norm(layers, norms, x):
    value = norms[0](layers[0](x))
    hidden = layers[1](torch.tanh(value))
    return layers[2](torch.tanh(hidden)), value


def returns_a_sum(layers, norms, x):
    hidden = x + layers[1](F.gelu(layers[0](norms[0](x))))
    return layers[3](F.gelu(layers[2](norms[1](hidden)))), hidden


def normed_over_rows(layers, norms, x):
    hidden = torch.tanh(F.layer_norm(layers[0](x).t(), (5,)).t())
    return layers[2](torch.tanh(norms[0](layers[1](hidden))))


def normed_over_two(layers, norms, x):
    hidden = torch.tanh(F.layer_norm(layers[0](x), (5, 32)))
    return layers[2](torch.tanh(norms[0](layers[1](hidden))))


def sum_with_another_input(layers, norms, x):
    hidden = torch.tanh(layers[0](x)) + torch.sin(x[:, :1]).expand(5, 32)
    return layers[2](torch.tanh(layers[1](hidden)) + layers[3](x.flip(0)))


def sum_that_is_broadcast(layers, norms, x):
    hidden = torch.tanh(norms[0](layers[0](x))) + x[:1]
    return layers[2](norms[1](torch.tanh(layers[1](hidden))))


def softmax_between(layers, norms, x):
    hidden = torch.softmax(layers[0](x), -1)
    return layers[2](torch.tanh(norms[0](layers[1](hidden))))


def writes_to_the_input(layers, norms, x):
    hidden = torch.tanh(norms[0](layers[0](x)))
    x.zero_()
    return layers[2](torch.tanh(norms[1](layers[1](hidden))))


def writes_to_a_norm(layers, norms, x):
    hidden = torch.tanh(norms[0](layers[0](x)))
    norms[0].weight.mul_(2.0)
    return layers[2](torch.tanh(norms[1](layers[1](hidden))))


def rewrites_a_kept_value(layers, norms, x):
    hidden = layers[0](x)
    inner = layers[2](F.relu(layers[1](norms[0](hidden))))
    hidden.mul_(2.0)
    return layers[3](norms[1](hidden + inner))


@pytest.mark.parametrize(
    "body",
    [
        returns_a_norm,
        returns_a_sum,
        normed_over_rows,
        normed_over_two,
        sum_with_another_input,
        sum_that_is_broadcast,
        softmax_between,
        writes_to_the_input,
        writes_to_a_norm,
        rewrites_a_kept_value,
    ],
)
def test_what_stands_in_the_way_leaves_no_chain(body):
    model = Net(body)
    sites, graph_module = fused(model)
    assert [site.form for site in sites if site.rewritten and site.steps] == []
    assert steps_of(graph_module) == []


def test_sites_of_a_chain_that_is_not_formed_keep_their_reasons():
    sites, _ = fused(Net(returns_a_norm))
    assert [(site.form, site.reason) for site in sites] == [
        ("plain", "norm-between"),
        ("plain", None),
    ]


def test_where_a_chain_is_not_faster_that_is_the_reason():
    model = Net(normed, width=256).bfloat16()
    x = torch.randn(65536, 256).bfloat16()
    sites, graph_module = fused(model, x, policy="auto")
    assert steps_of(graph_module) == []
    assert {site.reason for site in sites} == {"not-faster"}
    assert all("by the model" in site.detail for site in sites)


def test_a_residual_of_another_dtype_is_left_alone():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32).bfloat16() for _ in range(3))

        def forward(self, x):
            hidden = x + self.layers[0](x.bfloat16())  # float32
            hidden = hidden + self.layers[1](hidden.bfloat16())
            return self.layers[2](hidden.bfloat16())

    _, graph_module = fused(Mixed())
    assert steps_of(graph_module) == []


@pytest.mark.parametrize("kind", ["norms", "concatenations"])
def test_steps_under_autocast_are_of_the_dtypes_that_eager_takes(kind):
    model = Net(normed) if kind == "norms" else Joining(joined)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x)

    x = torch.randn(300, 32)
    _, graph_module = fused(Cast(), x)
    nested = [m for m in graph_module.modules() if isinstance(m, GraphModule)]
    assert [steps for module in nested for steps in steps_of(module)]
    for module in nested:
        for call in module.graph.find_nodes(op="call_function", target=TARGET):
            call.args = (*call.args[:4], "reference")
        module.recompile()
    exact = model.double()(x.double())
    model.float()
    ours, eager = graph_module(x), Cast()(x)
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


@pytest.mark.parametrize("options", [{"disable_forms": ("chain",)}, {"exclude": ("layers.1",)}])
def test_what_the_user_leaves_out_is_no_chain(options):
    _, graph_module = fused(Net(normed), **options)
    assert steps_of(graph_module) == []


def test_layers_of_sites_that_the_user_leaves_out_are_no_links():
    sites, graph_module = fused(Net(prenorm_blocks), disable_forms=("plain",))
    assert {site.reason for site in sites} == {"form-off"}
    assert steps_of(graph_module) == []


def test_in_training_pairs_are_planned_as_without_chains():
    model = Net(prenorm_blocks)
    graph = torch.export.export(model, (X,)).module()
    sites = fuse(graph, (X,), Options(policy="always"), target="h100").sites
    assert [site.form for site in sites] == ["plain", "plain"]


def test_where_no_kernel_runs_a_chain_pairs_are_fused_as_before():
    model = Net(prenorm_blocks)
    with torch.no_grad():
        sites = fuse(captured(model, X), (X,), Options(policy="always")).sites
    assert [site.form for site in sites] == ["plain", "plain"]
    assert all(site.rewritten for site in sites)


class Wide(nn.Module):
    """Narrow layers on both sides of one that no kernel holds."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 32, 32, 2048, 2048, 32, 32, 32)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:-1])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = torch.tanh(norm(layer(x)))
        return self.layers[-1](x)


def test_the_longest_parts_that_one_kernel_runs_are_chains():
    model = Wide()
    sites, graph_module = fused(model)
    found = [site.sizes for site in sites if site.rewritten]
    assert found == ["5×32→32→32→2048", "5×2048→32→32→32"]
    torch.testing.assert_close(graph_module(X), model(X), atol=2e-6, rtol=1e-5)


def test_no_part_of_a_long_run_is_planned_that_kernels_cannot_run(monkeypatch):
    planned = []

    def counting(setting, *others):
        planned.append(len(setting.layer_widths) - 1)
        return plan(setting, *others)

    monkeypatch.setattr(decisions, "plan", counting)
    blocks = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        for _ in range(20)
    )
    model, x = nn.Sequential(*blocks).eval().bfloat16(), torch.randn(4, 8).bfloat16()
    with torch.no_grad():
        sites = fuse(captured(model, x), (x,), target="h100").sites
    assert [len(site.chain) + 1 for site in sites if site.rewritten] == [16, 16, 8]
    assert len(planned) < 60
    assert {layers for layers in planned if layers > 16} == {40, 24}  # runs as a whole


def test_symbolic_rows_are_planned():
    model = Net(normed)
    rows = torch.export.Dim("rows")
    with torch.no_grad():
        program = torch.export.export(model, (X,), dynamic_shapes=({0: rows},)).module()
        sites = fuse(program, (X,), Options(policy="always"), target="h100").sites
    assert [site.plan for site in sites] == ["chain"]
