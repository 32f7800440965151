"""The family of kernels that a call names, and what is the same for all.

Everything here is written in ATen operators and kernel launches, so that the same functions run on
real tensors and under tracing. Products want matrices: the leading dimensions of ``x`` become rows
on the way in and are restored on the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusion_backend.errors import PlanError
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression, parse, variables
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.operands import check_use, kind_of, projections
from fusion_backend.operators.arguments import Given, or_empty, restore_rows
from fusion_backend.operators.operator import Operator


def forward(operator: Operator, *arguments: Any, **around: Any) -> Tensor:
    """The result ``(..., out)`` of ``x`` ``(..., in)``, plus the residual, contiguous.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, dtype, activation or operands.
        ValueError: tensors do not fit.
    """
    given = operator.checked(*arguments, **around)
    family = operator.family_of(given.plan, given.x.device)
    functions = expressions_of(operator, family, given)
    residual = given.residual
    rows = (given if family.adds_residual else given._replace(residual=None)).in_rows()
    if rows.norm is not None and not family.computes_norm:
        rows = rows._replace(x=rows.norm(rows.x), norm=None)
    y = restore_rows(operator.run(family, rows, functions), given.x)
    return y if residual is None or family.adds_residual else y + residual.contiguous()


def composed(operator: Operator, *arguments: Any, **around: Any) -> Tensor:
    """The operator as ATen operators, for all that looks at each of them."""
    *tensors_and_activations, _ = arguments
    return forward(operator, *tensors_and_activations, registry.REFERENCE.name, **around)


def forward_saving(
    operator: Operator, *arguments: Any, recompute: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the pre-activations ``(..., hidden)``, empty for the gate without one.

    Where they are recomputed, biases take their place, empty without one: copies, because they may
    be written to before the backward pass.

    Raises:
        PlanError: as :func:`forward`.
        ValueError: as :func:`forward`.
    """
    given = operator.checked(*arguments)
    x, first = given.x, given.first
    family = operator.family_of(given.plan, x.device)
    functions = expressions_of(operator, family, given, training=True)
    rows = given.in_rows()
    if recompute and operator.recomputes(given):
        y = operator.run(family, rows, functions)
        biases = (first.bias_gate if given.gated else None, first.bias_up)
        copied_gate, copied_up = (_copied(bias, x) for bias in biases)
        return restore_rows(y, x), copied_gate, copied_up
    y, gate, up = operator.run_saving(family, rows, functions)
    gate = None if gate is None else restore_rows(gate, x)
    return restore_rows(y, x), or_empty(gate, x), restore_rows(up, x)


def _copied(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if bias is None else bias.clone()


def backward(operator: Operator, *arguments: Any, **how: bool) -> list[Tensor]:
    """The gradients that are asked for; the others are empty."""
    call = operator.read_backward(*arguments, **how)
    return [or_empty(found, call.given.x) for found in operator.differentiate(call)]


def expressions_of(
    operator: Operator, family: Family, given: Given, training: bool = False
) -> Sequence[Expression]:
    """The activations, where a family can run them.

    Raises:
        PlanError: the family cannot run this activation or these operands.
    """
    if operator.is_chain:
        return [*map(_of_chain, given.activations, given.reads)]
    found = [_expression(text, given.gated) for text in given.activations]
    for f in found:
        check_use(f, given.operands)
    kinds = [*map(kind_of, given.operands)]
    index = family.untaken(kinds, training)
    if index is not None:
        raise PlanError(
            f"plan {family.name!r} cannot take the {kinds[index]} p{index} of {found[0]}; "
            f"use plan {registry.REFERENCE.name!r}"
        )
    return found


@functools.cache
def _of_chain(activation: str, earlier: int) -> Expression:
    """Read an activation of ``x``, and of as many earlier values of its chain."""
    expression, known = parse(activation), {"x", *map(name_of, range(earlier))}
    if set(variables(expression)) != known:
        raise PlanError(
            f"an activation of a chain must be an expression of {' and '.join(sorted(known))}, "
            f"got {activation!r}"
        )
    return expression


@functools.cache
def _expression(activation: str, gated: bool) -> Expression:
    """Read an activation, which speaks of ``x``, or of ``g`` and ``u`` where there is a gate."""
    expression = parse(activation)
    known = {"g", "u"} if gated else {"x"}
    if not known.issuperset(projections(expression)):
        raise PlanError(
            f"the activation of a {'gated' if gated else 'plain'} MLP must be an expression of "
            f"{' and '.join(sorted(known))}, got {activation!r}"
        )
    return expression
