"""The plan ``chain`` on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend import explain
from kernel_cases import interpreted, loops_are_broken
from repetition import slow_but

ops = torch.ops.fusedmlp

pytestmark = [interpreted, loops_are_broken]


def tensors(leading=(2, 5), grad=False):
    shapes = [(*leading, 13), (32, 13), (20, 32), (3, 20), (32,), (3,)]
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def chain(*values):
    x, *weights, first, last = values
    return ops.chain(x, weights, [first, None, last], ["gelu(x)", "relu(x)"], "chain")


def eager(*values):
    x, w_0, w_1, w_2, first, last = values
    return F.linear(F.relu(F.linear(F.gelu(F.linear(x, w_0, first)), w_1)), w_2, last)


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 0, 3)])
def test_inference_is_right(leading):
    values = tensors(leading)
    torch.testing.assert_close(chain(*values), eager(*values), atol=1e-4, rtol=1e-4)


def test_training_is_right():
    values = tensors(grad=True)
    found, right = (torch.autograd.grad(f(*values).sum(), values) for f in (chain, eager))
    torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)


def test_it_is_a_well_behaved_operator():
    x, *weights, first, last = tensors()
    opcheck(ops.chain, (x, weights, [first, None, last], ["gelu(x)", "relu(x)"], "chain"))


@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiled_graphs_keep_the_operator_whole(backend):
    values = tensors(grad=True)
    compiled = torch.compile(chain, backend=backend, fullgraph=True)
    found, right = (torch.autograd.grad(f(*values).sum(), values) for f in (compiled, eager))
    torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 24), torch.nn.Linear(24, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_compiled_model_runs_its_residual_blocks_as_one_kernel():
    model = torch.nn.Sequential(
        Block(12), Block(12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 3)
    )
    x = torch.randn(5, 12)
    with torch.no_grad():
        explanation = explain(model, x, options={"fusedmlp.policy": "always"})
        compiled = torch.compile(
            model, backend="fusedmlp", options={"fusedmlp.policy": "always"}, fullgraph=True
        )
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    (site,) = explanation.sites
    assert (site.form, site.plan) == ("chain", "chain")
    assert "3 norms and 2 sums of its values within" in site.detail
