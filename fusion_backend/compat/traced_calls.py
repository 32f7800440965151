"""What a function would launch: kernels of Triton's and operators, found by tracing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusion_backend.compat.operators import OpOverload

_OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """A kernel of Triton's as it is launched: compile-time constants are among the arguments."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Called(NamedTuple):
    """An operator that is called, such as ``aten.addmm``, and no launch of Triton's."""

    name: str
    arguments: tuple[Any, ...]


class Described(NamedTuple):
    """A tensor without its contents; ``dtype`` as text, such as ``"bfloat16"``."""

    size: Sequence[int]
    stride: Sequence[int]
    dtype: str


def traced(
    function: Callable[..., Any], tensors: Sequence[Described], device: str
) -> list[Launch | Called]:
    """What a function launches and calls in order; nothing runs, and autograd records nothing.

    Args:
        function: of the tensors.
        tensors: what it is called with.
        device: their type, such as ``"cuda"``.
    """
    from torch._higher_order_ops import triton_kernel_wrap
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    table = triton_kernel_wrap.kernel_side_table
    with torch.no_grad(), FakeTensorMode():
        inputs = [
            torch.empty_strided(
                tuple(size), tuple(stride), dtype=getattr(torch, dtype), device=device
            )
            for size, stride, dtype in tensors
        ]
        graph = make_fx(dispatch_functionalize(function))(*inputs).graph
    found: list[Launch | Called] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is triton_kernel_wrap.triton_kernel_wrapper_functional:
            constants = dict(table.get_constant_args(node.kwargs["constant_args_idx"]))
            given = {name: value_of(value) for name, value in node.kwargs["kwargs"].items()}
            kernel: Any = table.get_kernel(node.kwargs["kernel_idx"])
            options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
            if hasattr(kernel, "configs"):  # the options of one launch, as torch keeps them
                (config,) = kernel.configs
                options = {name: getattr(config, name) for name in _OPTIONS}
                kernel = kernel.fn
            found.append(Launch(kernel, {**constants, **given}, options))
        elif isinstance(node.target, OpOverload):
            found.append(Called(str(node.target), tuple(map(value_of, node.args))))
    return found


def value_of(argument: Any) -> Any:
    """The fake tensor that a node stands for, also in lists."""
    if isinstance(argument, (list, tuple)):
        return [value_of(each) for each in argument]
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument


def with_missing(launch: Launch) -> dict[str, Any]:
    """The arguments of a launch, and ``None`` for each that there is none."""
    return {name: launch.arguments.get(name) for name in launch.kernel.arg_names}
