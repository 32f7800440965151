"""When a site is left alone: one test a reason, and what must not be mistaken for one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import only_site, record, sites_of
from fusion_backend import Options, fuse
from fusion_backend.fusion.views.obstacles import is_pointwise_operator
from fusion_backend.reasons import REASONS
from models import MLP, Around, Gated, X


def _escape_by_use(m, x):
    h = m.up(x)
    return m.down(F.gelu(h)) + h.mean()


def _write_to_input(m, x):
    h = F.gelu(m.up(x))
    x.add_(1.0)
    return m.down(h), x


def _write_to_view_of_input(m, x):
    view = x[:1]
    h = F.gelu(m.up(x))
    view.zero_()
    return m.down(h)


def _write_by_dropout(m, x):
    h = F.gelu(m.up(x))
    F.dropout1d(x, 0.5, True, True)  # its last argument is ``inplace``
    return m.down(h), x


def _write_to_weight(m, x):
    h = F.gelu(m.up(x))
    m.up.weight.mul_(2.0)
    return m.down(h)


def _write_by_embedding(m, x):
    h = F.gelu(m.up(x))
    shrunk = F.embedding(torch.arange(8), m.down.weight, max_norm=0.01)
    return m.down(h), shrunk


def _write_to_hidden(m, x):
    h = F.gelu(m.up(x))
    h.mul_(2.0)
    return m.down(h)


def _write_to_factor(m, x):
    scale = m.up.bias * 2
    h = F.gelu(m.up(x)) * scale
    scale.add_(1.0)
    return m.down(h)


def _write_to_other_layer(m, x):
    h = m.up(x + 1)
    return m.down(F.gelu(m.up(x) + h.mul_(2)))


def _write_by_out(m, x):
    h = x.new_zeros(15, 16)
    return m.down(F.gelu(torch.mm(x.view(15, 8), m.up.weight.t(), out=h))).view(3, 5, 8)


def _write_of_the_hidden_value_to_an_input(m, x):
    one = x[:1, :1].repeat(1, 1, 2)
    return m.down(F.gelu(one.mul_(m.up(x[:1, :1]))))


def _read_under_old_name(m, x):
    h = m.up(x)
    r = h.relu_()
    return m.down(r * h)


def _autocast_begins_between(m, x):
    h = F.gelu(m.up(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.down(h)


def _grad_mode_changes_between(m, x):
    h = F.gelu(m.up(x))
    with torch.no_grad():
        return m.down(h)


def _hook_on_hidden(m, x):
    h = m.up(x)
    h.register_hook(lambda grad: grad * 2)
    return m.down(F.gelu(h))


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.relu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def _depthwise_convolution(m, x):
    h = F.conv1d(m.up(x).transpose(1, 2), m.up.weight[:, None, :3], padding=1, groups=16)
    return m.down(F.gelu(h.transpose(1, 2)))


def _attention(m, x):
    value = F.gelu(m.up(x))
    return m.down(F.scaled_dot_product_attention(x, x, value))


def _external_gate(m, x):
    return m.down(torch.sigmoid(m.up(x)) * torch.cumsum(x.repeat(1, 1, 2), 0))


# Before torch 2.14 Dynamo hands a tensor's hook over as an autograd.Function.
HOOK = "hook" if torch.__version__ >= (2, 14) else "custom-autograd"

REFUSED = {
    "used pre-activation": ("hidden-escapes", _escape_by_use),
    "write to the input": ("mutated", _write_to_input),
    "write to a view of the input": ("mutated", _write_to_view_of_input),
    "write by a dropout": ("mutated", _write_by_dropout),
    "write to a weight": ("mutated", _write_to_weight),
    "write by an embedding": ("mutated", _write_by_embedding),
    "write to the hidden value": ("mutated", _write_to_hidden),
    "read of an overwritten value": ("mutated", _read_under_old_name),
    "alpha dropout": (
        "active-dropout",
        lambda m, x: m.down(F.alpha_dropout(F.gelu(m.up(x)), 0.1, True)),
    ),
    "dropout of whole channels": (
        "active-dropout",
        lambda m, x: m.down(F.dropout1d(F.gelu(m.up(x)), 0.1, True)),
    ),
    "norm before the activation": (
        "norm-between",
        lambda m, x: m.down(F.gelu(F.layer_norm(m.up(x), (16,)))),
    ),
    "softmax": ("non-pointwise", lambda m, x: m.down(F.softmax(F.relu(m.up(x)), -1))),
    "transpose": (
        "non-pointwise",
        lambda m, x: m.down(F.gelu(m.up(x)).transpose(0, 1)),
    ),
    "concatenation": (
        "non-pointwise",
        lambda m, x: m.down(torch.cat([x, F.gelu(m.up(x)[..., :8])], -1)),
    ),
    "depthwise convolution": ("non-pointwise", _depthwise_convolution),
    "attention": ("non-pointwise", _attention),
    "pooled rows": ("non-pointwise", lambda m, x: m.down(F.gelu(m.up(x)).mean(1))),
    "largest row": ("non-pointwise", lambda m, x: m.down(F.gelu(m.up(x)).max(1)[0])),
    "one row": ("non-pointwise", lambda m, x: m.down(torch.tanh(m.up(x)[:, 0]))),
    "experts": (
        "experts",
        lambda m, x: torch.bmm(
            F.gelu(torch.bmm(x, m.up.weight.t().repeat(3, 1, 1))), m.up.weight.repeat(3, 1, 1)
        ),
    ),
    "packed experts": (
        "experts",
        lambda m, x: torch.bmm(
            F.glu(torch.bmm(x, m.up.weight.t().repeat(3, 1, 1))), m.up.weight[:8].repeat(3, 1, 1)
        ),
    ),
    "learnt slope a row": (
        "parameter-in-activation",
        lambda m, x: m.down(F.prelu(m.up(x), m.down.bias[:5])),
    ),
    "learnt factor a head": (
        "parameter-in-activation",
        lambda m, x: m.down((F.relu(m.up(x)).view(3, 5, 4, 4) * m.up.bias[:4]).view(3, 5, 16)),
    ),
    "integer factor": (
        "parameter-in-activation",
        lambda m, x: m.down(F.relu(m.up(x)) * m.up.bias.int()),
    ),
    "learnt factor a row": ("other-operand", lambda m, x: m.down(F.relu(m.up(x)) * x[0, :, :1])),
    "scale and shift of each sample": (
        "shapes-differ",
        lambda m, x: m.down(F.gelu(m.up(x)) * (1 + m.up(x[:, :1].square()))),
    ),
    "write by out=": ("out-argument", _write_by_out),
    "write to a factor": ("mutated", _write_to_factor),
    "write to the other layer's result": ("mutated", _write_to_other_layer),
    "write to a factor of one row": ("mutated", _write_of_the_hidden_value_to_an_input),
    "external gate": ("other-operand", _external_gate),
    "residual": ("other-operand", lambda m, x: m.down(F.gelu(m.up(x) + x.repeat(1, 1, 2)))),
    "detached": ("stops-gradient", lambda m, x: m.down(F.gelu(m.up(x)).detach())),
    "hook": (HOOK, _hook_on_hidden),
    "custom gradient": ("custom-autograd", lambda m, x: m.down(_Twice.apply(m.up(x)))),
    "narrowing cast": (
        "narrowing-cast",
        lambda m, x: m.down(F.gelu(m.up(x).bfloat16()).float()),
    ),
    "wider than supported": ("dtype", lambda m, x: m.down(F.gelu(m.up(x).double()).float())),
    "mixed rows": (
        "row-mixing-view",
        lambda m, x: F.linear(F.gelu(m.up(x)).view(3, 10, 8), m.up.weight),
    ),
    "broadcast": (
        "shapes-differ",
        lambda m, x: m.down(F.silu(m.up(x)) * m.up(x[:, :1])),
    ),
    "broadcast bias": (
        "shapes-differ",
        lambda m, x: m.down(F.gelu(F.linear(x, m.up.weight, m.up.bias[:1]))),
    ),
    "autocast between": ("mode-change", _autocast_begins_between),
    "grad mode between": ("mode-change", _grad_mode_changes_between),
    "three layers": (
        "unknown-form",
        lambda m, x: m.down(
            F.silu(m.up(x)) * F.linear(x, m.up.weight) + F.linear(x, m.up.weight * 2)
        ),
    ),
    "integer rounding": (
        "unknown-function",
        lambda m, x: m.down(F.gelu(torch.div(m.up(x), 2, rounding_mode="floor"))),
    ),
    "function without an expression": (
        "unknown-function",
        lambda m, x: m.down(torch.floor(m.up(x))),
    ),
}


WITHOUT_GRADIENTS = ("write to a weight", "write by an embedding", "write by out=")


@pytest.mark.parametrize("name", REFUSED)
def test_site_is_left_alone_with_its_reason(name):
    reason, body = REFUSED[name]
    torch.manual_seed(0)
    model, eager = Around(body), Around(body)
    eager.load_state_dict(model.state_dict())
    ours, theirs = X.clone(), X.clone()
    with torch.set_grad_enabled(name not in WITHOUT_GRADIENTS):
        torch.manual_seed(1)
        recorder, result = record(model, ours)
        torch.manual_seed(1)
        expected = eager(theirs)
    assert {(site.rewritten, site.reason) for site in recorder.sites} == {(False, reason)}
    assert all(site.detail for site in recorder.sites)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(ours, theirs)


def test_a_packed_value_that_is_also_read_whole_is_left_alone():
    def body(m, x):
        packed = m.up(x).view(-1, 16)
        return m.down(F.silu(packed[..., :16]) * packed[..., 0:16] + packed)

    model = Around(body)
    recorder, result = record(model, X)
    assert {(site.rewritten, site.reason) for site in recorder.sites} == {(False, "unknown-form")}
    torch.testing.assert_close(result, model(X))


def test_float64_is_left_alone():
    site = only_site(MLP(F.gelu).double(), X.double())
    assert (site.fused, site.reason) == (False, "dtype")
    assert "float64" in site.detail


def _write_afterwards(x, up, down):
    y = F.linear(F.gelu(F.linear(x, up)), down)
    x.mul_(0.5)  # eager does not keep x where neither it nor up requires a gradient
    return y


def test_a_write_to_what_only_the_fused_backward_pass_reads_leaves_the_site_alone():
    x, up, down = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16, requires_grad=True)
    recorder, result = record(_write_afterwards, x.clone(), up, down)
    assert [(site.rewritten, site.reason) for site in recorder.sites] == [(False, "mutated")]
    mine, expected = (
        torch.autograd.grad(y.sum(), down) for y in (result, _write_afterwards(x, up, down))
    )
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_write_that_autograd_is_not_told_of_changes_no_hidden_value(written):
    def function(x, *weights):
        y = x
        for weight in weights:
            y = F.linear(F.gelu(y), weight)
        (x, *weights)[written].data.mul_(3.0)
        return y

    given = [torch.randn(5, 8), torch.randn(16, 8), torch.randn(16, 16), torch.randn(8, 16)]
    gradients = []
    for run in (function, lambda *values: record(function, *values)[1]):
        values = [value.clone().requires_grad_() for value in given]
        y = run(*(value * 1 for value in values))
        gradients.append(torch.autograd.grad(y.sum(), values))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_an_input_that_eager_copies_may_be_written_to_afterwards():
    x, up, down = torch.randn(8, 5, 3).mT, torch.randn(16, 5), torch.randn(5, 16)
    up.requires_grad_()
    recorder, result = record(_write_afterwards, x.mT.clone().mT, up, down)
    expected = _write_afterwards(x, up, down)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), up), torch.autograd.grad(expected.sum(), up)
    )
    assert [(site.rewritten, site.reason) for site in recorder.sites] == [(False, "mutated")]


def test_a_write_after_a_site_without_gradients_is_fused():
    with torch.no_grad():
        site = only_site(_write_afterwards, X[0].clone(), torch.randn(16, 8), torch.randn(8, 16))
    assert site.rewritten


def test_rotary_angles_are_no_layer_of_experts():
    positions, frequencies = torch.arange(5).repeat(3, 1), torch.rand(3, 4, 1)

    def body(m, x):
        angles = (frequencies @ positions[:, None, :].float()).transpose(1, 2).repeat(1, 1, 4)
        queries = m.up(x) * angles.cos() + m.up(x).roll(8, -1) * angles.sin()
        return m.down(F.scaled_dot_product_attention(queries, queries, queries))

    assert "experts" not in {site.reason for site in sites_of(Around(body), X)}


@pytest.mark.parametrize("packed", [False, True])
def test_experts_of_grouped_products_are_left_alone(packed):
    last_rows = torch.tensor([2, 5, 8], dtype=torch.int32)
    up, down = torch.randn(3, 8, 32).bfloat16(), torch.randn(3, 16, 8).bfloat16()

    def experts(x):
        gate, value = torch._grouped_mm(x, up, offs=last_rows).chunk(2, -1)
        hidden = F.silu(gate) * value if packed else F.silu(gate)
        return torch._grouped_mm(hidden, down, offs=last_rows)

    site = only_site(experts, torch.randn(8, 8).bfloat16())
    assert (site.fused, site.reason) == (False, "experts")


def test_without_gradients_a_custom_function_is_what_its_forward_computes():
    model = Around(lambda m, x: m.down(_Twice.apply(m.up(x))))
    with torch.no_grad():
        recorder, result = record(model, X)
        assert [site.activation for site in recorder.sites if site.rewritten] == ["relu(x)"]
        torch.testing.assert_close(result, model(X))


def test_an_adaptive_scale_and_shift_is_no_site():
    norm, modulation, last = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 8)

    def modulated(x):
        scale, shift = modulation(F.silu(x[:, :1])).chunk(2, -1)
        return last(norm(x) * (1 + scale) + shift)

    assert sites_of(modulated, X) == []


def test_embeddings_are_no_parameters_of_an_activation():
    positions, table = torch.tensor([0]), torch.randn(2, 16)
    model = Around(lambda m, x: m.down(F.gelu(m.up(x) + F.embedding(positions, table))))
    assert only_site(model, X).reason == "other-operand"


def test_sparse_weights_are_left_alone():
    graph = torch.fx.symbolic_trace(lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v))
    weights = torch.randn(16, 8).to_sparse(), torch.randn(8, 16)
    result = fuse(graph, [X[0], *weights], Options(policy="always"))
    assert [(site.rewritten, site.reason) for site in result.sites] == [(False, "layout")]


def test_tensor_subclasses_are_left_alone():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(4, 8), torch.randn(4, 8))
    site = only_site(MLP(F.gelu), x)
    assert (site.fused, site.reason) == (False, "tensor-subclass")


def test_other_devices_are_left_alone():
    with torch.device("meta"):
        model = MLP(F.gelu)
    site = only_site(model, torch.empty(4, 8, device="meta"))
    assert (site.fused, site.reason) == (False, "device")


def test_zero_widths_are_left_alone():
    site = only_site(MLP(F.gelu, hidden=0), X)
    assert (site.fused, site.reason) == (False, "empty")


def test_functorch_transforms_are_left_alone():
    model = MLP(F.gelu)
    site = only_site(lambda x: torch.func.vmap(model)(x), X)
    assert (site.fused, site.reason) == (False, "functorch-transform")


def test_leading_sizes_known_only_at_run_time_are_left_alone():
    model = Around(lambda m, x: m.down(F.gelu(m.up(x)).unflatten(0, (-1, 3))))
    site = only_site(model, torch.randn(12, 8), dynamic=True)
    assert (site.fused, site.reason) == (False, "leading-shape")


def test_policy_never_fuses_nothing():
    graph = torch.fx.symbolic_trace(MLP(F.gelu))
    result = fuse(graph, [X], Options(policy="never"))
    assert [(site.rewritten, site.reason) for site in result.sites] == [(False, "policy")]


def test_writes_before_and_after_the_site_do_not_matter():
    def body(m, x):
        x.add_(1.0)
        y = m.down(F.gelu(m.up(x)))
        x.add_(1.0)
        return y

    model = Around(body)
    ours, theirs = X.clone(), X.clone()
    recorder, result = record(model, ours)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(theirs))
    torch.testing.assert_close(ours, theirs)


def test_a_size_taken_of_the_hidden_value_does_not_matter():
    model = Around(lambda m, x: m.down(F.gelu((h := m.up(x)).view(h.size(0), -1, h.size(-1)))))
    assert only_site(model, X, dynamic=True).rewritten


def test_an_mlp_inside_autocast_is_fused():
    def body(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.down(F.gelu(m.up(x)))

    model = Around(body)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.rewritten, site.dtype) == (True, "bfloat16")
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model(X), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_mlps_are_fused_in_their_nested_graph(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    model = Around(
        lambda m, x: checkpoint(lambda y: m.down(F.gelu(m.up(y))), x, use_reentrant=use_reentrant)
    )
    assert only_site(model, X).rewritten


def test_gradients_of_one_layer_only_are_exact():
    model = Gated(lambda g, u: F.silu(g) * u)
    model.gate.weight.requires_grad_(False)
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    result.sum().backward()
    gradient = model.up.weight.grad.clone()
    model.zero_grad()
    model(X).sum().backward()
    torch.testing.assert_close(gradient, model.up.weight.grad)
    assert model.gate.weight.grad is None


# Reasons that no single model of this file shows: the planner's, and a guard that legal graphs
# cannot reach because every earlier check catches them.
_SHOWN_ELSEWHERE = {"hook", "no-kernel", "not-faster", "symbolic-constant", "not-convex"}
_SHOWN_ELSEWHERE |= {"opaque-operator", "internal-error", "unverified", "excluded", "form-off"}
_SHOWN_ELSEWHERE |= {"sharding"}


def test_every_reason_is_triggered_by_some_test():
    shown = {reason for reason, _ in REFUSED.values()} | {"layout", "tensor-subclass", "device"}
    shown |= {
        "channels-first",
        "empty",
        "functorch-transform",
        "leading-shape",
        "policy",
        "overlaps",
    }
    assert {reason.code for reason in REASONS} == shown | _SHOWN_ELSEWHERE


@pytest.mark.parametrize("name", dir(object))
def test_a_method_that_every_object_has_is_no_pointwise_operator(name):
    assert not is_pointwise_operator(name)
