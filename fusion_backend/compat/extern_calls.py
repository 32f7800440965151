"""Calls of Python functions in the code that Inductor generates.

By itself Inductor calls an operator through PyTorch's dispatcher and back into Python, which may
take longer than what the operator computes. With a lowering of :func:`install` that returns
:func:`returning` or :func:`returning_list`, generated code makes a function once, when it is
loaded, and calls that. Nodes are those of Inductor's graph, which stand for tensors.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch


class Made(NamedTuple):
    """A function as generated code makes it.

    Attributes:
        name: in generated code; a number that tells its arguments apart follows.
        module: of what makes it.
        maker: the name in that module of what makes it.
        of: what the maker is called with; the ``repr`` of this stands in the code.
    """

    name: str
    module: str
    maker: str
    of: tuple[Any, ...]


class Result(NamedTuple):
    """A tensor that a call returns."""

    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


def install(overload: Any, make: Callable[[], Callable[..., Any]]) -> None:
    """Teach Inductor to lower an overload of an operator; once a process.

    If it met the operator before, it has made itself a lowering by which it calls the dispatcher.

    Args:
        overload: of an operator of ``torch.ops``.
        make: makes its lowering.
    """
    from torch._inductor import lowering

    if overload not in lowering.lowerings or overload in lowering.fallbacks:
        lowering.fallbacks.discard(overload)
        lowering.register_lowering(overload, type_promotion_kind=None)(make())


def by_dispatcher(overload: Any) -> Callable[..., Any]:
    """The lowering that Inductor has for an operator that it does not know."""
    from torch._inductor.lowering import fallback_handler

    made: Callable[..., Any] = fallback_handler(overload, add_to_fallback_set=False)
    return made


def returning(function: Made, tensors: Sequence[Any], result: Result) -> Any:
    """A call that returns one tensor, on the device of the first of its tensors.

    Args:
        function: takes the tensors, ``None`` among them.
        tensors: realized nodes; there is a first one.
        result: what is returned.
    """
    from torch._inductor import ir

    layout = _layout(tensors[0].get_device(), result)
    return ir.TensorBox.create(_call(function, tensors, layout))


def returning_list(
    function: Made, tensors: Sequence[Any], results: Sequence[Result], taken: Sequence[str] = ()
) -> list[Any]:
    """A call that returns a list of tensors, else as :func:`returning`.

    Args:
        function: as there.
        tensors: as there.
        results: what is returned.
        taken: of the names that :func:`spent` returned, those whose memory results take.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    device = tensors[0].get_device()
    call = _call(function, tensors, ir.MultiOutputLayout(device=device))
    # Inductor would have the memory of a buffer of its own reused once the call has read it. It
    # does not reuse that of graph inputs, and deletes their names itself.
    call.taken = [name for name in taken if name not in V.graph.graph_inputs]
    V.graph.never_reuse_buffers.update(call.taken)
    call.outputs = [
        ir.MultiOutput(_layout(device, result), call, [(list, i)])
        for i, result in enumerate(results)
    ]
    return [ir.TensorBox.create(output) for output in call.outputs]


def fixed(node: Any) -> Any:
    """A realized node whose strides stay what they are.

    Inductor may lay a buffer out anew until its layout is fixed; code that was made for the strides
    of before would then read other elements.
    """
    from torch._inductor import ir

    node = realized(node)
    if ir.is_storage_and_layout(node):
        ir.as_storage_and_layout(node, freeze=True)
    return node


def realized(node: Any) -> Any:
    """A node that is in memory, laid out as Inductor likes."""
    from torch._inductor import ir

    return ir.ExternKernel.realize_input(node)


def contiguous(node: Any) -> Any:
    """A contiguous node, copied where it is not; ``None`` for ``None``."""
    from torch._inductor import ir

    return None if node is None else ir.ExternKernel.require_contiguous(realized(node))


def spent(tensors: Sequence[Any], positions: Sequence[int]) -> list[str] | None:
    """Buffers whose memory the call that is being lowered may take for its results.

    They are taken all or not at all. One may be taken if nothing else reads it, and it is

    - a saved tensor that ahead-of-time autograd gives to the backward pass for good. PyTorch then
      refuses a second backward pass, unless ``torch._functorch.config.donated_buffer`` is off, and
      nothing is given;
    - or what another of our calls returned, in the same graph.

    Args:
        tensors: realized nodes, ``None`` among them.
        positions: of operands among the tensors, and among the arguments of the call.

    Returns:
        The names of the buffers, or ``None`` if one may not be taken.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    names = []
    for position in positions:
        buffer = tensors[position]
        if buffer is None:
            continue
        while isinstance(buffer, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
            buffer = buffer.data
        returned = isinstance(buffer, ir.MultiOutput) and isinstance(buffer.inputs[0], _kind())
        if not isinstance(buffer, ir.DonatedBuffer) and not returned:
            return None
        if not _is_read_once(V.graph.current_node.args[position]):
            return None
        names.append(buffer.get_name())
    return names


def _is_read_once(source: Any) -> bool:
    """Whether one call reads a node of a graph, and what the node is a view of."""
    while len(source.users) == 1:
        if source.op == "placeholder" or source.target is operator.getitem:
            return True
        source = source.args[0]
    return False


def floor_divided(dividend: Any, divisor: Any) -> Any:
    """``dividend // divisor`` of sizes, which may be symbols."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(dividend, divisor)


def _layout(device: torch.device, result: Result) -> Any:
    from torch._inductor import ir

    return ir.FixedLayout(device, result.dtype, [*result.size], [*result.stride])


def _call(function: Made, tensors: Sequence[Any], layout: Any) -> Any:
    name = f"{function.name}_{zlib.crc32(repr(function.of).encode()):08x}"
    maker = f"make_{function.name}"
    given = [tensor for tensor in tensors if tensor is not None]
    call = _kind()(layout, given, python_kernel_name=name)
    call.given = [tensor is not None for tensor in tensors]
    call.once = (
        "import torch",
        f"from {function.module} import {function.maker} as {maker}",
        f"{name} = {maker}{function.of!r}",
    )
    return call


@cache
def _kind() -> Any:
    from torch._inductor import ir

    class MadeOnce(ir.ExternKernelAlloc):
        given: Sequence[bool]
        once: Sequence[str]
        taken: Sequence[str] = ()

        def codegen(self, wrapper: Any) -> None:
            for line in self.once:
                wrapper.add_import_once(line)
            super().codegen(wrapper)
            for name in self.taken:
                wrapper.writeline(f"del {name}")

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if is_given else "None" for is_given in self.given]

    return MadeOnce
