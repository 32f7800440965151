"""Tensors that enter the activation beside the projections.

Operand ``i`` is the variable ``p{i}`` of the expression. Its shape tells what it is:

    scalar        ()  or one element             the same value everywhere
    vector        (hidden,)                      one value a feature
    elementwise   (*x.shape[:-1], hidden)        such as the result of another layer
    seed          (), int64                      of a dropout

Values have any floating dtype and are used in float32 (float64 where the MLP is in float64).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable, variables
from fusion_backend.mlp.expression.operand_names import index_of

Kind = Literal["scalar", "vector", "elementwise", "seed"]

# How many a kernel has room for.
MOST_IN_KERNELS = 4


def projections(expression: Expression) -> tuple[str, ...]:
    """The variables of an expression that are no operands."""
    return tuple(name for name in variables(expression) if index_of(name) is None)


def seeds(expression: Expression) -> frozenset[str]:
    """The variables that are seeds of dropouts.

    Raises:
        ExpressionError: a seed is no operand, or is used as a value too; or a probability is none.
    """
    found = set(_seeds(expression))
    if values := found & set(_values(expression)):
        raise ExpressionError(
            f"the seed of a dropout must not be a value, got {values.pop()} in {expression}"
        )
    return frozenset(found)


def _seeds(expression: Expression) -> Iterator[str]:
    if not isinstance(expression, Call):
        return
    if expression.function == "dropout":
        _, seed, p = expression.arguments
        if not isinstance(seed, Variable) or index_of(seed.name) is None:
            raise ExpressionError(f"the seed of a dropout must be an operand, got {seed}")
        if not isinstance(p, Constant) or not 0.0 <= p.value <= 1.0:
            raise ExpressionError(f"dropout needs a p in [0, 1], got {p}")
        yield seed.name
    for argument in expression.arguments:
        yield from _seeds(argument)


def _values(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Variable):
        yield expression.name
    elif isinstance(expression, Call):
        count = 1 if expression.function == "dropout" else len(expression.arguments)
        for argument in expression.arguments[:count]:
            yield from _values(argument)


def kind_of(operand: Tensor) -> Kind:
    """What an operand is, by its shape and dtype alone."""
    if operand.dtype == torch.int64:
        return "seed"
    if _has_one_element(operand):
        return "scalar"
    return "vector" if operand.dim() == 1 else "elementwise"


def as_rows_of(operand: Tensor) -> Tensor:
    """An operand as it broadcasts with ``(rows, hidden)``: with no, one or two dimensions."""
    kind = kind_of(operand)
    if kind == "elementwise":
        return operand.flatten(0, -2)
    return operand.reshape(()) if kind == "scalar" else operand


def reduced(gradient: Tensor, operand: Tensor) -> Tensor:
    """The gradient ``(rows, hidden)`` of an operand's elements as that of :func:`as_rows_of` it.

    Sums are accumulated in float32 at least.
    """
    if operand.dim() < 2:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient = gradient.sum(0, dtype=dtype) if operand.dim() else gradient.sum(dtype=dtype)
    return gradient.to(operand.dtype)


def check(operands: Sequence[Tensor], x: Tensor, hidden: int) -> None:
    """Refuse shapes, dtypes and devices that do not fit.

    Raises:
        ValueError: an operand is none of the four kinds, or lies on another device than ``x``.
    """
    for index, operand in enumerate(operands):
        name = f"operands[{index}]"
        expected: dict[Kind, tuple[Any, ...]] = {
            "seed": (),
            "scalar": tuple(operand.shape),
            "vector": (hidden,),
            "elementwise": (*x.shape[:-1], hidden),
        }
        kind = kind_of(operand)
        if operand.shape != expected[kind]:
            raise ValueError(
                f"{name} must be a scalar, a vector ({hidden},) or have shape "
                f"{expected['elementwise']}, got {tuple(operand.shape)}"
                if kind != "seed"
                else f"{name} is a seed and must have no dimensions, got {tuple(operand.shape)}"
            )
        if kind != "seed" and not operand.is_floating_point():
            raise ValueError(f"{name} must be floating or an int64 seed, got {operand.dtype}")
        if operand.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got {operand.device}")


def check_use(expression: Expression, operands: Sequence[Tensor]) -> None:
    """Refuse an expression that asks for an operand that is missing, or not what it is used as.

    Raises:
        ExpressionError: as said.
    """
    for name, is_seed in _uses(expression).items():
        index = index_of(name)
        assert index is not None
        if index >= len(operands):
            raise ExpressionError(
                f"{expression} needs operands up to {name}, got {len(operands)} of them"
            )
        if (kind_of(operands[index]) == "seed") != is_seed:
            use = "the int64 seed of a dropout" if is_seed else "a floating value"
            raise ExpressionError(f"{name} of {expression} must be {use}")


@functools.cache
def _uses(expression: Expression) -> Mapping[str, bool]:
    """The operands in an expression, and whether each is a seed."""
    known = seeds(expression)
    return {name: name in known for name in variables(expression) if index_of(name) is not None}


def _has_one_element(operand: Tensor) -> bool:
    """Whether it is known to; a symbolic size is not asked, which would be a guard."""
    return all(isinstance(size, int) and size == 1 for size in operand.shape)
