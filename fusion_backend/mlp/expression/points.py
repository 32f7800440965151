"""Where activations are compared: the same points every time, for every kind of behaviour."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

_LARGEST, _SMALLEST = 3.4028234663852886e38, 1e-45  # of float32

# Between the limits of float32: where functions saturate, in ordinary ranges densely.
_SCALE = (
    *(10.0**exponent for exponent in range(-38, 39, 4)),
    *(10.0 ** (exponent / 4.0) for exponent in range(-16, 9)),
    *(1.09**step for step in range(-30, 56)),
    *(16777216.0, 12582912.0, 65504.0, 65520.0, 88.7, 103.9, 709.8),
)
_COARSE_SCALE = (
    *(1e-38, 1e-20, 1e-8, 1e-3, 0.25, 0.75, 1.0, 1.5, 3.0, 6.0, 9.0),
    *(30.0, 120.0, 65504.0, 1e7, 1e19, 1e30),
)
_MODERATE = (0.0, 0.0123, 0.25, 0.75, 1.0, 1.5, 3.0, 9.0, 120.0)
_SPECIAL = (0.0, 30.0, 120.0, _LARGEST, _SMALLEST, 1.1754943508222875e-38, math.inf)

_MOST_NUMBERS = 10  # of which neighbours, sums and quotients are taken
_MOST_POINTS = 2048


Values = float | Literal["moderate"] | None
"""Of a variable: all; moderate ones; of the mask of a dropout, what it is where it keeps."""


def points_of(numbers: Sequence[float], of_variables: Sequence[Values]) -> list[Tensor]:
    """Values of each variable, in float64 and exact in float32.

    Args:
        numbers: the constants of the functions that will be compared.
        of_variables: which values each of them takes.

    Returns:
        One tensor ``(points,)`` a variable: of a single one all points; of several the product of
        coarser ones, or a part of it, and all points of each beside changing ones of the others.
    """
    fine, coarse = _fine(numbers), _coarse(numbers)
    if len(of_variables) == 1:
        return [fine]
    columns = [_column(values, coarse) for values in of_variables]
    product = _product(columns)
    found: list[list[Tensor]] = [[column] for column in product]
    for index, values in enumerate(of_variables):
        every = fine if values is None else columns[index]
        for other, column in enumerate(columns):
            beside = torch.arange(len(every)) * (2 * other + 1) + other
            found[other].append(every if other == index else column[beside % len(column)])
    return [torch.cat(parts) for parts in found]


def _column(values: Values, coarse: Tensor) -> Tensor:
    if values is None:
        return coarse
    return _both_signs(_MODERATE) if values == "moderate" else _tensor((0.0, values))


def _product(columns: Sequence[Tensor]) -> list[Tensor]:
    """All combinations, or as many of them as there may be, drawn without the global generator."""
    if math.prod(map(len, columns)) <= _MOST_POINTS:
        return list(torch.cartesian_prod(*columns).unbind(1))
    drawn = torch.Generator("cpu").manual_seed(0)
    return [
        column[torch.randint(len(column), (_MOST_POINTS,), generator=drawn, device="cpu")]
        for column in columns
    ]


def _tensor(values: Sequence[float]) -> Tensor:
    rounded = torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32)
    return rounded.to(torch.float64)


def _fine(numbers: Sequence[float]) -> Tensor:
    kinks = _tensor(_kinks(numbers)).to(torch.float32)
    ends = (torch.full_like(kinks, limit) for limit in (-math.inf, math.inf))
    neighbours = [torch.nextafter(kinks, end).to(torch.float64) for end in ends]
    return torch.cat(
        [
            _both_signs((*_SPECIAL, *_SCALE)),
            kinks.to(torch.float64),
            *neighbours,
            _tensor([math.nan]),
        ]
    )


def _coarse(numbers: Sequence[float]) -> Tensor:
    own = [abs(number) for number in numbers if 1e-30 < abs(number) < 1e30][:4]
    return torch.cat(
        [_both_signs((0.0, math.inf, _LARGEST, *_COARSE_SCALE, *own)), _tensor([math.nan])]
    )


def _kinks(numbers: Sequence[float]) -> list[float]:
    """The constants, and sums and quotients of two: where ``x + a`` or ``a * x`` meets ``b``."""
    finite = dict.fromkeys(abs(number) for number in numbers if math.isfinite(number))
    few = [*finite][:_MOST_NUMBERS]
    found = [*few, *(1.0 / number for number in few if number > 1e-38)]
    for a, b in itertools.combinations(few[:6], 2):
        found += [a + b, a - b, *(x / y for x, y in ((a, b), (b, a)) if y > 1e-38)]
    return [sign * x for x in dict.fromkeys(found) if abs(x) <= _LARGEST for sign in (1.0, -1.0)]


def _both_signs(magnitudes: Sequence[float]) -> Tensor:
    values = _tensor(magnitudes)
    return torch.cat([values, -values])
