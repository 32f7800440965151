"""What enters an activation beside the projections: parameters, other linear layers, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import check_as_eager, only_site, record, trained
from fusion_backend.fusion.views.node import operation
from fusion_backend.fusion.views.operand import in_order
from fusion_backend.mlp.expression import parse
from models import MLP, Conv1D, Gated, Packed, X
from repetition import walked


class Learnt(MLP):
    """An MLP whose activation has two parameters of one shape."""

    def __init__(self, f, shape):
        super().__init__(f)
        self.p, self.q = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.rand(shape))

    def forward(self, x):
        return self.down(self.f(self.up(x), self.p, self.q))


class LoRA(nn.Module):
    """A linear layer with a low-rank update, as PEFT computes it."""

    def __init__(self, base, out_features, dropout=0.0):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, out_features, bias=False)

    def forward(self, x):
        result = self.base(x)
        update = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype)))) * 2.0
        return (result + update).to(result.dtype)


SHAPES = [(), (1,), (16,), (1, 16), (1, 1, 16), (1, 1, 1)]
LEARNT = {
    "star relu": (lambda h, p, q: p * F.relu(h) ** 2 + q, "square(relu(x)) * p0 + p1"),
    "ia3": (lambda h, p, q: F.relu(h) * p, "relu(x) * p0"),
    "sine": (lambda h, p, q: torch.sin(p * h), "sin(x * p0)"),
    "one plus scale": (lambda h, p, q: F.gelu(h) * (1 + p) + q, "gelu(x) * p0 + p1"),
    "cast": (lambda h, p, q: F.gelu(h) * p.double().float(), "gelu(x) * p0"),
    "xielu": (
        lambda h, p, q: torch.where(
            h > 0,
            F.softplus(p) * h * h + 0.5 * h,
            (torch.expm1(torch.min(h, torch.tensor(-1e-6))) - h) * (0.5 + F.softplus(q)) + 0.5 * h,
        ),
        "where(x > 0.0, 0.5 * x + x * p0 * x, 0.5 * x + (expm1(minimum(x, -1e-06)) - x) * p1)",
    ),
    "order of first appearance": (
        lambda h, p, q: torch.where(h > q, F.relu(h), h * p),
        "where(x > p0, relu(x), x * p1)",
    ),
    "learnt swish": (lambda h, p, q: h * torch.sigmoid(p * h), "x * sigmoid(x * p0)"),
}


@pytest.mark.parametrize(("name", "shape"), walked(LEARNT, SHAPES), ids=str)
def test_parameters_of_the_activation_are_operands(name, shape):
    function, activation = LEARNT[name]
    model = Learnt(function, shape)
    check_as_eager(model, X, activation=activation)


@pytest.mark.parametrize(("slopes", "x"), [(1, X), (16, X[0])])
def test_prelu_takes_one_slope_or_one_a_feature(slopes, x):
    model = MLP(nn.PReLU(slopes))
    check_as_eager(model, x, activation="prelu(x, p0)")


def test_slopes_of_prelu_belong_to_the_second_dimension():
    square = torch.randn(3, 16, 8)  # as many rows as features
    site = only_site(MLP(nn.PReLU(16)), square)
    assert (site.fused, site.reason) == (False, "parameter-in-activation")


def test_a_factor_of_the_product_of_a_gated_mlp_is_an_operand():
    class Scaled(Gated):
        def forward(self, x):
            return self.down(self.scale * self.f(self.gate(x), self.up(x)))

    model = Scaled(lambda g, u: F.silu(g) * u)
    model.scale = nn.Parameter(torch.rand(16))
    check_as_eager(model, X, activation="silu(g) * u * p0", form="gated")


def test_buffers_are_operands_and_are_named_in_the_report():
    model = MLP(lambda h: F.relu(h) * model.limit)
    model.register_buffer("limit", torch.tensor(2.0))
    site = only_site(model, X)
    assert (site.activation, site.operands) == ("relu(x) * p0", ("number limit",))


def test_the_graph_reads_the_parameter_where_the_model_made_it():
    model = Learnt(lambda h, p, q: F.relu(h) * torch.exp(p), (1, 16))
    recorder, _ = record(model, X)
    (call,) = recorder.after[0].graph.find_nodes(
        op="call_function", target=torch.ops.fusedmlp.mlp.default
    )
    (view,) = call.args[7]
    assert view.target is torch.ops.aten.flatten.using_ints
    assert recorder.sites[0].operands == ("vector exp(p)",)


def test_a_wider_parameter_widens_the_activation_as_in_eager():
    model = Learnt(lambda h, p, q: (F.gelu(h) * p).to(h.dtype), (16,))
    model.up.bfloat16()
    model.down.bfloat16()
    recorder, result = record(model, X.bfloat16())
    assert [site.activation for site in recorder.sites] == ["gelu(x) * p0"]
    torch.testing.assert_close(result, model(X.bfloat16()), atol=0.02, rtol=0.02)


def test_a_parameter_of_float64_is_refused():
    model = Learnt(lambda h, p, q: (F.gelu(h) * p).float(), (16,))
    model.p.data = model.p.data.double()
    site = only_site(model, X)
    assert (site.fused, site.reason) == (False, "dtype")


def test_a_number_of_float64_is_refused():
    model = Learnt(lambda h, p, q: F.gelu(h) * p, ())
    model.p.data = model.p.data.double()
    assert only_site(model, X).reason == "dtype"


def test_only_the_parameter_may_need_a_gradient():
    model = Learnt(lambda h, p, q: F.relu(h) * p, (16,)).requires_grad_(False)
    model.p.requires_grad_(True)
    recorder, result = record(model, X)
    result.square().sum().backward()
    gradient, model.p.grad = model.p.grad, None
    model(X).square().sum().backward()
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(gradient, model.p.grad)


@pytest.mark.parametrize("dynamic", [None, True])
def test_low_rank_updates_are_operands(dynamic):
    model = MLP(F.gelu)
    model.up = LoRA(model.up, 16)
    site = check_as_eager(model, X, activation="gelu(x + 2.0 * p0)", dynamic=dynamic)
    assert site.operands == ("linear layer up.lora_B",)


def test_low_rank_updates_of_a_gated_mlp_are_operands():
    model = Gated(lambda g, u: F.silu(g) * u)
    model.gate, model.up = LoRA(model.gate, 16), LoRA(model.up, 16)
    check_as_eager(model, X, activation="silu(g + 2.0 * p0) * (u + 2.0 * p1)", form="gated")


PARTS = {
    "chunk": lambda h: h.chunk(2, -1),
    "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
    "after a reshape": lambda h: h.view(-1, 2, 16).unbind(1),
}


@pytest.mark.parametrize("name", PARTS)
def test_low_rank_updates_of_a_packed_layer_are_operands(name):
    model = Packed(PARTS[name])
    model.gate_up = LoRA(model.gate_up, 32)
    check_as_eager(model, X, activation="silu(g + 2.0 * p0) * (u + 2.0 * p1)", form="packed")


@pytest.mark.parametrize("rows", [slice(0, 16), slice(None, None, 2)])
def test_some_rows_of_a_sum_of_layers_are_no_features(rows):
    """There are as many of them as there are features."""
    base, update, down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
    x = torch.randn(32, 8)

    def forward(x):
        return down(F.gelu((base(x) + update(x + 1.0))[rows]))

    recorder, result = record(forward, x)
    assert not any(site.rewritten for site in recorder.sites)
    torch.testing.assert_close(result, forward(x))


def test_a_number_a_column_of_transposed_features_is_refused():
    model = Learnt(lambda h, p, q: (F.gelu(h.transpose(0, 1)) * p).transpose(0, 1), (16,))
    x = torch.randn(16, 8)
    recorder, result = record(model, x)
    assert [site.reason for site in recorder.sites] == ["parameter-in-activation"]
    torch.testing.assert_close(result, model(x))


def test_the_update_of_a_layer_of_rows_gets_its_shape():
    model = nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))
    model[0] = LoRA(model[0], 16)
    check_as_eager(model, X, activation="gelu(x + 2.0 * p0)")


def test_an_update_in_another_dtype_is_added_as_it_is():
    model = MLP(F.gelu).bfloat16()
    model.up = LoRA(model.up, 16)
    recorder, result = record(model, X.bfloat16())
    assert [site.activation for site in recorder.sites] == ["gelu(x + 2.0 * p0)"]
    torch.testing.assert_close(result, model(X.bfloat16()), atol=0.02, rtol=0.02)


def test_an_update_of_the_last_layer_needs_the_hidden_value():
    class Updated(MLP):
        def forward(self, x):
            h = self.f(self.up(x))
            return self.down(h) + self.b(self.a(h))

    model = Updated(F.gelu)
    model.a, model.b = nn.Linear(16, 2), nn.Linear(2, 8)
    sites = record(model, X)[0].sites
    assert [(site.form, site.rewritten) for site in sites] == [
        ("activated", True),
        ("activated", False),
    ]
    assert sites[1].reason == "overlaps"
    assert any("a low-rank update (LoRA) of the last linear layer" in s.detail for s in sites)


class Streams(nn.Module):
    def __init__(self, f, widths=(8, 8)):
        super().__init__()
        self.first, self.second = (nn.Linear(width, 16) for width in widths)
        self.down, self.f = nn.Linear(16, 8), f

    def forward(self, x, y):
        return self.down(self.f(self.first(x), self.second(y)))


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (lambda a, b: F.relu(a + b), "relu(x + p0)"),
        (lambda a, b: F.relu(a.view(-1, 16) + b.view(-1, 16)).view(3, 5, 16), "relu(x + p0)"),
        (lambda a, b: F.silu(a) * b, "silu(x) * p0"),
        (lambda a, b: torch.tanh(b) - a, "tanh(x) - p0"),
    ],
)
def test_layers_of_two_inputs_are_a_projection_and_an_operand(function, activation):
    check_as_eager(Streams(function), X, torch.randn(X.shape), activation=activation)


@pytest.mark.parametrize("widths", [(8, 24), (24, 8)])
def test_the_wider_layer_is_the_projection(widths):
    model = Streams(lambda a, b: F.relu(a - 2 * b), widths)
    first_is_wider = widths[0] > widths[1]
    activation = "relu(x - 2.0 * p0)" if first_is_wider else "relu(p0 - 2.0 * x)"
    args = [torch.randn(3, 5, width) for width in widths]
    site = check_as_eager(model, *args, activation=activation)
    assert site.shape.in_features == 24


def test_rows_of_another_shape_are_reshaped():
    model = Streams(lambda a, b: F.relu(a.flatten(0, 1) + b))
    recorder, result = record(model, X, torch.randn(15, 8))
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.shape == (15, 8)


@pytest.mark.parametrize("shape", [(1, 5, 8), (5, 8), (8,)])
def test_a_layer_with_fewer_rows_is_refused(shape):
    model = Streams(lambda a, b: F.relu(a + b))
    site = only_site(model, X, torch.randn(shape))
    assert (site.fused, site.reason) == (False, "shapes-differ")


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (["a", "b"], "a * x + b", ("x * p0 + p1", ["a", "b"])),
        (["a", "b"], "where(x > b, a, x)", ("where(x > p0, p1, x)", ["b", "a"])),
        (["a", "b", "c"], "sin(c * x) + b - a", ("sin(x * p0) + p1 - p2", ["c", "b", "a"])),
        (["a", "b"], "where(x > 0.0, b, b)", ("p0", ["b"])),
    ],
)
def test_operands_are_numbered_as_they_appear(names, text, expected):
    expression, order = in_order(parse(text), names)
    assert (str(expression), list(order)) == expected


DROPOUTS = {
    "module": nn.Dropout(0.5),
    "function": lambda h: F.dropout(h, 0.5),
    "in place": lambda h: F.dropout(h, 0.5, True, True),
    "torch": lambda h: torch.dropout(h, 0.5, True),
    "torch in place": lambda h: torch.dropout_(h, 0.5, True),
    "aten": lambda h: torch.ops.aten.dropout.default(h, 0.5, True),
    "with its mask": lambda h: torch.native_dropout(h, 0.5, True)[0],
}


def check_dropout(function, model, x):
    """The mask is that of the seed, and the same in the gradients as in the result.

    The model is ``down(dropout(relu(up(x))))`` and loss is linear in its result, so by Euler the
    loss without the last bias is the sum of weights times their gradients, of either layer.
    """
    model.zero_grad()
    torch.manual_seed(1)
    first, gradients = trained(function, model, x)
    second = function(x)
    torch.manual_seed(1)
    torch.testing.assert_close(function(x), first)
    assert not torch.allclose(first, second)
    weights = torch.linspace(-1, 1, first.numel()).view(first.shape)
    loss = ((first - model.down.bias) * weights).mean()
    of_up = sum((p * p.grad).sum() for p in model.up.parameters())
    torch.testing.assert_close((model.down.weight * model.down.weight.grad).sum(), loss)
    torch.testing.assert_close(of_up, loss)
    assert all(gradient is not None for gradient in gradients)


@pytest.mark.parametrize("name", DROPOUTS)
def test_active_dropout_is_drawn_from_a_seed(name):
    model = MLP(lambda h: DROPOUTS[name](F.relu(h)), hidden=64)
    recorder, _ = record(model, X)
    (site,) = recorder.sites
    assert (site.activation, site.rewritten) == ("dropout(relu(x), p0, 0.5)", True)
    assert site.operands == ("seed of a dropout",)
    torch._dynamo.reset()
    check_dropout(torch.compile(model, backend=recorder), model, X)


def test_dropout_keeps_each_element_with_its_probability():
    with torch.no_grad():
        model = MLP(lambda h: F.dropout(h.abs() + 1.0, 0.3), hidden=256, width=256)
        model.down.weight.copy_(torch.eye(256))
        model.down.bias.zero_()
        recorder, result = record(model, torch.randn(400, 256))
        kept = (result != 0).double()
    assert [site.rewritten for site in recorder.sites] == [True]
    spread = (0.3 * 0.7) ** 0.5
    assert abs(kept.mean() - 0.7) < 5 * spread / kept.numel() ** 0.5
    for dim, count in ((0, 400), (1, 256)):  # the means of independent draws scatter so much
        assert 0.8 < kept.mean(dim).std() / (spread / count**0.5) < 1.2
    neighbours = ((kept[:, 1:] - 0.7) * (kept[:, :-1] - 0.7)).mean() / spread**2
    assert abs(neighbours) < 5 / kept.numel() ** 0.5


def test_two_dropouts_have_masks_of_their_own():
    model = MLP(lambda h: F.dropout(F.dropout(F.relu(h), 0.5), 0.5))
    recorder, _ = record(model, X)
    (site,) = recorder.sites
    assert site.activation == "dropout(dropout(relu(x), p0, 0.5), p1, 0.5)"
    (call,) = recorder.after[0].graph.find_nodes(
        op="call_function", target=torch.ops.fusedmlp.mlp.default
    )
    assert len(set(call.args[7])) == 2


def test_seeds_are_drawn_in_the_order_of_the_model():
    model = MLP(lambda h: F.dropout(F.relu(h), 0.5) * torch.rand(16))

    def noisy(x):
        return torch.rand(8) + model(x) + torch.rand(8)

    recorder, _ = record(noisy, X)
    names = [operation(node) for node in recorder.after[0].graph.nodes]
    assert [name for name in names if name.startswith("rand")] == [
        "rand",
        "randint",
        "rand",
        "rand",
    ]


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(probability):
    model = MLP(lambda h: F.dropout(F.relu(h), probability))
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(X))


def test_dropout_is_no_activation_by_itself():
    assert record(MLP(nn.Dropout(0.5)), X)[0].sites == []


def test_dropout_with_a_probability_of_an_attribute_is_fused_when_floats_are_symbols():
    model = MLP(nn.Sequential(nn.ReLU(), nn.Dropout(0.25)))
    site = only_site(model, X, dynamic=True)
    assert site.activation == "dropout(relu(x), p0, 0.25)"


def test_an_exported_program_keeps_its_dropout():
    from capture import ALWAYS
    from fusion_backend import fuse

    model = MLP(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), hidden=64)
    for program in (
        torch.export.export(model, (X,)),
        torch.export.export(model, (X,)).run_decompositions(),
    ):
        fused = fuse(program.module(), [X], ALWAYS)
        assert [site.activation for site in fused.sites] == ["dropout(relu(x), p0, 0.5)"]
        torch.manual_seed(0)
        first = fused.graph_module(X)
        assert not torch.allclose(first, fused.graph_module(X))
        torch.manual_seed(0)
        torch.testing.assert_close(first, fused.graph_module(X))


class Convolutions(nn.Module):
    """An MLP over the channels of images."""

    def __init__(self, f):
        super().__init__()
        self.up, self.down, self.f = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1), f
        self.scale, self.other = nn.Parameter(torch.rand(16, 1, 1)), nn.Conv2d(8, 16, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.down(self.f(self.up(x), self.scale, self.other(-x)))


CONVOLUTIONS = {
    "one a channel": (lambda h, p, other: F.relu(h) * p, "relu(x) * p0"),
    "another convolution": (lambda h, p, other: F.relu(h + other), "relu(x + p0)"),
    "both": (lambda h, p, other: F.gelu(h - other * p), "gelu(x - p0 * p1)"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_channels_of_convolutions_are_features(name):
    function, activation = CONVOLUTIONS[name]
    model = Convolutions(function)
    for images in (torch.randn(2, 8, 16, 16), torch.randn(2, 8, 3, 5)):
        x = images.to(memory_format=torch.channels_last)
        check_as_eager(model, x, activation=activation)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (16, 1), (1, 16, 1)])
def test_a_number_for_each_column_of_an_image_is_refused(shape):
    p = torch.rand(shape)
    model = Convolutions(lambda h, scale, other: F.relu(h) * p)
    x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last)
    sites = record(model, x)[0].sites
    assert {site.reason for site in sites} <= {"parameter-in-activation", "other-operand"}


def test_a_number_for_each_row_of_transposed_features_is_refused():
    p = torch.rand(16)
    model = MLP(lambda h: (F.gelu(h).transpose(0, 1) * p).transpose(0, 1))
    site = only_site(model, torch.randn(16, 8))
    assert (site.fused, site.reason) == (False, "parameter-in-activation")
