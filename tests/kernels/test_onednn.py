"""The plan onednn: inference on the CPU through oneDNN's post-operations."""

from __future__ import annotations

import functools
import platform

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.errors import PlanError
from fusion_backend.kernels import onednn
from fusion_backend.kernels.onednn import onednn_supports
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning import onednn_profit
from fusion_backend.planning.onednn_profit import onednn_is_faster

ops = torch.ops.fusedmlp

pytestmark = pytest.mark.skipif(
    not onednn_supports("gelu(x)", torch.float32), reason="this build of torch has no oneDNN"
)

PLAIN = {
    "gelu(x)": F.gelu,
    "gelu_tanh(x)": lambda x: F.gelu(x, approximate="tanh"),
    "silu(x)": F.silu,
    "sigmoid(x)": torch.sigmoid,
    "tanh(x)": torch.tanh,
    "hardswish(x)": F.hardswish,
    "leaky_relu(x, 0.1)": lambda x: F.leaky_relu(x, 0.1),
}
GATED = {
    "silu(g) * u": lambda g, u: F.silu(g) * u,
    "u * gelu(g)": lambda g, u: F.gelu(g) * u,
    "g * sigmoid(u)": lambda g, u: g * torch.sigmoid(u),
    "g * u": lambda g, u: g * u,
}
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if onednn_supports("gelu(x)", dtype)
]


def tensors(gated, dtype=torch.float32, *, rows=200, width=96, hidden=160, bias=True):
    """An input and the six parameters, scaled as those of a trained model."""

    def layer(out_features, in_features):
        weight = torch.randn(out_features, in_features) / in_features**0.5
        return weight.to(dtype), torch.randn(out_features).to(dtype) if bias else None

    gate = layer(hidden, width) if gated else (None, None)
    x = torch.randn(rows, width).to(dtype)
    return [x, *gate, *layer(hidden, width), *layer(width, hidden)]


def mlp(values, activation):
    return ops.mlp(*values, [], activation, "onednn")


def eager(values, function):
    x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = values
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        return F.linear(function(up), weight_down, bias_down)
    gate = F.linear(x, weight_gate, bias_gate)
    return F.linear(function(gate, up), weight_down, bias_down)


def double(values):
    return [None if value is None else value.double() for value in values]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [*PLAIN, *GATED])
def test_results_are_as_exact_as_those_of_eager(activation, dtype, bias):
    function = {**PLAIN, **GATED}[activation]
    values = tensors(activation in GATED, dtype, bias=bias)
    exact = eager(double(values), function)
    found = mlp(values, activation)
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    ours, theirs = ((y.double() - exact).norm() for y in (found, eager(values, function)))
    # In float32 both sum in float32, in another order: neither is the more exact.
    assert ours <= (1.2 if dtype == torch.float32 else 1.05) * theirs


@pytest.mark.parametrize("activation", [*PLAIN, *GATED])
def test_nan_and_infinities_are_not_hidden(activation):
    values = tensors(activation in GATED, rows=4)
    values[0][:3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    found, right = mlp(values, activation), eager(values, {**PLAIN, **GATED}[activation])
    assert torch.equal(found.isfinite(), right.isfinite())


HIDING = {
    "relu(x)": ("relu", [], F.relu),
    "relu6(x)": ("hardtanh", [0.0, 6.0], F.relu6),
    "hardtanh(x, -1.0, 1.0)": ("hardtanh", [-1.0, 1.0], F.hardtanh),
    "hardsigmoid(x)": ("hardsigmoid", [], F.hardsigmoid),
    "leaky_relu(x, 0.0)": ("leaky_relu", [0.0], lambda x: F.leaky_relu(x, 0.0)),
}


@pytest.mark.parametrize("activation", HIDING)
def test_functions_in_which_onednn_hides_nan_are_declined_for_that(activation):
    name, scalars, function = HIDING[activation]
    assert not onednn_supports(activation, torch.float32)
    assert "turns NaN into a number" in onednn.why_not(activation, torch.float32)
    x, identity = torch.full((4, 16), torch.nan), torch.eye(16)
    theirs = torch.ops.mkldnn._linear_pointwise.default(x, identity, None, name, scalars, "")
    assert function(x).isnan().all()
    assert not theirs.isnan().any()  # or the reason would no longer be true


@pytest.mark.parametrize(
    "activation",
    ["gelu(x) + x", "silu(1.702 * x)", "silu(g) * g", "silu(g)", "silu(g) * gelu(u)", "square(x)"],
)
def test_other_activations_are_declined(activation):
    assert not onednn_supports(activation, torch.float32)


def test_other_dtypes_and_devices_are_declined():
    assert not onednn_supports("gelu(x)", torch.float64)
    assert not onednn_supports("gelu(x)", torch.float32, "cuda")


def test_a_build_without_onednn_is_declined(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    onednn.is_available.cache_clear()
    try:
        assert not onednn_supports("gelu(x)", torch.float32)
    finally:
        onednn.is_available.cache_clear()


def test_an_unsupported_call_names_another_plan():
    with pytest.raises(PlanError, match=r"no 'relu\(x\)' in torch.float32 on cpu; use plan 'ref"):
        mlp(tensors(False), "relu(x)")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded"])
@pytest.mark.parametrize("activation", ["gelu(x)", "silu(g) * u"])
def test_every_layout_is_read_right(activation, layout):
    def laid_out(tensor):
        if tensor is None:
            return None
        if layout == "transposed":
            return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        if layout == "expanded":
            return tensor[:1].expand_as(tensor)
        wide = torch.cat([tensor, tensor], -1)
        if layout == "sliced":
            return wide.copy_(wide)[..., : tensor.shape[-1]]
        return torch.repeat_interleave(tensor, 2, -1)[..., ::2]

    values = [laid_out(value) for value in tensors(activation == "silu(g) * u")]
    function = {**PLAIN, **GATED}[activation]
    torch.testing.assert_close(mlp(values, activation), eager(values, function))


@pytest.mark.parametrize("empty", ["rows", "width", "hidden"])
@pytest.mark.parametrize("activation", ["gelu(x)", "silu(g) * u"])
def test_empty_sizes_work(activation, empty):
    values = tensors(activation == "silu(g) * u", **{empty: 0})
    function = {**PLAIN, **GATED}[activation]
    torch.testing.assert_close(mlp(values, activation), eager(values, function))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu(x)", "silu(g) * u", "g * sigmoid(u)"])
def test_blocks_of_rows_make_the_same_result(activation, bias, monkeypatch):
    values = tensors(activation not in PLAIN, rows=200, bias=bias)
    whole = mlp(values, activation)
    monkeypatch.setattr(onednn, "IN_CACHE", 0)
    monkeypatch.setattr(onednn, "LEAST_ROWS", 48)
    hidden = []
    make = onednn.hidden_values
    monkeypatch.setattr(
        onednn, "hidden_values", lambda x, *rest: hidden.append(len(x)) or make(x, *rest)
    )
    monkeypatch.setattr(onednn, "BLOCK", 0)
    torch.testing.assert_close(mlp(values, activation), whole)
    assert hidden == [48, 48, 48, 48, 8]


def test_only_hidden_layers_beyond_the_cache_are_computed_in_blocks():
    def rows_of_a_block(rows, hidden, gated=False):
        weight = torch.empty(hidden, 64, device="meta")
        gate = weight if gated else None
        weights = Weights(gate, None, weight, None, weight.t(), None)
        return onednn.rows_of_a_block(torch.empty(rows, 64, device="meta"), weights)

    assert rows_of_a_block(16384, 256) is None
    assert rows_of_a_block(16384, 256, gated=True) == 8192
    assert rows_of_a_block(65536, 256) == 8192
    assert rows_of_a_block(65536, 3072) == 1024


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_ask_for_gradients_serve_inference(mode):
    values = [None if value is None else value.requires_grad_() for value in tensors(False)]
    with mode():
        found = torch.compile(mlp, fullgraph=True)(values, "gelu(x)")
    torch.testing.assert_close(found, eager(values, F.gelu).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rule_follows_what_was_measured(dtype, monkeypatch):
    monkeypatch.setattr(onednn_profit, "was_measured", lambda dtype: True)
    faster = functools.partial(onednn_is_faster, dtype=dtype)
    assert faster(4096, 64, 256, 64, False)
    assert faster(512, 768, 3072, 768, False, activation="gelu_tanh(x)")
    assert not faster(512, 768, 3072, 768, False)
    assert not faster(1, 768, 3072, 768, False, activation="gelu_tanh(x)")
    assert not faster(4096, 64, 256, 64, True)
    assert faster(32768, 64, 256, 64, True) is (dtype == torch.float32)
    assert faster(65536, 64, 256, 64, True) is (dtype != torch.float16)
    assert not faster(16384, 64, 256, 64, True)
    assert not faster(65536, 768, 3072, 768, True)


@pytest.fixture
def cpu(monkeypatch):
    """A function that sets what torch says of the CPU."""

    def says(**capabilities):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        onednn_profit.has_instructions.cache_clear()

    yield says
    onednn_profit.has_instructions.cache_clear()


def test_nothing_is_claimed_of_cpus_and_dtypes_that_were_not_measured(cpu):
    cpu(architecture="aarch64")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert not onednn_is_faster(65536, 64, 256, 64, False, dtype)


def test_with_avx2_only_what_is_computed_in_blocks_is_faster(cpu):
    cpu(architecture="x86_64", avx2=True, avx512_f=False)
    faster = functools.partial(onednn_is_faster, dtype=torch.float32)
    assert faster(32768, 64, 256, 64, False, activation="gelu(x)")
    assert faster(16384, 128, 512, 128, True, activation="silu(g) * u")
    assert not faster(32768, 64, 256, 64, False, activation="gelu_tanh(x)")
    assert not faster(16384, 64, 256, 64, False, activation="gelu(x)")
    assert not faster(65536, 768, 3072, 768, False, activation="gelu(x)")
    assert not onednn_is_faster(65536, 64, 256, 64, False, torch.bfloat16, "gelu(x)")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another architecture's names")
def test_instructions_are_asked_for_as_torch_names_them():
    assert {"avx2", "avx512_f", "avx512_fp16", "amx_bf16"} <= torch.cpu.get_capabilities().keys()
