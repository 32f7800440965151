"""Which implementation a plan means.

Everything here is written in ATen operators and kernel launches, so that the same functions run on
real tensors and under tracing. Products want matrices: the leading dimensions of ``x`` become rows
on the way in and are restored on the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat import triton_features
from fusion_backend.errors import PlanError
from fusion_backend.kernels import library, onednn, reference
from fusion_backend.mlp.expression import Expression, parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import (
    MOST_IN_KERNELS,
    Kind,
    as_rows_of,
    check_use,
    kind_of,
    projections,
)
from fusion_backend.mlp.weights import Weights

KERNEL_PLANS = ("back_to_back", "stream", "epilogue")
PLANS = (*KERNEL_PLANS, "library", "rows", "onednn", "reference")

HiddenGradient = Callable[
    [Tensor, Tensor, "Tensor | None", Tensor, Expression, Sequence[Tensor], Sequence[int]],
    "tuple[Tensor | None, Tensor, Tensor, list[Tensor]]",
]


def forward(
    x: Tensor,
    weights: Weights,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The MLP of ``x`` ``(..., in)``, plus the residual, as a contiguous ``(..., out)``.

    A norm comes before the MLP.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, dtype, activation or operands.
    """
    f = checked(plan, x.device, activation, weights.weight_gate is not None, operands)
    rows, values = as_rows(x), [*map(as_rows_of, operands)]
    added = None if residual is None else as_rows(residual)
    if plan == "back_to_back":
        from fusion_backend.kernels import launch

        y = launch.back_to_back(rows, *weights, f, values, residual=added, norm=norm)
        return restore_rows(y, x)
    if plan == "rows":
        from fusion_backend.kernels.cpu_rows import launch as cpu

        layers, gated = weights.by_kind(), weights.weight_gate is not None
        y = cpu.rows(rows, *layers, values, (activation,), gated, added, norm)
        return restore_rows(y, x)
    rows = rows if norm is None else norm(rows)
    if plan == "stream":
        from fusion_backend.kernels import launch

        y = launch.stream(rows, *weights, f, values)
    elif plan == "epilogue":
        y = _epilogue(rows, weights, f, values, save_preact=False, residual=added)[0]
        return restore_rows(y, x)
    elif plan == "library":
        y = library.forward(rows, weights, activation)
    elif plan == "onednn":
        y = onednn.forward(rows, weights, activation)
    else:
        y = reference.forward(rows, weights, f, values)
    y = restore_rows(y, x)
    return y if residual is None else y + residual.contiguous()


def forward_saving(
    x: Tensor, weights: Weights, operands: Sequence[Tensor], activation: str, plan: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The MLP and its pre-activations ``(..., hidden)``; ``None`` for the gate of a plain MLP.

    Where they are recomputed, biases take their place, empty without one: copies, because they may
    be written to before the backward pass.

    The vendors' libraries do not hand out pre-activations: their plans train on the reference.

    Raises:
        PlanError: as :func:`forward`.
    """
    gated = weights.weight_gate is not None
    f = checked(plan, x.device, activation, gated, operands, training=True)
    rows, values = as_rows(x), [*map(as_rows_of, operands)]
    if recomputes(plan, x, weights, operands):
        y = forward(x, weights, operands, activation, plan)
        gate, up = (_copied(bias, x) for bias in (weights.bias_gate, weights.bias_up))
        return y, gate if gated else None, up
    if plan == "rows" and _has_rows_gradients(weights):
        from fusion_backend.kernels.cpu_rows import launch as cpu

        layers = weights.by_kind()
        saved = cpu.rows_saving(rows, *layers, values, activation, gated)
        y, *preacts = (restore_rows(each, x) for each in saved)
        return y, preacts[0] if gated else None, preacts[-1]
    if plan in KERNEL_PLANS:
        y, preact_gate, preact_up = _epilogue(rows, weights, f, values, save_preact=True)
        assert preact_up is not None
    else:
        y, preact_gate, preact_up = reference.forward_saving(rows, weights, f, values)
    if preact_gate is not None:
        preact_gate = restore_rows(preact_gate, x)
    return restore_rows(y, x), preact_gate, restore_rows(preact_up, x)


def recomputes(plan: str, x: Tensor, weights: Weights, operands: Sequence[Tensor]) -> bool:
    """Whether a plan's backward pass computes the pre-activations again, from x."""
    hidden, inner = weights.weight_up.shape
    widths = (inner, hidden, weights.weight_down.shape[0])
    if plan == "rows":
        from fusion_backend.kernels.cpu_rows.support import recomputes_from

        return _has_rows_gradients(weights) and recomputes_from(inner)
    if plan != "back_to_back":
        return False
    from fusion_backend.kernels.support import can_recompute

    return can_recompute(*widths, weights.weight_gate is not None, x.dtype, operands)


def _copied(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if bias is None else bias.clone()


def _has_rows_gradients(weights: Weights) -> bool:
    """Whether the CPU's kernels compute gradients; without any features there is nothing to do."""
    return 0 not in (*weights.weight_up.shape, weights.weight_down.shape[0])


def rows_gradients(
    grad_output: Tensor,
    x: Tensor,
    weights: Weights,
    preacts: tuple[Tensor | None, Tensor],
    operands: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> Iterator[Tensor] | None:
    """The gradients that are asked for under the plan ``rows``; ``None`` if it has no kernel.

    Args:
        grad_output: ``(rows, out)``.
        x: ``(rows, in)``.
        weights: without biases.
        preacts: as :func:`forward_saving` returned them.
        operands: of the activation.
        activation: as text.
        needs: as for ``mlp_backward``.
    """
    if not _has_rows_gradients(weights):
        return None
    from fusion_backend.kernels.cpu_rows import gradient_launch

    given: tuple[Tensor | None, Tensor | None] = preacts
    if recomputes("rows", x, weights, operands):
        gate, up = (None if bias is None or not bias.shape[0] else bias for bias in preacts)
        weights, given = weights._replace(bias_gate=gate, bias_up=up), (None, None)
    values = [*map(as_rows_of, operands)]
    return iter(
        gradient_launch.gradients(grad_output, x, weights, given, values, activation, needs)
    )


def hidden_gradient(plan: str, device: torch.device) -> HiddenGradient:
    """The function that turns the output's gradient into those of what f is of.

    Raises:
        PlanError: the plan is unknown or cannot run on this device.
    """
    check_plan(plan, device)
    if plan in KERNEL_PLANS:
        from fusion_backend.kernels import launch

        return launch.hidden_and_operand_gradients
    return reference.hidden_and_operand_gradients


def joined_hidden_gradient(
    plan: str,
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    has_sums: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``launch.joined_hidden_gradient``, if the plan has kernels."""
    check_plan(plan, grad_output.device)
    if plan not in KERNEL_PLANS:
        return None
    from fusion_backend.kernels import launch

    of_hidden = (preact_gate, preact_up, activation, has_sums)
    return launch.joined_hidden_gradient(grad_output, weight_down, *of_hidden)


def checked(
    plan: str,
    device: torch.device,
    activation: str,
    gated: bool,
    operands: Sequence[Tensor],
    training: bool = False,
) -> Expression:
    """The activation, where the plan can run it.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, activation or operands.
    """
    f = _expression(activation, gated)
    check_plan(plan, device)
    _check_operands(plan, operands, f, training)
    return f


def check_plan(plan: str, device: torch.device) -> None:
    """Refuse a plan that does not exist, or whose kernels cannot run on ``device``."""
    if plan not in PLANS:
        raise PlanError(f"plan must be one of {', '.join(PLANS)}, got {plan!r}")
    if (
        plan in KERNEL_PLANS
        and device.type != "cuda"
        and not triton_features.triton_is_interpreted()
    ):
        raise PlanError(
            f"plan {plan!r} needs a CUDA device or TRITON_INTERPRET=1, got {device.type}; "
            "use plan 'reference'"
        )
    if plan == "rows" and device.type not in ("cpu", "meta"):
        raise PlanError(f"plan 'rows' is for CPUs, got {device.type}; use plan 'reference'")


def plan_takes(plan: str, kinds: Sequence[Kind], training: bool) -> bool:
    """Whether a plan runs an MLP whose activation has operands of these kinds.

    Args:
        plan: one of :data:`PLANS`.
        kinds: what the operands are, by :func:`fusion_backend.mlp.operands.kind_of`.
        training: whether gradients are wanted: the libraries' plans train on the reference.
    """
    return _untaken(plan, kinds, training) is None


def _untaken(plan: str, kinds: Sequence[Kind], training: bool) -> int | None:
    """The first operand that a plan cannot take."""
    if plan in KERNEL_PLANS:
        if plan == "stream" and not training and "seed" in kinds:
            return kinds.index("seed")  # its shares of columns cut through what one draw serves
        return MOST_IN_KERNELS if len(kinds) > MOST_IN_KERNELS else None
    return None if training or not kinds or plan in ("rows", "reference") else 0


def _check_operands(
    plan: str, operands: Sequence[Tensor], activation: Expression, training: bool
) -> None:
    check_use(activation, operands)
    kinds = [*map(kind_of, operands)]
    index = _untaken(plan, kinds, training)
    if index is not None:
        raise PlanError(
            f"plan {plan!r} cannot take the {kinds[index]} p{index} of {activation}; "
            "use plan 'reference'"
        )


def as_rows(tensor: Tensor) -> Tensor:
    """``(..., features)`` as ``(rows, features)``."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def restore_rows(rows: Tensor, like: Tensor) -> Tensor:
    """``(rows, features)``, to which nothing else refers, with the leading dimensions of ``like``.

    The result is no view to autograd, as that of ATen's own products is not: in compiled code it
    may be written to in place.
    """
    if like.dim() == 2:
        return rows
    result: Tensor = torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))
    return result


def _epilogue(
    x: Tensor,
    weights: Weights,
    activation: Expression,
    operands: Sequence[Tensor],
    save_preact: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from fusion_backend.kernels import launch

    postact, preact_gate, preact_up = launch.epilogue(
        x, *weights[:4], activation, save_preact, operands
    )
    layer = weights.weight_down, weights.bias_down
    if residual is None:
        return F.linear(postact, *layer), preact_gate, preact_up
    return launch.linear(postact, *layer, residual), preact_gate, preact_up


@functools.cache
def _expression(activation: str, gated: bool) -> Expression:
    """Read the activation, which speaks of ``x``, or of ``g`` and ``u`` where the MLP is gated."""
    expression = parse(activation)
    known = {"g", "u"} if gated else {"x"}
    if not known.issuperset(projections(expression)):
        raise PlanError(
            f"the activation of a {'gated' if gated else 'plain'} MLP must be an expression of "
            f"{' and '.join(sorted(known))}, got {activation!r}"
        )
    return expression
