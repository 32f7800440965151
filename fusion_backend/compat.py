"""Where we touch what torch does not promise to keep: one entry a subject, torch 2.11 to 2.14.

Code elsewhere in the package uses public interfaces only, so a new release of torch can break this
file and no other.
"""

from __future__ import annotations

import ast
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad


@contextmanager
def below_autograd() -> Iterator[None]:
    """Dispatch as if no tensor required gradients (``at::AutoDispatchBelowADInplaceOrView``).

    Views that are made within are not marked as such: a result may be written to in place.
    """
    marking_views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(marking_views):
        yield


def multiplies_in_tf32() -> bool:
    """Whether cuBLAS may round operands of float32 products to TF32: what eager PyTorch does.

    ``fp32_precision`` of cuBLAS is what cuBLAS itself is set by. It knows what was set through the
    older interface (``allow_tf32``, ``set_float32_matmul_precision``) and for all backends at once,
    and can be read whatever came last; the older getters raise once the newer interface was used.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # NVIDIA's libraries then never do
        return False
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def allow_tf32(allowed: bool) -> None:
    """Set how all products of float32 are computed, by both of torch's interfaces.

    Through the older one: the newer agrees with it then, and whoever asks either gets an answer.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@contextmanager
def multiplying_in_tf32(allowed: bool) -> Iterator[None]:
    """:func:`allow_tf32` within this context; both interfaces are left as they were found."""
    torchs: Any = torch.backends
    backends = (torchs.cuda.matmul, torchs.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    older = _older_precision()
    allow_tf32(allowed)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _older_precision() -> str:
    """What the older interface holds; ``"highest"`` where it cannot tell.

    It raises where the newer interface was set to something that it cannot express, most often TF32
    while it holds ``"highest"``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


def transforming() -> bool:
    """Whether forward-mode differentiation or a transform of ``torch.func`` is at work."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def below_autocast(device_type: str) -> AbstractContextManager[None]:
    """Dispatch as if autocast were off for ``device_type``, leaving its state visible."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key)
    )
    return guard


def launching_directly() -> AbstractContextManager[None]:
    """Let ``wrap_triton`` launch at once: on real tensors its tracing costs about 1 ms a call."""
    from torch._library.triton import set_wrap_triton_enabled

    return set_wrap_triton_enabled(False)


@contextmanager
def plain_mode() -> Iterator[None]:
    """Run tensors of the CPU as in a fresh program, whatever traces, casts or records around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def exporting() -> bool:
    """Whether ``torch.export`` traces: it keeps operators that consist of Triton kernels whole."""
    from torch._functorch import config

    return not config.decompose_custom_triton_ops


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


def compiles_to_cpp() -> bool:
    """Whether Inductor generates C++, as AOTInductor does: it does not call Python functions."""
    from torch._inductor import config

    return bool(config.cpp_wrapper)


def cpp_function(types: Sequence[str], source: str) -> Callable[..., None]:
    """The function ``kernel`` of a C++ source, compiled for this CPU as Inductor compiles its own.

    It takes a tensor for each pointer among ``types``, and an int for each ``int64_t``.

    Raises:
        Exception: there is no compiler, it fails, or its result cannot be kept or loaded.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    function: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(list(types), source)
    return function


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data, because it stands for others in a trace."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(tensor)


def fake_mode_of_its_own() -> Any:
    """A mode for fake tensors with symbols of its own, so that no other's grow by what it runs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextmanager
def nothing_else_traced() -> Iterator[None]:
    """Run as if no compiler were at work, without gradients, as ahead-of-time autograd dispatches.

    Under the Python dispatcher operators whose schemas do not tell what they write to (batch norms)
    are replaced by those whose schemas do.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    log = logging.getLogger("torch._subclasses.fake_tensor")  # tells of calls that cannot be run
    was_disabled, log.disabled = log.disabled, True
    try:
        with (
            _disable_current_modes(),
            tracing(None),
            torch.inference_mode(False),
            torch.no_grad(),
            enable_python_dispatcher(),
        ):
            yield
    finally:
        log.disabled = was_disabled


# What stands for a size that only the data tell. Zero and one have meanings of their own.
_UNKNOWN_SIZE = 8


def number_of(value: Any) -> Any:
    """The number that a symbol had when the graph was traced, without a guard."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    if value.node.hint is not None:
        return kind(value.node.hint)
    environment: Any = value.node.shape_env
    # The second is what 2.13 and before call it.
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    symbols = value.node.expr.free_symbols
    return kind(value.node.expr.xreplace({s: known.get(s, _UNKNOWN_SIZE) for s in symbols}))


def empty_strided_cuda() -> Callable[..., torch.Tensor]:
    """Allocates on the current GPU, given sizes, strides and dtype, as fast as Inductor's code."""
    guards: Any = torch._C._dynamo.guards
    function: Callable[..., torch.Tensor] = guards._empty_strided_cuda
    return function


def starts_aligned(tensor: torch.Tensor, alignment: int) -> bool:
    """Whether the data of ``tensor`` start at a multiple of ``alignment`` bytes, at most 16.

    A tensor that is traced has no address yet. Inductor takes its storage to be aligned to 16
    bytes, and copies an input that turns out not to be when the compiled graph is called.
    """
    if not is_traced(tensor):
        return tensor.data_ptr() % alignment == 0
    offset: Any = tensor.storage_offset()
    return isinstance(offset, int) and offset * tensor.dtype.itemsize % alignment == 0


def use_torchs_assembler() -> None:
    """Let Triton use the assembler that comes with torch (``bin/ptxas``), as Inductor does.

    Triton keeps kernels apart by the assembler that made them, and Inductor sets it when it first
    compiles one. A process that finds its graphs in the cache compiles none, and would make those
    kernels of ours again that the process before it made with the other assembler.
    """
    with suppress(ImportError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()


@contextmanager
def cache_tag(tag: str) -> Iterator[None]:
    """Make ``tag`` part of the keys under which graphs are cached, beside the user's own tag.

    AOTAutograd's cache is keyed on an operator's name, not on what it decomposes into; and in 2.11
    it does not know the dtype of an autocast around the graph, so that is added here.
    """
    from torch.compiler import config

    dtypes = [
        f"-{device}-{torch.get_autocast_dtype(device)}"
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    own: str = config.cache_key_tag
    whole = "".join([own, tag, *dtypes])
    with _autotuning_under_tag(own), config.patch(cache_key_tag=whole):  # type: ignore[attr-defined]
        yield


@contextmanager
def _autotuning_under_tag(tag: str) -> Iterator[None]:
    """Let Inductor look the fastest configuration of a kernel up under ``tag``.

    It is kept by the processes that compile kernels, which know no tag that is set in this one: a
    second process would not find it, and measure again.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch.compiler import config

    key_of = AutotuneCache._prepare_key

    def untagged(filename: str) -> str:
        with config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            return key_of(filename)

    AutotuneCache._prepare_key = staticmethod(untagged)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutotuneCache._prepare_key = staticmethod(key_of)  # type: ignore[method-assign]


@contextmanager
def analysing_kernels_once() -> Iterator[None]:
    """Let what our kernels write to be found out once for all launches of a graph that are alike.

    Ahead-of-time autograd and Inductor ask that four times for every launch, and each time Triton's
    frontend compiles the kernel, which takes some 40 ms: seconds for a model of many layers.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    # In 2.11 the first does not exist, in 2.14 the second.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    name = next((each for each in names if hasattr(triton_kernel_wrap, each)), None)
    if name is None:
        yield
        return
    analyse = getattr(triton_kernel_wrap, name)
    found: dict[tuple[FunctionType, str, str], Any] = {}

    def once(kernel: Any, arguments: Mapping[str, Any], descriptors: Any) -> Any:
        function = kernel
        while not isinstance(function, FunctionType):  # num_warps is passed by wrapping the kernel
            function = function.fn
        if not function.__module__.startswith("fusion_backend."):
            return analyse(kernel, arguments, descriptors)
        alike = {each: _kind_of_argument(value) for each, value in arguments.items()}
        key = function, repr(sorted(alike.items())), repr(descriptors)
        if key not in found:
            found[key] = analyse(kernel, arguments, descriptors)
        return copy.copy(found[key])

    setattr(triton_kernel_wrap, name, once)
    try:
        yield
    finally:
        setattr(triton_kernel_wrap, name, analyse)


def _kind_of_argument(value: Any) -> str:
    """What the code of a kernel depends on: the dtype of a tensor, the value of a constant."""
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}"
    if hasattr(value, "get_dtype"):  # a tensor as Inductor sees it
        return f"tensor of {value.get_dtype()}"
    return f"{type(value).__name__} {value!r}"


@contextmanager
def starting_kernels_early() -> Iterator[None]:
    """Let the processes that compile for Inductor begin with a kernel of ours once it is written.

    So they do with Inductor's own kernels; with others when the whole graph's code is loaded. They
    recognise it by its source, and once they have begun, loading waits for them.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define = PythonWrapperCodegen.define_kernel

    def defined(self: Any, kernel_name: str, kernel_body: str, *others: Any, **more: Any) -> None:
        define(self, kernel_name, kernel_body, *others, **more)
        ours = kernel_name.startswith("fusedmlp_") and not compiles_to_cpp()
        if ours and AsyncCompile.use_process_pool():
            call: Any = ast.parse(kernel_body, mode="eval").body  # async_compile.triton(...)
            name, source = map(ast.literal_eval, call.args)
            AsyncCompile().triton(name, source)

    PythonWrapperCodegen.define_kernel = defined  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonWrapperCodegen.define_kernel = define  # type: ignore[method-assign]


def inductor_compiler(mode: str | None, options: Mapping[str, Any]) -> Any:
    """What ``backend="inductor"`` calls: checks mode and options, and compiles graphs with them.

    Its ``config`` holds the options of Inductor that mode and options amount to.

    Raises:
        RuntimeError: Inductor knows no such mode or option.
    """
    return torch._TorchCompileInductorWrapper(mode, dict(options), dynamic=None)


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
    """Whether Inductor will take the weights for constants, and so pack them beforehand."""
    from torch._inductor import config

    return bool(config.freezing)


def draws_as_eager() -> bool:
    """Whether Inductor is to draw the random numbers that eager PyTorch draws."""
    from torch._inductor import config

    return bool(config.fallback_random)


def clamp_stops_at_limits() -> bool:
    """Whether autograd's clamp has the gradient 0 at its limits, as since 2.14, and not 1."""
    return torch.__version__ >= "2.14"


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


class CompileSettings(NamedTuple):
    """How ``torch.compile`` was asked to compile something."""

    options: Mapping[str, Any]
    mode: str | None
    dynamic: bool | None


def compile_settings(compiled: Callable[..., Any]) -> CompileSettings | None:
    """What ``torch.compile`` was given for what it returned; ``None`` for what is not compiled.

    Options and mode of backends other than fusedmlp and Inductor are theirs alone, and left out. A
    mode of Inductor's is kept as the options that it stands for.
    """
    backend: Any = getattr(_context_of(compiled), "callback", None)
    while backend is not None and not hasattr(backend, "compiler_name"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    if backend is None:
        return None
    if backend.compiler_name == "fusedmlp":
        given = backend.kwargs
        return CompileSettings(given.get("options", {}), given.get("mode"), backend.dynamic)
    options = backend.config if backend.compiler_name == "inductor" else {}
    return CompileSettings(options, None, backend.dynamic)


def _context_of(compiled: Any) -> Any:
    """Dynamo's record of one call of ``torch.compile``: of a module, a function, or a method."""
    found = getattr(compiled, "dynamo_ctx", None)
    in_place = getattr(compiled, "_compiled_call_impl", None)  # of module.compile()
    if found is not None or in_place is not None:
        return found or _context_of(in_place)
    if not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    cells = getattr(compiled, "__closure__", None) or ()
    inside = (cell.cell_contents for cell in cells)
    return next((each for each in inside if hasattr(each, "compiler_config")), None)
