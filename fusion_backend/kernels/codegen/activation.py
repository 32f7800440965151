"""Prints an activation expression and its derivatives as Triton device functions.

    silu(g) * u    →    activation(g, u) = postact
                        activation_gradient(g, u) = postact, ∂/∂g, ∂/∂u

Both also take the place of their blocks and the operands of the activation (``operand_tiles``), and
load those that occur. The latter can multiply the gradient of the result by the derivatives by
operands as well, and stores these products, or sums of them.

The code is straight-line, one operation a line, on float32 blocks; equal sub-expressions are
computed once, so the gradient of ``silu(g) * u`` also has a single exponential. A kernel calls the
two functions as globals of exactly these names: Inductor copies the sources of kernels and of what
they call by global name, and offers them the modules ``tl`` and ``libdevice`` only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.errors import ExpressionError
from fusion_backend.kernels.codegen.approximations import (
    normal_cdf,
    scaled,
    tolerates_approximation,
)
from fusion_backend.kernels.codegen.printed import execute
from fusion_backend.kernels.codegen.spellings import (
    CONVERSIONS,
    HARDWARE_TANH,
    INTEGER_SPELLINGS,
    SCALES_FOR,
    TRUTH_VALUE_SPELLINGS,
    spellings,
)
from fusion_backend.kernels.device.operand_tiles import (
    load_elements,
    load_scalar,
    load_vector,
    random_bits,
    store_elements,
    store_sums,
)
from fusion_backend.mlp.expression import (
    FUNCTIONS,
    Call,
    Constant,
    Expression,
    Variable,
    call,
    differentiate,
    substitute,
)
from fusion_backend.mlp.expression.functions import NumberKind
from fusion_backend.mlp.expression.operand_names import index_of, name_of
from fusion_backend.mlp.expression.philox import scale, threshold
from fusion_backend.mlp.expression.simplification import bind
from fusion_backend.mlp.operands import Kind, projections


@dataclass(frozen=True)
class ActivationCode:
    """Triton device functions of one activation (``triton.JITFunction``, or interpreted).

    Attributes:
        forward: named ``activation``; the activation of float32 blocks ``(x)`` or ``(g, u)``, of
            their place and of the operands, two tuples.
        gradient: named ``activation_gradient``; of the same, the activation followed by its partial
            derivative by each block. It also takes the gradient of the result, and where to store
            those of operands.
    """

    forward: Any
    gradient: Any

    @property
    def is_inline(self) -> bool:
        """Whether ``forward`` is few instructions: it calls none of the vendor's functions."""
        return "libdevice." not in self.forward.src


@functools.cache
def emit(
    expression: Expression,
    accuracy: torch.dtype,
    kinds: tuple[Kind, ...] = (),
    wanted: tuple[int, ...] = (),
    gluon: bool = False,
) -> ActivationCode:
    """Prints and compiles ``expression``.

    Args:
        expression: a function of ``x``, or of ``g`` and ``u``, and of operands.
        accuracy: a dtype whose rounding hides the functions' errors. For float16 and bfloat16
            these are NVIDIA's hardware approximations; for float32 functions are accurate to a few
            units in the last place, on every target. The interpreter takes any as float32.
        kinds: what each operand is.
        wanted: of which operands the gradient is stored.
        gluon: print functions of Gluon, whose language has the same names for all that is used.

    Raises:
        ExpressionError: the variables are others.
    """
    names = projections(expression)
    parameters = ("x",) if names == ("x",) else ("g", "u")
    if not names or not set(names) <= set(parameters):
        raise ExpressionError(f"an activation must be of x, or of g and u; got {expression}")
    partials = tuple(differentiate(expression, name) for name in parameters)
    return ActivationCode(
        forward=_compiled("activation", parameters, kinds, (expression,), accuracy, gluon=gluon),
        gradient=_compiled(
            "activation_gradient",
            parameters,
            kinds,
            (expression, *partials),
            accuracy,
            wanted,
            gluon,
        ),
    )


@functools.cache
def exact_functions(
    expression: Expression,
    accuracy: torch.dtype,
    gluon: bool = False,
    differentiated: bool = True,
) -> int:
    """How many functions of vendors an activation calls, with its derivatives or without.

    Kernels take longer for them than for their products. Arguments are those of :func:`emit`. The
    interpreter calls none.
    """
    if triton_is_interpreted():
        return 0
    printed = emit(expression, accuracy, gluon=gluon)
    code: str = (printed.gradient if differentiated else printed.forward).src
    return code.count("libdevice.")


def emit_function(
    name: str, expression: Expression, accuracy: torch.dtype, earlier: int = 0
) -> Any:
    """A device function of another name: ``expression`` of ``x``, without its derivative.

    A kernel with several activations tells them apart by name, and so does Triton.

    Args:
        name: of the function.
        expression: a function of ``x``, and of operands that are blocks like x.
        accuracy: as for :func:`emit`.
        earlier: how many of these there are; the function takes them after x.
    """
    blocks = {name_of(index): f"earlier_{index}" for index in range(earlier)}
    in_blocks = substitute(expression, {name: Variable(to) for name, to in blocks.items()})
    return _compiled(name, ("x", *blocks.values()), (), (in_blocks,), accuracy)


def _tanh_factors(expression: Expression) -> Iterator[Expression]:
    """The tanh that the activation is a multiple of.

    Only there is the relative error of ``tanh.approx`` that of the result, half of bfloat16's
    rounding: in ``1 + tanh(x)`` or ``x - tanh(x)`` cancellation would make it large.
    """
    match expression:
        case Call("mul", (a, b)):
            yield from _tanh_factors(a)
            yield from _tanh_factors(b)
        case Call("neg", (a,)) | Call("div", (a, _)) | Call("dropout", (a, _, _)):
            yield from _tanh_factors(a)
        case Call("tanh"):
            yield expression


class _Writer:
    """Straight-line code under construction: a line for each different operation."""

    def __init__(
        self,
        block: str,
        kinds: tuple[Kind, ...],
        accuracy: torch.dtype,
        hardware_tanh: frozenset[Expression],
    ) -> None:
        self.lines: list[str] = []
        self._block = block
        self._kinds = kinds
        self._accuracy = accuracy
        self._spellings = spellings(accuracy)
        self._scales = SCALES_FOR[accuracy]
        self._hardware_tanh = hardware_tanh
        self._names: dict[Expression, str] = {}

    def operand(self, expression: Expression, kind: NumberKind = "float") -> str:
        """Name or number of the value: as a float32, an int32 or a truth value."""
        if isinstance(expression, Constant):
            return _number(expression, kind)
        name = self._name(expression)
        return name if expression.kind == kind else CONVERSIONS[kind].format(name)

    def result(self, expression: Expression) -> str:
        """The value as a whole block."""
        if isinstance(expression, Constant):
            number = _number(expression, "float")
            return f"tl.full({self._block}.shape, {number}, tl.float32)"
        value = self.operand(expression)
        if self._is_block(expression):
            return value
        return f"tl.broadcast_to({value}, {self._block}.shape)"

    def store_gradient(self, index: int, partial: Expression) -> None:
        """Store the gradient of an operand, or its sums over rows."""
        store = "store_elements" if self._kinds[index] == "elementwise" else "store_sums"
        product = f"grad * {self.operand(partial)}"
        self.lines.append(f"{store}(gradients[{index}], {product}, place)")

    def _is_block(self, expression: Expression) -> bool:
        """Whether a value has the shape of a block without being broadcast."""
        if isinstance(expression, Variable):
            index = index_of(expression.name)
            return index is None or self._kinds[index] == "elementwise"
        if isinstance(expression, Call):
            return expression.function == "dropout" or any(
                map(self._is_block, expression.arguments)
            )
        return False

    def _name(self, expression: Expression) -> str:
        if expression not in self._names:
            if isinstance(expression, Variable):
                self._names[expression] = self._loaded(expression.name)
            else:
                assert isinstance(expression, Call)
                self._names[expression] = self._computed(expression)
        return self._names[expression]

    def _loaded(self, variable: str) -> str:
        index = index_of(variable)
        if index is None:
            return variable
        rows, columns = (f"{self._block}.shape[{dimension}]" for dimension in (0, 1))
        code = {
            "scalar": f"load_scalar(operands[{index}])",
            "vector": f"load_vector(operands[{index}], place, {columns})",
            "elementwise": f"load_elements(operands[{index}], place, {rows}, {columns})",
        }
        return self._assigned(code[self._kinds[index]])

    def _mask(self, seed: Expression, p: Expression) -> str:
        """What a dropout multiplies by."""
        assert isinstance(seed, Variable)
        assert isinstance(p, Constant)
        shape = f"{self._block}.shape[0], {self._block}.shape[1]"
        bits = f"random_bits(operands[{index_of(seed.name)}], place, {shape})"
        kept = f"{bits} >= {threshold(p.value)}"
        return self._assigned(f"tl.where({kept}, {scale(p.value)!r}, 0.0)")

    def _computed(self, expression: Call) -> str:
        if expression in self._hardware_tanh:
            return self._assigned(HARDWARE_TANH.format(self.operand(expression.arguments[0])))
        match expression:
            case Call("dropout", (Constant(1.0), seed, p)):
                return self._mask(seed, p)
        simpler = self._expanded(expression)
        if simpler is not None:
            return self.operand(simpler)
        if expression.function in self._scales:
            argument = scaled(expression.arguments[0], self._scales[expression.function])
            spelling = self._spellings[expression.function]
            return self._assigned(spelling.format(self.operand(argument)))
        operands = [
            self.operand(argument, kind)
            for argument, kind in zip(expression.arguments, expression.operand_kinds, strict=True)
        ]
        spelling = self._spellings[expression.function]
        if expression.kind == "int":
            spelling = INTEGER_SPELLINGS.get(expression.function, spelling)
        if expression.kind == "bool":
            spelling = TRUTH_VALUE_SPELLINGS.get(expression.function, spelling)
        return self._assigned(spelling.format(*operands))

    def _assigned(self, code: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name

    def _expanded(self, expression: Call) -> Expression | None:
        """The call in terms of simpler functions; None if Triton has it."""
        if (logistic := normal_cdf(expression, self._accuracy)) is not None:
            return logistic
        match expression:
            case Call("clamp", (x, Constant(low), Constant(high))):
                x = x if low == -math.inf else call("maximum", x, low)
                return x if high == math.inf else call("minimum", x, high)
            case Call("pow", (x, Constant(exponent))):
                return _power(x, exponent)
            case Call("dropout", (x, seed, p)):
                return call("mul", x, Call("dropout", (Constant(1.0), seed, p)))
        if expression.function in self._spellings:
            return None
        expansion = FUNCTIONS[expression.function].expansion
        assert expansion is not None, f"{expression.function} has neither spelling nor expansion"
        return bind(expansion, expression)


def _power(x: Expression, exponent: float) -> Expression | None:
    """The constant power of x by multiplications and square roots; None if that is not possible."""
    if exponent < 0.0:
        return call("reciprocal", call("pow", x, -exponent))
    if exponent == 0.5:
        return call("sqrt", x)
    if exponent == 2.0:
        return call("square", x)
    if exponent > 64.0 or exponent != int(exponent):
        return None
    half, odd = divmod(int(exponent), 2)
    even = call("square", call("pow", x, float(half)))
    return call("mul", x, even) if odd else even


def _number(constant: Constant, kind: NumberKind) -> str:
    value = constant.value
    if kind != "float":
        return repr(bool(value) if kind == "bool" else int(value))
    return f'float("{value}")' if math.isinf(value) else repr(float(value))


def _compiled(
    name: str,
    parameters: tuple[str, ...],
    kinds: tuple[Kind, ...],
    results: tuple[Expression, ...],
    accuracy: torch.dtype,
    wanted: tuple[int, ...] | None = None,
    gluon: bool = False,
) -> Any:
    """A device function of ``parameters`` that returns the values of ``results``.

    It stores the gradients of those operands that are ``wanted``.
    """
    if triton_is_interpreted() or not all(map(tolerates_approximation, results)):
        accuracy = torch.float32
    hardware_tanh = frozenset[Expression]()
    if accuracy == torch.bfloat16:
        hardware_tanh = frozenset(_tanh_factors(results[0]))
    writer = _Writer(parameters[0], kinds, accuracy, hardware_tanh)
    returned = ", ".join(map(writer.result, results))
    for index in wanted or ():
        writer.store_gradient(index, differentiate(results[0], name_of(index)))
    gradient = "" if wanted is None else ", grad=None, gradients=None"
    lines = [
        f"def {name}({', '.join(parameters)}, place=None, operands=None{gradient}):",
        f"    # {results[0]}",
        *(f"    {line}" for line in writer.lines),
        f"    return {returned}",
    ]
    source = "\n".join(lines) + "\n"
    if gluon:
        source = source.replace("tl.PropagateNan", "triton_language.PropagateNan")
    precise = [] if accuracy == torch.float32 else [f"{accuracy}".removeprefix("torch.")]
    words = (*precise, *["gluon"] * gluon, name, *kinds, *map(name_of, wanted or ()))
    filename = f"<fusedmlp {' '.join(words)} {results[0]}>"
    namespace: dict[str, Any] = {
        "__name__": __name__,
        "tl": tl,
        "libdevice": libdevice,
        "load_scalar": load_scalar,
        "load_vector": load_vector,
        "load_elements": load_elements,
        "random_bits": random_bits,
        "store_elements": store_elements,
        "store_sums": store_sums,
    }
    if not gluon:
        execute(source, filename, namespace)
        return triton.jit(namespace[name])
    from triton.experimental import gluon as language

    namespace |= {"tl": language.language, "triton_language": tl}
    execute(source, filename, namespace)
    return language.jit(namespace[name])
