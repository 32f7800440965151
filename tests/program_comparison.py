"""Whether two runs of a program agree: values and their classes, strides, aliases, gradients, logs.

Where eager itself is chaotic, so that a rounding decides what comes out, each element has to be one
that eager gives if it rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from program_runs import Outcome, Refused, eager, run
from random_programs import Program
from rounding import NothingSelects, Repeated, RoundingOtherwise, ZerosAbsorb, ZerosSelect

# How often eager is asked what else it may give.
ROUNDINGS = 32
# Of so many roundings that give different values, those between are taken to be possible, too.
MANY = 4


@dataclass(frozen=True)
class Difference:
    """What a fused program does differently.

    Attributes:
        kind: in a few words that are the same for all of its kind.
        message: in full.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def forms_differ(mine: Outcome, expected: Outcome, program: Program) -> Difference | None:
    """What differs but for values: aliases, counts, dtypes, shapes, strides, missing gradients."""
    # Autograd promises no layout.
    unordered = ("gradient", "result") if program.uses("autograd") else ("gradient",)
    if _sharing(mine) != _sharing(expected):
        message = f"{_sharing(mine)} share memory, not {_sharing(expected)}"
        return Difference("aliases", message)
    for what, ours, theirs in _parts(mine, expected):
        if len(ours) != len(theirs):
            return Difference(f"{what}s missing", f"{len(ours)}, not {len(theirs)}")
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found = _form_differs(what, i, a, b, what not in unordered)
            if found is not None:
                return found
    return None


def _form_differs(what: str, i: int, mine: Any, expected: Any, ordered: bool) -> Difference | None:
    if mine is None or expected is None:
        if mine is expected:
            return None
        said = "a gradient, not None" if expected is None else "None, not a gradient"
        return Difference("gradient None", f"{what} {i} is {said}")
    if (mine.dtype, mine.shape) != (expected.dtype, expected.shape):
        forms = f"{mine.dtype} {mine.shape}, not {expected.dtype} {expected.shape}"
        return Difference(f"{what} dtype or shape", f"{what} {i} is {forms}")
    if ordered and mine.numel() > 1 and _steps(mine) != _steps(expected):
        message = f"{what} {i} has strides {mine.stride()}, not {expected.stride()}"
        return Difference(f"{what} strides", message)
    if mine.requires_grad != expected.requires_grad:
        return Difference(f"{what} requires_grad", f"{what} {i}: {mine.requires_grad}")
    return None


def _steps(value: Tensor) -> list[int]:
    """Its strides where they tell anything: not those of dimensions of size 1."""
    return [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def values_differ(mine: Outcome, expected: Outcome, program: Program) -> Difference | None:
    """The first value that is not near eager's; forms are the same."""
    for what, i, a, b in _tensors(mine, expected):
        near = _near(a, b, _slack(b, program, what))
        if not bool(near.all()):
            return _difference(what, i, a, b, ~near)
    return None


def _difference(what: str, i: int, mine: Tensor, expected: Tensor, far: Tensor) -> Difference:
    classes = bool((_class_of(mine) != _class_of(expected))[far].any())
    index = tuple(far.nonzero()[0].tolist())
    message = f"{what} {i} differs in {int(far.sum())} of {far.numel()} elements; at {index}: "
    message += f"{mine.detach()[index].item()}, not {expected.detach()[index].item()}"
    return Difference(f"{what} {'class' if classes else 'value'}", message)


def is_chaotic(mine: Outcome, expected: Outcome, program: Program, function: Any) -> bool:
    """Whether each element is one that eager gives if it rounds or computes otherwise.

    A value narrower than float32 may also be what eager gives in float32, in which kernels compute,
    or differ from eager's where that is no nearer to the value in float64.
    """
    runs = [expected]
    for otherwise in (Repeated(1), Repeated(64), ZerosAbsorb()):
        with otherwise:
            runs.append(run(function, program))
    for selecting in (NothingSelects, ZerosSelect):
        runs.append(run(function, program, backward=selecting))
    for seed in range(ROUNDINGS):
        with RoundingOtherwise(seed):
            runs.append(run(function, program))
    exacter = list(_exacter(program, function)) if program.is_rounded else []
    for what, i, a, b in _tensors(mine, expected):
        given, exact = (_alike(a, what, i, each) for each in ([*runs, *exacter], exacter[-1:]))
        right = _is_among(a, given, _most_slack(given, program, what))
        for value in exact:
            right |= _is_no_less_exact(a, b, value)
        if not bool(right.all()):
            return False
    return True


def _alike(mine: Tensor, what: str, i: int, runs: list[Outcome]) -> list[Tensor]:
    """The same value of some runs, of those that have it in this shape."""
    others = [other.parts()[what][i] for other in runs if len(other.parts()[what]) > i]
    return [other for other in others if other is not None and other.shape == mine.shape]


def _is_no_less_exact(mine: Tensor, eager: Tensor, exact: Tensor) -> Tensor:
    """Which elements miss a finite value by no more than eager misses it at most.

    Any will do where eager overflows.
    """
    ours, theirs = ((value.detach().double() - exact.double()).abs() for value in (mine, eager))
    most = theirs.nan_to_num(torch.inf).amax(-1, keepdim=True) if theirs.dim() else theirs
    return exact.isfinite() & ((ours <= most) | ~eager.isfinite())


def _most_slack(given: list[Tensor], program: Program, what: str) -> Tensor:
    """The largest that one of some values has: one that is infinite tells of no size."""
    return torch.stack([_slack(value, program, what) for value in given]).amax(0)


def _exacter(program: Program, function: Any) -> Iterator[Outcome]:
    """What eager gives in float32 and in float64, if it does."""
    runs: tuple[Callable[[], Outcome], ...] = (
        lambda: run(function, replace(program, dtype="float32")),
        lambda: run(function, program, double=True),
    )
    for attempt in runs:
        try:
            yield attempt()
        except Exception:  # it names a dtype
            continue


def _is_among(mine: Tensor, given: list[Tensor], slack: Tensor) -> Tensor:
    """Which elements are near one of those given, or between many that are all different."""
    near = torch.stack([_near(mine, other, slack) for other in given])
    numbers = torch.stack([other.detach().double() for other in given])
    finite = numbers.isfinite()
    low = torch.where(finite, numbers, torch.inf).amin(0)
    high = torch.where(finite, numbers, -torch.inf).amax(0)
    ordered = torch.where(finite, numbers, torch.nan).sort(0).values
    distinct = ((ordered[1:] - ordered[:-1]) > slack / 4).sum(0) + 1
    value, width = mine.detach().double(), high - low
    between = (value >= low - width / 2) & (value <= high + width / 2)
    return near.any(0) | (between & (distinct >= MANY))


def is_right_in_float32(program: Program, differs: Callable[[Program], Any]) -> bool:
    """Whether a program in a narrower dtype agrees with eager in float32."""
    if program.dtype not in ("bfloat16", "float16"):
        return False
    wide = replace(program, dtype="float32")
    try:
        eager(wide)
    except Refused:
        return False
    return differs(wide) is None


def _parts(mine: Outcome, expected: Outcome) -> Iterator[tuple[str, list[Any], list[Any]]]:
    others = expected.parts()
    for what, ours in mine.parts().items():
        yield what, ours, others[what]


def _tensors(mine: Outcome, expected: Outcome) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    for what, ours, theirs in _parts(mine, expected):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a is not None and b is not None and a.numel():
                yield what, i, a, b


def _class_of(value: Tensor) -> Tensor:
    """0 for a finite number, 1 for NaN, 2 and 3 for the infinities."""
    value = value.detach().double()
    return value.isnan() * 1 + value.isposinf() * 2 + value.isneginf() * 3


def _near(mine: Tensor, expected: Tensor, slack: Tensor) -> Tensor:
    a, b = mine.detach().double(), expected.detach().double()
    return (_class_of(a) == _class_of(b)) & (~b.isfinite() | ((a - b).abs() <= slack))


def _slack(expected: Tensor, program: Program, what: str) -> Tensor:
    """How far a value may be from eager's without a question.

    The numbers of a row are sums of like terms; a gradient is one of many rows.
    """
    size = expected.detach().double().abs().nan_to_num(0, 0, 0)
    is_row = what != "gradient" and size.dim() > 0
    scale = size.amax(-1, keepdim=True) if is_row else size.amax()
    scale = scale.clamp(min=1.0 if program.numbers == "normal" else 0.01)
    if program.is_rounded or expected.dtype in (torch.bfloat16, torch.float16):
        return 0.1 * size + 0.05 * scale
    if expected.dtype == torch.float64:
        return 1e-7 * size + 1e-9 * scale
    return 1e-3 * size + 1e-5 * scale


def _sharing(outcome: Outcome) -> list[tuple[int, int]]:
    """Which results and arguments share memory."""
    tensors = (*outcome.results, *outcome.arguments)
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (i, j)
        for i, a in enumerate(storages)
        for j, b in enumerate(storages[:i])
        if a == b and a != 0
    ]
