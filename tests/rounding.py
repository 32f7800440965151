"""Eager programs that compute otherwise: rounded otherwise, or by another kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROUNDED = (torch.bfloat16, torch.float16, torch.float32)
# Their terms may cancel: they are as inexact as the sum of the terms' absolute values.
_SUMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "sum", "mean", "mv", "addmv")


class RoundingOtherwise(TorchDispatchMode):
    """Moves whatever is rounded, to float32 and narrower, by at most one unit in its last place.

    What float64 says is exact, such as ``x - x``, stays as it is. Views are views of values that
    have been moved.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        returned = [item.alias_info for item in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if func.namespace != "aten" or is_view or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        wide = tree_map(_doubled, (args, kwargs))
        results = func(*args, **kwargs)
        exact, slack = _exactly(func, *wide)
        for i, result in enumerate(tree_leaves(results)):
            if isinstance(result, torch.Tensor) and result.dtype in ROUNDED and result.numel():
                self._move(result, *(values[i] if values else None for values in (exact, slack)))
        return results

    def _move(self, result: torch.Tensor, exact: Any, slack: Any) -> None:
        if 0 in result.stride():  # elements share memory: PyTorch writes to no such tensor
            return
        if not isinstance(exact, torch.Tensor) or exact.shape != result.shape:
            exact = slack = None
        by = 2 * torch.rand(result.shape, generator=self._generator, dtype=torch.float64) - 1
        size = result.double().abs() if slack is None else slack.abs()
        moved = result.double() + torch.finfo(result.dtype).eps * by * size
        if exact is not None:
            moved = torch.where(exact == result.double(), result.double(), moved)
        result.copy_(torch.where(result.isfinite(), moved, result.double()))


class Repeated(TorchDispatchMode):
    """Computes each element of a pointwise function in a vector of so many that are equal.

    Kernels treat infinities and NaN otherwise in vectors than at their ends: on a CPU, GELU of
    infinity is infinity if it stands alone, and NaN among others.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = (args, kwargs or {})
        result = func(*args, **given[1])
        # Derivatives have no tag.
        is_pointwise = torch.Tag.pointwise in func.tags or "_backward" in func._schema.name
        if is_pointwise and not func._schema.is_mutable and isinstance(result, torch.Tensor):
            with suppress(RuntimeError):  # of a derivative that is not pointwise
                vectors = [func(*a, **k) for a, k in self._elements(given, result.shape)]
                result.copy_(torch.stack([vector[0] for vector in vectors]).reshape(result.shape))
        return result

    def _elements(self, given: Any, shape: torch.Size) -> Iterator[Any]:
        def element(value: Any, i: int) -> Any:
            is_many = isinstance(value, torch.Tensor)
            return value.expand(shape).reshape(-1)[i].repeat(self._times) if is_many else value

        for i in range(shape.numel()):
            yield tree_map(functools.partial(element, i=i), given)


class ZerosAbsorb(TorchDispatchMode):
    """Computes products of matrices in which zero times infinity is zero.

    The backward pass of a slice multiplies zeros: for what nobody read, it makes NaN of infinite
    arguments. A fused site computes nothing for what nobody read.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = args[0].unsqueeze(-1), args[1].unsqueeze(-3)
            zeros = (left == 0) | (right == 0)
            return (left * right).masked_fill(zeros, 0).sum(-2)
        return func(*args, **(kwargs or {}))


class NothingSelects(TorchDispatchMode):
    """Gives NaN wherever a function gives zero of a number that is infinite or NaN.

    For the backward pass: eager selects where an activation is masked, and gives zero even of an
    infinite gradient. Kernels multiply by the derivative, which is zero there.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and value.shape == result.shape:
                    lost = (result == 0) & ~value.isfinite()
                    result = result.masked_fill(lost, torch.nan) if lost.any() else result
        return result


class ZerosSelect(TorchDispatchMode):
    """Gives zero wherever a function makes NaN of an infinite number.

    For the backward pass: eager multiplies an infinite gradient by each zero factor of a derivative
    and then adds. Kernels add the derivative's terms first, and the zeros are lost among them.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            values = [
                value
                for value in tree_leaves((args, kwargs))
                if isinstance(value, torch.Tensor) and value.shape == result.shape
            ]
            if any(bool(value.isinf().any()) for value in values):
                made = result.isnan()
                for value in values:
                    made &= ~value.isnan()
                result = result.masked_fill(made, 0)
        return result


def _doubled(value: Any) -> Any:
    is_rounded = isinstance(value, torch.Tensor) and value.dtype in ROUNDED
    return value.detach().double() if is_rounded else value


def _exactly(func, args, kwargs) -> tuple[list[Any] | None, list[Any] | None]:
    """The results in float64, and for sums those of absolute values."""
    name = func._schema.name.removeprefix("aten::")
    if name == "_to_copy":
        return [args[0]], None
    magnitudes = tree_map(_magnitude, (args, kwargs)) if name in _SUMS else None
    try:
        exact = tree_leaves(func(*args, **kwargs))
        if magnitudes is None:
            return exact, None
        return exact, tree_leaves(func(*magnitudes[0], **magnitudes[1]))
    except (RuntimeError, NotImplementedError):
        return None, None


def _magnitude(value: Any) -> Any:
    is_double = isinstance(value, torch.Tensor) and value.dtype == torch.float64
    return value.abs() if is_double else value
