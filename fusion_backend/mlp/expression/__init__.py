"""Activations as data: immutable expressions of the projections of an MLP.

An expression prints as infix text, ``silu(g) * u``, and :func:`parse` reads that text back to an
equal expression, so the text can be an operator's argument. The language has numbers, ``inf``,
variables, ``+ - * /``, one comparison at a time, and calls of the functions of :data:`FUNCTIONS`:

    >>> e = canonicalize(parse("u * (g * sigmoid(g))"))
    >>> str(e)
    'silu(g) * u'
    >>> str(differentiate(e, "u"))
    'silu(g)'

This module is the whole interface; the others hold one part of it each.
"""

from __future__ import annotations

from fusion_backend.mlp.expression.canonical import canonicalize
from fusion_backend.mlp.expression.differentiation import differentiate, passing_gradients
from fusion_backend.mlp.expression.evaluation import evaluate
from fusion_backend.mlp.expression.functions import FUNCTIONS, Function
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable, variables
from fusion_backend.mlp.expression.parsing import parse
from fusion_backend.mlp.expression.simplification import call, substitute

__all__ = [
    "FUNCTIONS",
    "Call",
    "Constant",
    "Expression",
    "Function",
    "Variable",
    "call",
    "canonicalize",
    "differentiate",
    "evaluate",
    "parse",
    "passing_gradients",
    "substitute",
    "variables",
]
