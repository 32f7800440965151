"""The rewrite alone, without torch.compile: on a program of torch.export.

    python examples/export_pass.py

`fuse` takes an exported program, or any GraphModule, and gives back a new one; what it was given
stays as it is. The new program has the signature of the old one: save it, compile it ahead of time.
Its module is an ordinary GraphModule: run it, print it, rewrite it further.
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
    result = fusion_backend.fuse(program, options={"fusedmlp.policy": "always"})

    print(result.exported_program)
    for site in result.sites:
        print(f"{site.form} MLP {site.shape} with activation {site.activation}: {site.detail}")
    with torch.no_grad():
        difference = (result.graph_module(x) - model(x)).abs().max()
    print(f"greatest difference from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
