"""Keep backend="inductor" and add the rewrite to it as a pass.

    python examples/inductor_pass.py

`FusionPass` is a pass of Inductor's own kind: its `uuid` is a hash of its source and options, so
Inductor's caches keep working and never serve code that an older version of the pass has made.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend import Options
from fusion_backend.inductor_pass import FusionPass


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    x = torch.randn(8, 64)

    compiled = torch.compile(
        model,
        backend="inductor",
        options={"pre_grad_custom_pass": FusionPass(Options(policy="always"))},
    )
    with torch.no_grad():
        difference = (compiled(x) - model(x)).abs().max()
    print(f"greatest difference from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
