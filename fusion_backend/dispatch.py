"""Which implementation a plan means.

Everything here is written in ATen operators and kernel launches, so that the same functions run on
real tensors and under tracing. Products want matrices: the leading dimensions of ``x`` become rows
on the way in and are restored on the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import compat, library, onednn, reference
from fusion_backend.errors import PlanError
from fusion_backend.expression import Expression, parse, variables
from fusion_backend.weights import Weights

KERNEL_PLANS = ("back_to_back", "stream", "epilogue")
PLANS = (*KERNEL_PLANS, "library", "onednn", "reference")

HiddenGradient = Callable[
    [Tensor, Tensor, "Tensor | None", Tensor, Expression], "tuple[Tensor | None, Tensor, Tensor]"
]


def forward(x: Tensor, weights: Weights, activation: str, plan: str) -> Tensor:
    """The MLP of ``x`` ``(..., in)`` as a contiguous ``(..., out)``.

    Raises:
        PlanError: the plan is unknown or cannot run on this device or activation.
    """
    f = _expression(activation, weights.weight_gate is not None)
    check_plan(plan, x.device)
    rows = as_rows(x)
    if plan == "back_to_back":
        from fusion_backend.kernels import launch

        y = launch.back_to_back(rows, *weights, f)
    elif plan == "stream":
        from fusion_backend.kernels import launch

        y = launch.stream(rows, *weights, f)
    elif plan == "epilogue":
        y, _, _ = _epilogue(rows, weights, f, save_preact=False)
    elif plan == "library":
        y = library.forward(rows, weights, activation)
    elif plan == "onednn":
        y = onednn.forward(rows, weights, activation)
    else:
        y = reference.forward(rows, weights, f)
    return restore_rows(y, x)


def forward_saving(
    x: Tensor, weights: Weights, activation: str, plan: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The MLP and its pre-activations ``(..., hidden)``; ``None`` for the gate of a plain MLP.

    The vendors' libraries do not hand out pre-activations: their plans train on the reference.

    Raises:
        PlanError: as :func:`forward`.
    """
    f = _expression(activation, weights.weight_gate is not None)
    check_plan(plan, x.device)
    if plan in KERNEL_PLANS:
        y, preact_gate, preact_up = _epilogue(as_rows(x), weights, f, save_preact=True)
        assert preact_up is not None
    else:
        y, preact_gate, preact_up = reference.forward_saving(as_rows(x), weights, f)
    if preact_gate is not None:
        preact_gate = restore_rows(preact_gate, x)
    return restore_rows(y, x), preact_gate, restore_rows(preact_up, x)


def hidden_gradient(plan: str, device: torch.device) -> HiddenGradient:
    """The function that turns the output's gradient into those of the pre-activations.

    Raises:
        PlanError: the plan is unknown or cannot run on this device.
    """
    check_plan(plan, device)
    if plan in KERNEL_PLANS:
        from fusion_backend.kernels import launch

        return launch.hidden_gradient
    return reference.hidden_gradient


def check_plan(plan: str, device: torch.device) -> None:
    """Refuse a plan that does not exist, or whose kernels cannot run on ``device``."""
    if plan not in PLANS:
        raise PlanError(f"plan must be one of {', '.join(PLANS)}, got {plan!r}")
    if plan in KERNEL_PLANS and device.type != "cuda" and not compat.triton_is_interpreted():
        raise PlanError(
            f"plan {plan!r} needs a CUDA device or TRITON_INTERPRET=1, got {device.type}; "
            "use plan 'reference'"
        )


def as_rows(tensor: Tensor) -> Tensor:
    """``(..., features)`` as ``(rows, features)``."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def restore_rows(rows: Tensor, like: Tensor) -> Tensor:
    """``(rows, features)`` with the leading dimensions of ``like``."""
    return rows.view(*like.shape[:-1], rows.shape[-1])


def _epilogue(
    x: Tensor, weights: Weights, activation: Expression, save_preact: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from fusion_backend.kernels import launch

    postact, preact_gate, preact_up = launch.epilogue(x, *weights[:4], activation, save_preact)
    return F.linear(postact, weights.weight_down, weights.bias_down), preact_gate, preact_up


@functools.cache
def _expression(activation: str, gated: bool) -> Expression:
    """Read the activation, which speaks of ``x``, or of ``g`` and ``u`` where the MLP is gated."""
    expression = parse(activation)
    known = {"g", "u"} if gated else {"x"}
    if not known.issuperset(variables(expression)):
        raise PlanError(
            f"the activation of a {'gated' if gated else 'plain'} MLP must be an expression of "
            f"{' and '.join(sorted(known))}, got {activation!r}"
        )
    return expression
