"""What a measurement says of an MLP that would run on other kernels than were measured.

Its times are lengthened, by the most that the two kinds of kernels were measured to differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec

import torch

from fusion_backend.kernels import registry
from fusion_backend.mlp.expression import FUNCTIONS, Call, Expression
from fusion_backend.mlp.expression.simplification import bind
from fusion_backend.planning.gpus import kernel_target
from fusion_backend.planning.measurements import Measurement, Widths
from fusion_backend.planning.setting import Setting

_STREAM, _EPILOGUE = registry.STREAM.name, registry.EPILOGUE.name
_BACK_TO_BACK = registry.BACK_TO_BACK.name

# By how much kernels for any GPU take longer than those made for Hopper.
_ANY_GPU = {_STREAM: 2.0, _EPILOGUE: 1.3, _BACK_TO_BACK: 1.45}
_ANY_GPU_PLAIN = {**_ANY_GPU, _EPILOGUE: 1.2}
_ANY_GPU_IN_TRAINING = 1.15  # of a whole step

# By how much an activation of special functions takes longer where they are computed exactly, as
# in float32, than where they are approximated, as most are in 16 bits: measured on an H100 before
# and after bfloat16's were. Products of wide layers hide much of it.
_EXACT = {_EPILOGUE: 1.5, _BACK_TO_BACK: 1.9}
_EXACT_WIDE = {_EPILOGUE: 1.15, _BACK_TO_BACK: 1.9}
_EXACT_IN_TRAINING = {_EPILOGUE: 1.6, _BACK_TO_BACK: 1.9}
# By how much approximations exact enough for float16, of two special functions where bfloat16 has
# one, take longer than bfloat16's: the most of 22 MLPs on an H200, but for a bare tanh.
_FLOAT16 = {_EPILOGUE: 1.18, _BACK_TO_BACK: 1.3}
_FLOAT16_WIDE = {_EPILOGUE: 1.11, _BACK_TO_BACK: 1.3}
_WIDE = 512
# By how much less an erf-GELU gains than its tanh approximation in 16 bits: in narrow layers, and
# by precision in wide ones. Where both were measured, nothing that pays by this was slower than
# Inductor's code.
_ERF = {_STREAM: 1.06, _EPILOGUE: 1.12, _BACK_TO_BACK: 1.19}
_ERF_WIDE = {
    "bfloat16": {_STREAM: 1.06, _EPILOGUE: 1.06},
    "float16": {_STREAM: 1.06, _EPILOGUE: 1.1},
}
# Functions that need no special function; and those, too, of which 16 bits take approximations.
_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "square", "abs", "sign", "relu", "clamp", "dropout"),
        *("maximum", "minimum", "where", "lt", "le", "gt", "ge", "eq", "ne"),
        *("logical_and", "logical_or", "logical_not"),
    }
)
_APPROXIMATED = _ARITHMETIC | {
    *("exp", "exp2", "sigmoid", "tanh", "gelu", "log", "sqrt", "rsqrt", "reciprocal"),
    *("sin", "cos"),
}


def any_gpu(gated: bool) -> Mapping[str, float]:
    """By how much families take longer on kernels for any GPU than on those made for Hopper."""
    return _ANY_GPU if gated else _ANY_GPU_PLAIN


def of_its_kernels(measured: Measurement, setting: Setting) -> Measurement:
    """The measurement, for the kernels that a site of known widths would run on."""
    if setting.dtype == torch.float32:
        return measured
    if setting.training:
        return _of_its_training_kernels(measured, setting)
    assert setting.widths is not None
    target = kernel_target(setting.gpu)

    def made_for_hopper(family: str, widths: Widths, dtype: torch.dtype) -> bool:
        how = (setting.gated, dtype, setting.transposed)
        return registry.named(family).runs_made_for_hopper(measured.rows, widths, *how, target)

    dtype = getattr(torch, measured.kind.precision)
    by_any = setting.strided or bool(setting.operands)
    longer = {
        family: factor
        for family, factor in any_gpu(setting.gated).items()
        if family in measured.microseconds
        and made_for_hopper(family, measured.widths, dtype)
        and (by_any or not made_for_hopper(family, setting.widths, setting.dtype))
    }
    padding = _padded_rows(setting.widths) / _padded_rows(measured.widths)
    if padding > 1.0 and _BACK_TO_BACK in measured.microseconds:
        longer[_BACK_TO_BACK] = longer.get(_BACK_TO_BACK, 1.0) * padding
    return measured.lengthened(longer) if longer else measured


def _of_its_training_kernels(measured: Measurement, setting: Setting) -> Measurement:
    """:func:`of_its_kernels` of a training step, measured without operands of the activation."""
    assert setting.widths is not None
    by_any = setting.strided or setting.operands
    longer = {_EPILOGUE: _ANY_GPU_IN_TRAINING} if by_any else {}
    padding = _padded_products(setting.widths) / _padded_products(measured.widths)
    longer[_BACK_TO_BACK] = longer.get(_BACK_TO_BACK, 1.0) * max(padding, 1.0)
    longer = {f: by for f, by in longer.items() if by > 1.0 and f in measured.microseconds}
    return measured.lengthened(longer) if longer else measured


def of_its_activation(measured: Measurement, setting: Setting) -> Measurement:
    """The measurement of a form's activation, in bfloat16 or as predicted, for a site's own."""
    same = measured.activation == setting.activation and setting.dtype != torch.float16
    longer = exact_activation(setting)
    return measured.lengthened(longer) if longer and not same else measured


def of_erf(measured: Measurement) -> Measurement | None:
    """The measurement of a tanh-GELU for an erf-GELU; only in inference in 16 bits."""
    precision = measured.kind.precision
    if measured.kind.training or precision not in _ERF_WIDE:
        return None
    return measured.lengthened(_ERF_WIDE[precision] if measured.width >= _WIDE else _ERF)


def exact_activation(setting: Setting) -> Mapping[str, float]:
    """By how much a site's activation makes plans slower than measured; empty if it does not."""
    if setting.dtype == torch.float32:
        return {}
    if not needs_exact_functions(setting):
        longer = _FLOAT16_WIDE if _is_wide(setting) else _FLOAT16
        return longer if special_functions(setting) > 1 else {}
    if setting.training:
        return _EXACT_IN_TRAINING
    return _EXACT_WIDE if _is_wide(setting) else _EXACT


def _is_wide(setting: Setting) -> bool:
    return setting.widths is not None and setting.widths[0] >= _WIDE


def needs_exact_functions(setting: Setting) -> bool:
    """Whether an activation has functions of which kernels take no approximation."""
    if setting.dtype == torch.float32:
        return True
    return not all(_is_of(_APPROXIMATED, f) for f in setting.activations)


def exact_functions(setting: Setting, differentiated: bool = False) -> int:
    """How many functions of a site's activation kernels compute exactly, in 16 bits.

    At least one counts where some are, and no more where operands enter them or Triton is missing.

    Args:
        setting: the site.
        differentiated: whether to count those of its derivatives, too.
    """
    if not needs_exact_functions(setting):
        return 0
    if setting.operands or find_spec("triton") is None:
        return 1
    from fusion_backend.kernels.codegen import activation

    how = (setting.dtype, False, differentiated)
    return max(1, sum(activation.exact_functions(f, *how) for f in setting.activations))


def special_functions(setting: Setting) -> int:
    """How many special functions the approximations of a site's activation take, for each value."""
    if setting.dtype != torch.float16 or all(_is_of(_ARITHMETIC, f) for f in setting.activations):
        return 1
    return 2


def _padded_rows(widths: Widths) -> int:
    """How wide rows of x and y are, together, for the kernel that pads them."""
    from fusion_backend.kernels.host.configs import padded

    in_features, _, out_features = widths
    return padded(in_features) + padded(out_features)


def _padded_products(widths: Widths) -> int:
    """How large the weights of a narrow MLP are, together, for the kernels that pad them."""
    from fusion_backend.kernels.host.configs import padded

    return padded(widths[1]) * _padded_rows(widths)


@functools.cache
def _is_of(functions: frozenset[str], activation: Expression) -> bool:
    """Whether an activation is made of these functions only."""
    if not isinstance(activation, Call):
        return True
    if activation.function in functions:
        return all(_is_of(functions, argument) for argument in activation.arguments)
    expansion = FUNCTIONS[activation.function].expansion
    return expansion is not None and _is_of(functions, bind(expansion, activation))
