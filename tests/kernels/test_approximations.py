"""What kernels for 16 bits compute in place of functions that the hardware does not have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusion_backend.kernels.codegen.approximations import normal_cdf, scaled
from fusion_backend.mlp.expression import Expression, evaluate, parse

# Relative, and the value of the distribution below which the error no longer falls with it.
ERRORS = {torch.bfloat16: (2**-11.3, 2**-14), torch.float16: (2**-15, 2**-11)}


def finite(dtype: torch.dtype) -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return values[values.isfinite()].double()


def value(expression: Expression | None, x: Tensor) -> Tensor:
    assert expression is not None
    return evaluate(expression, {"x": x})


@pytest.mark.parametrize("accuracy", ERRORS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.7071067811865476, -2.0])
def test_normal_cdf_is_right_for_all_values(scale: float, accuracy: torch.dtype) -> None:
    x = finite(accuracy)
    exact = torch.special.erfc(-scale * x) / 2.0
    got = value(normal_cdf(parse(f"0.5 * (1.0 + erf({scale} * x))"), accuracy), x)
    relative, least = ERRORS[accuracy]
    assert (got - exact).abs().le(relative * (exact + least)).all()


@pytest.mark.parametrize("accuracy", ERRORS, ids=str)
def test_normal_cdf_keeps_its_accuracy_in_float32(accuracy: torch.dtype) -> None:
    x = torch.linspace(-12.0, 12.0, 100_001)
    cdf = normal_cdf(parse("0.5 * (1.0 + erf(0.7071067811865476 * x))"), accuracy)
    exact = torch.special.ndtr(x.double())
    relative, least = ERRORS[accuracy]
    assert (value(cdf, x).double() - exact).abs().le(relative * (exact + least)).all()
    far = torch.tensor([-torch.inf, -65504.0, 65504.0, torch.inf])
    assert value(cdf, far).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_normal_cdf_is_found_with_its_terms_in_either_order() -> None:
    one, other = parse("0.5 * (1.0 + erf(x))"), parse("0.5 * (erf(x) + 1.0)")
    assert normal_cdf(one, torch.bfloat16) == normal_cdf(other, torch.bfloat16) is not None
    assert normal_cdf(parse("1.0 + erf(x)"), torch.bfloat16) is None
    assert normal_cdf(one, torch.float32) is None


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
