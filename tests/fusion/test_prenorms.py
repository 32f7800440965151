"""Norms before an MLP: which its operator computes, and which must stay outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, calls_of, fused_calls, record, record_as_eager
from fusion_backend import explain, fuse
from fusion_backend.compat.triton_features import has_gluon
from fusion_backend.kernels.host.targets import H100
from fusion_backend.mlp import record as records
from fusion_backend.mlp.expression import parse
from fusion_backend.planning.gains import gains_by_norm
from models import MLP, Around, Gated, X

OPERATOR = torch.ops.fusedmlp.mlp.default
EPS32 = torch.finfo(torch.float32).eps


def mlp(m, x):
    """Of an activation that oneDNN does not know: its plan leaves norms to Inductor."""
    return m.down(F.mish(m.up(x)))


def norm(m, x):
    return F.layer_norm(x, (8,), m.scale, m.shift)


def _input_written_to_afterwards(m, x):
    x = x * 2
    y = mlp(m, norm(m, x))
    x.zero_()
    return y, x


def _input_written_to_before(m, x):
    x = x * 2
    x.add_(1.0)
    return mlp(m, norm(m, x))


def _in_place_on_the_hidden_value(m, x):
    return m.down(F.relu_(m.up(norm(m, x)))).mul_(2.0)


def _in_a_branch(m, x):
    return torch.cond(x.sum() > 0, lambda x: mlp(m, norm(m, x)), lambda x: x + 1, (x,))


def _gated(m, x):
    h = norm(m, x)
    return m.down(F.mish(m.up(h)) * F.linear(h, m.other))


def _shared_by_two_but_one_layer(m, x):
    """A residual of the norm's input, and a second block of the result."""
    for _ in range(2):
        x = x + mlp(m, norm(m, x))
    return x


# What eager computes, and the norms that the fused operators take in.
ABSORBED = {
    "layer norm": (lambda m, x: mlp(m, norm(m, x)), ["layer_norm(1e-05)"]),
    "torch": (
        lambda m, x: mlp(m, torch.layer_norm(x, (8,), m.scale, m.shift, 1e-3, False)),
        ["layer_norm(0.001)"],
    ),
    "keywords": (
        lambda m, x: mlp(m, F.layer_norm(input=x, normalized_shape=[8], bias=m.shift, eps=0.1)),
        ["layer_norm(0.1)"],
    ),
    "without parameters": (lambda m, x: mlp(m, F.layer_norm(x, (8,))), ["layer_norm(1e-05)"]),
    "RMS norm": (lambda m, x: mlp(m, F.rms_norm(x, (8,), m.scale, 1e-6)), ["rms_norm(1e-06)"]),
    "RMS norm of torch": (lambda m, x: mlp(m, torch.rms_norm(x, (8,))), [f"rms_norm({EPS32!r})"]),
    "RMS norm without eps": (
        lambda m, x: mlp(m, F.rms_norm(1e-4 * x, (8,), m.scale)),
        [f"rms_norm({EPS32!r})"],
    ),
    "computed parameters": (
        lambda m, x: mlp(m, F.rms_norm(x, (8,), 1 + m.scale, 1e-5)),
        ["rms_norm(1e-05)"],
    ),
    "ATen": (
        lambda m, x: mlp(m, torch.ops.aten.layer_norm.default(x, [8], m.scale)),
        ["layer_norm(1e-05)"],
    ),
    "gated": (_gated, ["layer_norm(1e-05)"]),
    "residual": (lambda m, x: x + mlp(m, norm(m, x)), ["layer_norm(1e-05)"]),
    "computed input": (lambda m, x: mlp(m, norm(m, torch.sin(x))), ["layer_norm(1e-05)"]),
    "other layout": (
        lambda m, x: mlp(m, norm(m, x.mT.contiguous().mT)),
        ["layer_norm(1e-05)"],
    ),
    "two blocks": (_shared_by_two_but_one_layer, ["layer_norm(1e-05)"] * 2),
    "written afterwards": (_input_written_to_afterwards, ["layer_norm(1e-05)"]),
    "written before": (_input_written_to_before, ["layer_norm(1e-05)"]),
    "hidden value written to": (_in_place_on_the_hidden_value, ["layer_norm(1e-05)"]),
    "branch": (_in_a_branch, ["layer_norm(1e-05)"]),
}


def _result_read_elsewhere(m, x):
    h = norm(m, x)
    return h + mlp(m, h)


def _result_returned(m, x):
    h = norm(m, x)
    return mlp(m, h), h


def _result_of_two_mlps(m, x):
    h = norm(m, x)
    return mlp(m, h) + m.down(F.relu(F.linear(h, m.other)))


def _input_written_to_between(m, x):
    x = x * 2
    hidden = m.up(norm(m, x))
    x.zero_()
    return m.down(F.mish(hidden)), x


def _input_written_to_before_the_first_layer(m, x):
    x = x * 2
    h = norm(m, x)
    x[:1].add_(1.0)
    return mlp(m, h), x


def _parameter_written_to_between(m, x):
    scale = m.scale * 2
    hidden = m.up(F.layer_norm(x, (8,), scale))
    scale.mul_(0.5)
    return m.down(F.mish(hidden))


def _result_written_to(m, x):
    h = norm(m, x)
    h.add_(1.0)
    return mlp(m, h)


def _other_grad_mode(m, x):
    with torch.enable_grad():
        h = norm(m, x)
    return mlp(m, h)


def _width_read_of_the_result(m, x):
    h = norm(m, x)
    return mlp(m, h) * h.sum()


ALONE = {
    "read elsewhere": _result_read_elsewhere,
    "returned": _result_returned,
    "read by two MLPs": _result_of_two_mlps,
    "reduced elsewhere": _width_read_of_the_result,
    "input written between": _input_written_to_between,
    "input written before the first layer": _input_written_to_before_the_first_layer,
    "parameter written between": _parameter_written_to_between,
    "result written": _result_written_to,
    "other grad mode": _other_grad_mode,
    "over two dimensions": lambda m, x: mlp(m, F.layer_norm(x, (5, 8))),
    "over all": lambda m, x: mlp(m, F.layer_norm(x[0], (5, 8))),
    "reshaped": lambda m, x: mlp(m, norm(m, x).flatten(0, 1)),
    "group norm": lambda m, x: mlp(m, F.group_norm(x, 5)),
    "normalize": lambda m, x: mlp(m, F.normalize(x, dim=-1)),
    "scaled afterwards": lambda m, x: mlp(m, norm(m, x) * 2),
    "cast": lambda m, x: mlp(m, norm(m, x).to(torch.float64).float()),
    "after the MLP": lambda m, x: norm(m, mlp(m, x)),
    "of a chain": lambda m, x: F.linear(F.mish(mlp(m, norm(m, x))), m.square),
    "of a part of an MLP": lambda m, x: (h := F.mish(m.up(norm(m, x)))).sum() + m.down(h),
}


def model_of(body) -> Around:
    model = Around(body)
    model.scale = nn.Parameter(1.0 + torch.randn(8) / 4)
    model.shift = nn.Parameter(torch.randn(8))
    model.other = nn.Parameter(torch.randn(16, 8) / 4)
    model.square = nn.Parameter(torch.randn(8, 8) / 4)
    return model


def norms(recorder) -> list[str]:
    calls = (call for graph in recorder.after for call in calls_of(graph, OPERATOR))
    return [call.kwargs["norm"] for call in calls if "norm" in call.kwargs]


def check(body, expected_norms) -> None:
    recorder = record_as_eager(model_of(body), X)
    assert norms(recorder) == expected_norms
    assert sum("before it within" in site.detail for site in recorder.sites) == len(expected_norms)


@pytest.mark.parametrize("name", ABSORBED)
def test_a_norm_is_computed_within(name):
    check(*ABSORBED[name])


@pytest.mark.parametrize("name", ALONE)
def test_a_norm_that_would_not_be_the_same_stays_outside(name):
    check(ALONE[name], [])


def test_a_block_is_one_call():
    with torch.no_grad():
        recorder, _ = record(model_of(ABSORBED["residual"][0]), X)
    (call,) = (n for n in recorder.after[0].graph.nodes if n.op.startswith("call"))
    assert call.target is OPERATOR
    assert call.args[0] is call.kwargs["residual"]
    assert call.args[0].op == "placeholder"
    assert call.meta["example_value"].shape == X.shape


def test_symbolic_rows_and_symbolic_eps():
    scale = nn.Parameter(torch.randn(8))
    gated = Gated(lambda g, u: F.mish(g) * u)

    def block(x, eps):
        return gated(F.rms_norm(x, (8,), scale, eps))

    with torch.no_grad():
        for dynamic, count in ((False, 1), (True, 0)):
            recorder, result = record(block, X, 0.25, dynamic=dynamic)
            assert len(norms(recorder)) == count
            torch.testing.assert_close(result, block(X, 0.25))
        recorder, result = record(lambda x: block(x, 0.25), X, dynamic=True)
    assert norms(recorder) == ["rms_norm(0.25)"]


@pytest.mark.parametrize("other", ["input", "parameters", "layers", "autocast"])
def test_all_is_computed_in_one_dtype(other):
    model = model_of(lambda m, x: mlp(m, F.layer_norm(x, (8,), m.scale)))
    x = X.clone()
    if other == "parameters":
        model, x = model.bfloat16(), x.bfloat16()
        model.scale.data = model.scale.data.float()  # which a CPU takes
    elif other == "layers":
        model.body = lambda m, x: mlp(m, F.layer_norm(x, (8,)).bfloat16())
        model.bfloat16()
    elif other == "input":
        model.body = lambda m, x: mlp(m, F.layer_norm(x.bfloat16(), (8,)).float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=other == "autocast"):
        recorder, _ = record(model, x)
    assert fused_calls(recorder.after[0]) == 1
    assert norms(recorder) == []


@pytest.mark.parametrize("export", [False, True])
def test_graphs_that_dynamo_did_not_make_are_rewritten_alike(export):
    model = model_of(ABSORBED["residual"][0])
    with torch.no_grad():
        traced = (
            torch.export.export(model, (X,)).module() if export else torch.fx.symbolic_trace(model)
        )
        fused = fuse(traced, [X], ALWAYS).graph_module
        torch.testing.assert_close(fused(X), model(X))
    (call,) = fused.graph.find_nodes(op="call_function", target=OPERATOR)
    assert call.kwargs["norm"] == "layer_norm(1e-05)"


@pytest.mark.parametrize(("name", "norm"), [("layer_norm", nn.LayerNorm), ("rms_norm", nn.RMSNorm)])
def test_modules_in_a_symbolically_traced_graph_are_opened(name, norm):
    model = nn.Sequential(norm(8), nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 8))
    with torch.no_grad():
        fused = fuse(torch.fx.symbolic_trace(model), [X], ALWAYS).graph_module
        torch.testing.assert_close(fused(X), model(X))
    (call,) = fused.graph.find_nodes(op="call_function", target=OPERATOR)
    assert call.kwargs["norm"].startswith(name)
    assert not fused.graph.find_nodes(op="call_module")


def test_a_norm_that_is_learnt_stays_outside():
    model = model_of(ABSORBED["layer norm"][0])
    recorder, result = record(model, X)
    assert fused_calls(recorder.after[0]) == 1
    assert norms(recorder) == []
    assert result.requires_grad


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_norm_of_an_encoder_layer_that_is_put_back_stays_there(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    head = MLP(F.mish)

    def model(x):
        return head(layer(x))

    with torch.no_grad():
        recorder, result = record(model, X)
        torch.testing.assert_close(result, model(X))
    assert fused_calls(recorder.after[0]) >= 1


def normalizes(body) -> bool:
    """Whether the site of a body, planned for an H100, computes the norm before it."""
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU("tanh"), nn.Linear(256, 64)).bfloat16()
    norm, x = nn.LayerNorm(64).bfloat16(), torch.empty(16384, 64).bfloat16()
    with torch.no_grad():
        (site,) = explain(lambda x: body(norm, mlp, x), x, target="h100").sites
    assert site.plan == "back_to_back"
    return "before it within" in site.detail


def narrow(rows, width, gated, dtype):
    activations = (parse("silu(g) * u" if gated else "relu(x)"),)
    layers = (activations, gated, rows, width, 4 * width, (width,))
    return records.MLP(*layers, dtype, torch.device("cuda"), True, True, False)


@pytest.mark.parametrize(
    ("rows", "width", "gated", "dtype", "gains"),
    [
        (1024, 64, False, torch.bfloat16, True),
        (1 << 20, 128, False, torch.float16, True),
        (1 << 20, 64, True, torch.bfloat16, True),
        (1 << 20, 128, True, torch.bfloat16, False),
        (1024, 192, True, torch.float16, True),
        (1025, 192, False, torch.bfloat16, False),
        (2048, 256, False, torch.float16, False),
        (4096, 256, True, torch.bfloat16, False),
        (1024, 64, False, torch.float32, False),
    ],
)
def test_norms_within_gain_where_that_was_measured(rows, width, gated, dtype, gains):
    assert gains_by_norm(narrow(rows, width, gated, dtype), H100) == gains


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_within_gain_where_the_gluon_kernel_runs(dtype):
    pytest.importorskip("triton")
    for rows in (2048, 4096):
        gains = gains_by_norm(narrow(rows, 256, False, dtype), H100)
        assert gains == (has_gluon() and rows == 4096)


def test_a_norm_that_inductor_computes_with_what_comes_before_stays_there():
    assert not normalizes(lambda norm, mlp, x: mlp(norm(torch.sin(x))))
    assert not normalizes(lambda norm, mlp, x: mlp(norm(torch.sin(x).view(128, -1, 64))))
    assert normalizes(lambda norm, mlp, x: mlp(norm(x.view(128, -1, 64))))
    assert normalizes(lambda norm, mlp, x: mlp(norm(F.linear(x, mlp[0].weight[:64]))))
    assert normalizes(lambda norm, mlp, x: (s := torch.sin(x)) + mlp(norm(s)))
