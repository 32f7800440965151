"""How each function in activations is spelled in Triton, and in its interpreter."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping

import torch

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.mlp.expression.functions import NumberKind

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
INTEGER_SPELLINGS: Mapping[str, str] = {
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
}
TRUTH_VALUE_SPELLINGS: Mapping[str, str] = {
    **dict.fromkeys(("add", "maximum"), "{0} | {1}"),
    **dict.fromkeys(("mul", "minimum"), "{0} & {1}"),
}
CONVERSIONS: Mapping[NumberKind, str] = {
    "bool": "({0} != 0)",
    "int": "{0}.to(tl.int32)",
    "float": "{0}.to(tl.float32)",
}


def _inline(lines: Iterable[str]) -> str:
    """Some lines of PTX, which make ``$0`` of ``$1``, as code with a place for the argument."""
    return (
        f'tl.inline_asm_elementwise("{{{{ {"; ".join(lines)}; }}}}", "=f,f", [{{0}}], '
        "dtype=tl.float32, is_pure=True, pack=1)"
    )


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
_LOGISTIC_OF_BFLOAT16 = _inline(
    (
        ".reg .f32 a",
        "tanh.approx.f32 a, $1",
        "fma.rn.ftz.f32 $0, a, 0f3F000000, 0f3F000000",
    )
)

# The same as 1 / (1 + 2^-x): two special functions, with a relative error of 2^-20.
_LOGISTIC_OF_FLOAT16 = _inline(
    (
        ".reg .f32 e",
        "ex2.approx.ftz.f32 e, $1",
        "add.rn.f32 e, e, 0f3F800000",
        "rcp.approx.ftz.f32 $0, e",
    )
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
    return _inline(lines)


# (tanh x - x) / x³, of which the error at 1/4 is 2^-21 of tanh x.
_TANH = (-1 / 3, 2 / 15, -17 / 315)


def _tanh() -> str:
    """1 - 2 / (1 + exp(2x)), and near zero, where that cancels, a polynomial: 2^-20 at most."""
    cubic, fifth, seventh = map(_float32, _TANH)
    lines = (
        ".reg .f32 e, s, p",
        ".reg .pred near",
        f"mul.rn.f32 e, $1, {_float32(2 * math.log2(math.e))}",
        "ex2.approx.ftz.f32 e, e",
        f"add.rn.f32 e, e, {_float32(1.0)}",
        "rcp.approx.ftz.f32 e, e",
        f"fma.rn.f32 e, e, {_float32(-2.0)}, {_float32(1.0)}",
        "mul.rn.f32 s, $1, $1",
        f"fma.rn.f32 p, s, {seventh}, {fifth}",
        f"fma.rn.f32 p, s, p, {cubic}",
        "mul.rn.f32 p, p, s",
        "fma.rn.f32 p, p, $1, $1",
        f"setp.lt.f32 near, s, {_float32(1 / 16)}",
        "selp.f32 $0, p, e, near",
    )
    return _inline(lines)


_APPROXIMATIONS: Mapping[str, str] = {
    "exp": _POWER_OF_TWO,
    "exp2": _POWER_OF_TWO,
    "log": "tl.log({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": _sine(half=False),
    "cos": _sine(half=True),
}
_SPELLINGS_FOR: Mapping[torch.dtype, Mapping[str, str]] = {
    torch.bfloat16: {**_APPROXIMATIONS, "sigmoid": _LOGISTIC_OF_BFLOAT16},
    torch.float16: {**_APPROXIMATIONS, "sigmoid": _LOGISTIC_OF_FLOAT16, "tanh": _tanh()},
}

# What these multiply their argument by first.
_EXPONENTIAL = {"exp": math.log2(math.e)}
SCALES_FOR: Mapping[torch.dtype, Mapping[str, float]] = {
    torch.float32: {},
    torch.bfloat16: {**_EXPONENTIAL, "sigmoid": 0.5},
    torch.float16: {**_EXPONENTIAL, "sigmoid": -math.log2(math.e)},
}

# One instruction on NVIDIA since sm_75, with a relative error of 2^-11.
HARDWARE_TANH = (
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


def spellings(accuracy: torch.dtype) -> Mapping[str, str]:
    """Every function's spelling, of its arguments; ``accuracy`` as for ``activation.emit``."""
    if triton_is_interpreted():
        return {**_SPELLINGS, **_INTERPRETED_SPELLINGS}
    return {**_SPELLINGS, **_SPELLINGS_FOR.get(accuracy, {})}
