"""What the installed Triton offers, and how torch launches its kernels: 3.6 to 3.8."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress


def launching_directly() -> AbstractContextManager[None]:
    """Let ``wrap_triton`` launch at once: on real tensors its tracing costs about 1 ms a call."""
    from torch._library.triton import set_wrap_triton_enabled

    return set_wrap_triton_enabled(False)


def triton_is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET=1``: kernels then run on the CPU and cannot be traced."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def has_gluon() -> bool:
    """Whether Triton has Gluon in the form that our kernels use: in 3.6, of torch 2.11, and 3.8."""
    try:
        from triton.experimental.gluon.language.nvidia import hopper
    except ImportError:
        return False
    return hasattr(hopper, "warpgroup_mma") and hasattr(hopper, "async_copy")


def use_torchs_assembler() -> None:
    """Let Triton use the assembler that comes with torch (``bin/ptxas``), as Inductor does.

    Triton keeps kernels apart by the assembler that made them, and Inductor sets it when it first
    compiles one. A process that finds its graphs in the cache compiles none, and would make those
    kernels of ours again that the process before it made with the other assembler.
    """
    with suppress(ImportError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()
