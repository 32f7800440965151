"""Launches of compiled kernels without most of the Python that Triton runs for each of them.

For each launch Triton's launcher makes a tensor map (``CUtensorMap``) of each descriptor and puts
the parameters together anew. That takes the host several times as long as the launch itself. Here
both are kept by the values that they are made of, and the function in C that Triton's launcher ends
in is called with them. Triton's own launcher is called where somebody set hooks, where a kernel
needs scratch memory, and in versions whose function is not known.

Seen in Triton 3.6, where each kernel has a function in C of its own, 3.7 and 3.8, where all have
the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusion_backend.compat.cuda import current_raw_stream

# A matrix that a descriptor describes: the address, rows, columns, elements from row to row.
Matrix = tuple[int, int, int, int]
# Of a kernel; an address is a number. Addresses and sizes decide all that is kept.
Argument = int | Matrix | None

# Lists of parameters that are kept, of one kernel: the layers of a model share it, and a layer's
# tensors alternate among few addresses. One takes about 2 KB.
KEPT_LAUNCHES = 512
# Tensor maps that are kept, of one parameter of a kernel: weights stay where other tensors do not.
KEPT_MAPS = 512

_ZEROS = 0  # what lies outside of a matrix is loaded as zeros, in ``fill_tma_descriptor``


class _Own(NamedTuple):
    """How the function in C is called that Triton's launcher ends in.

    Attributes:
        run: takes a grid, a stream, what is ``fixed``, and then the kernel's parameters.
        fixed: the same in all launches of a kernel.
        packs: whether the parameters are one argument.
        describe: makes a tensor map.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]
    packs: bool
    describe: Callable[..., Any]


def prepared(kernel: Any, constants: Sequence[Any], device: int) -> Callable[..., None]:
    """A function that launches a kernel on the current stream of a GPU.

    Args:
        kernel: compiled for that GPU (``triton.CompiledKernel``).
        constants: the last of its arguments, which it was compiled for.
        device: the number of the GPU.

    Returns:
        A function of the number of programs and of the kernel's other arguments: numbers,
        addresses, ``None`` where it was compiled for that, and a :data:`Matrix` for a descriptor.
    """
    from triton import knobs

    with torch.cuda.device(device):
        by_triton = _by_triton(kernel, tuple(constants), device)
        parts = _own(kernel)
    if parts is None:
        return by_triton
    run, *_ = parts
    parameters = _parameters(kernel, tuple(constants), parts)
    current_stream = current_raw_stream()

    def launch(programs: int, *arguments: Argument) -> None:
        # What follows runs for each launch. A chain of hooks is one of none by default.
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            by_triton(programs, *arguments)
        else:
            run(programs, 1, 1, current_stream(device), *parameters(*arguments))

    return launch


def _by_triton(kernel: Any, constants: tuple[Any, ...], device: int) -> Callable[..., None]:
    """:func:`prepared` by Triton's launcher alone, which calls hooks."""
    from triton import knobs

    run, current_stream = kernel.run, current_raw_stream()

    def launch(programs: int, *arguments: Argument) -> None:
        runtime, stream = knobs.runtime, current_stream(device)
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        given = *map(_described, arguments), *constants
        metadata = kernel.launch_metadata((programs, 1, 1), stream, *given)
        what = kernel.function, kernel.packed_metadata, metadata
        run(programs, 1, 1, stream, *what, *hooks, *given)

    return launch


class _Address(NamedTuple):
    """What Triton's launcher asks of a tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Described(NamedTuple):
    """What Triton's launcher reads of a tensor descriptor, without the checks of its class."""

    base: _Address
    shape: tuple[int, int]
    strides: tuple[int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def _described(argument: Argument) -> Any:
    if not isinstance(argument, tuple):
        return argument
    address, rows, columns, stride = argument
    return _Described(_Address(address), (rows, columns), (stride, 1))


def _parameters(
    kernel: Any, constants: tuple[Any, ...], own: _Own
) -> Callable[..., tuple[Any, ...]]:
    """A function of a kernel's arguments that gives what :attr:`_Own.run` takes after the stream.

    It keeps what it gave. Nothing kept can be out of date: a tensor map consists of the arguments,
    which are the key, and of what is the same in all launches of the kernel.
    """
    makers = _map_makers(kernel, own.describe)

    @functools.lru_cache(KEPT_LAUNCHES)
    def parameters(*arguments: Argument) -> tuple[Any, ...]:
        flat: list[Any] = []
        for argument, maker in zip((*arguments, *constants), makers, strict=True):
            flat += (argument,) if maker is None else maker(*argument)
        return (*own.fixed, tuple(flat)) if own.packs else (*own.fixed, *flat)

    return parameters


def _map_makers(
    kernel: Any, describe: Callable[..., Any]
) -> list[Callable[..., tuple[Any, ...]] | None]:
    """For each argument of a kernel, what makes the parameters of a matrix; ``None`` for others."""
    descriptors = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    return [
        _map_maker(describe, **next(descriptors)) if _is_descriptor(kind) else None
        for kind in kernel.src.signature.values()
    ]


def _map_maker(
    describe: Callable[..., Any],
    swizzle: int,
    elem_size: int,
    elem_type: int,
    block_size: Sequence[int],
    **others: bool,
) -> Callable[..., tuple[Any, ...]]:
    """A function that makes the parameters of a matrix: the map of its tiles, sizes and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    layout = swizzle, elem_size, TMA_DTYPE_DEVICE_TO_HOST[elem_type], block_size
    if any(others.values()):
        raise ValueError(f"a tensor map must be of plain tiles, got {others}")

    @functools.lru_cache(KEPT_MAPS)
    def make(address: int, rows: int, columns: int, stride: int) -> tuple[Any, ...]:
        shape, strides = (rows, columns), (stride, 1)
        return (describe(address, *layout, shape, strides, _ZEROS), *shape, *strides)

    return make


def _is_descriptor(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _own(kernel: Any) -> _Own | None:
    """How a kernel is launched without Triton's launcher; ``None`` where that is not known."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = kernel.run
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    known = {(3, 6): _of_its_own, (3, 7): _of_all_kernels, (3, 8): _of_all_kernels}
    if type(launcher) is not CudaLauncher or version not in known or _needs_more(launcher):
        return None
    try:
        found = known[version](kernel, launcher)
        _map_makers(kernel, found.describe)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None
    return found


def _needs_more(launcher: Any) -> bool:
    """Whether Triton's launcher passes memory that it allocates, or that instruments write to."""
    sizes = launcher.global_scratch_size, launcher.profile_scratch_size
    return any(sizes) or getattr(launcher, "gsan_enabled", False)


def _of_its_own(kernel: Any, launcher: Any) -> _Own:
    """Triton 3.6: a function in C is written for the kernel, and wrapped if it has descriptors."""
    run = launcher.launch
    if inspect.isfunction(run):
        run = inspect.getclosurevars(run).nonlocals["launcher"]
    how = launcher.launch_cooperative_grid, launcher.launch_pdl
    scratch = hooks = None, None
    fixed = kernel.function, *how, *scratch, kernel.packed_metadata, None, *hooks
    return _Own(run, fixed, False, _utilities().fill_tma_descriptor)


def _of_all_kernels(kernel: Any, launcher: Any) -> _Own:
    """Triton 3.7 and 3.8: one function in C, which is told the kernel's signature."""
    how = launcher.launch_cooperative_grid, launcher.launch_pdl
    scratch = hooks = None, None
    kinds = launcher.arg_annotations, launcher.kernel_signature
    fixed = kernel.function, *how, kernel.packed_metadata, None, *hooks, *scratch, *kinds
    utilities = _utilities()
    return _Own(utilities.launch, fixed, True, utilities.fill_tma_descriptor_tiled)


def _utilities() -> Any:
    from triton.runtime.driver import driver

    return driver.active.utils
