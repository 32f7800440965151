"""The canonical form: one spelling for equal activations, and never for different ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expression_examples import EXAMPLES, points
from fusion_backend.mlp.expression import (
    Call,
    Constant,
    Expression,
    Variable,
    canonicalize,
    evaluate,
    parse,
    variables,
)

ROOT = repr(math.sqrt(2.0 / math.pi))


def canonical(text: str) -> str:
    return str(canonicalize(parse(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("u * silu(g)", "silu(g) * u"),
        ("u * (g * sigmoid(g))", "silu(g) * u"),
        ("sigmoid(1.702 * x) * x", "x * sigmoid(1.702 * x)"),
        ("1.0 + x * 0.5", "0.5 * x + 1.0"),
        ("x + -1.0", "x - 1.0"),
        ("-x + 1.0", "1.0 - x"),
        ("-x * -g", "g * x"),
        ("x * (0.1 * x) * x", "0.1 * x * x * x"),
        ("x + x", "2.0 * x"),
        ("x / 4.0", "0.25 * x"),
        ("0.0 < x", "x > 0.0"),
        ("maximum(2.0, x)", "maximum(x, 2.0)"),
        ("pow(x, 2.0)", "square(x)"),
        ("x * x", "square(x)"),
        ("x * square(x)", "pow(x, 3.0)"),
        ("pow(x, 0.5)", "sqrt(x)"),
        ("relu(x) * relu(x)", "square(relu(x))"),
        ("pow(relu(x), 2.0)", "square(relu(x))"),
        ("maximum(x, 0.0)", "maximum(x, 0.0)"),
        ("hardtanh(x, 0.0, inf)", "relu(x)"),
        ("threshold(x, 0.0, 0.0)", "relu(x)"),
        ("hardtanh(x, 0.0, 6.0)", "relu6(x)"),
        ("x * relu6(x + 3.0) / 6.0", "hardswish(x)"),
        ("hardtanh(x + 3.0, 0.0, 6.0) / 6.0", "hardsigmoid(x)"),
        ("x * tanh(softplus(x, 1.0, 20.0))", "mish(x)"),
        ("x / (1.0 + abs(x))", "softsign(x)"),
    ],
)
def test_operands_are_ordered_and_functions_have_their_usual_names(
    text: str, expected: str
) -> None:
    assert canonical(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "x * sigmoid(x)",
        "sigmoid(x) * x",
        "0.5 * x * (1.0 + tanh(0.5 * x))",
    ],
)
def test_silu_is_recognised(text: str) -> None:
    assert canonical(text) == "silu(x)"


@pytest.mark.parametrize(
    "text",
    [
        "0.5 * x * (1.0 + erf(x / sqrt(2.0)))",
        "x * 0.5 * (1.0 + erf(x / 1.41421356))",
        "x * (0.5 + 0.5 * erf(x * 0.70710678))",
        "x * (erf(0.7071067811865476 * x) + 1.0) / 2.0",
        "0.5 * x + 0.5 * x * erf(x / 1.4142135623730951)",
    ],
)
def test_gelu_is_recognised(text: str) -> None:
    assert canonical(text) == "gelu(x)"


@pytest.mark.parametrize("root", [ROOT, "sqrt(2.0 / 3.141592653589793)", "0.79788456"])
@pytest.mark.parametrize(
    "text",
    [
        "0.5 * x * (1.0 + tanh(ROOT * (x + 0.044715 * pow(x, 3.0))))",
        "0.5 * x * (1.0 + tanh(ROOT * (x + 0.044715 * x * x * x)))",
        "0.5 * x * (tanh(ROOT * x * (1.0 + 0.044715 * x * x)) + 1.0)",
        "x * (0.5 * tanh(x * ROOT * (0.044715 * square(x) + 1.0)) + 0.5)",
    ],
)
def test_tanh_gelu_is_recognised(text: str, root: str) -> None:
    assert canonical(text.replace("ROOT", root)) == "gelu_tanh(x)"


@pytest.mark.parametrize(
    "text",
    [
        "x * sigmoid(1.702 * x)",
        "0.5 * x * (tanh(0.8 * (x + 0.044715 * pow(x, 3.0))) + 1.0)",
        "0.5 * x * (tanh(0.7978845608028654 * (x + 0.045 * pow(x, 3.0))) + 1.0)",
        "0.5 * x * (erf(0.7 * x) + 1.0)",
        "x * tanh(x)",
        "x * (tanh(x) + 1.0)",
        "0.5 * x * (erf(x / 1.41421) + 1.0)",
        "0.5 * x * (tanh(0.7979 * (x + 0.044715 * pow(x, 3.0))) + 1.0)",
        "x - tanh(x)",
        "0.0 * x",
        "x - x",
    ],
)
def test_what_only_resembles_a_known_activation_stays(text: str) -> None:
    assert canonical(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "x + 100000000.0 - 100000000.0",
        "x + 12582912.0 - 12582912.0",
        "maximum(x, -x) - x + 1e-08",
        "0.0 - x",
        "x + 0.0",
        "-(x - 1.0)",
        "x + 2.0 + 1.0",
        "1e-30 * (1e+30 * x)",
        "2.0 * (3.0 * x)",
        "g * u * sigmoid(g)",
        "x / 3.0",
        "g / u * g",
    ],
)
def test_terms_and_factors_stay_in_their_groups(text: str) -> None:
    assert canonical(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "log(sigmoid(x) + 1e-07)",
        "sigmoid(x) * log(sigmoid(x) + 1e-08)",
        "x / (sigmoid(x) + 1e-08)",
        "x * sigmoid(1.5957691216057308 * (x + 0.044715 * pow(x, 3.0)))",  # exact far below zero
    ],
)
def test_a_number_that_guards_keeps_an_expression_from_being_recognised(text: str) -> None:
    assert canonical(text) == text


@pytest.mark.parametrize("text", ["x / (exp(-x) + 1.0)", "1.0 / (exp(-x) + 1.0) * x"])
def test_silu_whose_slope_is_nan_far_below_zero_stays_as_written(text: str) -> None:
    assert canonical(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("u * (0.5 * g * (1.0 + erf(g / sqrt(2.0))))", "gelu(g) * u"),
        ("u * 2.0 * (0.5 * g * (1.0 + erf(g / sqrt(2.0))))", "2.0 * u * gelu(g)"),
        ("(g + u) * sigmoid(g + u)", "silu(g + u)"),
        ("clamp(g, -inf, 7.0) * sigmoid(clamp(g, -inf, 7.0)) * u", "silu(clamp(g, -inf, 7.0)) * u"),
        ("square(0.5 * x * (1.0 + erf(x / sqrt(2.0))))", "square(gelu(x))"),
        ("(x + 1.0) * sigmoid(x + 1.0)", "silu(x + 1.0)"),
    ],
)
def test_activations_are_recognised_inside_of_larger_expressions(text: str, expected: str) -> None:
    assert canonical(text) == expected


def test_clamped_swiglu_reads_gate_first() -> None:
    gate, up = "clamp(g, -inf, 7.0)", "clamp(u, -7.0, 7.0)"
    text = f"({up} + 1.0) * ({gate} * sigmoid({gate} * 1.702))"
    assert canonical(text) == f"{gate} * sigmoid(1.702 * {gate}) * ({up} + 1.0)"


def test_infinite_constants_are_kept() -> None:
    assert canonical("x + inf - inf") == "x + inf - inf"
    assert canonical("x / 0.0") == "x / 0.0"


@pytest.mark.parametrize("text", EXAMPLES)
def test_canonical_form_is_stable_and_computes_the_same(text: str) -> None:
    expression = parse(text)
    result = canonicalize(expression)
    assert canonicalize(result) == result
    assert parse(str(result)) == result
    values = points(torch.float64)
    torch.testing.assert_close(
        evaluate(result, values), evaluate(expression, values), rtol=1e-9, atol=1e-9, equal_nan=True
    )


G, U = Variable("g"), Variable("u")
operands = st.sampled_from([G, U, Constant(0.5), Constant(2.0), Constant(-3.0)])
commutative = st.recursive(
    operands,
    lambda inner: (
        st.builds(
            lambda name, a, b: Call(name, (a, b)),
            st.sampled_from(["add", "mul", "sub", "div", "maximum"]),
            inner,
            inner,
        )
        | st.builds(lambda name, a: Call(name, (a,)), st.sampled_from(["relu", "neg"]), inner)
    ),
    max_leaves=8,
)


def swapped(expression: Expression) -> Expression:
    if not isinstance(expression, Call):
        return expression
    arguments = tuple(map(swapped, expression.arguments))
    if expression.function in ("add", "mul", "maximum"):
        arguments = arguments[::-1]
    return Call(expression.function, arguments)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(commutative)
def test_expressions_equal_up_to_commutativity_become_the_same(expression: Expression) -> None:
    result = canonicalize(expression)
    assert canonicalize(swapped(expression)) == result
    assert canonicalize(result) == result


def test_variables_may_have_any_name() -> None:
    assert variables(canonicalize(parse("silu(v1) * v0"))) == ("v0", "v1")
