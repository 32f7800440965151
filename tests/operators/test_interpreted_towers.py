"""``fusedmlp::towers`` on the plan ``chain``, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from kernel_cases import interpreted, loops_are_broken
from repetition import slow_but

ops = torch.ops.fusedmlp

pytestmark = [interpreted, loops_are_broken]


def tensors(leading=(2, 5), grad=False):
    shapes = [(*leading, 13), (32, 13), (20, 32), (3, 20), (16, 13), (1, 16), (32,), (1,)]
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def arguments(values):
    x, *weights, first, last = values
    biases = [first, None, None, None, last]
    return (x, weights, biases, ["gelu(x)", "relu(x)", "tanh(x)"], [3, 2], "chain")


def towers(*values):
    return tuple(ops.towers(*arguments(values)))


def eager(*values):
    x, w_0, w_1, w_2, v_0, v_1, first, last = values
    policy = F.linear(F.relu(F.linear(F.gelu(F.linear(x, w_0, first)), w_1)), w_2)
    return policy, F.linear(F.tanh(F.linear(x, v_0)), v_1, last)


def gradients(function, values):
    return torch.autograd.grad([y.sum() for y in function(*values)], values)


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 0, 3)])
def test_inference_is_right(leading):
    values = tensors(leading)
    torch.testing.assert_close(towers(*values), eager(*values), atol=1e-4, rtol=1e-4)


def test_training_is_right():
    values = tensors(grad=True)
    found, right = (gradients(f, values) for f in (towers, eager))
    torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)


def test_it_is_a_well_behaved_operator():
    opcheck(ops.towers, arguments(tensors()))


@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiled_graphs_keep_the_operator_whole(backend):
    values = tensors(grad=True)
    compiled = torch.compile(towers, backend=backend, fullgraph=True)
    found, right = (gradients(f, values) for f in (compiled, eager))
    torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)
