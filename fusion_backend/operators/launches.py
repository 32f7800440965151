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


def is_transposed(node: Any) -> bool:
    """Whether a realized node of Inductor's is the transpose of a contiguous matrix."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and min(size) > 1 and stride == [1, size[0]]
