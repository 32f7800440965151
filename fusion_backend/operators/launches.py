"""What the lowerings of launches share: the module of a call is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fusion_backend.compat import inductor
from fusion_backend.kernels.family import Call
from fusion_backend.mlp import weights


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
    """Whether a node of Inductor's that is :func:`fixed` is a contiguous matrix's transpose."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and min(size) > 1 and stride == [1, size[0]]


def what_of(call: Call, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What the lowerings give to :func:`prepare`, of tensors in place of Inductor's nodes.

    Args:
        call: the operator.
        arguments: those of its schema; tensors without data will do.
    """
    rest = [each for each in arguments if isinstance(each, (str, bool))]
    operands = arguments[: len(arguments) - len(rest)]
    x, weight, second = operands[:3]
    takes = call.transposed == "always" or (call.transposed == "plain" and second is None)
    given = tuple(operand is not None for operand in operands)
    turned = [
        takes and i > 0 and operand is not None and weights.is_transposed(operand)
        for i, operand in enumerate(operands)
    ]
    if call.results is not None:
        return (*rest, tuple(map(int, weight.shape)), x.dtype, given, turned[1], x.get_device())
    hidden, inner = map(int, weight.shape)
    out = hidden if second is None else int(second.shape[0])
    return (*rest, (inner, hidden, out), x.dtype, given, tuple(turned), x.get_device())
