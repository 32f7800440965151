"""1×1 convolutions as linear layers: which are, on which layouts, and that strides stay."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, only_site, record
from fusion_backend import explain, fuse
from fusion_backend.fusion.views.convolutions import convolution_view, is_channels_last
from models import ConvMLP
from repetition import slow_but, walked

LAST = torch.channels_last
X = torch.randn(2, 8, 5, 6).to(memory_format=LAST)


def spelled(name):
    """The convolution of x with w and b in another spelling."""
    return {
        "functional": lambda x, w, b: F.conv2d(x, w, b),
        "keywords": lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, stride=1, padding=0),
        "torch": lambda x, w, b: torch.conv2d(x, w, b, (1, 1), (0, 0), (1, 1), 1),
        "dilated": lambda x, w, b: F.conv2d(x, w, b, dilation=(2, 3)),
        "same padding": lambda x, w, b: F.conv2d(x, w, b, padding="same"),
        "valid padding": lambda x, w, b: F.conv2d(x, w, b, padding="valid"),
        "ATen": lambda x, w, b: torch.ops.aten.conv2d.default(x, w, b),
        "ATen's general one": lambda x, w, b: torch.ops.aten.convolution.default(
            x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
        "method of no bias": lambda x, w, b: F.conv2d(x, w),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("functional", "keywords", "torch", "dilated", "same padding", "valid padding"),
        *("ATen", "ATen's general one", "method of no bias"),
    ],
)
def test_every_spelling_of_a_1x1_convolution_is_a_linear_layer(name):
    model, f = ConvMLP(F.gelu), spelled(name)

    def forward(x):
        h = F.gelu(f(x, model.up.weight, model.up.bias))
        return f(h, model.down.weight, model.down.bias)

    recorder, result = record(forward, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("plain", "gelu(x)", True)
    assert site.shape == (60, 8, 16, 8)
    assert result.stride() == forward(X).stride()
    torch.testing.assert_close(result, forward(X))


OTHERS = {
    "stride": lambda x, w: F.conv2d(x, w, stride=2),
    "padding": lambda x, w: F.conv2d(x, w, padding=(0, 1)),
    "groups": lambda x, w: F.conv2d(x, w[:, :4], groups=2),
    "larger kernel": lambda x, w: F.conv2d(x, w.expand(-1, -1, 1, 3)),
    "transposed": lambda x, w: F.conv_transpose2d(x, w),
    "general one, transposed": lambda x, w: torch.ops.aten.convolution.default(
        x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1
    ),
    "no batch": lambda x, w: F.conv2d(x[0], w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_no_linear_layer(name):
    recorder, _ = record(OTHERS[name], X, torch.randn(8, 8, 1, 1))
    assert not any(map(convolution_view, recorder.before[0].graph.nodes))


def gradients(model, x, function):
    """Result, and gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    result = function(x)
    leaves = [x, *model.parameters()]
    return result, torch.autograd.grad(result.square().sum(), leaves)


def check_gradients(model, x, recorder):
    """Result, its strides and all gradients are eager's."""
    compiled = torch.compile(model, backend=recorder)
    (result, mine), (expected, theirs) = gradients(model, x, compiled), gradients(model, x, model)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(mine, theirs)


LAYOUTS = {
    "2d": (2, X),
    "3d": (3, torch.randn(2, 8, 3, 4, 5).to(memory_format=torch.channels_last_3d)),
    "1d": (1, torch.randn(2, 5, 8).transpose(1, 2)),
    "one position": (2, torch.randn(4, 8, 1, 1)),
    "one position, channels-last": (2, torch.randn(4, 8, 1, 1).to(memory_format=LAST)),
    "one image": (2, torch.randn(1, 8, 5, 6).to(memory_format=LAST)),
    "no image": (2, torch.randn(0, 8, 5, 6).to(memory_format=LAST)),
    "one row of positions": (2, torch.randn(2, 8, 1, 6).to(memory_format=LAST)),
}


@pytest.mark.parametrize(
    ("name", "bias", "converted"), walked(LAYOUTS, [False, True], [False, True])
)
def test_results_and_gradients_are_those_of_the_convolutions(name, bias, converted):
    positions, x = LAYOUTS[name]
    model = ConvMLP(F.silu, positions, bias)
    if converted and positions == 2:
        model = model.to(memory_format=LAST)
    recorder, _ = record(model, x.requires_grad_(False))
    assert [site.rewritten for site in recorder.sites] == [True]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recorder)
    (result, mine), (expected, theirs) = gradients(model, x, compiled), gradients(model, x, model)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(mine, theirs)
    if name != "one position, channels-last" or converted:  # eager itself is of two minds there
        assert result.stride() == expected.stride()


def test_a_converted_model_is_fused_on_channels_first_input_too():
    model, x = ConvMLP(F.gelu).to(memory_format=LAST), X.contiguous()
    recorder, result = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.stride() == model(x).stride()
    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize("positions", [1, 2, 3])
def test_channels_first_data_are_left_alone(positions):
    model, x = ConvMLP(F.gelu, positions), torch.randn(2, 8, *(4, 5, 6)[:positions])
    recorder, result = record(model, x)
    (site,) = recorder.sites
    assert (site.fused, site.reason) == (False, "channels-first")
    assert result.stride() == model(x).stride()
    torch.testing.assert_close(result, model(x))


class Gated(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.packed, self.down = nn.Conv2d(8, 32, 1), nn.Conv2d(16, 8, 1)
        self.split = split

    def forward(self, x):
        return self.down(self.split(self.packed(x)))


GATED = {
    "chunk": (lambda h: F.silu((p := h.chunk(2, 1))[0]) * p[1], "silu(g) * u"),
    "slices": (lambda h: F.silu(h[:, 16:]) * h[:, :16], "silu(g) * u"),
    "interleaved": (lambda h: F.silu(h[:, ::2]) * h[:, 1::2], "silu(g) * u"),
    "split": (lambda h: torch.mul(*h.split(16, dim=-3)), "g * u"),
    "glu": (lambda h: F.glu(h, dim=1), "sigmoid(g) * u"),
}


@pytest.mark.parametrize("name", GATED)
def test_parts_of_a_packed_convolution_are_features(name):
    split, activation = GATED[name]
    model = Gated(split)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("packed", activation, True)
    torch.testing.assert_close(result, model(X))


OTHER_PARTS = {
    "images": lambda h: F.silu((p := h.repeat(2, 1, 1, 1).chunk(2, 0))[0]) * p[1],
    "columns": lambda h: F.glu(h.repeat(1, 1, 1, 2)),
    "rows": lambda h: F.silu((p := h.repeat(1, 1, 2, 1).chunk(2, 2))[0]) * p[1],
    "channels of two images": lambda h: (
        F.silu((p := h.contiguous().view(1, 64, 5, 6).chunk(2, 1))[0].view(2, 16, 5, 6))
        * p[1].view(2, 16, 5, 6)
    ),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_other_parts_are_no_features(name):
    split = OTHER_PARTS[name]
    model = Gated(split if name == "channels of two images" else lambda h: split(h[:, :16]))
    recorder, result = record(model, X)
    assert not any(site.rewritten for site in recorder.sites)
    torch.testing.assert_close(result, model(X))


BETWEEN = {
    "dropout": nn.Dropout2d(0.5).eval(),
    "contiguous": lambda h: h.contiguous(memory_format=LAST),
    "conversion": lambda h: h.to(memory_format=LAST),
    "clone": lambda h: h.clone(),
    "permute and back": lambda h: h.permute(0, 2, 3, 1).sigmoid().permute(0, 3, 1, 2),
    "flatten and back": lambda h: h.flatten(2).unflatten(2, (5, 6)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_changes_nothing_may_stand_between(name):
    model = ConvMLP(lambda h: BETWEEN[name](F.gelu(h)))
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.stride() == model(X).stride()
    torch.testing.assert_close(result, model(X))


def test_a_hidden_value_that_becomes_channels_first_makes_a_result_that_is():
    model = ConvMLP(lambda h: F.gelu(h).contiguous())
    recorder, result = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    assert result.is_contiguous()
    torch.testing.assert_close(result, model(X))


class ColumnScale(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns))

    def forward(self, h):
        return F.gelu(h) * self.scale


class TurnedScale(ColumnScale):
    def __init__(self):
        super().__init__(6)

    def forward(self, h):
        return (F.gelu(h).transpose(1, 3) * self.scale.view(-1, 1, 1)).transpose(1, 3)


class OtherImagesScale(ColumnScale):
    def __init__(self):
        super().__init__(16)

    def forward(self, h):
        return (F.gelu(h).reshape(2, 16, 3, 6) * self.scale.view(-1, 1, 1)).view(1, 16, 6, 6)


class ChannelScale(ColumnScale):
    def __init__(self):
        super().__init__(16)

    def forward(self, h):
        return self.scale.view(16, 1, 1) * F.relu(h)


class StarReLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, h):
        return self.scale * F.relu(h) ** 2 + self.bias


@pytest.mark.parametrize("f", [ChannelScale, StarReLU, nn.PReLU, lambda: nn.PReLU(16)])
@pytest.mark.parametrize("name", slow_but(["2d"], ["2d", "1d", "one position"]))
def test_parameters_of_the_activation_are_numbers_or_one_a_channel(f, name):
    positions, x = LAYOUTS[name]
    f = f() if not (f is ChannelScale and positions == 1) else nn.PReLU(16)
    model = ConvMLP(f, positions)
    recorder, _ = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    check_gradients(model, x, recorder)


class TwoStreams(nn.Module):
    """A sum of convolutions of two inputs, of which some channels may be taken."""

    def __init__(self, part):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 32, 1), nn.Conv2d(4, 32, 1)
        self.down, self.part = nn.Conv2d(16, 8, 1), part

    def forward(self, x):
        first, second = self.first(x), self.second(x[:, :4])
        return self.down(F.gelu(self.part(first) + self.part(second)))


@pytest.mark.parametrize("part", [lambda h: h[:, :16], lambda h: h.chunk(2, 1)[1]])
def test_a_convolution_of_another_input_enters_element_by_element(part):
    model = TwoStreams(part)
    recorder, _ = record(model, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    check_gradients(model, X, recorder)


def test_active_dropout_between_convolutions_keeps_the_mean():
    model = ConvMLP(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), bias=False)
    x = torch.randn(1, 8, 64, 64).to(memory_format=LAST)
    recorder, result = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    expected = model.eval()(x)
    assert not torch.equal(result, expected)
    torch.testing.assert_close(
        result.mean((0, 2, 3)), expected.mean((0, 2, 3)), atol=0.03, rtol=0.1
    )


def test_dropout_of_whole_channels_is_left_alone():
    site = only_site(ConvMLP(nn.Sequential(nn.ReLU(), nn.Dropout2d(0.5))), X)
    assert (site.fused, site.reason) == (False, "active-dropout")


SQUARE = torch.randn(1, 8, 6, 6).to(memory_format=LAST)
REFUSED = {
    "group norm": ("norm-between", nn.Sequential(nn.GELU(), nn.GroupNorm(4, 16))),
    "other rows": ("row-mixing-view", lambda h: F.gelu(h).reshape(1, 16, 4, 9)),
    "turned image": ("non-pointwise", lambda h: F.gelu(h).transpose(2, 3)),
    "pooling": ("non-pointwise", lambda h: F.avg_pool2d(F.gelu(h), 2)),
    "depthwise convolution": (
        "non-pointwise",
        nn.Sequential(nn.GELU(), nn.Conv2d(16, 16, 3, groups=16)),
    ),
    "a number a column": ("parameter-in-activation", ColumnScale(6)),
    "a number a channel of turned images": ("parameter-in-activation", TurnedScale()),
    "a number a channel of other images": ("parameter-in-activation", OtherImagesScale()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_pointwise_is_left_alone(name):
    reason, f = REFUSED[name]
    model = ConvMLP(f)
    with torch.no_grad():
        recorder, result = record(model, SQUARE)
        torch.testing.assert_close(result, model(SQUARE))
    assert {(site.rewritten, site.reason) for site in recorder.sites} == {(False, reason)}


def test_a_vector_that_is_added_to_columns_is_no_bias():
    columns = torch.randn(6)
    model = ConvMLP(lambda h: F.gelu(h + columns), bias=False)
    recorder, result = record(model, X)
    assert not any(site.rewritten for site in recorder.sites)
    torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize("size", [1, 5])
def test_a_convolution_and_a_linear_layer_make_no_mlp(size):
    model = ConvMLP(F.gelu)
    x = torch.randn(2, 8, size, size).to(memory_format=LAST)

    def forward(x):
        h = F.gelu(model.up(x))
        h = h.flatten(1) if size == 1 else h.permute(0, 2, 3, 1)
        return F.linear(h, model.down.weight[:, :, 0, 0])

    site = only_site(forward, x)
    assert (site.rewritten, site.reason) == (
        False,
        "row-mixing-view" if size == 1 else "non-pointwise",
    )


@pytest.mark.parametrize("name", ["2d", "1d", "one position"])
def test_sizes_may_be_symbolic(name):
    positions, x = LAYOUTS[name]
    model = ConvMLP(F.gelu, positions)
    with torch.no_grad():
        recorder, result = record(model, x, dynamic=True)
        (site,) = recorder.sites
        assert site.rewritten
        assert isinstance(site.shape.rows, str)
        assert result.stride() == model(x).stride()
        torch.testing.assert_close(result, model(x))


def test_under_autocast_the_convolutions_run_in_its_dtype():
    model = ConvMLP(F.gelu)

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    recorder, result = record(forward, X)
    (site,) = recorder.sites
    assert (site.rewritten, site.dtype, result.dtype) == (True, "bfloat16", torch.bfloat16)
    assert result.stride() == forward(X).stride()
    torch.testing.assert_close(result, forward(X), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_program_is_fused(decomposed):
    model = ConvMLP(F.gelu).requires_grad_(False)
    program = torch.export.export(model, (X,))
    program = program.run_decompositions() if decomposed else program
    result = fuse(program.module(), [X], ALWAYS)
    assert [site.rewritten for site in result.sites] == [True]
    torch.testing.assert_close(result.graph_module(X), model(X))


@pytest.mark.parametrize(
    ("name", "training"),
    slow_but([("2d", False)], itertools.product(["2d", "1d", "one position"], [False, True])),
)
def test_inductor_compiles_it_forward_and_backward(name, training):
    positions, x = LAYOUTS[name]
    model = ConvMLP(F.gelu, positions)
    if positions == 2:
        model = model.to(memory_format=LAST)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    if not training:
        with torch.no_grad():
            result, expected = compiled(x), model(x)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
        return
    (result, mine), (expected, theirs) = gradients(model, x, compiled), gradients(model, x, model)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(mine, theirs)


def test_on_a_cpu_convolutions_are_left_to_inductor_by_default():
    with torch.no_grad():
        (site,) = explain(ConvMLP(F.gelu).eval(), X).sites
    assert (site.fused, site.reason) == (False, "not-faster")
    assert "not measured" in site.detail


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3, 4, 5), False),
        (torch.empty(2, 3, 4, 5).to(memory_format=LAST), True),
        (torch.empty(2, 4, 5, 3).permute(0, 3, 1, 2), True),
        (torch.empty(2, 4, 5, 6).permute(0, 3, 1, 2)[:, :3], False),
        (torch.empty(2, 4, 5, 3).permute(0, 3, 1, 2)[:, :, 1:], False),
        (torch.empty(2, 3, 1, 1), True),
        (torch.empty(2, 1, 4, 5), True),
    ],
)
def test_channels_last_data_are_told_by_their_strides(tensor, expected):
    assert is_channels_last(tensor) == expected


def test_modules_in_a_symbolically_traced_graph_are_opened():
    model = ConvMLP(nn.GELU()).eval()
    with torch.no_grad():
        result = fuse(torch.fx.symbolic_trace(model), [X], ALWAYS)
        torch.testing.assert_close(result.graph_module(X), model(X))
    assert [site.rewritten for site in result.sites] == [True]
