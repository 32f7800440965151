"""Whether an expression computes what a program does, up to the rounding of that program.

Both run at the same points in float64 and in float32, the program's derivative by autograd and the
expression's as it is written. A difference is a rounding if it is no larger than what the roundings
of the program itself change in its result, each taken by itself (see ``programs.spread``). A term
that vanishes in a sum is no rounding, nor is a NaN or an infinity where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import plain_mode
from fusion_backend.mlp.expression.differentiation import differentiate
from fusion_backend.mlp.expression.nodes import Expression
from fusion_backend.mlp.expression.points import Values, points_of
from fusion_backend.mlp.expression.programs import (
    Program,
    Rounding,
    of_expressions,
    results,
    run,
    slopes,
    spread,
)

_NARROW = (torch.bfloat16, torch.float16)
_UNIT = 2.0**-23
# A difference counts as so many roundings of the result, and as so many times their spread.
_ROUNDINGS, _SPREADS = 8.0, 4.0
# A slope is as exact as those of its neighbourhood are: autograd's own formulas cancel.
_ROUNDINGS_OF_SLOPES = 16.0
# Near the limits a product in another order is infinite, or has few digits left.
_NEARLY_INFINITE, _NEARLY_ZERO = 2.0**-12, 2.0**-120
_LARGE, _HUGE = 2.0**80, 2.0**40


class Difference(NamedTuple):
    """Where two functions differ.

    Attributes:
        what: ``value``, or the variable of the slope.
        dtype: in which both were computed.
        at: the values of the variables.
        expected: of the program.
        got: of the expression.
    """

    what: str
    dtype: torch.dtype
    at: Mapping[str, float]
    expected: float
    got: float

    def __str__(self) -> str:
        what = "the value" if self.what == "value" else f"the slope by {self.what}"
        at = ", ".join(f"{name} = {value!r}" for name, value in self.at.items())
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{what} at {at} is {self.expected!r} in {dtype}, not {self.got!r}"


def agree(program: Program, expression: Expression) -> bool:
    """Whether an expression of the program's variables computes its result."""
    return difference(program, expression) is None


@functools.lru_cache(maxsize=4096)
def difference(
    program: Program,
    expression: Expression,
    of_variables: tuple[Values, ...] = (),
    differentiable: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Difference | None:
    """The first point at which an expression differs from a program of one result.

    Args:
        program: what the graph computes.
        expression: of its variables; a seed of a dropout stands for its mask.
        of_variables: which values each variable takes; all if not given.
        differentiable: the variables by which slopes are compared; all if not given.
        dtype: that the graph computes in. What it rounds to bfloat16 or float16 on the way kernels
            hold in float32, so float32 is compared as well.
    """
    with plain_mode():
        return _Comparison(program, expression, of_variables, differentiable).difference(dtype)


class _Comparison:
    def __init__(
        self,
        program: Program,
        expression: Expression,
        of_variables: tuple[Values, ...],
        differentiable: tuple[str, ...] | None,
    ) -> None:
        names = program.variables
        self._program = program
        self._slopes = tuple(names if differentiable is None else differentiable)
        parts = (expression, *(differentiate(expression, name) for name in self._slopes))
        self._expressions = of_expressions(parts, names)
        numbers = tuple(dict.fromkeys((*program.numbers, *self._expressions.numbers)))
        self._points = points_of(numbers, of_variables or (None,) * len(names))
        self._by = [names.index(name) for name in self._slopes]

    def difference(self, dtype: torch.dtype) -> Difference | None:
        for computed in (torch.float64, torch.float32):
            found = self._in(computed)
            if found is not None:
                return found
        return self._in_narrow(dtype) if dtype in _NARROW else None

    def _in(self, dtype: torch.dtype) -> Difference | None:
        points = [point.to(dtype) for point in self._points]
        expected, got, wrong = self._compared(points, dtype)
        large = torch.stack([(p.abs() > _LARGE) & p.isfinite() for p in points]).any(0)
        if (wrong & large).any():
            # What only the largest numbers make infinite is a rounding of the order of factors.
            smaller = [
                torch.where(p.isfinite() & (p.abs() > _LARGE), p * 2.0**-24, p) for p in points
            ]
            wrong &= ~large | self._compared(smaller, dtype)[2]
        differing = wrong.nonzero()
        if not len(differing):
            return None
        what, index = differing[0].tolist()
        return self._described(what, dtype, index, expected, got)

    def _compared(
        self, points: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Value and slopes of both, and where they differ ``(1 + slopes, points)``."""
        expected, undefined = self._of_program(points, dtype)
        got = self._of_expressions(points, dtype)
        within = [a.abs() * (_UNIT * _ROUNDINGS) for a in expected]
        for index in range(1, len(within)):
            around = _around(expected[index], points)
            within[index] = within[index] + around * (_UNIT * _ROUNDINGS_OF_SLOPES)
        compared = [*zip(expected, got, within, strict=True)]
        wrong = torch.stack([differs(*of_one) for of_one in compared])
        # What slope a NaN has, on the way too, differs between the instructions of one processor,
        # and between functions: PyTorch's clamp has one of 1.
        wrong[1:] &= ~undefined
        if dtype == torch.float32:
            # There products of the chain rule overflow in one order and not in another; float64's
            # range shows whether they are the same.
            wrong[1:] &= ~torch.stack([(p.abs() > _HUGE) & p.isfinite() for p in points]).any(0)
        # Infinity times a slope that rounds to zero, or to almost zero.
        infinite = torch.stack(list(points)).isinf().any(0)
        for row, (a, b, _) in zip(wrong[1:], compared[1:], strict=True):
            row &= ~(infinite & ~a.isfinite() & ~b.isfinite())
        at = wrong.any(0).nonzero()[:, 0]
        if len(at):
            spreads = self._spreads([point[at].double() for point in points], Rounding(_UNIT))
            for row, (a, b, bound), spread_of_one in zip(wrong, compared, spreads, strict=True):
                bound = bound[at] + spread_of_one.to(dtype) * _SPREADS
                row[at] &= differs(a[at], b[at], bound)
        return expected, got, wrong

    def _of_program(
        self, points: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor]:
        """Value and slopes, and at which points a value on the way is NaN."""
        leaves = [point.clone().requires_grad_() for point in points]
        values = run(self._program, leaves, dtype)
        (result,) = results(self._program, values)
        undefined = torch.zeros_like(points[0], dtype=torch.bool)
        for value in values:
            undefined |= value.detach().isnan()
        found = [result.detach(), *slopes(result, [leaves[index] for index in self._by])]
        return found, undefined

    def _of_expressions(self, points: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        with torch.no_grad():
            return results(self._expressions, run(self._expressions, points, dtype))

    def _spreads(self, points: Sequence[Tensor], rounding: Rounding) -> list[Tensor]:
        """Of the value, and of slopes, which may round as autograd does or as they are written."""
        value, *of_autograd = spread(self._program, points, rounding, self._by)
        with torch.no_grad():
            _, *as_written = spread(self._expressions, points, rounding, ())
        return [value, *(a + b for a, b in zip(of_autograd, as_written, strict=True))]

    def _in_narrow(self, dtype: torch.dtype) -> Difference | None:
        """Values that a narrow dtype can hold differ by what it rounds away on the way."""
        points = [point.to(dtype) for point in self._points]
        exact = [point.to(torch.float64) for point in points]
        with torch.no_grad():
            narrow = run(self._program, points, dtype)
            (expected,) = results(self._program, narrow)
            overflows = _overflows(narrow, run(self._program, exact, torch.float64))
            got = self._of_expressions([p.to(torch.float32) for p in points], torch.float32)[0]
            # Several amounts: a function may vary faster than its operand is rounded, as sin(30 x).
            units = [torch.finfo(dtype).eps * part for part in (1.0, 0.8, 0.6, 0.35, 0.2)]
            spreads = [spread(self._program, exact, Rounding(u, dtype), ())[0] for u in units]
            bound = torch.stack(spreads).amax(0)
        got = got.to(dtype)
        finite = expected.isfinite() & got.isfinite() & ~overflows
        unit = torch.finfo(dtype).eps * _ROUNDINGS
        wide = expected.double()
        within = wide.abs() * unit + bound * _SPREADS + torch.finfo(dtype).tiny
        differing = (finite & ((got.double() - wide).abs() > within)).nonzero()
        if not len(differing):
            return None
        return self._described(0, dtype, int(differing[0, 0]), [expected], [got])

    def _described(
        self,
        what: int,
        dtype: torch.dtype,
        index: int,
        expected: Sequence[Tensor],
        got: Sequence[Tensor],
    ) -> Difference:
        values = (point[index].item() for point in self._points)
        at = dict(zip(self._program.variables, values, strict=True))
        pair = expected[what][index].item(), got[what][index].item()
        return Difference(("value", *self._slopes)[what], dtype, at, *pair)


def _overflows(narrow: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Where a narrow dtype makes something infinite on the way that is a number."""
    like = narrow[0]
    found = torch.zeros(like.shape, dtype=torch.bool, device="cpu")
    for value, number in zip(narrow, exact, strict=True):
        if value.is_floating_point():
            found |= (value.isinf() & number.isfinite()).expand(like.shape)
    return found


def _around(slope: Tensor, points: Sequence[Tensor]) -> Tensor:
    """The largest of the slopes at points of about the same magnitude, of any sign."""
    magnitude = torch.stack(list(points)).abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(0)
    octave = (magnitude.clamp_min(1e-38).log2() / 3.0).round().long()
    octave = octave - octave.min()
    finite = torch.where(slope.isfinite(), slope.abs(), 0.0)
    largest = torch.zeros(int(octave.max()) + 1, dtype=slope.dtype, device="cpu")
    return largest.scatter_reduce(0, octave, finite, "amax")[octave]


def differs(expected: Tensor, got: Tensor, within: Tensor) -> Tensor:
    """Where two results are not the same NaN, the same infinity or near each other."""
    limits = torch.finfo(expected.dtype)
    large = limits.max * _NEARLY_INFINITE
    both_large = (expected.abs() >= large) & (got.abs() >= large) & (expected.sign() == got.sign())
    infinite = both_large & (expected.isinf() | got.isinf())
    near = (expected - got).abs() <= within + _NEARLY_ZERO
    near &= expected.isfinite() & got.isfinite()
    return ~(near | infinite | (expected.isnan() & got.isnan()))
