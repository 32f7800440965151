"""The rewrite alone, without torch.compile: on a program of torch.export.

    python examples/export_pass.py

`fuse` takes any GraphModule whose nodes carry example values and gives back a new one; what it was
given stays as it is. The result is an ordinary GraphModule: run it, print it, rewrite it further.
"""

from __future__ import annotations

import torch
from torch import nn

import fusion_backend


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)).eval()
    x = torch.randn(8, 64)

    program = torch.export.export(model, (x,))
    result = fusion_backend.fuse(program.module(), (x,), fusion_backend.Options(policy="always"))

    print(result.graph_module.graph)
    for site in result.sites:
        print(f"{site.form} MLP {site.shape} with activation {site.activation}: {site.detail}")
    with torch.no_grad():
        difference = (result.graph_module(x) - model(x)).abs().max()
    print(f"greatest difference from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
