"""Whether products of float32 use TF32: one question, whichever interface of torch set it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def multiplies_in_tf32() -> bool:
    """Whether cuBLAS may round operands of float32 products to TF32: what eager PyTorch does.

    ``fp32_precision`` of cuBLAS is what cuBLAS itself is set by. It knows what was set through the
    older interface (``allow_tf32``, ``set_float32_matmul_precision``) and for all backends at once,
    and can be read whatever came last; the older getters raise once the newer interface was used.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # NVIDIA's libraries then never do
        return False
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def allow_tf32(allowed: bool) -> None:
    """Set how all products of float32 are computed, by both of torch's interfaces.

    Through the older one: the newer agrees with it then, and whoever asks either gets an answer.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@contextmanager
def multiplying_in_tf32(allowed: bool) -> Iterator[None]:
    """:func:`allow_tf32` within this context; both interfaces are left as they were found."""
    torchs: Any = torch.backends
    backends = (torchs.cuda.matmul, torchs.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    older = _older_precision()
    allow_tf32(allowed)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _older_precision() -> str:
    """What the older interface holds; ``"highest"`` where it cannot tell.

    It raises where the newer interface was set to something that it cannot express, most often TF32
    while it holds ``"highest"``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"
