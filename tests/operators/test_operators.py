"""The operators of torch.ops.fusedmlp: what they compute, and how compilers see them."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.errors import PlanError
from operator_calls import GATED, OUT, PLAIN, arguments, calls, compiled_calls, eager
from repetition import slow_but

ops = torch.ops.fusedmlp


def as_double(values):
    return [value.double() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize(
    ("plan", "activation", "grad"),
    slow_but(
        [("reference", GATED, True), ("onednn", PLAIN, False)],
        itertools.product(["reference", "onednn"], [GATED, PLAIN], [True, False]),
    ),
)
def test_mlp_is_a_well_behaved_operator(activation, plan, grad):
    values = arguments(activation, plan)
    for value in values:
        if isinstance(value, torch.Tensor):
            value.requires_grad_(grad)
    opcheck(ops.mlp, values)
    opcheck(ops.mlp, values, {"residual": torch.randn(2, 3, OUT, requires_grad=grad)})


@pytest.mark.parametrize(
    ("activation", "plan"),
    slow_but([(GATED, "onednn")], itertools.product([PLAIN, GATED], ["reference", "onednn"])),
)
def test_the_halves_of_training_are_well_behaved_operators(activation, plan):
    values = arguments(activation, plan)
    x, weight_gate, _, weight_up, _, weight_down = values[:6]
    opcheck(ops.mlp_forward, values)
    y, preact_gate, preact_up = ops.mlp_forward(*values)
    gated = weight_gate is not None
    saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, [], activation, plan)
    for needs in ([True, gated, gated] + 4 * [True], [False] * 7, [True] + [False] * 6):
        opcheck(ops.mlp_backward, (torch.randn_like(y), *saved, needs))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3), (1, 2, 1, 3)])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_any_leading_dimensions_are_rows(activation, leading):
    values = arguments(activation, leading=leading)
    y = ops.mlp(*values)
    assert y.is_contiguous()
    torch.testing.assert_close(y, eager(*values))
    residual = torch.randn(OUT, *leading).movedim(0, -1)
    total = ops.mlp(*values, residual=residual)
    assert total.is_contiguous()
    torch.testing.assert_close(total, eager(*values) + residual)


@pytest.mark.parametrize("bias", [True, False])
def test_transposed_and_strided_tensors_are_read_where_they_lie(bias):
    values = list(arguments(GATED, leading=(3, 5), bias=bias))
    values[0] = values[0].transpose(0, 1)
    for weight in (1, 3, 5):
        values[weight] = values[weight].t().contiguous().t()
    torch.testing.assert_close(ops.mlp(*values), eager(*values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_half_precision_is_at_least_as_exact_as_eager(activation, dtype):
    values = arguments(activation, leading=(500,), dtype=dtype)
    exact = eager(*as_double(values))
    ours, theirs = ((f(*values).double() - exact).norm() for f in (ops.mlp, eager))
    assert ops.mlp(*values).dtype == dtype
    assert ours <= 1.05 * theirs


def test_meta_tensors_have_shapes_only():
    values = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in arguments(GATED)]
    y = ops.mlp(*values)
    assert (y.device.type, y.shape) == ("meta", (2, 3, OUT))


def test_inductor_sees_the_reference_as_plain_aten():
    found = compiled_calls(ops.mlp, *arguments(PLAIN))
    assert "aten.addmm.default" in found
    assert not any("fusedmlp" in name for name in found)


def test_inductor_sees_cublaslt_as_aten():
    with FakeTensorMode(), torch.no_grad():
        values = [torch.empty(v.shape, device="cuda") if isinstance(v, torch.Tensor) else v
                  for v in arguments(PLAIN)[:7]]  # fmt: skip
        tensors = [value for value in values if value is not None]

        def call(x, *layers):
            return (ops.mlp(x, None, None, *layers, [], PLAIN, "library"),)

        found = calls(aot_export_joint_simple(call, tensors, trace_joint=False))
    assert "aten._addmm_activation.default" in found
    assert not any("fusedmlp" in name for name in found)


def test_onednn_stays_one_call():
    with torch.no_grad():
        assert compiled_calls(ops.mlp, *arguments(PLAIN, "onednn")) == ["fusedmlp.mlp.default"]


@pytest.mark.parametrize(
    ("activation", "plan", "dynamic"),
    slow_but(
        [(GATED, "onednn", True)],
        itertools.product([PLAIN, GATED], ["reference", "onednn"], [False, True]),
    ),
)
def test_inductor_computes_what_eager_does(plan, activation, dynamic):
    values = arguments(activation, plan)
    compiled = torch.compile(ops.mlp, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*values), eager(*values))


class Module(torch.nn.Module):
    """An MLP that calls the operator itself."""

    def __init__(self, plan):
        super().__init__()
        self.up, self.down, self.plan = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), plan

    def forward(self, x):
        up, down = self.up, self.down
        layers = (None, None, up.weight, up.bias, down.weight, down.bias)
        return ops.mlp(x, *layers, [], PLAIN, self.plan)


@pytest.mark.parametrize("plan", ["reference", "onednn", "epilogue"])
def test_exported_programs_name_the_operator(plan):
    batch = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(Module(plan), (torch.randn(4, 8),), dynamic_shapes=batch)
    assert calls(program.graph_module) == ["fusedmlp.mlp.default"]
    assert calls(program.run_decompositions().graph_module) == ["fusedmlp.mlp.default"]


def test_exported_programs_survive_a_file():
    module, x, file = Module("reference"), torch.randn(4, 8), io.BytesIO()
    torch.export.save(torch.export.export(module, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), module(x))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("epilogue", "needs a CUDA device or TRITON_INTERPRET=1, got cpu; use plan 'reference'"),
        ("back_to_back", "needs a CUDA device or TRITON_INTERPRET=1, got cpu"),
        ("library", "needs a CUDA device, got cpu"),
        ("fastest", "plan must be one of back_to_back, stream, epilogue, .*, got 'fastest'"),
    ],
)
def test_plans_that_cannot_run_say_what_can(plan, message, monkeypatch):
    monkeypatch.setattr(
        "fusion_backend.compat.triton_features.triton_is_interpreted", lambda: False
    )
    values = arguments("relu(x)", plan)
    with pytest.raises(PlanError, match=message):
        ops.mlp(*values)
    if plan != "library":
        with pytest.raises(PlanError, match=message):
            ops.mlp_forward(*values)


def test_the_activation_must_fit_the_form():
    with pytest.raises(PlanError, match="plain MLP must be an expression of x, got 'silu"):
        ops.mlp(*arguments(PLAIN)[:7], [], GATED, "reference")
    with pytest.raises(PlanError, match="gated MLP must be an expression of g and u, got 'relu"):
        ops.mlp(*arguments(GATED)[:7], [], "relu(x)", "reference")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_and_dtypes_that_do_not_fit_are_refused(device):
    good = [v.to(device) if isinstance(v, torch.Tensor) else v for v in arguments(GATED)]
    for index, name in ((0, "x"), (1, "weight_gate"), (4, "bias_up"), (5, "weight_down")):
        values = list(good)
        values[index] = torch.cat([values[index]] * 2, dim=-1)
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            ops.mlp(*values)
        values[index] = good[index].double()
        with pytest.raises(ValueError, match=f"{name} must be torch.float32 on {device}"):
            ops.mlp(*values)
    for residual in (torch.randn(OUT), torch.randn(2, 3, 1), torch.randn(2, 3, OUT).double()):
        with pytest.raises(ValueError, match="residual must"):
            ops.mlp(*good, residual=residual.to(device))
