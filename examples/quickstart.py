"""Compile a model with the backend and see that it computes the same.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Linear(768, 3072), nn.GELU(approximate="tanh"), nn.Linear(3072, 768)
    ).to(device)
    x = torch.randn(16, 768, device=device)

    compiled = torch.compile(model, backend="fusedmlp")
    with torch.no_grad():
        expected, actual, exact = model(x), compiled(x), model.double()(x.double())

    print(f"16 rows of 768 on {device}")
    print(f"eager against float64:    {relative_error(expected, exact):.1e}")
    print(f"fusedmlp against float64: {relative_error(actual, exact):.1e}")


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference, relative to the exact values' own."""
    return ((actual - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
