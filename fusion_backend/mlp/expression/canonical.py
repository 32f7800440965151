"""The canonical form of activation expressions: one spelling for equal activations."""

from __future__ import annotations

import functools
import math

from fusion_backend.compat.dispatcher import clamp_stops_at_limits
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression
from fusion_backend.mlp.expression.ordering import ordered
from fusion_backend.mlp.expression.recognition import recognise
from fusion_backend.mlp.expression.simplification import call


@functools.cache
def canonicalize(expression: Expression) -> Expression:
    """Rewrites an expression so that equal activations get one, preferably short, spelling.

    Operands are ordered (``silu(g) * u``, whichever factor came first), constants folded, and known
    activations called by their names: ``relu(x) * relu(x)`` becomes ``square(relu(x))`` and a GELU
    spelled out becomes ``gelu(x)`` or ``gelu_tanh(x)``.

    No value changes but by the rounding of a known activation that is spelled out: terms and
    factors stay in their groups, see ``ordering``. Gradients at kinks stay those of the original:
    ``maximum(x, 0.0)``, whose gradient at 0 is 1/2, is not ``relu(x)``.
    """
    if not isinstance(expression, Call):
        return expression
    arguments = tuple(map(canonicalize, expression.arguments))
    result = _respelled(ordered(Call(expression.function, arguments)))
    shorter = recognise(result)
    return result if shorter is None else canonicalize(shorter)


def _respelled(expression: Expression) -> Expression:
    """The usual name of a function that is a special case of another."""
    match expression:
        case Call("hardtanh", (x, Constant(0.0), Constant(math.inf))):
            return call("relu", x)
        case Call("clamp", (x, Constant(0.0), Constant(math.inf))) if clamp_stops_at_limits():
            return call("relu", x)
        case Call("threshold", (x, Constant(0.0), Constant(0.0))):
            return call("relu", x)
        case Call("hardtanh", (x, Constant(0.0), Constant(6.0))):
            return call("relu6", x)
        case Call("pow", (x, Constant(0.5))):
            return call("sqrt", x)
        case Call("pow", (x, Constant(-0.5))):
            return call("rsqrt", x)
    return expression
