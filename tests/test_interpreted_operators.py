"""The operators on Triton's interpreter, which must be on before Triton is imported.

Run as part of the suite, this file runs itself once more in a process where it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)

pytest.importorskip("triton")

ops = torch.ops.fusedmlp

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")

PLANS = ["epilogue", "back_to_back"]
ACTIVATIONS = {
    "gelu(x)": F.gelu,
    "square(relu(x))": lambda x: F.relu(x).square(),
    "silu(g) * u": lambda g, u: F.silu(g) * u,
}


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that it would start")
def test_kernel_plans_pass_on_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[1]
    process = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stdout


def arguments(activation, *, leading=(2, 5), grad=False, dtype=torch.float32):
    shapes = [(*leading, 16), (32, 16), (32,), (32, 16), (32,), (24, 32), (24,)]
    values = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    if activation != "silu(g) * u":
        values[1] = values[2] = None
    return values


def eager(values, activation):
    x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = values
    preacts = [F.linear(x, weight_up, bias_up)]
    if weight_gate is not None:
        preacts.insert(0, F.linear(x, weight_gate, bias_gate))
    return F.linear(ACTIVATIONS[activation](*preacts), weight_down, bias_down)


def gradients(y, values):
    return torch.autograd.grad(y.square().sum(), [value for value in values if value is not None])


@interpreted
@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 0, 3)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_inference_is_right(plan, activation, leading):
    values = arguments(activation, leading=leading)
    y = ops.mlp(*values, activation, plan)
    torch.testing.assert_close(y, eager(values, activation), atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_right(plan, activation):
    values = arguments(activation, grad=True)
    y, right = ops.mlp(*values, activation, plan), eager(values, activation)
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    for found, expected in zip(gradients(y, values), gradients(right, values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@interpreted
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_keep_the_operators_whole(backend, dynamic):
    values = arguments("silu(g) * u", grad=True)

    def mlp(*values):
        return ops.mlp(*values, "silu(g) * u", "epilogue")

    y = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=dynamic)(*values)
    right = eager(values, "silu(g) * u")
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    for found, expected in zip(gradients(y, values), gradients(right, values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@interpreted
@pytest.mark.parametrize("activation", ["gelu(x)", "silu(g) * u"])
@pytest.mark.parametrize("plan", PLANS)
def test_operators_are_well_behaved(plan, activation):
    values = arguments(activation)
    opcheck(ops.mlp, (*values, activation, plan))
    opcheck(ops.mlp_forward, (*values, activation, plan))
    y, preact_gate, preact_up = ops.mlp_forward(*values, activation, plan)
    x, weight_gate, _, weight_up, _, weight_down, _ = values
    saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, activation, plan)
    gated = weight_gate is not None
    opcheck(ops.mlp_backward, (torch.randn_like(y), *saved, [True, gated, gated] + 4 * [True]))


@interpreted
def test_autocast_to_float16_runs_kernels_in_float16():
    values = arguments("silu(g) * u", grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        y = ops.mlp(*values, "silu(g) * u", "epilogue")
        right = eager(values, "silu(g) * u")
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, right, atol=0.05, rtol=0.02)
    found = torch.autograd.grad(y.sum(), values)
    assert {gradient.dtype for gradient in found} == {torch.float32}
