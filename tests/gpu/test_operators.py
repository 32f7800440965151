"""The operators on a GPU: exactness, what Inductor makes of them, and how many kernels run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

import fusion_backend
import fusion_backend.operators
from fusion_backend.kernels.library import library_supports

ops = torch.ops.fusedmlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
ACTIVATIONS = {
    PLAIN: lambda x: F.gelu(x, approximate="tanh"),
    "relu(x)": F.relu,
    GATED: lambda g, u: F.silu(g) * u,
}
CASES = [
    ("epilogue", PLAIN),
    ("epilogue", GATED),
    ("back_to_back", PLAIN),
    ("back_to_back", GATED),
    ("stream", PLAIN),
    ("stream", GATED),
    ("library", PLAIN),
    ("library", "relu(x)"),
    ("reference", PLAIN),
    ("reference", GATED),
]
HALVES = [torch.bfloat16, torch.float16]


def tensors(activation, dtype, *, leading=(300,), width=64, hidden=256, grad=False, bias=True):
    """An input and the six parameters, scaled as those of a trained model."""

    def tensor(*shape):
        scaled = torch.randn(*shape, device="cuda") / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        return scaled.to(dtype).requires_grad_(grad)

    def layer(out_features, in_features):
        return tensor(out_features, in_features), tensor(out_features) if bias else None

    gate = layer(hidden, width) if activation == GATED else (None, None)
    x = torch.randn(*leading, width, device="cuda").to(dtype).requires_grad_(grad)
    return [x, *gate, *layer(hidden, width), *layer(width, hidden)]


def eager(values, activation):
    x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = values
    preacts = [F.linear(x, weight_up, bias_up)]
    if weight_gate is not None:
        preacts.insert(0, F.linear(x, weight_gate, bias_gate))
    return F.linear(ACTIVATIONS[activation](*preacts), weight_down, bias_down)


def double(values):
    return [v if v is None else v.detach().double().requires_grad_(v.requires_grad) for v in values]


def gradients(y, values, upstream):
    asking = [value for value in values if value is not None]
    return torch.autograd.grad(y, asking, upstream.to(y.dtype))


def error(found, exact):
    return (found.double() - exact).norm() / exact.norm()


def mlp(activation, plan):
    return lambda *values: ops.mlp(*values, [], activation, plan)


_NO_KERNELS = ("Memset", "Memcpy")


def kernels(function):
    """Names of the GPU kernels of one warm call.

    Memory sets and copies are not counted, nor is the second step of a product that cuBLAS splits.
    """
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if not name.startswith(_NO_KERNELS)]
    return [name for name in kernels if "splitKreduce" not in name]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("plan", "activation"), CASES)
def test_inference_is_as_exact_as_eager(plan, activation, dtype, compiled):
    values = tensors(activation, dtype)
    function = mlp(activation, plan)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    exact = eager(double(values), activation)
    assert error(function(*values), exact) <= 1.05 * error(eager(values, activation), exact)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("plan", "activation"), CASES)
def test_training_is_as_exact_as_eager(plan, activation, dtype, compiled, dynamic):
    if dynamic and not compiled:
        pytest.skip("nothing to compile")
    values = tensors(activation, dtype, leading=(3, 77), grad=True)
    function = mlp(activation, plan)
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=dynamic)
    upstream, exact_values = torch.randn_like(values[0]), double(values)
    ours, theirs = function(*values), eager(values, activation)
    truth = eager(exact_values, activation)
    assert error(ours, truth) <= 1.05 * error(theirs, truth)
    found = gradients(ours, values, upstream), gradients(theirs, values, upstream)
    for mine, other, right in zip(*found, gradients(truth, exact_values, upstream), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (other.shape, dtype, other.stride())
        assert error(mine, right) <= 1.1 * error(other, right)


@pytest.mark.parametrize("plan", ["epilogue", "back_to_back", "stream"])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_kernel_plans_are_well_behaved_operators(plan, activation):
    values = tensors(activation, torch.bfloat16)
    opcheck(ops.mlp, (*values, [], activation, plan))
    opcheck(ops.mlp_forward, (*values, [], activation, plan))
    y, preact_gate, preact_up = ops.mlp_forward(*values, [], activation, plan)
    x, weight_gate, _, weight_up, _, weight_down, _ = values
    saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, [], activation, plan)
    gated = weight_gate is not None
    opcheck(ops.mlp_backward, (torch.randn_like(y), *saved, [True, gated, gated] + 4 * [True]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("plan", "activation", "count"),
    [
        ("back_to_back", PLAIN, 1),
        ("back_to_back", GATED, 1),
        ("epilogue", PLAIN, 2),
        ("epilogue", GATED, 2),
        ("stream", PLAIN, 2),
        ("stream", GATED, 2),
        ("library", PLAIN, 2),
        ("library", "relu(x)", 2),
    ],
)
def test_inference_takes_one_kernel_or_two(plan, activation, count, compiled):
    values = tensors(activation, torch.bfloat16, leading=(4096,))
    function = mlp(activation, plan)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    with torch.no_grad():
        found = kernels(lambda: function(*values))
    assert len(found) == count, found


def test_inductor_inlines_the_launches_and_calls_no_operator():
    from torch._inductor.utils import run_and_get_code

    values = tensors(GATED, torch.bfloat16, grad=True)
    compiled = torch.compile(mlp(GATED, "epilogue"), fullgraph=True)

    def step():
        compiled(*values).sum().backward()

    _, sources = run_and_get_code(step)
    assert len(sources) == 2
    for source in sources:
        assert ".run(" in source
        assert "torch.ops.fusedmlp" not in source


@pytest.mark.parametrize(("activation", "count"), [(PLAIN, 4), (GATED, 6)])
def test_a_training_step_without_biases_is_products_alone(activation, count):
    """Two forward; backward one for the pre-activations, and one for each weight and each dx."""
    values = tensors(activation, torch.bfloat16, leading=(4096,), grad=True, bias=False)
    compiled = torch.compile(mlp(activation, "epilogue"), fullgraph=True)
    upstream = torch.randn_like(values[0])
    found = kernels(lambda: gradients(compiled(*values), values, upstream))
    assert len(found) == 2 + count, found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("plan", "activation"), CASES)
def test_kernels_run_where_their_tensors_are(plan, activation, compiled):
    values = tensors(activation, torch.bfloat16)
    elsewhere = [v if v is None else v.to("cuda:1") for v in values]
    function = torch.compile(mlp(activation, plan)) if compiled else mlp(activation, plan)
    torch.testing.assert_close(function(*elsewhere).cpu(), mlp(activation, plan)(*values).cpu())


@pytest.mark.parametrize("plan", ["library", "epilogue", "back_to_back", "stream"])
@pytest.mark.parametrize("activation", ["relu(x)", PLAIN])
def test_nan_is_not_hidden(plan, activation):
    values = tensors(activation, torch.bfloat16)
    values[0][:7, 0] = torch.nan
    y = ops.mlp(*values, [], activation, plan)
    assert torch.equal(y.isnan(), eager(values, activation).isnan())


def test_the_library_declines_one_row_and_no_bias():
    supports = {"device_type": "cuda", "in_features": 64, "hidden_features": 256}
    dtype = torch.bfloat16
    assert library_supports(PLAIN, dtype, has_bias_up=True, rows=2, **supports)
    assert not library_supports(PLAIN, dtype, has_bias_up=True, rows=1, **supports)
    assert not library_supports(PLAIN, dtype, has_bias_up=False, rows=2, **supports)
    assert not library_supports("gelu(x)", dtype, has_bias_up=True, rows=2, **supports)


@pytest.mark.parametrize("plan", ["library", "epilogue", "reference"])
@pytest.mark.parametrize("leading", [(), (1,), (2, 0, 3), (2, 3, 5)])
def test_any_leading_dimensions_are_rows(plan, leading):
    values = tensors(PLAIN, torch.bfloat16, leading=leading)
    y = ops.mlp(*values, [], PLAIN, plan)
    assert y.is_contiguous()
    torch.testing.assert_close(y, eager(values, PLAIN), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backward", [False, True])
def test_autocast_computes_as_eager_does(backward):
    values = tensors(GATED, torch.float32, grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, right = ops.mlp(*values, [], GATED, "epilogue"), eager(values, GATED)
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)
    if backward:
        pairs = [gradients(y, values, torch.ones_like(y)) for y in (found, right)]
        for mine, theirs in zip(*pairs, strict=True):
            assert mine.dtype == torch.float32
            assert error(mine, theirs.double()) < 2e-2


def test_exported_programs_name_the_operator_and_run():
    class Module(torch.nn.Module):
        def forward(self, *values):
            return ops.mlp(*values, [], GATED, "epilogue")

    values = tuple(tensors(GATED, torch.bfloat16))
    program = torch.export.export(Module(), values)
    assert any(node.target is ops.mlp.default for node in program.graph.nodes)
    right = ops.mlp(*values, [], GATED, "epilogue")
    torch.testing.assert_close(program.module()(*values), right)
    torch.testing.assert_close(torch.compile(program.module())(*values), right)


CACHED = """
import torch, fusion_backend.operators
from torch._dynamo.utils import counters
up, down = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((256, 64), (64, 256)))
call = lambda x, up, down: torch.ops.fusedmlp.mlp(
    x, None, None, up, None, down, None, [], "gelu(x)", "epilogue"
)
torch.compile(call, fullgraph=True)(torch.randn(100, 64, device="cuda"), up, down).sum().backward()
print(*(counters["aot_autograd"]["autograd_cache_" + name] for name in ("hit", "miss", "bypass")))
"""


def test_a_second_process_takes_launches_from_the_cache(tmp_path):
    root = str(Path(fusion_backend.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CACHED]
    printed = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert printed == ["0 1 0\n", "1 0 0\n"]
