"""Which arithmetic products of float32 tensors use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Within this context ``tf32`` is TF32, and every other precision what its name says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
