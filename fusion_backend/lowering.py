"""How calls of the operators run eagerly, and what ahead-of-time autograd makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fusion_backend import compat, dispatch


def decomposition(implementation: Callable[..., Any], plan: int) -> Callable[..., Any]:
    """The rule by which functionalization replaces a call by what ``implementation`` does.

    Args:
        implementation: of the operator.
        plan: the position of the plan's name among its arguments.
    """

    def rule(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(t is Tensor or issubclass(t, (FunctionalTensor, FakeTensor)) for t in types):
            return NotImplemented  # a tensor subclass that has rules of its own
        if _stays_whole(operator, args[plan]):
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        with mode:
            return implementation(*args, **kwargs)

    return rule


def _stays_whole(operator: Any, plan: str) -> bool:
    """Whether ahead-of-time autograd leaves a call as it is.

    oneDNN's products cannot be lowered by Inductor unless their weights are constants, and one call
    is cheaper than two. Triton's interpreter runs kernels that cannot be traced. An exported
    program must name what it computes, not how one machine launches it.
    """
    return (
        compat.exporting()
        or (plan == "onednn" and operator is torch.ops.fusedmlp.mlp.default)
        or (plan in dispatch.KERNEL_PLANS and compat.triton_is_interpreted())
    )


def eager(implementation: Callable[..., Any], plan: int) -> Callable[..., Any]:
    """``implementation`` for real tensors; ``plan`` as for :func:`decomposition`."""

    def kernel(*arguments: Any) -> Any:
        if arguments[plan] not in dispatch.KERNEL_PLANS:
            return implementation(*arguments)
        with compat.launching_directly():
            return implementation(*arguments)

    return kernel
