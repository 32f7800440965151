"""fuse, torch.export, AOTInductor's package: what was saved is loaded and called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS
from fusion_backend import fuse
from models import Layers
from repetition import slow_but

# A package holds what Inductor generates of ATen's operators: nothing of ours in C++.
pytestmark = pytest.mark.usefixtures("rows_by_reference")

PROGRAMS = {
    "onednn": lambda m, x: m.down(F.gelu(m.up(x))),
    "onednn, gated": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
    "reference": lambda m, x: m.down(torch.sin(m.up(x))),
    "operands": lambda m, x: m.down(torch.sin(m.up(x)) * m.scale),
    "norm and residual": lambda m, x: x + m.down(torch.sin(m.up(m.before(x)))),
    "chain": lambda m, x: m.end(F.relu(m.down(F.relu(m.up(x))))),
    "hidden value": lambda m, x: m.down(m.norm(F.gelu(m.up(x)))),
}


class Several(Layers):
    """All of the programs, of one input."""

    def __init__(self, names):
        super().__init__(None)
        self.scale, self.before = nn.Parameter(torch.rand(16)), nn.LayerNorm(8)
        self.names = names

    def forward(self, x):
        return [PROGRAMS[name](self, x + i) for i, name in enumerate(self.names)]


def packaged_and_called(names, path):
    model = Several(names).eval().requires_grad_(False)
    x = torch.randn(4, 8)
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    with torch.no_grad():
        result = fuse(program.module(), [x], ALWAYS)
    assert [site.rewritten for site in result.sites] == [True] * len(names)
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},)
    fused = torch.export.export(result.graph_module, (x,), dynamic_shapes=shapes)
    # One package is compiled faster than the headers for many.
    settings = {"aot_inductor.precompile_headers": False}
    saved = torch._inductor.aoti_compile_and_package(
        fused, package_path=str(path), inductor_configs=settings
    )
    loaded = torch._inductor.aoti_load_package(saved)
    for rows in (4, 7, 33):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(list(loaded(x)), model(x))


@pytest.mark.slow
def test_a_package_runs_every_plan_of_a_cpu_with_symbolic_rows(tmp_path):
    packaged_and_called(tuple(PROGRAMS), tmp_path / "all.pt2")


@pytest.mark.parametrize("name", slow_but([next(iter(PROGRAMS))], PROGRAMS))
def test_a_package_runs_one_plan_alone(name, tmp_path):
    packaged_and_called((name,), tmp_path / "one.pt2")
