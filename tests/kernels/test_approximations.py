"""What bfloat16 kernels compute in place of functions that the hardware does not have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusion_backend.kernels.codegen.approximations import normal_cdf, scaled
from fusion_backend.mlp.expression import Expression, evaluate, parse


def finite_bfloat16() -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    return values[values.isfinite()].double()


def value(expression: Expression | None, x: Tensor) -> Tensor:
    assert expression is not None
    return evaluate(expression, {"x": x})


@pytest.mark.parametrize("scale", [1.0, 0.7071067811865476, -2.0])
def test_normal_cdf_is_right_for_all_values_of_bfloat16(scale: float) -> None:
    x = finite_bfloat16()
    exact = torch.special.erfc(-scale * x) / 2.0
    got = value(normal_cdf(parse(f"0.5 * (1.0 + erf({scale} * x))")), x)
    assert (got - exact).abs().le(2**-11.3 * (exact + 2**-14)).all()


def test_normal_cdf_is_found_with_its_terms_in_either_order() -> None:
    one, other = parse("0.5 * (1.0 + erf(x))"), parse("0.5 * (erf(x) + 1.0)")
    assert normal_cdf(one) == normal_cdf(other)
    assert normal_cdf(parse("1.0 + erf(x)")) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.0 * x", "6.0 * x"),
        ("-x", "-3.0 * x"),
        ("x / 2.0", "1.5 * x"),
        ("x", "3.0 * x"),
        ("x * (1.0 + 2.0 * square(x))", "x * (3.0 + 6.0 * square(x))"),
        ("x * (1.0 + square(x))", "3.0 * (x * (1.0 + square(x)))"),
    ],
)
def test_a_factor_goes_into_the_constants_that_are_there(text: str, expected: str) -> None:
    assert str(scaled(parse(text), 3.0)) == str(parse(expected))
