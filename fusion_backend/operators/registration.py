"""How operators are registered, run eagerly, and taken apart by ahead-of-time autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat import inductor, triton_features
from fusion_backend.compat.operators import OpOverload, argument_names
from fusion_backend.compat.tracing import FakeTensor, FunctionalTensor, FunctionalTensorMode
from fusion_backend.kernels import registry
from fusion_backend.operators import checkpointing, flops

Function = Callable[..., Any]


class Rules(NamedTuple):
    """What an operator does.

    Attributes:
        implementation: of real tensors, and of what is traced.
        fake: shapes and dtypes of the results.
        differentiable: makes the autograd kernel of the operator.
        autocasting: makes the autocast kernel of the operator and a type of device.
    """

    implementation: Function
    fake: Function
    differentiable: Callable[[Function], Function]
    autocasting: Callable[[Function, str], Function]


def declare(library: torch.library.Library, schema: str) -> OpOverload:
    """Declare an operator in a library and return it: it has a schema, and no rules yet."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    packet = getattr(getattr(torch.ops, library.ns), schema[: schema.index("(")])
    operator: OpOverload = packet.default
    return operator


def register(library: torch.library.Library, operator: OpOverload, rules: Rules) -> None:
    """Give an operator, which a library declares, all of its rules.

    One of its arguments is a plan.
    """
    name, plan = operator.name(), argument_names(operator).index("plan")
    for device in ("CPU", "CUDA"):
        library.impl(name, _eager(rules.implementation, plan), device)
        library.impl(name, rules.autocasting(operator, device.lower()), f"Autocast{device}")
    library.impl(name, rules.differentiable(operator), "Autograd")
    torch.library.register_fake(name, rules.fake, lib=library)
    torch.library.register_torch_dispatch(
        name, FunctionalTensorMode, _decomposition(rules.implementation, plan), lib=library
    )
    checkpointing.register(library, name)
    flops.register(operator)


def _named(plan: str, what: str) -> bool:
    """What a family says of itself; an unknown one is refused where it is to run."""
    return any(getattr(family, what) for family in registry.FAMILIES if family.name == plan)


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

    Some families say so of themselves. Triton's interpreter runs kernels that cannot be traced. An
    exported program must name what it computes, not how one machine launches it.
    """
    return (
        inductor.exporting()
        or (_named(plan, "stays_one_call") and operator is torch.ops.fusedmlp.mlp.default)
        or (_named(plan, "launches_triton") and triton_features.triton_is_interpreted())
    )


def _eager(implementation: Function, plan: int) -> Function:
    """``implementation`` for real tensors, of which the first decides where kernels run."""

    def kernel(*arguments: Any, **others: Any) -> Any:
        if not _named(arguments[plan], "launches_triton"):
            return implementation(*arguments, **others)
        with triton_features.launching_directly(), torch.cuda.device_of(arguments[0]):
            return implementation(*arguments, **others)

    return kernel
