"""Inductor's compiler and configuration, as far as the package asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def exporting() -> bool:
    """Whether ``torch.export`` traces: it keeps operators that consist of Triton kernels whole."""
    from torch._functorch import config

    return not config.decompose_custom_triton_ops


def compiles_to_cpp() -> bool:
    """Whether Inductor generates C++, as AOTInductor does: it does not call Python functions."""
    from torch._inductor import config

    return bool(config.cpp_wrapper)


def inductor_compiler(mode: str | None, options: Mapping[str, Any]) -> Any:
    """What ``backend="inductor"`` calls: checks mode and options, and compiles graphs with them.

    Its ``config`` holds the options of Inductor that mode and options amount to.

    Raises:
        RuntimeError: Inductor knows no such mode or option.
    """
    return torch._TorchCompileInductorWrapper(mode, dict(options), dynamic=None)


def compiled_within(
    compiler: Any,
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    context: Callable[[], AbstractContextManager[None]],
) -> Any:
    """What ``compiler`` makes of a graph, with a context around the compilation of each part.

    The backward pass is compiled when it first runs, long after this function has returned.

    Args:
        compiler: of :func:`inductor_compiler`.
        graph_module: that is compiled.
        example_inputs: its inputs.
        context: makes the context.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_part(*arguments: Any, **options: Any) -> Any:
        with context():
            return compile_fx_inner(*arguments, **options)

    return compile_fx(
        graph_module,
        example_inputs,
        inner_compile=compile_part,
        config_patches=compiler.config,
    )


def unaligned_inputs(inputs: Sequence[Any]) -> list[int]:
    """Which inputs do not start at whole 16 bytes, where Inductor's code takes tensors to start.

    Code for inputs that do is found in AOTAutograd's cache for inputs that do not. As CUDA graphs
    copy only what was aligned when they first ran, such code then reads misaligned addresses.
    """
    from torch._inductor.utils import tensor_is_aligned

    tensors = [(index, each) for index, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
    return [index for index, each in tensors if not tensor_is_aligned(each)]


def options_of_mode(mode: str) -> dict[str, Any]:
    """The options of Inductor that a mode of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    found: dict[str, Any] = list_mode_options(mode)
    return found


def cache_directory() -> str:
    """Where Inductor keeps what it compiled; it makes the directory, if it can."""
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return str(cache_dir())
    except OSError:  # importing it makes the directory, too, and has set the variable by now
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def inductor_options(options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Show planning the options that Inductor will compile with."""
    from torch._inductor import config

    patched: AbstractContextManager[None] = config.patch(dict(options))
    return patched


def max_autotunes() -> bool:
    """Whether Inductor will choose its products by measuring: ``mode="max-autotune"``."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def weights_are_frozen() -> bool:
    """Whether Inductor will take the weights for constants, and so pack them beforehand.

    It does where the user asks for it, and takes none for constants that may get gradients.
    """
    from torch._inductor import config

    return bool(config.freezing) and not torch.is_grad_enabled()


def backward_owns_what_is_saved() -> bool:
    """Whether ahead-of-time autograd lets backward passes write to saved tensors, once each."""
    from torch._functorch import config

    return bool(config.donated_buffer)


def draws_as_eager() -> bool:
    """Whether Inductor is to draw the random numbers that eager PyTorch draws."""
    from torch._inductor import config

    return bool(config.fallback_random)


def optimization_hint(size: Any) -> int:
    """A size that Inductor is lowering, as it was when the graph was traced; 0 if not known."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=0))


def compiles_in_parallel() -> bool:
    """Whether Inductor may compile kernels beside what it does itself."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads() > 1


def compile_in_this_process() -> None:
    """Let Inductor compile kernels itself, without processes of its own: one of many calls this."""
    from torch._inductor import config

    config.compile_threads = 1


def has_cutlass() -> bool:
    """Whether Inductor finds the sources of CUTLASS, which it writes kernels with."""
    from torch._inductor import config

    return (Path(config.cuda.cutlass_dir) / "include" / "cutlass").is_dir()


def loaded_code() -> list[str]:
    """Paths of the modules that Inductor wrote and this process loaded, in that order."""
    from torch._inductor.codecache import PyCodeCache

    return [str(module.__file__) for module in PyCodeCache.modules if hasattr(module, "call")]


@contextmanager
def compiling_candidates_only() -> Iterator[None]:
    """Under max-autotune compile every candidate but measure none, and keep no choice.

    Their kernels stay in Triton's cache. What is compiled with the first candidate in the place of
    the fastest is not to be run for its speed, so Inductor's caches see nothing of it.
    """
    from torch._inductor import config, select_algorithm

    def compiled(candidates: list[Any]) -> list[Any]:
        for candidate in candidates:
            with suppress(Exception):  # too much shared memory, for example: Inductor drops it too
                candidate.precompile()
        return candidates[:1]

    select_algorithm.add_preprocessing_fn(compiled)
    try:
        with config.patch(fx_graph_cache=False, autotune_local_cache=False):
            yield
    finally:
        select_algorithm.clear_preprocessing_fns()


def cpp_function(types: Sequence[str], source: str) -> Callable[..., None]:
    """The function ``kernel`` of a C++ source, compiled for this CPU as Inductor compiles its own.

    It takes a tensor for each pointer among ``types``, and an int for each ``int64_t``.

    Raises:
        Exception: there is no compiler, it fails, or its result cannot be kept or loaded.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    function: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(list(types), source)
    return function
