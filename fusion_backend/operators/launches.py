"""What the lowerings of launches share: the module of a call is imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fusion_backend.compat import inductor
from fusion_backend.kernels.family import Call


class Launch:
    """The function of an operator on real tensors."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return getattr(import_module(self._call.module), self._call.name)(*arguments)


def prepare(call: Call, rows: Any, what: tuple[Any, ...]) -> None:
    """Let kernels be compiled while Inductor compiles, unless it was told not to do so itself."""
    hint = inductor.optimization_hint(rows)
    if hint and inductor.compiles_in_parallel():
        getattr(import_module(call.module), call.prepare)(hint, *what)


def fixed(node: Any) -> Any:
    """A realized node of Inductor's whose strides stay what they are.

    Inductor may lay a buffer out anew until its layout is fixed; code that was made for the strides
    of before would then read other elements.
    """
    from torch._inductor import ir

    node = ir.ExternKernel.realize_input(node)
    if ir.is_storage_and_layout(node):
        ir.as_storage_and_layout(node, freeze=True)
    return node


def is_transposed(node: Any) -> bool:
    """Whether a node of Inductor's that is :func:`fixed` is a contiguous matrix's transpose."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and min(size) > 1 and stride == [1, size[0]]
