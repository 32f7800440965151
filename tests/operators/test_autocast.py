"""Autocast: the operators cast as torch.nn.functional.linear does."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels.onednn import onednn_supports
from repetition import slow_but

ops = torch.ops.fusedmlp
HALVES = [torch.bfloat16, torch.float16]


def tensors(dtype=torch.float32):
    """An input, and a gated MLP with biases."""
    shapes = ((2, 3, 8), (16, 8), (16,), (16, 8), (16,), (8, 16), (8,))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def mlp(*values, plan="reference"):
    return ops.mlp(*values, [], "silu(g) * u", plan)


def eager(x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down):
    gate = F.silu(F.linear(x, weight_gate, bias_gate))
    return F.linear(gate * F.linear(x, weight_up, bias_up), weight_down, bias_down)


@pytest.fixture
def without_caches():
    """Torch 2.11 takes a graph compiled for one dtype of autocast for that of another."""
    with inductor_config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize(
    ("backend", "dtype"),
    slow_but(
        [(None, torch.bfloat16), ("aot_eager", torch.float16)],
        itertools.product([None, "aot_eager", "inductor"], HALVES),
    ),
)
def test_training_computes_in_autocasts_dtype_and_keeps_float32_gradients(
    dtype, backend, without_caches
):
    values = tensors()
    function = mlp if backend is None else torch.compile(mlp, backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=dtype):
        found, right = function(*values), eager(*values)
    assert found.dtype == right.dtype == dtype
    torch.testing.assert_close(found, right, atol=0.1, rtol=0.02)
    upstream = torch.randn_like(found)
    pairs = [torch.autograd.grad(y, values, upstream) for y in (found, right)]
    for mine, theirs in zip(*pairs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, atol=0.5, rtol=0.05)


@pytest.mark.parametrize("plan", ["reference", "onednn"])
@pytest.mark.parametrize("dtype", HALVES)
def test_inference_computes_in_autocasts_dtype(dtype, plan):
    if plan == "onednn" and not onednn_supports("silu(g) * u", dtype):
        pytest.skip(f"oneDNN does not compute in {dtype} on this CPU")
    values = tensors()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        found, right = mlp(*values, plan=plan), eager(*values)
    assert found.dtype == dtype
    torch.testing.assert_close(found, right, atol=0.1, rtol=0.02)


def test_operands_of_different_dtypes_meet_in_autocasts_dtype():
    values = tensors()
    values[1] = values[1].detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(*values).dtype == eager(*values).dtype == torch.bfloat16


def test_float64_is_left_alone():
    values = tensors(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(*values).dtype == eager(*values).dtype == torch.float64


def test_autocast_of_another_device_changes_nothing():
    values = tensors()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        assert mlp(*values).dtype == torch.float32


def test_a_backward_pass_inside_autocast_computes_what_one_outside_does():
    values = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mlp(*values)
        inside = torch.autograd.grad(found.sum(), values, retain_graph=True)
    torch.testing.assert_close(inside, torch.autograd.grad(found.sum(), values))


def test_autocast_does_not_reach_into_the_backward_pass_of_a_float32_forward_pass():
    values = tensors()
    found = mlp(*values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(found.sum(), values, retain_graph=True)
    torch.testing.assert_close(inside, torch.autograd.grad(found.sum(), values), atol=0, rtol=0)
