"""Which arithmetic products of float32 tensors use."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fusion_backend.compat import tf32


def products_in(precision: str) -> AbstractContextManager[None]:
    """Within this context ``tf32`` is TF32, and every other precision what its name says."""
    return tf32.multiplying_in_tf32(precision == "tf32")
