"""Truth values, integers and floats in activations: each node has PyTorch's kind of number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from capture import only_site, record
from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression import call, differentiate, evaluate, parse
from fusion_backend.mlp.expression.nodes import bounds
from models import MLP, X
from repetition import slow_but

VALUES = torch.tensor([-120.0, -1.5, -0.0, 0.0, 0.5, 1.0, 1.5, 2.5, 120.0, float("nan")])


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("x > 0.0", "bool", lambda x: x > 0),
        ("(x > 0.0) + (x > 1.0)", "bool", lambda x: (x > 0) + (x > 1)),
        ("(x > 0.0) * (x > 1.0)", "bool", lambda x: (x > 0) * (x > 1)),
        ("maximum(x > 0.0, x > 1.0)", "bool", lambda x: torch.maximum(x > 0, x > 1)),
        ("(x > 0.0) + True", "bool", lambda x: (x > 0) + True),
        ("(x > 0.0) + 1", "int", lambda x: (x > 0) + 1),
        ("(x > 0.0) * 2.5", "float", lambda x: (x > 0) * 2.5),
        ("float(x > 0.0) + float(x > 1.0)", "float", lambda x: (x > 0).float() + (x > 1).float()),
        ("int(x > 0.0) - int(x < 0.0)", "int", lambda x: (x > 0).int() - (x < 0).int()),
        ("1 - int(x > 0.0)", "int", lambda x: 1 - (x > 0).int()),
        ("int(x > 0.0) / int(x > 1.0)", "float", lambda x: (x > 0).int() / (x > 1).int()),
        ("bitwise_and(int(x > 0.0) * 3, 2)", "int", lambda x: ((x > 0).int() * 3) & 2),
        ("bitwise_or(int(x > 0.0), 2)", "int", lambda x: (x > 0).int() | 2),
        ("bitwise_xor(int(x > 0.0), 3)", "int", lambda x: (x > 0).int() ^ 3),
        ("bitwise_not(int(x > 0.0))", "int", lambda x: ~(x > 0).int()),
        ("logical_not(x > 0.0)", "bool", lambda x: ~(x > 0)),
        ("where(x > 0.0, 1, 0)", "int", lambda x: torch.where(x > 0, 1, 0)),
        ("where(x > 0.0, True, False)", "bool", lambda x: torch.where(x > 0, True, False)),
        ("where(x > 0.0, 1, x)", "float", lambda x: torch.where(x > 0, 1, x)),
        ("sigmoid(x > 0.0)", "float", lambda x: torch.sigmoid(x > 0)),
        ("(x > 0.0) == (x > 1.0)", "bool", lambda x: (x > 0) == (x > 1)),
    ],
)
def test_arithmetic_has_the_kind_and_the_values_of_pytorch(text, kind, expected) -> None:
    expression = parse(text)
    assert expression.kind == kind
    assert parse(str(expression)) == expression
    result = expected(VALUES)
    names = {torch.bool: "bool", torch.float32: "float"}
    assert names.get(result.dtype, "int") == kind
    torch.testing.assert_close(
        evaluate(expression, {"x": VALUES}), result.float(), rtol=0, atol=0, equal_nan=True
    )


def test_integers_are_bounded_by_what_they_are_made_of() -> None:
    assert bounds(parse("int(x > 0.0) * 3 - 5")) == (-5, -2)
    assert bounds(parse("abs(int(x > 0.0) - 4)")) == (0, 4)
    assert bounds(parse("bitwise_not(where(x > 0.0, 9, 2))")) == (-10, -3)
    low, high = bounds(parse("bitwise_xor(int(x > 0.0) * 5, 2)"))
    assert low <= 0
    assert high >= 7
    with pytest.raises(ExpressionError, match="only an integer"):
        bounds(parse("x + 1.0"))


@pytest.mark.parametrize("text", ["int(x)", "bitwise_and(x, 1)", "bitwise_not(x)"])
def test_floats_are_not_taken_for_integers(text) -> None:
    with pytest.raises(ExpressionError, match="needs integers"):
        parse(text)


def test_a_number_has_the_kind_of_what_it_meets() -> None:
    assert str(call("mul", parse("x"), True)) == "x"
    assert str(call("add", parse("x"), 2)) == "x + 2.0"
    assert str(call("add", parse("int(x > 0.0)"), True)) == "int(x > 0.0) + 1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * (x > 0.0)", "float(x > 0.0)"),
        ("x * ((x > 0.0) + (x > 1.0))", "float((x > 0.0) + (x > 1.0))"),
        ("x * int(x > 0.0)", "float(x > 0.0)"),
        ("float(x > 0.0) + float(x > 1.0)", "0.0"),
    ],
)
def test_truth_values_and_integers_pass_no_gradient(text, expected) -> None:
    assert str(differentiate(parse(text), "x")) == expected


PROGRAMS = {
    "sum of floats": lambda h: (h > 0).float() + (h > 1).float() + (h > 2).float(),
    "difference of floats": lambda h: (h > 1).to(h.dtype) - (h < -1).to(h.dtype),
    "one minus a float": lambda h: h * (1 - (h > 0).float()),
    "sum of truth values": lambda h: h * ((h > 0) + (h > 0) + (h < 5)),
    "product of truth values": lambda h: h * ((h > 0) * (h > 1)),
    "integers": lambda h: h * (1 - (h > 0).int() + (h > 1).long() * 2),
    "small integers": lambda h: h * ((h > 0).to(torch.int8) + (h > 1).to(torch.uint8)),
    "bits": lambda h: h * ((((h > 0).int() | 2) ^ (h > 1).int()) & 3),
    "bits of truth values": lambda h: h * ((h > 0) & ~(h > 1) | (h < -1) ^ (h < 0)),
    "inverted bits": lambda h: h * ~(h > 0).int(),
    "exclusive": lambda h: h * torch.logical_xor(h > 0, h > 1),
    "true is one": lambda h: F.relu(h) + True,
    "true as a limit": lambda h: torch.clamp(h, -True, True),
    "true as a slope": lambda h: F.leaky_relu(h, True) * torch.sigmoid(h),
    "true as a branch": lambda h: torch.where(h > 0, True, h),
    "quotient of integers": lambda h: h * ((h > 0).int() / ((h > 1).int() + 2)),
    "back to truth values": lambda h: h * ((h > 0).int() - 1).bool(),
    "chosen integers": lambda h: h * torch.where(h > 0, 3, -2),
    "chosen floats": lambda h: h * torch.where(h > 0, 0.1, 0.7),
    "masked": lambda h: ((h > 0).float() * 3).masked_fill(h > 1, 0.3) + F.relu(h),
    "truth of a float": lambda h: F.gelu(h) * F.relu(h).bool(),
    "alpha": lambda h: torch.add((h > 0).int(), (h > 1).int(), alpha=3) * h,
}


@pytest.mark.usefixtures("rows_by_reference")
@pytest.mark.parametrize("name", PROGRAMS)
def test_masks_and_integers_between_layers_are_as_in_eager(name) -> None:
    check_as_eager(name)


@pytest.mark.parametrize("name", slow_but(["quotient of integers"], PROGRAMS))
def test_they_are_in_generated_code(name) -> None:
    check_as_eager(name)


def check_as_eager(name) -> None:
    """The program of this name between two layers, with its gradients."""
    model, x = MLP(PROGRAMS[name]), (X * 3).requires_grad_()
    recorder, result = record(model, x)
    (site,) = recorder.sites
    assert site.rewritten, site.detail
    expected = model(x)
    torch.testing.assert_close(result, expected)
    for found, right in zip(
        torch.autograd.grad(result.sum(), [x, *model.parameters()], allow_unused=True),
        torch.autograd.grad(expected.sum(), [x, *model.parameters()], allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(
            *(torch.zeros(()) if g is None else g.sum() for g in (found, right))
        )


REFUSED = {
    "floats to integers": lambda h: h * F.relu(h).int(),
    "an overflow": lambda h: h * ((h > 0).to(torch.int8) * 100 * 2),
    "below zero without a sign": lambda h: h * ((h > 0).to(torch.uint8) - 1),
    "beyond 32 bits": lambda h: h * ((h > 0).long() * 2**40),
    "a quotient without remainder": lambda h: h * ((h > 0).int() // 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kind_is_refused(name) -> None:
    site = only_site(MLP(REFUSED[name]), X)
    assert (site.rewritten, site.reason) == (False, "unknown-function")
