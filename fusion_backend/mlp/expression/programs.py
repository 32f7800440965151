"""Pointwise programs as lists of steps, to run them in several dtypes and to see their rounding.

An activation's nodes in a graph and its expression both become such a program, see ``region`` and
:func:`of_expressions`; ``verification`` runs the two and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.mlp.expression.functions import FUNCTIONS
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable

Compute = Callable[[torch.dtype, Sequence[Tensor]], Tensor]


class Step(NamedTuple):
    """One call of a program.

    Attributes:
        compute: of the dtype to compute floats in, and of the values that it reads.
        reads: which values: variables come first, then results of the steps before.
        text: tells it from other steps of the same values.
        adds: whether it is the sum or difference of two numbers.
        rounds_often: whether it rounds between its operands and its result as well.
    """

    compute: Compute
    reads: tuple[int, ...]
    text: str
    adds: bool = False
    rounds_often: bool = False


@dataclass(frozen=True)
class Program:
    """Functions of some variables, all of one shape.

    Attributes:
        variables: their names, in order.
        steps: what is computed, in order.
        results: which values the program is computed for.
        numbers: the constants in it.
        text: equal for programs that do the same.
        moderate: the variables for which calls of PyTorch compute one of several formulas, each of
            which overflows elsewhere: only their moderate values are compared.
    """

    variables: tuple[str, ...]
    steps: tuple[Step, ...] = field(compare=False)
    results: tuple[int, ...]
    numbers: tuple[float, ...]
    text: str
    moderate: frozenset[int] = frozenset()


@dataclass
class Writer:
    """A program under construction."""

    variables: tuple[str, ...]
    steps: list[Step] = field(default_factory=list)
    numbers: dict[float, None] = field(default_factory=dict)
    moderate: set[int] = field(default_factory=set)
    _known: dict[Expression, int] = field(default_factory=dict)

    def step(self, step: Step) -> int:
        """Append a step; which value its result is."""
        self.steps.append(step)
        return len(self.variables) + len(self.steps) - 1

    def number(self, value: float) -> int:
        """A value that is the same everywhere."""
        self.note(value)
        return self.step(Step(lambda dtype, _: torch.tensor(value, dtype=dtype), (), repr(value)))

    def note(self, value: Any) -> None:
        """Remember a constant of the program."""
        if isinstance(value, (int, float)):
            self.numbers.setdefault(float(value))

    def expression(self, expression: Expression, values: Mapping[str, int]) -> int:
        """Append an expression of values, step by step; which value it is."""
        if isinstance(expression, Variable):
            return values[expression.name]
        if isinstance(expression, Call) and expression.function == "dropout":
            value, seed, _ = expression.arguments
            expression = Call("mul", (value, seed))  # the seed stands for what it multiplies by
        if expression not in self._known:
            self._known[expression] = self._computed(expression, values)
        return self._known[expression]

    def _computed(self, expression: Expression, values: Mapping[str, int]) -> int:
        if isinstance(expression, Constant):
            return self.number(expression.value)
        assert isinstance(expression, Call)
        function = FUNCTIONS[expression.function]
        split = len(expression.arguments) - function.constants
        constants = [a.value for a in expression.arguments[split:] if isinstance(a, Constant)]
        for value in constants:
            self.note(value)
        reads = tuple(
            self.expression(argument, values) for argument in expression.arguments[:split]
        )
        kinds = expression.operand_kinds

        def compute(dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
            dtypes = [_DTYPES.get(kind, dtype) for kind in kinds]
            converted = [v.to(to) for v, to in zip(operands, dtypes, strict=False)]
            return function.evaluate(*converted, *constants)

        text = f"{expression.function}{constants or ''}"
        return self.step(Step(compute, reads, text, expression.function in ("add", "sub")))

    def program(self, results: Sequence[int]) -> Program:
        lines = [f"{step.text} {step.reads}" for step in self.steps]
        text = "; ".join((*self.variables, *lines))
        numbers = tuple(self.numbers)
        moderate = frozenset(i for i in self.moderate if i < len(self.variables))
        return Program(self.variables, tuple(self.steps), tuple(results), numbers, text, moderate)


_DTYPES = {"bool": torch.bool, "int": torch.int64}


def of_expressions(expressions: Sequence[Expression], variables: tuple[str, ...]) -> Program:
    """A program that computes expressions, and what they have in common once.

    The seed of a dropout stands for the tensor that it multiplies by.
    """
    writer = Writer(variables)
    values = {name: index for index, name in enumerate(variables)}
    return writer.program([writer.expression(expression, values) for expression in expressions])


def run(program: Program, values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Every value of a program: its variables, and the results of all steps.

    Args:
        program: what to run.
        values: one tensor a variable, all of one shape and of the dtype.
        dtype: to compute floats in.
    """
    known = list(values)
    for step in program.steps:
        known.append(step.compute(dtype, [known[index] for index in step.reads]))
    return known


def results(program: Program, known: Sequence[Tensor]) -> list[Tensor]:
    """What a program is computed for, as floats of the shape and dtype of its variables."""
    like = known[0]
    return [known[index].to(like.dtype).expand(like.shape) for index in program.results]


def slopes(result: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of each element of a result by that of each variable."""
    if not result.requires_grad:
        return [torch.zeros_like(value) for value in values]
    return list(
        torch.autograd.grad(
            result.sum(), values, allow_unused=True, materialize_grads=True, retain_graph=True
        )
    )


class Rounding(NamedTuple):
    """How a dtype rounds: by which part of a number, and whether it lets small terms vanish.

    Of a sum only the rounding of the smaller term is counted, so that a term which vanishes is no
    rounding. With ``narrow``, a dtype that the program is run in while kernels hold float32, all of
    it counts, and whatever else a step is off in that dtype.
    """

    unit: float
    narrow: torch.dtype | None = None


def spread(
    program: Program, values: Sequence[Tensor], rounding: Rounding, variables: Sequence[int]
) -> list[Tensor]:
    """By how much the roundings of a program change its results, and their slopes.

    The program runs in float64 many times at once: in each run another call is off by a rounding.
    The changes of all runs are added up.

    Args:
        program: what to run.
        values: one tensor ``(points,)`` a variable, in float64.
        rounding: of which dtype.
        variables: by which variables the first result is differentiated.

    Returns:
        A bound ``(points,)`` for every result, then for every slope.
    """
    known = run(program, values, torch.float64)
    errors = [
        _roundings(step, known, len(program.variables) + position, rounding)
        for position, step in enumerate(program.steps)
    ]
    count = 1 + 2 * sum(map(len, errors))
    shape = (count, len(values[0]))
    nudged: list[Tensor] = [value.expand(shape).clone().requires_grad_() for value in values]
    inputs, row = list(nudged), 1
    for step, error in zip(program.steps, errors, strict=True):
        operands = [nudged[index] for index in step.reads]
        if step.rounds_often:
            for position, amount in enumerate(error):
                operands[position] = operands[position] + _placed(amount, row, shape)
                row += 2
        result = step.compute(torch.float64, operands)
        if not step.rounds_often and error:
            result = result + _placed(error[0], row, shape)
            row += 2
        nudged.append(result)
    found = [nudged[index].to(torch.float64).expand(shape) for index in program.results]
    if variables:
        found += slopes(found[0], [inputs[index] for index in variables])
    return [_total_change(value.detach()) for value in found]


def _roundings(
    step: Step, known: Sequence[Tensor], position: int, rounding: Rounding
) -> list[Tensor]:
    """What a rounding of the step amounts to, at each point: of its result, or of its operands."""
    result = known[position]
    if not result.is_floating_point() or not step.reads:
        return []
    if step.rounds_often:
        return [known[index].abs() * rounding.unit for index in step.reads]
    operands = [known[index].detach() for index in step.reads]
    if rounding.narrow is not None:
        # Near zero, numbers are rounded by the distance of subnormal ones.
        least = torch.finfo(rounding.narrow).tiny * rounding.unit
        error = _error(step, operands, rounding.narrow)
        return [torch.maximum(result.abs() * rounding.unit + least, 2.0 * error)]
    errors = [_error(step, operands, torch.float32, factor) for factor in _NEARBY]
    if not any(((error > 0.0) & (result.abs() > _SMALL)).any() for error in errors):
        return []
    if step.adds:
        term = known[step.reads[0]].double()
        smaller = torch.minimum(term.abs(), (result - term).abs())
        return [torch.where(errors[0] > 0.0, smaller * rounding.unit, 0.0)]
    # Some functions cancel within, as 1 + erf(x) does: all near a point are taken as the worst is.
    return [torch.maximum(result.abs() * rounding.unit, 2.0 * torch.stack(errors).amax(0))]


def _error(
    step: Step, operands: Sequence[Tensor], dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    """How far the step is off in a dtype, with its operands times a factor; 0 where not finite."""
    narrow = [(o * factor).to(dtype) if o.is_floating_point() else o for o in operands]
    wide = [o.to(torch.float64) if o.is_floating_point() else o for o in narrow]
    found = step.compute(dtype, narrow).double()
    error = (found - step.compute(torch.float64, wide)).abs()
    return torch.where(error.isfinite(), error, 0.0)


_NEARBY = (1.0, 1.0 + 2.0**-22, 1.0 - 2.0**-22, 1.0 + 2.0**-20, 1.0 - 2.0**-20)
# Below it float32 has fewer digits.
_SMALL = 1e-30


def _placed(amount: Tensor, row: int, shape: tuple[int, int]) -> Tensor:
    """The amount in one row, its negative in the next, zero in all others."""
    amounts = torch.zeros(shape, dtype=torch.float64)
    amount = torch.where(amount.detach().isfinite(), amount.detach(), 0.0)
    amounts[row], amounts[row + 1] = amount, -amount
    return amounts


def _total_change(rows: Tensor) -> Tensor:
    change = (rows[1:] - rows[0]).abs().unflatten(0, (-1, 2)) if len(rows) > 1 else rows[:0, None]
    change = torch.where(change.isfinite(), change, 0.0)
    return change.amax(1).sum(0) if len(rows) > 1 else torch.zeros_like(rows[0])
