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
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        up = self.up(x)
        if self.gate is None:
            return self.down(F.gelu(up, approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * up)


def blocks(gated: bool) -> nn.Module:
    """Several MLPs: what each keeps is held until all have run."""
    layers = (m for _ in range(4) for m in (nn.LayerNorm(WIDTH), Mlp(gated)))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def step_of(model: nn.Module, backend: str, options: dict[str, object] | None = None):
    """The peak of a step above what is resident, in bytes, and its gradients."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, options=options)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(x).backward(grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - resident
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
@pytest.mark.parametrize(("gated", "saved"), [(False, 0.5), (True, -0.1)], ids=["plain", "gated"])
def test_the_activation_takes_the_memory_of_what_it_is_computed_of(gated, saved):
    """A plain step takes half a hidden value less than Inductor's at least, a gated one as much."""
    torch.manual_seed(0)
    model = Mlp(gated).to("cuda", torch.bfloat16)
    always = {"fusedmlp.policy": "always"}
    unfused, expected = step_of(model, "inductor")
    fused, found = step_of(model, "fusedmlp", always)
    assert fused < unfused - saved * ROWS * HIDDEN * 2
    check_alike(found, expected)


def check_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps
