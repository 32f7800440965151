"""An activation that nobody foresaw is fused like any other, forward and backward.

    python examples/unforeseen_activation.py

The activation is not looked up by name: the pointwise operations between the two linear layers
are read from the graph, become an expression, and the expression is differentiated. The policy
"always" is used so that the example fuses on a CPU too, where training is otherwise Inductor's.
"""

from __future__ import annotations

import torch
from torch import nn

import fusion_backend


class WavyGate(nn.Module):
    """`down(sin(g) * sigmoid(1.5 g) * u + 0.1 relu(g)²)` of a gate g and a value u."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.value = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.gate(x), self.value(x)
        hidden = torch.sin(gate) * torch.sigmoid(1.5 * gate) * value
        return self.down(hidden + 0.1 * torch.relu(gate) ** 2)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = WavyGate(64, 256).to(device)
    x = torch.randn(32, 64, device=device, requires_grad=True)

    explanation = fusion_backend.explain(model, x, options={"fusedmlp.policy": "always"})
    (site,) = explanation.sites
    print(f"activation: {site.activation}")

    compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    exact = values_and_gradients(model.double(), x.double())
    eager = values_and_gradients(model.float(), x)
    fused = values_and_gradients(compiled, x)
    print(f"{'relative error of':24} {'eager':>8} {'fusedmlp':>8}")
    for name in exact:
        errors = [relative_error(found[name], exact[name]) for found in (eager, fused)]
        print(f"{name:24} {errors[0]:8.1e} {errors[1]:8.1e}")


def values_and_gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of its sum of squares by the input and the parameters."""
    x = x.detach().requires_grad_()
    output = model(x)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(output.square().sum(), [x, *parameters.values()])
    names = ["x", *(name.removeprefix("_orig_mod.") for name in parameters)]
    return {"output": output.detach()} | dict(zip(names, gradients, strict=True))


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference, relative to the exact values' own."""
    return ((actual - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
