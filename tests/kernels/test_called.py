"""Which tensors suit the kernels that generated code calls."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusion_backend.kernels.host.called import suits


def symbolic(x: torch.Tensor) -> torch.Tensor:
    """x with all of its sizes symbolic, as under ``torch.compile(dynamic=True)``."""
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.dim())
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(
        x, symbolic_context=context, source=ConstantSource("x")
    )


@pytest.mark.parametrize("columns", [64, 60])
def test_a_symbolic_stride_counts_once_a_guard_has_made_it_a_number(columns):
    x = symbolic(torch.zeros(100, columns, dtype=torch.bfloat16))
    assert not suits(x)
    assert int(x.shape[1]) == columns  # as the width of a weight does
    assert suits(x) == (columns == 64)


def test_rows_may_lie_apart_by_whole_pieces():
    x = torch.zeros(100, 72, dtype=torch.bfloat16)
    assert suits(x[:, :64])
    assert not suits(torch.zeros(100, 68, dtype=torch.bfloat16)[:, :64])
    assert not suits(x.t())
    assert not suits(x[:, 1:])
