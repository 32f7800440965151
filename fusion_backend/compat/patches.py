"""What is replaced in torch for a while: each patch says what for, and undoes itself."""

from __future__ import annotations

import ast
import copy
import dataclasses
import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from fusion_backend.compat.inductor import compiles_to_cpp


@contextmanager
def cache_tag(tag: str) -> Iterator[None]:
    """Make ``tag`` part of the keys under which graphs are cached, beside the user's own tag.

    AOTAutograd's cache is keyed on an operator's name, not on what it decomposes into; and in 2.11
    it does not know the dtype of an autocast around the graph, so that is added here. Within itself
    it changes nothing.
    """
    from torch.compiler import config

    if tag in config.cache_key_tag:
        yield
        return
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
def repros_import(module: str) -> Iterator[None]:
    """Let the scripts that torch writes to repeat a failure import a module that defines operators.

    They have no other way to find them.
    """
    names = ("after_aot", "after_dynamo", "aoti")
    loaded = (sys.modules.get(f"torch._dynamo.repro.{name}") for name in names)
    writers: list[Any] = [found for found in loaded if hasattr(found, "extra_imports")]
    before = [writer.extra_imports for writer in writers]
    for writer, own in zip(writers, before, strict=True):
        writer.extra_imports = f"{own}\nimport {module}"
    try:
        yield
    finally:
        for writer, own in zip(writers, before, strict=True):
            writer.extra_imports = own


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
        alike = {each: kind_of_argument(value) for each, value in arguments.items()}
        key = function, repr(sorted(alike.items())), repr(descriptors)
        if key not in found:
            found[key] = analyse(kernel, arguments, descriptors)
        return copy.copy(found[key])

    with _replaced(triton_kernel_wrap, name, once):
        yield


@contextmanager
def drawing_once() -> Iterator[None]:
    """Let the backward pass read the random numbers that the forward pass drew, under any budget.

    With an activation-memory budget below 1 the partitioner computes seeds again like anything
    else: the backward pass then drops other elements than the forward pass did.
    """
    from torch._functorch import partitioners

    name = "choose_saved_values_set"
    choose = getattr(partitioners, name)

    def chosen(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        saved = choose(joint_graph, node_info, memory_budget)
        if memory_budget == 1:
            return saved
        known = set(saved)
        drawn = [n for n in joint_graph.nodes if n not in known and _draws(n, node_info)]
        return [*saved, *drawn]

    with _replaced(partitioners, name, chosen):
        yield


def _draws(node: Any, node_info: Any) -> bool:
    """Whether a node of the forward pass is what a generator drew, and not to be drawn again."""
    drawn = node
    if node.target is operator.getitem:
        drawn = node.args[0]
    tags = getattr(drawn.target, "tags", ())
    if drawn.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    again = "recompute" in drawn.meta  # by its checkpoint, which keeps the generator's state
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not again and node in node_info.required_fw_nodes


@contextmanager
def pricing_our_products() -> Iterator[None]:
    """Let the partitioner take our kernels for as expensive as the products that they compute.

    Under an activation-memory budget it computes everything again, for nothing, but for operators
    that it knows to be expensive. Those it weighs by their formulas of FLOPs.
    """
    from torch._functorch import partitioners

    name = "get_default_op_list"
    listed = getattr(partitioners, name)
    known = listed()

    class Priced(type(known)):  # type: ignore[misc]
        def is_compute_intensive(self, node: Any) -> bool:
            return bool(super().is_compute_intensive(node)) or _is_our_product(node)

    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    priced = Priced(**fields)
    with _replaced(partitioners, name, lambda: priced):
        yield


def _is_our_product(node: Any) -> bool:
    """Whether a node runs one of our kernels that multiply matrices."""
    from torch.utils.flop_counter import flop_registry

    target = node.target
    if getattr(target, "namespace", "") == "fusedmlp":
        return getattr(target, "overloadpacket", target) in flop_registry
    if getattr(target, "__name__", "") != "triton_kernel_wrapper_functional":
        return False
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    while kernel not in flop_registry and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel in flop_registry and kernel.__module__.startswith("fusion_backend.")


@contextmanager
def paying_for_padding() -> Iterator[None]:
    """Let Inductor time what it costs to pad a result of our kernels.

    Where a product has an odd number of rows or columns, it times the product with padded operands.
    It takes padding itself for free, because the code that computes an operand could write to a
    larger one. Its own code can. What a kernel of ours or a library has written is copied.
    """
    from torch._inductor.fx_passes import pad_mm

    name = "should_exclude_padding_time"
    is_free = getattr(pad_mm, name)

    def is_free_indeed(match: Any, operand: str) -> bool:
        made_by = pad_mm.get_non_view_def(match.kwargs[operand])
        of_library = made_by.target is torch.ops.aten._addmm_activation.default
        return not of_library and not _is_our_product(made_by) and is_free(match, operand)

    with _replaced(pad_mm, name, is_free_indeed):
        yield


def kind_of_argument(value: Any) -> str:
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

    with _replaced(PythonWrapperCodegen, "define_kernel", defined):
        yield


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let a module or a class have another attribute of a name."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)
