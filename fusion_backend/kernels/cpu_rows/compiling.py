"""Kernels by Inductor's C++ compiler: its choice of compiler, flags and instruction set, its cache.

A kernel is compiled once for a machine and a state of its source; further processes load it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fusion_backend.compat import inductor
from fusion_backend.kernels.cpu_rows.source import Kernel, arguments, products, source

_LONGEST_MESSAGE = 300


class CompilationError(RuntimeError):
    """No compiler was found, or it refused a kernel. The message is one line."""


def compiled(kernel: Kernel) -> tuple[Callable[..., None], tuple[int, int]]:
    """The C++ function of a kernel, and the addresses of ``product`` and ``pack``.

    Raises:
        CompilationError: as said.
    """
    found = _compiled_or_message(kernel)
    if isinstance(found, str):
        raise CompilationError(found)
    return found


def why_not(kernel: Kernel) -> str | None:
    """Why a kernel cannot be had on this machine, or ``None`` where it can: it is then compiled."""
    found = _compiled_or_message(kernel)
    return found if isinstance(found, str) else None


@functools.cache
def _compiled_or_message(kernel: Kernel) -> tuple[Callable[..., None], tuple[int, int]] | str:
    try:
        library = _products(kernel.dtype)
        types = ["int64_t"] * len(arguments(kernel))
        return inductor.cpp_function(types, source(kernel)), library
    except Exception as error:  # Inductor's errors of C++ compilers have no common class
        line = next((line for line in str(error).splitlines() if line.strip()), "no message")
        return f"{type(error).__name__}: {line[:_LONGEST_MESSAGE]}"


@functools.cache
def _products(dtype: torch.dtype) -> tuple[int, int]:
    addresses = torch.zeros(2, dtype=torch.int64)
    inductor.cpp_function(["int64_t*"], products(dtype))(addresses)
    product, pack = addresses.tolist()
    return product, pack
