"""Every activation is checked before it is used: what is fused computes what the graph does.

The region of a site, run as the graph has it, and its expression, as it was canonicalised and
recognised, are compared at many points, with their slopes, see ``agreement``. So a wrong rule costs
a fusion, and never a right result. An activation is compared once in a process, which takes
milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from fusion_backend import reasons
from fusion_backend.compat.dispatcher import plain_mode
from fusion_backend.errors import FusionError
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.region import region_of
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.mlp.expression import Call, Constant, Expression, Variable
from fusion_backend.mlp.expression.agreement import difference
from fusion_backend.mlp.expression.philox import scale
from fusion_backend.mlp.expression.points import Values
from fusion_backend.mlp.expression.programs import Program
from fusion_backend.reasons import Refusal


def unverified(match: Match) -> Refusal | None:
    """Why the expression of a site must not be used, or ``None`` where it is what the graph does.

    It warns where it finds a difference, which should not be.
    """
    found = None if match.expression is None else _difference(match, match.expression)
    if found is None:
        return None
    warnings.warn(
        f"fusedmlp leaves an MLP alone as its activation {match.activation!r} is not what the "
        f"graph computes ({found}); please report it",
        stacklevel=2,
    )
    return Refusal(reasons.UNVERIFIED, found)


def _difference(match: Match, expression: Expression) -> str | None:
    result = tensor_of(match.sources[0].linear.node)
    assert result is not None
    kept = _masks(expression)
    try:
        with plain_mode():
            region = region_of(match)
            found = difference(
                region,
                expression,
                tuple(_values(i, name, kept, region) for i, name in enumerate(region.variables)),
                _differentiable(match, region.variables),
                result.dtype,
            )
    except (FusionError, RuntimeError, TypeError, ValueError) as error:
        return f"it does not run by itself: {type(error).__name__}: {error}"
    return None if found is None else str(found)


def _values(index: int, name: str, kept: Mapping[str, float], region: Program) -> Values:
    return "moderate" if index in region.moderate else kept.get(name)


def _differentiable(match: Match, variables: tuple[str, ...]) -> tuple[str, ...]:
    """The variables that gradients may be asked of: projections, and operands that need one."""
    projections = variables[: len(match.sources)]
    operands = zip(variables[len(projections) :], match.operands, strict=True)
    wanted = [
        name
        for name, operand in operands
        if operand.kind != "seed"
        and (tensor := tensor_of(operand.node)) is not None
        and tensor.requires_grad
    ]
    return (*projections, *wanted)


def _masks(expression: Expression) -> dict[str, float]:
    """By the seed of each dropout what an element that is kept is multiplied by."""
    match expression:
        case Call("dropout", (value, Variable(seed), Constant(p))):
            return {**_masks(value), seed: scale(p)}
        case Call(_, arguments):
            return {k: v for argument in arguments for k, v in _masks(argument).items()}
    return {}
