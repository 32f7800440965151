"""Kernels by Inductor's C++ compiler: its choice of compiler, flags and instruction set, its cache.

A kernel is compiled once for a machine and a state of its source; further processes load it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from fusion_backend.compat import inductor
from fusion_backend.kernels.cpu_rows import gradient_source
from fusion_backend.kernels.cpu_rows.gradient_source import GradientKernel
from fusion_backend.kernels.cpu_rows.source import Kernel, arguments, products, source

_LONGEST_MESSAGE = 300


class CompilationError(RuntimeError):
    """No compiler was found, or it refused a kernel. The message is one line."""


class Library(NamedTuple):
    """What an element type's products offer: addresses of functions, as in ``common.h``.

    Attributes:
        product: of rows in float32.
        element_product: of rows of the element type, 0 where there are no matrix units for it.
        pack: makes a panel of weights.
        weight_product: of a weight's gradient.
        panel: output features of a panel.
    """

    product: int
    element_product: int
    pack: int
    weight_product: int
    panel: int


def compiled(kernel: Kernel | GradientKernel) -> tuple[Callable[..., None], Library]:
    """The C++ function of a kernel, and what :func:`compiled_products` returns.

    Raises:
        CompilationError: as said.
    """
    found = compiled_or_message(kernel)
    if isinstance(found, str):
        raise CompilationError(found)
    return found


def why_not(kernel: Kernel | GradientKernel) -> str | None:
    """Why a kernel cannot be had on this machine, or ``None`` where it can: it is then compiled."""
    found = compiled_or_message(kernel)
    return found if isinstance(found, str) else None


@functools.cache
def compiled_or_message(
    kernel: Kernel | GradientKernel,
) -> tuple[Callable[..., None], Library] | str:
    """A kernel and its products, or why there are none; compiled once a process."""
    try:
        library = compiled_products(kernel.dtype)
        if isinstance(kernel, GradientKernel):
            names, text = gradient_source.arguments(kernel), gradient_source.source(kernel)
        else:
            names, text = arguments(kernel), source(kernel)
        return inductor.cpp_function(["int64_t"] * len(names), text), library
    except Exception as error:  # Inductor's errors of C++ compilers have no common class
        line = next((line for line in str(error).splitlines() if line.strip()), "no message")
        return f"{type(error).__name__}: {line[:_LONGEST_MESSAGE]}"


@functools.cache
def compiled_products(dtype: torch.dtype) -> Library:
    """What an element type's products offer; compiled once a process."""
    # No tensor, which would have no data where one traces.
    offered = (ctypes.c_int64 * len(Library._fields))()
    inductor.cpp_function(["int64_t"], products(dtype))(ctypes.addressof(offered))
    return Library(*offered)
