"""Expressions as data: printing, parsing, building, evaluation and differentiation."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expression_examples import EXAMPLES, ONE_VARIABLE, points
from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression import (
    FUNCTIONS,
    Call,
    Constant,
    Expression,
    Variable,
    call,
    differentiate,
    evaluate,
    parse,
    substitute,
    variables,
)

X, Y = Variable("x"), Variable("y")
_POSITIVE = call("gt", X, 0.0)

# Overflow in float32, or are undefined, at -1e4 or 1e4.
UNBOUNDED = (
    *("exp(x)", "exp2(x)", "expm1(x)", "sinh(x)", "cosh(x)", "pow(x, 7.0)"),
    *("sqrt(x)", "rsqrt(x)", "log(x)", "log1p(x)", "log2(x)", "pow(x, 0.5)", "pow(x, 2.5)"),
)

constants = st.floats(allow_nan=False).map(Constant)
numbers = constants | st.booleans().map(Constant) | st.integers(-9, 9).map(Constant)


def calls(arguments: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    whole = arguments.map(lambda argument: argument if argument.kind != "float" else _POSITIVE)

    def of(name: str) -> st.SearchStrategy[Expression]:
        function = FUNCTIONS[name]
        kinds = [whole if function.integral else arguments] * len(function.parameters)
        kinds[len(kinds) - function.constants :] = [constants] * function.constants
        return st.tuples(*kinds).map(lambda chosen: Call(name, chosen))

    return st.sampled_from(sorted(FUNCTIONS)).flatmap(of)


expressions = st.recursive(numbers | st.sampled_from([X, Y]), calls, max_leaves=12)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(expressions)
def test_printed_text_parses_back_to_the_same_expression(expression: Expression) -> None:
    assert parse(str(expression)) == expression


@pytest.mark.parametrize(
    "text",
    [
        "silu(g) * u",
        "x * sigmoid(1.702 * x)",
        "0.5 * x + 1.0",
        "(x + y) * z",
        "x - (y - z)",
        "x / (y * z)",
        "x / y * z",
        "-x * y",
        "-(x * y)",
        "-(x + y)",
        "x - -y",
        "x * -2.0",
        "(x < y) * x",
        "(x < y) == (y < x)",
        "clamp(g, -inf, 7.0) * u",
        "where(x + 1.0 > y, x, -y)",
        "neg(2.0)",
        "--x",
        "1e-05 * x",
    ],
)
def test_text_with_minimal_parentheses_prints_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x +",
        "frobnicate(x)",
        "silu(x, y)",
        "clamp(x, y, 1.0)",
        "pow(2.0, x)",
        "x ** 2",
        "x < y < z",
        "x if y else z",
        "nan",
        "'text'",
        "math.exp(x)",
        "relu(input=x)",
        "__import__('os').getcwd()",
    ],
)
def test_text_outside_of_the_language_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


def test_expressions_are_immutable_and_equal_by_value() -> None:
    expression = parse("silu(x)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        expression.function = "gelu"  # type: ignore[attr-defined]
    assert expression == call("silu", X)
    assert hash(expression) == hash(call("silu", X))
    assert Constant(0.0) != Constant(-0.0)


def test_an_expression_of_another_process_is_the_same_key() -> None:
    """There the hashes of texts differ."""
    text = "gelu_tanh(x) * 2.0"
    code = "import pickle, sys; from fusion_backend.mlp.expression import parse; "
    code += f"sys.stdout.buffer.write(pickle.dumps(parse({text!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) in {parse(text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * 1.0", "x"),
        ("x + -0.0", "x"),
        ("x - 0.0", "x"),
        ("x + 0.0", "x + 0.0"),
        ("0.0 - x", "0.0 - x"),
        ("x / 1.0", "x"),
        ("(x > 0.0) * 1", "int(x > 0.0)"),
        ("(x > 0.0) * 1.0", "float(x > 0.0)"),
        ("(x > 0.0) * True", "x > 0.0"),
        ("logical_and(x < inf, y > 0.0)", "logical_and(x < inf, y > 0.0)"),
        ("logical_and(1.0 < inf, y > 0.0)", "y > 0.0"),
        ("1e+30 * 1e+30 * x", "1e+30 * 1e+30 * x"),
        ("-1.0 * x", "-x"),
        ("--x", "x"),
        ("pow(x, 1.0)", "x"),
        ("x * (2.0 * sqrt(4.0))", "x * 4.0"),
        ("where(x < 0.0, y, y)", "y"),
        ("x * 0.0", "x * 0.0"),
        ("x - x", "x - x"),
        ("1.0 / 0.0 * x", "1.0 / 0.0 * x"),
    ],
)
def test_building_drops_only_what_changes_no_value(text: str, expected: str) -> None:
    assert str(substitute(parse(text), {})) == expected


def test_call_refuses_a_variable_for_a_constant_parameter() -> None:
    with pytest.raises(ExpressionError, match="leaky_relu needs a constant slope, got y"):
        call("leaky_relu", X, Y)


def test_variables_come_in_the_order_of_their_appearance() -> None:
    assert variables(parse("u * silu(g) + u")) == ("u", "g")


def test_substitution_replaces_variables() -> None:
    assert str(substitute(parse("silu(x) * y"), {"x": parse("2.0 * y")})) == "silu(2.0 * y) * y"


def test_examples_use_every_function() -> None:
    used = {name for text in EXAMPLES for name in FUNCTIONS if name in _calls(parse(text))}
    elsewhere = {"dropout", *(n for n, function in FUNCTIONS.items() if function.integral)}
    assert used | elsewhere == set(FUNCTIONS)  # test_operands.py, test_kinds.py


def _calls(expression: Expression) -> set[str]:
    if not isinstance(expression, Call):
        return set()
    return {expression.function}.union(*map(_calls, expression.arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_evaluation_keeps_dtype_and_shape(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    for text in ("where(x > 0.0, 0.1, 0.2)", "x > 0.0", "2.0", "x * where(x > 0.0, 0.1, 0.2)"):
        result = evaluate(parse(text), {"x": x})
        assert (result.dtype, result.shape) == (dtype, x.shape), text


def test_evaluation_needs_every_variable() -> None:
    with pytest.raises(ExpressionError, match="values are needed for u"):
        evaluate(parse("silu(g) * u"), {"g": torch.ones(1)})


def test_choice_between_numbers_is_exact_in_float64() -> None:
    x = torch.ones(1, dtype=torch.float64)
    assert evaluate(parse("where(x > 0.0, 0.1, 0.2)"), {"x": x}).item() == 0.1


@pytest.mark.parametrize("text", EXAMPLES)
def test_derivatives_are_those_of_autograd_at_kinks_too(text: str) -> None:
    expression = parse(text)
    values = {name: value.requires_grad_() for name, value in points(torch.float64).items()}
    result = evaluate(expression, values)
    for name in variables(expression):
        (expected,) = torch.autograd.grad(result.sum(), values[name], retain_graph=True)
        got = evaluate(differentiate(expression, name), values)
        # hardsigmoid's slope is 1/6 in float32 in PyTorch
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("text", [text for text in ONE_VARIABLE if text not in UNBOUNDED])
def test_function_and_derivative_are_finite_in_float32_far_from_zero(text: str) -> None:
    x = torch.tensor([-1e4, 1e4])
    for expression in (parse(text), differentiate(parse(text), "x")):
        assert evaluate(expression, {"x": x}).isfinite().all(), str(expression)


def test_masked_gradient_is_zero_even_if_what_it_masks_is_infinite() -> None:
    gradient = differentiate(parse("relu(g) * u"), "g")
    values = {"g": torch.tensor([-1.0]), "u": torch.tensor([float("inf")])}
    assert evaluate(gradient, values).item() == 0.0


def test_branch_not_taken_makes_a_gradient_nan_as_in_autograd() -> None:
    expression = parse("where(x > 20.0, x, log(1.0 + exp(x)))")
    x = torch.tensor([1000.0, 30.0], requires_grad=True)
    (expected,) = torch.autograd.grad(evaluate(expression, {"x": x}).sum(), x)
    got = evaluate(differentiate(expression, "x"), {"x": x.detach()})
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert expected.isnan().tolist() == [True, False]


def test_comparisons_contribute_no_gradient() -> None:
    assert str(differentiate(parse("(x > 0.0) * y"), "x")) == "0.0"
