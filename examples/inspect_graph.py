"""See what was fused, what was left alone and why, and the graph before and after.

python examples/inspect_graph.py
"""

from __future__ import annotations

import torch
from torch import nn

import fusion_backend


class Block(nn.Module):
    """A residual MLP, and a second one that also returns what its activation reads."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.encode = nn.Linear(width, hidden)
        self.decode = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.mlp(self.norm(x))
        features = self.encode(x)
        return self.decode(nn.functional.relu(features)), features


def main() -> None:
    # "always": whether this machine would be faster is not the question here.
    explanation = fusion_backend.explain(
        Block(64, 256).eval(), torch.randn(128, 64), options={"fusedmlp.policy": "always"}
    )
    print(explanation)

    print()
    explanation.print_graphs()


if __name__ == "__main__":
    main()
