"""Eager programs that round otherwise: what a rounding decides, such as the side of a jump."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

HALF = (torch.bfloat16, torch.float16)


class RoundingOtherwise(TorchDispatchMode):
    """Moves whatever is computed in bfloat16 and float16 by at most one unit in its last place.

    Views and writes are what they were of values that have been moved.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        results = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return results
        return tree_map(self._moved, results)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in HALF:
            return value
        by = 2 * torch.rand(value.shape, generator=self._generator) - 1
        return value.copy_(value.float() * (1 + torch.finfo(value.dtype).eps * by))
