"""Which arithmetic products of float32 tensors use."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fusion_backend import compat


def products_in(precision: str) -> AbstractContextManager[None]:
    """Within this context ``tf32`` is TF32, and every other precision what its name says."""
    return compat.multiplying_in_tf32(precision == "tf32")
