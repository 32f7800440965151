"""Kernels for one activation each, from templates that leave it open."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import triton

from fusion_backend.compat.triton_features import use_torchs_assembler
from fusion_backend.kernels.codegen import flops
from fusion_backend.kernels.codegen.activation import emit
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.operands import Kind

Template = Callable[..., None]


@functools.cache
def specialize(
    template: Template,
    expression: Expression,
    accuracy: torch.dtype,
    kinds: tuple[Kind, ...] = (),
    wanted: tuple[int, ...] = (),
    gluon: bool = False,
    own_launch: bool = False,
) -> Any:
    """The kernel that ``template`` becomes with ``expression`` as its activation.

    A template is an ordinary function that calls the globals ``activation`` or
    ``activation_gradient``. The kernel has its code and its source, but globals of its own, in
    which the device functions of the expression have these names: Triton hashes what the names
    refer to, and Inductor copies it by name, so both see the very activation.

    Args:
        template: the undecorated kernel.
        expression: the activation, a function of ``x`` or of ``g`` and ``u``, and of operands.
        accuracy: as for :func:`fusion_backend.kernels.codegen.activation.emit`.
        kinds: what each operand is.
        wanted: of which operands ``activation_gradient`` stores the gradient.
        gluon: whether the template is written in Gluon.
        own_launch: whether we launch the kernel, and not Inductor, which knows of the number of
            rows what is fixed.

    Returns:
        A ``triton.JITFunction``, or what the interpreter has in its place.

    Raises:
        ExpressionError: the expression is not one of these variables, or has no derivative.
    """
    code = emit(expression, accuracy, kinds, wanted, gluon)
    scope = {
        **template.__globals__,
        "activation": code.forward,
        "activation_gradient": code.gradient,
    }
    kernel = types.FunctionType(
        template.__code__, scope, template.__name__, template.__defaults__, template.__closure__
    )
    functools.update_wrapper(kernel, template)
    del kernel.__dict__["__wrapped__"]  # inspect would follow it back to the template
    jit: Any = triton.jit
    if gluon:
        from triton.experimental import gluon as language

        jit = language.jit
    if not own_launch:
        made = jit(kernel)
        flops.register(made)
        return made
    use_torchs_assembler()  # as whoever else compiled it
    # The number of rows and the stride of x differ from call to call: one kernel serves all.
    return jit(kernel, do_not_specialize=("rows", "x_row_units"))
