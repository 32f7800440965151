"""Autocast: the operators cast as ``torch.nn.functional.linear`` does, and once for the whole MLP.

Eager casts the operands of each linear layer to autocast's dtype. The pointwise work between the
layers then sees that dtype or, for functions on autocast's float32 list, float32; we compute it in
float32 always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import below_autocast


def casting(
    operator: Callable[..., Any], device_type: str, kept: Collection[int | str | None] = ()
) -> Callable[..., Any]:
    """A kernel for autocast's dispatch key that casts eligible tensors and calls ``operator``.

    Args:
        operator: that is called.
        device_type: whose autocast it is.
        kept: positions and names of arguments that may have any dtype, and so stay as they are.
    """

    def kernel(*arguments: Any, **others: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        operands = [
            argument if i in kept else _cast(argument, dtype, device_type)
            for i, argument in enumerate(arguments)
        ]
        others = {
            name: other if name in kept else _cast(other, dtype, device_type)
            for name, other in others.items()
        }
        with below_autocast(device_type):
            return operator(*operands, **others)

    return kernel


def passing(operator: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """A kernel for autocast's dispatch key that calls ``operator`` with its arguments as they are.

    The backward pass computes in the dtypes that the forward pass settled.
    """

    def kernel(*arguments: Any, **others: Any) -> Any:
        with below_autocast(device_type):
            return operator(*arguments, **others)

    return kernel


def _cast(argument: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Cast what autocast finds eligible: floating-point tensors of its device, but not float64."""
    if isinstance(argument, (list, tuple)):
        return [_cast(each, dtype, device_type) for each in argument]
    if not isinstance(argument, Tensor) or argument.device.type != device_type:
        return argument
    if not argument.is_floating_point() or argument.dtype == torch.float64:
        return argument
    return argument.to(dtype)
