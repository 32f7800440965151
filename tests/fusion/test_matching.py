"""Which subgraphs are found, of which form, with which activation."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import only_site, record, sites_of
from fusion_backend.fusion.views.linear import linear_view
from models import MLP, Conv1D, Gated, Packed, X
from repetition import walked


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


PLAIN = {
    "gelu": (lambda x: F.gelu(x), "gelu(x)"),
    "gelu module": (nn.GELU(), "gelu(x)"),
    "gelu tanh": (nn.GELU(approximate="tanh"), "gelu_tanh(x)"),
    "gelu tanh by hand": (
        lambda x: (
            0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ),
        "gelu_tanh(x)",
    ),
    "gelu erf by hand": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu(x)"),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "x * sigmoid(1.702 * x)"),
    "relu": (F.relu, "relu(x)"),
    "relu in place": (nn.ReLU(inplace=True), "relu(x)"),
    "relu method in place": (lambda x: x.relu_(), "relu(x)"),
    "squared relu": (lambda x: torch.square(F.relu(x)), "square(relu(x))"),
    "squared relu by pow": (lambda x: F.relu(x).pow(2), "square(relu(x))"),
    "silu": (F.silu, "silu(x)"),
    "silu by hand": (lambda x: x * x.sigmoid(), "silu(x)"),
    "tanh": (torch.tanh, "tanh(x)"),
    "elu": (nn.ELU(0.5), "elu(x, 0.5, 1.0, 1.0)"),
    "leaky relu": (nn.LeakyReLU(0.2), "leaky_relu(x, 0.2)"),
    "hardswish": (F.hardswish, "hardswish(x)"),
    "clamp": (lambda x: x.clamp(min=-1.0, max=2.0), "clamp(x, -1.0, 2.0)"),
    "shifted softplus": (
        lambda x: F.softplus(x) - math.log(2),
        "softplus(x, 1.0, 20.0) - 0.6931471805599453",
    ),
    "scaled silu": (lambda x: F.silu(x) * 1.679, "1.679 * silu(x)"),
    "gelu tanh, factored": (
        lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        "gelu_tanh(x)",
    ),
    "gelu tanh by an integer power": (
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_tanh(x)",
    ),
    "gelu erf, constant last": (
        lambda x: 0.5 * (1.0 + torch.erf(x * 0.7071067811865475)) * x,
        "gelu(x)",
    ),
    "squared relu by operator": (lambda x: F.relu(x) ** 2, "square(relu(x))"),
    "squared relu by product": (lambda x: (r := F.relu(x)) * r, "square(relu(x))"),
    "star relu": (lambda x: 0.8944 * F.relu(x) ** 2 - 0.4472, "0.8944 * square(relu(x)) - 0.4472"),
    "sine": (lambda x: torch.sin(30 * x), "sin(30.0 * x)"),
    "elu in place": (lambda x: F.elu(x, inplace=True), "elu(x, 1.0, 1.0, 1.0)"),
    "silu in place": (lambda x: F.silu(x, inplace=True), "silu(x)"),
    "tanh in place": (torch.tanh_, "tanh(x)"),
    "scaled in place": (lambda x: F.relu(x).mul_(2.0), "2.0 * relu(x)"),
    "soft cap": (lambda x: 32 * torch.tanh(x / 32), "32.0 * tanh(0.03125 * x)"),
    "xielu": (
        lambda x: torch.where(
            x > 0,
            0.8 * x * x + 0.5 * x,
            (torch.expm1(torch.min(x, torch.tensor(-1e-6))) - x) * 0.3 + 0.5 * x,
        ),
        "where(x > 0.0, 0.5 * x + 0.8 * x * x, 0.5 * x + 0.3 * (expm1(minimum(x, -1e-06)) - x))",
    ),
    "mask of truth values": (lambda x: x * (x > 0), "x * (x > 0.0)"),
    "masked fill": (lambda x: x.masked_fill(x < 0, 0.0), "where(x < 0.0, 0.0, x)"),
    "zeros like": (
        lambda x: torch.where(x > torch.zeros_like(x), x, torch.zeros_like(x)),
        "where(x > 0.0, x, 0.0)",
    ),
    "constant tensor": (lambda x: F.gelu(x) * torch.tensor(2.0), "2.0 * gelu(x)"),
    "full": (lambda x: F.gelu(x) + torch.full((), 2.0), "gelu(x) + 2.0"),
    "soft shrink": (
        nn.Softshrink(0.5),
        "where(logical_and(x <= 0.5, x >= -0.5), 0.0, where(x > 0.5, x - 0.5, x + 0.5))",
    ),
    "hard shrink": (
        nn.Hardshrink(0.5),
        "where(logical_and(x <= 0.5, x >= -0.5), 0.0, x)",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_activation_becomes_an_expression(name):
    function, expression = PLAIN[name]
    model = MLP(function)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.rewritten, site.detail) == ("plain", True, site.detail)
    assert site.activation == expression
    torch.testing.assert_close(result, model(X))


GATED = {
    "swiglu": (lambda g, u: F.silu(g) * u, "silu(g) * u"),
    "swiglu, up first": (lambda g, u: u * F.silu(g), "silu(g) * u"),
    "swiglu, second layer is the gate": (lambda g, u: g * F.silu(u), "silu(g) * u"),
    "geglu": (lambda g, u: F.gelu(g) * u, "gelu(g) * u"),
    "geglu tanh": (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu_tanh(g) * u"),
    "reglu": (lambda g, u: F.relu(g) * u, "relu(g) * u"),
    "glu": (lambda g, u: torch.sigmoid(g) * u, "sigmoid(g) * u"),
    "bilinear": (lambda g, u: g * u, "g * u"),
    "clamped swiglu": (
        lambda g, u: F.silu(g.clamp(max=7)) * u.clamp(-7, 7),
        "silu(clamp(g, -inf, 7.0)) * clamp(u, -7.0, 7.0)",
    ),
    "gpt-oss": (
        lambda g, u: (
            (u.clamp(-7, 7) + 1) * (g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)))
        ),
        "clamp(g, -inf, 7.0) * sigmoid(1.702 * clamp(g, -inf, 7.0)) * (clamp(u, -7.0, 7.0) + 1.0)",
    ),
    "tanh gelu by hand": (lambda g, u: PLAIN["gelu tanh by hand"][0](g) * u, "gelu_tanh(g) * u"),
    "two streams": (lambda g, u: F.gelu(g + u), "gelu(g + u)"),
    "two soft caps": (
        lambda g, u: torch.tanh(g / 4) * 4 * torch.sigmoid(g) * u,
        "4.0 * tanh(0.25 * g) * sigmoid(g) * u",
    ),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_becomes_an_expression(name):
    function, expression = GATED[name]
    model = Gated(function)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("gated", expression, True)
    torch.testing.assert_close(result, model(X))


SPLITS = {
    "chunk": lambda h: h.chunk(2, dim=-1),
    "chunk by positive dim": lambda h: h.chunk(2, dim=2),
    "split": lambda h: torch.split(h, 16, dim=-1),
    "split with sizes": lambda h: h.split([16, 16], dim=-1),
    "slices": lambda h: (h[..., :16], h[..., 16:]),
    "interleaved slices": lambda h: (h[..., ::2], h[..., 1::2]),
    "full slices": lambda h: (h[:, :, :16], h[:, :, 16:32]),
    "narrow": lambda h: (h.narrow(-1, 0, 16), h.narrow(-1, 16, 16)),
    "second half gates": lambda h: h.chunk(2, dim=-1)[::-1],
    "tensor_split": lambda h: torch.tensor_split(h, 2, dim=-1),
    "slices from the end": lambda h: (h[..., :-16], h[..., -16:]),
    "unbind after view": lambda h: h.view(3, 5, 2, 16).unbind(-2),
    "unbind after unflatten": lambda h: h.unflatten(-1, (2, -1)).unbind(2),
    "interleaved unbind": lambda h: h.view(3, 5, 16, 2).unbind(-1),
    "index after view": lambda h: ((p := h.view(3, 5, 2, 16))[..., 0, :], p[..., 1, :]),
    "interleaved index": lambda h: ((p := h.view(3, 5, 16, 2))[..., 0], p[..., 1]),
    "select": lambda h: ((p := h.view(3, 5, 2, 16)).select(2, 0), p.select(2, 1)),
    "unbind after permute": lambda h: h.view(3, 5, 2, 16).permute(2, 0, 1, 3).unbind(0),
    "unbind after movedim": lambda h: h.unflatten(-1, (2, 16)).movedim(-2, 0).unbind(),
    "index after movedim": lambda h: ((p := h.view(3, 5, 16, 2).movedim(3, 1))[:, 0], p[:, 1]),
    "select after transpose": lambda h: (
        (p := h.view(3, 5, 16, 2).transpose(-1, -2)).select(-2, 0),
        p.select(2, 1),
    ),
    "unbind after two moves": lambda h: (
        h.view(3, 5, 2, 16).transpose(0, 2).transpose(1, 2).unbind(0)
    ),
    "reshape of rows, then unbind": lambda h: h.reshape(15, 2, 16).unbind(1),
    "contiguous parts": lambda h: [part.contiguous() for part in h.chunk(2, dim=-1)],
    "same slice twice": lambda h: (h[..., :16] * 0.5 + h[..., :16] * 0.5, h[..., 16:]),
}


@pytest.mark.parametrize(("name", "bias"), walked(SPLITS, [False, True]))
def test_packed_projections_are_found_in_every_spelling(name, bias):
    model = Packed(SPLITS[name], bias=bias)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("packed", "silu(g) * u", True)
    assert site.shape == (15, 8, 16, 8)
    torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize(
    "name",
    ["chunk", "split", "split with sizes", "tensor_split", "slices", "unbind after unflatten"],
)
def test_packed_projections_of_one_row_are_found(name):
    """Whose parts have the shape of a parameter of the activation."""
    model, x = Packed(SPLITS[name]), X[:1, :1]
    recorder, result = record(model, x)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("packed", "silu(g) * u", True)
    assert site.operands == ()
    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize(
    "split",
    [
        lambda h: h.view(5, 5, 2, 16).permute(2, 1, 0, 3).unbind(0),
        lambda h: h.view(5, 5, 2, 16).transpose(0, 2)[0:2].unbind(0),
        lambda h: [part.transpose(0, 1) for part in h.chunk(2, -1)],
    ],
)
def test_parts_with_their_rows_in_another_order_are_no_packed_projections(split):
    model, x = Packed(split), torch.randn(5, 5, 8)
    recorder, result = record(model, x)
    assert {(site.rewritten, site.reason) for site in recorder.sites} == {(False, "non-pointwise")}
    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize(
    "part",
    [
        lambda h: h[..., 4:],
        lambda h: h[..., 1::2],
        lambda h: h.chunk(2, -1)[1],
        lambda h: h.view(3, 5, 16, 2)[..., 1],
    ],
)
def test_some_features_of_a_layer_are_a_form_of_their_own(part):
    up = nn.Linear(8, 32)
    down = nn.Linear(part(torch.empty(3, 5, 32)).shape[-1], 8)
    recorder, result = record(lambda x: down(F.gelu(part(up(x)))), X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("sliced", "gelu(x)", True)
    torch.testing.assert_close(result, down(F.gelu(part(up(X)))))


def test_features_that_are_also_read_elsewhere_leave_the_hidden_value():
    up, down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(x):
        first, second = up(x).chunk(2, -1)
        return down(F.gelu(first)), second

    site = only_site(forward, X)
    assert (site.form, site.reason) == ("sliced", "hidden-escapes")


@pytest.mark.parametrize("glu", [nn.GLU(), lambda h: F.glu(h, dim=2)])
def test_glu_is_a_packed_projection(glu):
    model = Packed(lambda h: (h,), glu)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("packed", "sigmoid(g) * u", True)
    torch.testing.assert_close(result, model(X))


def test_glu_over_rows_is_no_packed_projection():
    x = torch.randn(4, 8)
    assert not [site for site in sites_of(MLP(lambda h: F.glu(h, dim=0)), x) if site.rewritten]


def test_conv1d_layers_are_linear_layers():
    model = nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("plain", "gelu(x)", True)
    torch.testing.assert_close(result, model(X))


# Each computes F.linear(x, w, b).
LINEAR = {
    "matmul": lambda x, w, b: torch.matmul(x, w.t()) + b,
    "operator": lambda x, w, b: x @ w.T + b,
    "transpose": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) + b,
    "bias first": lambda x, w, b: b + F.linear(x, w),
    "bias in place": lambda x, w, b: F.linear(x, w).add_(b),
    "bias by +=": lambda x, w, b: operator.iadd(x @ w.t(), b),
    "einsum": lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b,
    "einsum with names": lambda x, w, b: torch.einsum("bsi,io->bso", x, w.t()) + b,
    "einsum of a list": lambda x, w, b: torch.einsum("...i,oi->...o", [x, w]) + b,
    "scaled weight": lambda x, w, b: F.linear(x, w * 0.5 * 2.0, b),
    "product with a scaled weight": lambda x, w, b: x @ (w * 0.5 * 2.0).t() + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()).view(3, 5, -1),
}


@pytest.mark.parametrize("name", LINEAR)
def test_every_spelling_of_a_linear_layer_is_one(name):
    model = MLP(F.gelu)

    def spelled(x):
        h = F.gelu(LINEAR[name](x, model.up.weight, model.up.bias))
        return LINEAR[name](h, model.down.weight, model.down.bias)

    recorder, result = record(spelled, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("plain", "gelu(x)", True)
    (call,) = recorder.after[0].graph.find_nodes(
        op="call_function", target=torch.ops.fusedmlp.mlp.default
    )
    assert None not in (call.args[4], call.args[6])  # both biases are the operator's
    torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize("equation", ["bsi,oi->sbo", "bsi,oi->bs", "bsi,oi->boi", "bss,os->bso"])
def test_other_equations_are_no_linear_layer(equation):
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.randn(3, 8, 8), torch.randn(8, 8)
    node = graph.call_function(torch.einsum, (equation, x, w))
    try:
        node.meta["val"] = torch.einsum(equation, x.meta["val"], w.meta["val"])
    except RuntimeError:
        node.meta["val"] = torch.randn(3, 8, 8)
    assert linear_view(node) is None


def test_a_bias_of_a_wider_dtype_is_no_part_of_the_layer():
    model = MLP(F.gelu).bfloat16()
    wide = torch.randn(8)
    recorder, result = record(
        lambda x: F.linear(model.f(model.up(x)), model.down.weight) + wide, X.bfloat16()
    )
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.dtype == torch.float32


def test_a_product_that_is_also_read_without_its_bias_ends_the_site():
    model = MLP(F.gelu)

    def forward(x):
        y = F.linear(F.gelu(model.up(x)), model.down.weight)
        return y, y + model.down.bias

    recorder, result = record(forward, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, forward(X))


def test_weights_behind_a_parametrization_are_weights():
    weight_norm = nn.utils.parametrizations.weight_norm
    model = MLP(F.gelu)
    model.up, model.down = weight_norm(model.up), weight_norm(model.down)
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(X))


def test_a_tied_weight_may_be_used_both_ways():
    model = MLP(F.gelu)
    recorder, result = record(lambda x: F.linear(F.gelu(model.up(x)), model.up.weight.T), X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, F.linear(F.gelu(model.up(X)), model.up.weight.T))


def test_products_of_two_activations_are_no_linear_layer():
    model = MLP(F.gelu)
    assert sites_of(lambda x: F.relu(model.up(x)) @ model.up(x).t(), X[0]) == []


INACTIVE = {
    "in evaluation": nn.Dropout(0.5).eval(),
    "of nothing": nn.Dropout(0.0),
    "of nothing, in place": nn.Dropout(0.0, inplace=True),
    "of no channels": nn.Dropout1d(0.0),
    "of nothing, keeping the variance": nn.AlphaDropout(0.0),
    "of no channels, keeping the variance": nn.FeatureAlphaDropout(0.0),
    "of nothing, with its mask": lambda h: torch.native_dropout(h, 0.0, True)[0],
}


# Dynamic shapes make the probability an input of the graph.
@pytest.mark.parametrize(
    ("name", "dynamic", "fallback_random"), walked(INACTIVE, [True, None], [False, True])
)
def test_inactive_dropout_is_nothing(name, dynamic, fallback_random):
    dropout = INACTIVE[name]
    model = MLP(lambda h: dropout(F.gelu(h)))
    with torch._inductor.config.patch(fallback_random=fallback_random):
        recorder, result = record(model, X, dynamic=dynamic)
    (site,) = recorder.sites
    assert (site.activation, site.rewritten) == ("gelu(x)", True)
    torch.testing.assert_close(result, model(X))


def test_reshapes_of_leading_dimensions_are_nothing():
    model = MLP(lambda h: F.gelu(h.reshape(-1, 16)).view(3, 5, 16))
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(X))


RESHAPES = {
    "heads": lambda h: F.gelu(h.view(3, 5, 4, 4)).view(3, 5, 16),
    "flatten of heads": lambda h: F.gelu(h.unflatten(-1, (4, 4))).flatten(-2),
    "rows in other groups": lambda h: F.gelu(h).view(3, 16, 5).reshape(3, 5, 16),
    "unsqueeze": lambda h: F.gelu(h.unsqueeze(1)).squeeze(1),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshapes_that_end_where_they_began_are_nothing(name):
    model = MLP(RESHAPES[name])
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(X))


TRANSPOSES = {
    "transpose": lambda h: F.gelu(h.transpose(1, 2)).transpose(1, 2),
    "permute": lambda h: F.gelu(h.permute(1, 2, 0)).permute(2, 0, 1),
    "three in a circle": lambda h: F.gelu(h.movedim(0, 2).movedim(0, 2)).movedim(0, 2),
    "copy in between": lambda h: F.gelu(h.mT.contiguous()).swapaxes(-1, -2),
    "rows": lambda h: F.gelu(h.transpose(0, 1)).transpose(0, 1),
    "matrix": lambda h: F.gelu(h.flatten(0, 1).T).t().view(3, 5, 16),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposes_that_cancel_are_nothing(name):
    model = MLP(TRANSPOSES[name])
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.activation, site.rewritten) == ("gelu(x)", True)
    assert result.stride() == model(X).stride()
    torch.testing.assert_close(result, model(X))


def test_both_projections_may_be_transposed_and_back():
    model = Gated(lambda g, u: (F.silu(g.transpose(0, 1)) * u.transpose(0, 1)).transpose(0, 1))
    recorder, result = record(model, X)
    assert [(site.activation, site.rewritten) for site in recorder.sites] == [("silu(g) * u", True)]
    torch.testing.assert_close(result, model(X))


SQUARE = torch.randn(4, 4, 8)
LEFT_MOVED = {
    "one way only": lambda g, u: (F.silu(g) * u).transpose(0, 1),
    "one of two": lambda g, u: F.silu(g.transpose(0, 1)) * u,
    "one of two, both back": lambda g, u: (F.silu(g.transpose(0, 1)) * u).transpose(0, 1),
    "another pair": lambda g, u: (
        (F.silu(g.view(4, 4, 4, 4).transpose(0, 2)) * 1.0).transpose(1, 2).reshape(4, 4, 16) * u
    ),
    "reshape in between": lambda g, u: (
        (F.silu(g.transpose(0, 1)) * u.transpose(0, 1))
        .reshape(16, 16)
        .view(4, 4, 16)
        .transpose(0, 1)
    ),
}


@pytest.mark.parametrize("name", LEFT_MOVED)
def test_transposes_that_do_not_cancel_stand_between(name):
    model = Gated(LEFT_MOVED[name])
    recorder, result = record(model, SQUARE)
    assert {(site.rewritten, site.reason) for site in recorder.sites} == {(False, "non-pointwise")}
    torch.testing.assert_close(result, model(SQUARE))


def test_a_result_with_joined_leading_dimensions_keeps_its_shape():
    model = MLP(lambda h: F.gelu(h).flatten(0, 1))
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.shape == (15, 8)
    torch.testing.assert_close(result, model(X))


def test_casts_to_a_wider_dtype_and_back_are_nothing():
    model = MLP(lambda h: F.gelu(h.float()).to(h.dtype)).bfloat16()
    site = only_site(model, X.bfloat16())
    assert (site.activation, site.rewritten, site.dtype) == ("gelu(x)", True, "bfloat16")


def test_an_activation_nobody_foresaw_is_written_out():
    model = MLP(lambda h: torch.where(h > 0, h * torch.cos(h), 0.1 * torch.expm1(h)))
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert site.rewritten
    torch.testing.assert_close(result, model(X))


def test_linear_layers_with_nothing_between_are_no_site():
    assert sites_of(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), X) == []


def test_a_residual_and_a_norm_alone_are_no_site():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.norm(x + self.first(x)))

    assert sites_of(Block(), X) == []


@pytest.mark.usefixtures("no_cpp_compiler")
def test_of_three_layers_too_wide_for_one_kernel_the_pair_with_the_wider_hidden_value_is_fused():
    model = nn.Sequential(
        *(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 320), nn.ReLU(), nn.Linear(320, 8))
    )
    sites = sites_of(model, X)
    assert [(site.shape[2], site.reason) for site in sites] == [
        (300, "overlaps"),
        (320, "no-kernel"),
    ]


@pytest.mark.usefixtures("no_cpp_compiler")
def test_of_layers_too_wide_for_one_kernel_every_second_pair_is_fused():
    layers = [nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)]
    sites = sites_of(nn.Sequential(*layers, nn.ReLU(), nn.Linear(300, 8)), X)
    assert [(site.rewritten, site.reason) for site in sites] == [
        (True, "no-kernel"),
        (False, "overlaps"),
        (True, "no-kernel"),
    ]


def test_equal_activations_in_different_words_are_equal_texts():
    spellings = (F.silu, lambda x: x * torch.sigmoid(x), lambda x: torch.sigmoid(x).mul(x))
    assert {only_site(MLP(f), X).activation for f in spellings} == {"silu(x)"}


def test_module_path_and_shape_are_those_of_the_model():
    model = nn.Sequential()
    model.add_module("block", nn.ModuleDict({"mlp": MLP(F.gelu)}))
    model.forward = lambda x: model.block["mlp"](x)
    site = only_site(model, X)
    assert site.module == "block.mlp"
    assert site.shape == (15, 8, 16, 8)
    assert (site.dtype, site.device) == ("float32", "cpu")


@pytest.mark.parametrize("dynamic", [None, True])
def test_hand_written_activations_match_with_dynamic_shapes(dynamic):
    model = MLP(PLAIN["gelu tanh by hand"][0])
    recorder, result = record(model, X, dynamic=dynamic)
    (site,) = recorder.sites
    assert (site.activation, site.rewritten) == ("gelu_tanh(x)", True)
    assert isinstance(site.shape.rows, str if dynamic else int)
    torch.testing.assert_close(result, model(X))
