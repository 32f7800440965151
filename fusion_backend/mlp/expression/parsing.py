"""Reading activation expressions from texts: a subset of Python's own expressions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression.nodes import (
    Call,
    Constant,
    Expression,
    Variable,
    check_constants,
)

_SYNTAX: Mapping[type[ast.AST], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
}


def parse(text: str) -> Expression:
    """Reads an expression exactly as it is written, without simplifying it.

    Raises:
        ExpressionError: ``text`` is not an expression of the language.
    """
    expression = parse_template(text)
    _check(expression)
    return expression


@functools.cache
def parse_template(text: str) -> Expression:
    """Like :func:`parse`, for texts in which variables may stand for constants."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ExpressionError(f"an activation must be an expression, got {text!r}") from error
    return _parsed(tree.body)


def _check(expression: Expression) -> None:
    if isinstance(expression, Call):
        check_constants(expression)
        for argument in expression.arguments:
            _check(argument)


def _parsed(node: ast.expr) -> Expression:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return Constant(value)
        case ast.Name(id="inf" | "nan" as name):
            return Constant(float(name))
        case ast.Name(id=name):
            return Variable(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _parsed(operand)
            literal = isinstance(operand, (ast.Constant, ast.Name))
            if isinstance(inner, Constant) and literal and inner.kind != "bool":
                return Constant(-inner.value)
            return Call("neg", (inner,))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _SYNTAX:
            return Call(_SYNTAX[type(operation)], (_parsed(left), _parsed(right)))
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            if type(operation) in _SYNTAX:
                return Call(_SYNTAX[type(operation)], (_parsed(left), _parsed(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return Call(name, tuple(_parsed(argument) for argument in arguments))
    raise ExpressionError(
        "an activation may use numbers, variables, + - * /, a comparison and calls; "
        f"got {ast.unparse(node)!r}"
    )
