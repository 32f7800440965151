"""The first layers of an MLP and its activation, by plan.

    preact = x W_1ᵀ + b_1             one or two products
    hidden = f(preact)                in float32 at least, rounded once

As in :mod:`fusion_backend.operators.dispatch`, everything runs on real tensors and under tracing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusion_backend.kernels import registry
from fusion_backend.mlp.operands import as_rows_of
from fusion_backend.mlp.weights import FirstLayer
from fusion_backend.operators import dispatch


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
    family = registry.named(plan, registry.of_first_layers(), "the plan of activated_linear")
    family.check_device(x.device)
    gated = first.weight_gate is not None
    f = dispatch.checked(family, activation, gated, operands, training=save_preact)
    rows, values = dispatch.as_rows(x), [*map(as_rows_of, operands)]
    return family.run_first_layers(rows, first, f, values, save_preact)
