"""From nn.Linear to a fused MLP: count the kernels of a GeGLU MLP, and time them.

    python examples/profile_mlp.py

Three ways to run `W_down(gelu(W_gate x) * W_up x)` at the sizes 768/3072:

1. eager: three matrix products, and one kernel each for GELU and for the multiplication;
2. Inductor: the same three products, GELU and multiplication in one kernel;
3. fusedmlp: both products of the pair, GELU and the multiplication in one kernel, then the last
   product. On a CPU nothing fuses a gated MLP, and the table says so by showing the same counts.
"""

from __future__ import annotations

import torch
from torch import nn

import fusion_backend


class GeGLU(nn.Module):
    """A gated MLP: `down(gelu(gate(x)) * up(x))`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


def main() -> None:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    rows = 8192 if on_gpu else 64
    model = GeGLU(768, 3072).to(device, dtype).eval()
    x = torch.randn(rows, 768, device=device, dtype=dtype)

    print(f"GeGLU 768/3072, {rows} rows, {dtype} on {device}")
    with torch.no_grad():
        print(fusion_backend.explain(model, x))
        print(fusion_backend.profile(model, x))


if __name__ == "__main__":
    main()
