"""How operators are registered, run eagerly, and taken apart by ahead-of-time autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import inductor, triton_features
from fusion_backend.compat.tracing import FakeTensor, FunctionalTensor, FunctionalTensorMode
from fusion_backend.operators import dispatch

# Plans by which Triton's kernels are launched.
_KERNEL_PLANS = (*dispatch.KERNEL_PLANS, "chain")

Function = Callable[..., Any]


def register(
    library: torch.library.Library,
    implementation: Function,
    schema: str,
    plan: int,
    *,
    fake: Function,
    differentiable: Function,
    autocasting: Callable[[Function, str], Function],
) -> None:
    """Define the operator named after its implementation, with all of its rules.

    Args:
        library: to define it in.
        implementation: of real tensors, and of what is traced.
        schema: name, arguments and results.
        plan: the position of the plan's name among the arguments.
        fake: shapes and dtypes of the results.
        differentiable: the autograd kernel.
        autocasting: makes the autocast kernel of the operator and a type of device.
    """
    name = implementation.__name__
    qualified = f"{library.ns}::{name}"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(getattr(torch.ops, library.ns), name).default
    for device in ("CPU", "CUDA"):
        library.impl(name, _eager(implementation, plan), device)
        library.impl(name, autocasting(operator, device.lower()), f"Autocast{device}")
    library.impl(name, differentiable, "Autograd")
    torch.library.register_fake(qualified, fake, lib=library)
    torch.library.register_torch_dispatch(
        qualified, FunctionalTensorMode, _decomposition(implementation, plan), lib=library
    )


def _decomposition(implementation: Function, plan: int) -> Function:
    """The rule by which functionalization replaces a call by what ``implementation`` does."""

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
        inductor.exporting()
        or (plan == "onednn" and operator is torch.ops.fusedmlp.mlp.default)
        or (plan in _KERNEL_PLANS and triton_features.triton_is_interpreted())
    )


def _eager(implementation: Function, plan: int) -> Function:
    """``implementation`` for real tensors, of which the first decides where kernels run."""

    def kernel(*arguments: Any, **others: Any) -> Any:
        if arguments[plan] not in _KERNEL_PLANS:
            return implementation(*arguments, **others)
        with triton_features.launching_directly(), torch.cuda.device_of(arguments[0]):
            return implementation(*arguments, **others)

    return kernel
