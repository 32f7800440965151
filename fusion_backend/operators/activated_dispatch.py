"""The first layers of an MLP and its activation, by plan.

    preact = x W_1ᵀ + b_1             one or two products
    hidden = f(preact)                in float32 at least, rounded once

As in :mod:`fusion_backend.operators.dispatch`, everything runs on real tensors and under tracing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.mlp.operands import as_rows_of
from fusion_backend.mlp.weights import FirstLayer
from fusion_backend.operators import dispatch

PLANS = ("epilogue", "reference")


def forward(
    x: Tensor, first: FirstLayer, operands: Sequence[Tensor], activation: str, plan: str
) -> Tensor:
    """The activation ``(..., hidden)``, contiguous, of ``x`` ``(..., in)``.

    Raises:
        PlanError: the plan is none of these, or cannot run on this device, activation or operands.
    """
    hidden, _, _ = _run(x, first, operands, activation, plan, save_preact=False)
    return dispatch.restore_rows(hidden, x)


def forward_saving(
    x: Tensor, first: FirstLayer, operands: Sequence[Tensor], activation: str, plan: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The activation and its pre-activations ``(..., hidden)``; ``None`` where no gate is.

    Raises:
        PlanError: as :func:`forward`.
    """
    hidden, gate, up = _run(x, first, operands, activation, plan, save_preact=True)
    assert up is not None
    restored = None if gate is None else dispatch.restore_rows(gate, x)
    return dispatch.restore_rows(hidden, x), restored, dispatch.restore_rows(up, x)


def _run(
    x: Tensor,
    first: FirstLayer,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
    save_preact: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if plan not in PLANS:
        raise PlanError(
            f"the plan of activated_linear must be one of {', '.join(PLANS)}, got {plan!r}"
        )
    gated = first.weight_gate is not None
    f = dispatch.checked(plan, x.device, activation, gated, operands, training=save_preact)
    rows, values = dispatch.as_rows(x), [*map(as_rows_of, operands)]
    if plan == "epilogue":
        from fusion_backend.kernels import launch

        return launch.epilogue(rows, *first, f, save_preact, values)
    gate = None
    if first.weight_gate is not None:
        gate = F.linear(rows, first.weight_gate, first.bias_gate)
    up = F.linear(rows, first.weight_up, first.bias_up)
    hidden = reference.activate(gate, up, f, values).contiguous()
    # An activation may be one of its variables; what is returned must be a tensor of its own.
    return hidden.clone() if hidden is gate or hidden is up else hidden, gate, up
