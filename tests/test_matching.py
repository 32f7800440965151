"""Which subgraphs are found, of which form, with which activation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import fused_calls, only_site, record, sites_of
from fusion_backend.patterns import FORMS


class MLP(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, f, hidden=16, width=8, bias=True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.f = f

    def forward(self, x):
        return self.down(self.f(self.up(x)))


class Gated(nn.Module):
    def __init__(self, f, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=bias), nn.Linear(8, 16, bias=bias)
        self.down = nn.Linear(16, 8, bias=bias)
        self.f = f

    def forward(self, x):
        return self.down(self.f(self.gate(x), self.up(x)))


class Packed(nn.Module):
    def __init__(self, split, f=lambda g, u: F.silu(g) * u, bias=False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 32, bias=bias), nn.Linear(16, 8, bias=bias)
        self.split, self.f = split, f

    def forward(self, x):
        return self.down(self.f(*self.split(self.gate_up(x))))


X = torch.randn(3, 5, 8)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_finds_its_own_example(form):
    model, args = form.example()
    recorder, result = record(model, *args)
    (site,) = recorder.sites
    assert (site.form, site.fused) == (form.name, True)
    assert [fused_calls(graph) for graph in recorder.before] == [0]
    assert [fused_calls(graph) for graph in recorder.after] == [1]
    torch.testing.assert_close(result, model(*args))


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
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_activation_becomes_an_expression(name):
    function, expression = PLAIN[name]
    model = MLP(function)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.fused, site.detail) == ("plain", True, site.detail)
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
}


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_becomes_an_expression(name):
    function, expression = GATED[name]
    model = Gated(function)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.fused) == ("gated", expression, True)
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
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SPLITS)
def test_packed_projections_are_found_in_every_spelling(name, bias):
    model = Packed(SPLITS[name], bias=bias)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.fused) == ("packed", "silu(g) * u", True)
    assert site.shape == (15, 8, 16, 8)
    torch.testing.assert_close(result, model(X))


class Conv1D(nn.Module):
    """The linear layer of GPT-2: the weight is (in, out), and addmm wants rows."""

    def __init__(self, out_features, in_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / 4)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


def test_conv1d_layers_are_linear_layers():
    model = nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.fused) == ("plain", "gelu(x)", True)
    torch.testing.assert_close(result, model(X))


def test_matmul_with_a_transposed_weight_is_a_linear_layer():
    up, down = torch.randn(16, 8), torch.randn(16, 8)

    def model(x):
        return F.relu(x @ up.t()) @ down

    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.fused) == ("plain", "relu(x)", True)
    torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5).eval(), nn.Dropout(0.0).train()])
def test_inactive_dropout_is_nothing(dropout):
    model = MLP(nn.Sequential(nn.GELU(), dropout))
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.activation, site.fused) == ("gelu(x)", True)
    torch.testing.assert_close(result, model(X))


def test_reshapes_of_leading_dimensions_are_nothing():
    model = MLP(lambda h: F.gelu(h.reshape(-1, 16)).view(3, 5, 16))
    recorder, result = record(model, X)
    assert [site.fused for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(X))


def test_a_result_with_joined_leading_dimensions_keeps_its_shape():
    model = MLP(lambda h: F.gelu(h).flatten(0, 1))
    recorder, result = record(model, X)
    assert [site.fused for site in recorder.sites] == [True]
    assert result.shape == (15, 8)
    torch.testing.assert_close(result, model(X))


def test_casts_to_a_wider_dtype_and_back_are_nothing():
    model = MLP(lambda h: F.gelu(h.float()).to(h.dtype)).bfloat16()
    site = only_site(model, X.bfloat16())
    assert (site.activation, site.fused, site.dtype) == ("gelu(x)", True, "bfloat16")


def test_an_activation_nobody_foresaw_is_written_out():
    model = MLP(lambda h: torch.where(h > 0, h * torch.cos(h), 0.1 * torch.expm1(h)))
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert site.fused
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


def test_in_a_chain_every_second_pair_is_fused():
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    sites = sites_of(nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 8)), X)
    assert [(site.fused, site.reason) for site in sites] == [
        (True, None),
        (False, "overlaps"),
        (True, None),
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
    assert (site.activation, site.fused) == ("gelu_tanh(x)", True)
    assert isinstance(site.shape.rows, str if dynamic else int)
    torch.testing.assert_close(result, model(X))
