"""Memory of training steps on a GPU: what is kept, and what is computed again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from kernel_cases import gluon_on_gpu

ROWS, WIDTH, HIDDEN = 8192, 768, 3072


class Mlp(nn.Module):
    def __init__(self, gated: bool, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden) if gated else None
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        up = self.up(x)
        if self.gate is None:
            return self.down(F.gelu(up, approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * up)


def blocks(gated: bool) -> nn.Module:
    """Several MLPs: what each keeps is held until all have run."""
    layers = (m for _ in range(4) for m in (nn.LayerNorm(WIDTH), Mlp(gated)))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def step_of(
    model: nn.Module, backend: str, options: dict[str, object] | None = None, size=(ROWS, WIDTH)
):
    """The peak of a step above what is resident after it, in bytes, and its gradients."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, options=options)
    torch.manual_seed(1)
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        compiled(x).backward(grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return peak, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_recompute_takes_less_memory(gated):
    torch.manual_seed(0)
    model = blocks(gated)
    always = {"fusedmlp.policy": "always"}
    kept, expected = step_of(model, "fusedmlp", always)
    again, found = step_of(model, "fusedmlp", {**always, "fusedmlp.recompute": True})
    # Of four MLPs' pre-activations one is there at a time.
    preact = (2 if gated else 1) * ROWS * HIDDEN * 2
    assert again < kept - 2 * preact
    check_alike(found, expected)


@gluon_on_gpu
@pytest.mark.parametrize(
    ("gated", "rows", "width", "hidden", "most"),
    [
        (False, ROWS, WIDTH, HIDDEN, 0.7),
        (True, ROWS, WIDTH, HIDDEN, 0.8),
        (True, 2048, 2048, 5632, 0.8),
    ],
    ids=["plain", "gated", "gated, wide"],
)
def test_a_step_takes_less_memory_than_inductors(gated, rows, width, hidden, most):
    """Gradients take the memory of the pre-activations that they are of."""
    torch.manual_seed(0)
    model = Mlp(gated, width, hidden).to("cuda", torch.bfloat16)
    always = {"fusedmlp.policy": "always"}
    unfused, expected = step_of(model, "inductor", size=(rows, width))
    fused, found = step_of(model, "fusedmlp", always, size=(rows, width))
    assert fused <= most * unfused
    check_alike(found, expected)


@gluon_on_gpu
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_second_backward_pass_is_right_where_nothing_is_given_for_good(gated):
    torch._dynamo.reset()  # what was compiled for such a model before takes what is saved
    torch.manual_seed(0)
    model = Mlp(gated).to("cuda", torch.bfloat16)
    options = {"fusedmlp.policy": "always"}
    compiled = torch.compile(model, backend="fusedmlp", options=options)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad, leaves = torch.randn_like(x), [x, *model.parameters()]
    with torch._functorch.config.patch(donated_buffer=False):
        y = compiled(x)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        second = torch.autograd.grad(y, leaves, grad)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def check_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps
