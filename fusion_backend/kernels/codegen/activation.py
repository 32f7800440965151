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
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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

_NAN = "propagate_nan=tl.PropagateNan.ALL"

# Vendor math functions (libdevice on NVIDIA, ocml on AMD) are within 1 or 2 ulp. Triton's own
# `tl.exp` and the like are not: the hardware exponential loses |x| / 2 ulp in its argument.
_SPELLINGS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "square": "{0} * {0}",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "libdevice.rsqrt({0})",
    "pow": "libdevice.pow({0}, {1})",
    "exp": "libdevice.exp({0})",
    "exp2": "libdevice.exp2({0})",
    "expm1": "libdevice.expm1({0})",
    "log": "libdevice.log({0})",
    "log1p": "libdevice.log1p({0})",
    "log2": "libdevice.log2({0})",
    "sin": "libdevice.sin({0})",
    "cos": "libdevice.cos({0})",
    "tanh": "libdevice.tanh({0})",
    "erf": "libdevice.erf({0})",
    "erfc": "libdevice.erfc({0})",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    "relu": f"tl.maximum({{0}}, 0.0, {_NAN})",
    "maximum": f"tl.maximum({{0}}, {{1}}, {_NAN})",
    "minimum": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "where": "tl.where({0}, {1}, {2})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}",
    "float": "{0}",
    "int": "{0}",
}

# Numbers of other kinds than floats. Integers are few bits wide, see `nodes.bounds`.
_INTEGER_SPELLINGS: Mapping[str, str] = {
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
}
_TRUTH_VALUE_SPELLINGS: Mapping[str, str] = {
    **dict.fromkeys(("add", "maximum"), "{0} | {1}"),
    **dict.fromkeys(("mul", "minimum"), "{0} & {1}"),
}
_CONVERSIONS: Mapping[NumberKind, str] = {
    "bool": "({0} != 0)",
    "int": "{0}.to(tl.int32)",
    "float": "{0}.to(tl.float32)",
}

# The hardware's power of two: a relative error of 2^-22. What is smaller than the normal numbers of
# float32 becomes 0: the code that would keep it costs four instructions.
_POWER_OF_TWO = (
    'tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [{0}], '
    "dtype=tl.float32, is_pure=True, pack=1)"
)

# 1 / (1 + exp(-x)) = 0.5 + 0.5 tanh(x / 2): one special function where the exponential and its
# reciprocal are two. On an H100 this was measured to put a GELU or SiLU no more than 2e-5
# off: less than the rounding of its argument to bfloat16, which unfused programs do, does to it,
# where the result is not itself that small.
_LOGISTIC = (
    'tl.inline_asm_elementwise("{{ .reg .f32 a; tanh.approx.f32 a, $1; '
    'fma.rn.ftz.f32 $0, a, 0f3F000000, 0f3F000000; }}", "=f,f", [{0}], '
    "dtype=tl.float32, is_pure=True, pack=1)"
)

# sin(x) = (-1)^k sin(x - k π) for the whole number k next to x / π, and cos(x) the same of k + 1/2.
# Two parts of π leave an error of 2^-19 at most up to |x| = 4e6; beyond, where float32 hardly knows
# the phase any more and bfloat16 rounded it away long before, the result is of any phase, but no
# larger than 1. The vendor's functions reduce such arguments exactly, in local memory and on a
# branch of their own: on an H200 a chain with sin(30 x) took twice as long as one with GELU.
_TO_WHOLE = 1.5 * 2.0**23  # adding it leaves the nearest whole number in the last bits
_PI = 3.1415927410125732  # as float32 has it
_SINE = (-0.16665850689386066, 0.008314235474527903, -0.000185409106384574)  # (sin r - r) / r³


def _float32(value: float) -> str:
    """A constant of PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _sine(half: bool) -> str:
    """The sine, or with ``half`` the cosine."""
    cubic, fifth, seventh = map(_float32, _SINE)
    turns, whole = _float32(1 / math.pi), _float32(_TO_WHOLE)
    lines = (
        ".reg .f32 k, r, s, p",
        ".reg .b32 n, m",
        ".reg .pred far",
        f"fma.rn.f32 k, $1, {turns}, {_float32(-0.5 if half else 0.0)}",
        f"add.rn.f32 k, k, {whole}",
        "mov.b32 n, k",
        *(["not.b32 n, n"] if half else []),
        "shl.b32 n, n, 31",
        f"sub.rn.f32 k, k, {whole}",
        *([f"add.rn.f32 k, k, {_float32(0.5)}"] if half else []),
        f"fma.rn.f32 r, k, {_float32(-_PI)}, $1",
        f"fma.rn.f32 r, k, {_float32(_PI - math.pi)}, r",
        "abs.f32 s, r",
        f"setp.gt.f32 far, s, {_float32(2.0)}",
        f"selp.f32 r, {_float32(0.0)}, r, far",
        "mul.rn.f32 s, r, r",
        f"fma.rn.f32 p, s, {seventh}, {fifth}",
        f"fma.rn.f32 p, s, p, {cubic}",
        "mul.rn.f32 s, s, r",
        "fma.rn.f32 p, s, p, r",
        "mov.b32 m, p",
        "xor.b32 m, m, n",
        "mov.b32 $0, m",
    )
    return (
        f'tl.inline_asm_elementwise("{{{{ {"; ".join(lines)}; }}}}", "=f,f", [{{0}}], '
        "dtype=tl.float32, is_pure=True, pack=1)"
    )


_FAST_SPELLINGS: Mapping[str, str] = {
    "exp": _POWER_OF_TWO,
    "exp2": _POWER_OF_TWO,
    "sigmoid": _LOGISTIC,
    "log": "tl.log({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": _sine(half=False),
    "cos": _sine(half=True),
}

# What these multiply their argument by first.
_FAST_SCALES = {"exp": math.log2(math.e), "sigmoid": 0.5}

# One instruction on NVIDIA since sm_75, with a relative error of 2^-11.
_HARDWARE_TANH = (
    'tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [{0}], '
    "dtype=tl.float32, is_pure=True, pack=1)"
)

# The interpreter has no vendor functions. Float64 hides the cancellation, but for tiny arguments.
_WIDE = "{0}.to(tl.float64)"
_INTERPRETED_SPELLINGS: Mapping[str, str] = {
    **{name: f"tl.{name}({{0}})" for name in ("exp", "exp2", "log", "log2", "sin", "cos")},
    **{name: f"tl.{name}({{0}})" for name in ("erf", "rsqrt")},
    "erfc": f"(1.0 - tl.erf({_WIDE})).to(tl.float32)",
    "sqrt": "tl.sqrt({0})",
    # Of minus infinity a power that is no integer is that of infinity.
    "pow": f"tl.exp({{1}} * tl.log(tl.where({{0}} == -float('inf'), -{_WIDE}, {_WIDE})))"
    ".to(tl.float32)",
    "expm1": f"tl.where(tl.abs({{0}}) < 1e-4, {{0}} + 0.5 * {{0}} * {{0}}, tl.exp({_WIDE}) - 1.0)"
    ".to(tl.float32)",
    "log1p": f"tl.where(tl.abs({{0}}) < 1e-4, {{0}} - 0.5 * {{0}} * {{0}}, tl.log({_WIDE} + 1.0))"
    ".to(tl.float32)",
    "tanh": f"tl.where(tl.abs({{0}}) < 1e-4, {{0}}, 1.0 - 2.0 / (tl.exp(2.0 * {_WIDE}) + 1.0))"
    ".to(tl.float32)",
}


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
    fast: bool,
    kinds: tuple[Kind, ...] = (),
    wanted: tuple[int, ...] = (),
    gluon: bool = False,
) -> ActivationCode:
    """Prints and compiles ``expression``.

    Args:
        expression: a function of ``x``, or of ``g`` and ``u``, and of operands.
        fast: use hardware approximations whose error vanishes in the rounding of the result to
            bfloat16. Only for NVIDIA GPUs and bfloat16; without it the functions are accurate to a
            few units in the last place of float32 on every target. The interpreter ignores it.
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
        forward=_compiled("activation", parameters, kinds, (expression,), fast, gluon=gluon),
        gradient=_compiled(
            "activation_gradient", parameters, kinds, (expression, *partials), fast, wanted, gluon
        ),
    )


@functools.cache
def exact_functions(
    expression: Expression, fast: bool, gluon: bool = False, differentiated: bool = True
) -> int:
    """How many functions of vendors an activation calls, with its derivatives or without.

    Kernels take longer for them than for their products. Arguments are those of :func:`emit`. The
    interpreter calls none.
    """
    if triton_is_interpreted():
        return 0
    printed = emit(expression, fast, gluon=gluon)
    code: str = (printed.gradient if differentiated else printed.forward).src
    return code.count("libdevice.")


def emit_function(name: str, expression: Expression, fast: bool, earlier: int = 0) -> Any:
    """A device function of another name: ``expression`` of ``x``, without its derivative.

    A kernel with several activations tells them apart by name, and so does Triton.

    Args:
        name: of the function.
        expression: a function of ``x``, and of operands that are blocks like x.
        fast: as for :func:`emit`.
        earlier: how many of these there are; the function takes them after x.
    """
    blocks = {name_of(index): f"earlier_{index}" for index in range(earlier)}
    in_blocks = substitute(expression, {name: Variable(to) for name, to in blocks.items()})
    return _compiled(name, ("x", *blocks.values()), (), (in_blocks,), fast)


def _dialect(fast: bool) -> Mapping[str, str]:
    if triton_is_interpreted():
        return {**_SPELLINGS, **_INTERPRETED_SPELLINGS}
    return {**_SPELLINGS, **_FAST_SPELLINGS} if fast else _SPELLINGS


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
        self, block: str, kinds: tuple[Kind, ...], fast: bool, hardware_tanh: frozenset[Expression]
    ) -> None:
        self.lines: list[str] = []
        self._block = block
        self._kinds = kinds
        self._fast = fast
        self._spellings = _dialect(fast)
        self._hardware_tanh = hardware_tanh
        self._names: dict[Expression, str] = {}

    def operand(self, expression: Expression, kind: NumberKind = "float") -> str:
        """Name or number of the value: as a float32, an int32 or a truth value."""
        if isinstance(expression, Constant):
            return _number(expression, kind)
        name = self._name(expression)
        return name if expression.kind == kind else _CONVERSIONS[kind].format(name)

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
            return self._assigned(_HARDWARE_TANH.format(self.operand(expression.arguments[0])))
        match expression:
            case Call("dropout", (Constant(1.0), seed, p)):
                return self._mask(seed, p)
        simpler = self._expanded(expression)
        if simpler is not None:
            return self.operand(simpler)
        if self._fast and expression.function in _FAST_SCALES:
            argument = scaled(expression.arguments[0], _FAST_SCALES[expression.function])
            spelling = self._spellings[expression.function]
            return self._assigned(spelling.format(self.operand(argument)))
        operands = [
            self.operand(argument, kind)
            for argument, kind in zip(expression.arguments, expression.operand_kinds, strict=True)
        ]
        spelling = self._spellings[expression.function]
        if expression.kind == "int":
            spelling = _INTEGER_SPELLINGS.get(expression.function, spelling)
        if expression.kind == "bool":
            spelling = _TRUTH_VALUE_SPELLINGS.get(expression.function, spelling)
        return self._assigned(spelling.format(*operands))

    def _assigned(self, code: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name

    def _expanded(self, expression: Call) -> Expression | None:
        """The call in terms of simpler functions; None if Triton has it."""
        if self._fast and (logistic := normal_cdf(expression)) is not None:
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
    fast: bool,
    wanted: tuple[int, ...] | None = None,
    gluon: bool = False,
) -> Any:
    """A device function of ``parameters`` that returns the values of ``results``.

    It stores the gradients of those operands that are ``wanted``.
    """
    fast = fast and not triton_is_interpreted() and all(map(tolerates_approximation, results))
    hardware_tanh = frozenset(_tanh_factors(results[0])) if fast else frozenset()
    writer = _Writer(parameters[0], kinds, fast, hardware_tanh)
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
    words = (*["fast"] * fast, *["gluon"] * gluon, name, *kinds, *map(name_of, wanted or ()))
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
