"""What there is to count on a CPU, which has no kernel launches: operators that do work.

A *CPU operator* is, on the profiler's timeline,

- one of Inductor's C++ loops (visible under ``cpp.enable_kernel_profile``), or
- the outermost call of a primitive operator of torch, one with a kernel of its own (``addmm``,
  ``gelu``, ``mkldnn::_linear_pointwise``). What it calls in turn is part of it.

Operators composed of others (``linear``, ``matmul``) are looked into. So are custom operators, such
as ``fusedmlp::mlp``: they hide no work by being opaque. One in which no operator was recorded
counts once. Views, allocations and operators that return no tensor do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache

import torch

from fusion_backend.compat.operators import OpOverload, is_frame, runs_eagerly
from fusion_backend.instruments.profiler_trace import Event

INDUCTOR_LOOP = re.compile(r"(graph_\d+_)?(cpp_\w+)")
TORCH_NAMESPACES = frozenset({"aten", "mkl", "mkldnn", "onednn", "prims", "quantized"})
# Schemas do not tell these from operators that do work.
FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
        "resize_", "resize_as_", "set_", "detach_", "_unsafe_view",
    )
)  # fmt: skip


class Kind(Enum):
    """What an event of the CPU timeline is."""

    PRIMITIVE = "does work"
    FREE = "does no work"
    FRAME = "is composed of operators, or is a range such as a node of autograd"
    CUSTOM = "may be composed of operators, or do work of its own"


@dataclass
class Call:
    """A call on the timeline, with the calls made inside of it; times in microseconds.

    ``sequence`` is as in :class:`Event`.
    """

    name: str
    start: float
    end: float
    inside: list[Call] = field(default_factory=list)
    sequence: int = -1

    @property
    def duration(self) -> float:
        """Microseconds."""
        return self.end - self.start


def count_operators(events: Iterable[Event]) -> Counter[str]:
    """How often each CPU operator was called."""
    return Counter(call.name for call in operators_in(events))


def operators_in(events: Iterable[Event]) -> list[Call]:
    """The CPU operators that were called, thread by thread in their order."""
    return [found for call in nest(events) for found in operators_of(call)]


def nest(events: Iterable[Event]) -> list[Call]:
    """The outermost calls of each thread."""
    outermost: list[Call] = []
    open_calls: dict[object, list[Call]] = {}
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        stack = open_calls.setdefault(event.thread, [])
        while stack and stack[-1].end < event.end:
            stack.pop()
        call = Call(event.name, event.start, event.end, sequence=event.sequence)
        (stack[-1].inside if stack else outermost).append(call)
        stack.append(call)
    return outermost


def operators_of(call: Call) -> list[Call]:
    """The CPU operators in ``call``, itself included."""
    if loop := INDUCTOR_LOOP.fullmatch(call.name):
        return [replace(call, name=loop.group(2))]
    kind = classify(call.name)
    if kind is Kind.FREE:
        return []
    if kind is Kind.PRIMITIVE:
        return [call]
    inside = [found for each in call.inside for found in operators_of(each)]
    if inside or kind is not Kind.CUSTOM or does_no_work(call.name):
        return inside
    return [call]


@cache
def classify(name: str) -> Kind:
    """What the event ``name``, such as ``aten::addmm``, is."""
    overloads = overloads_of(name)
    if not overloads:
        return Kind.FRAME
    if name.partition("::")[0] not in TORCH_NAMESPACES:
        return Kind.CUSTOM
    if all(map(is_frame, overloads)):
        return Kind.FRAME
    return Kind.FREE if does_no_work(name) else Kind.PRIMITIVE


@cache
def does_no_work(name: str) -> bool:
    """Whether the operator allocates, returns views or returns no tensor, and writes nothing."""
    if name in FREE:
        return True
    schemas = [overload._schema for overload in overloads_of(name)]
    first = schemas[0]
    if first.is_mutable:
        return False
    returns_tensors = any("Tensor" in str(value.type) for value in first.returns)
    return not returns_tensors or all(value.alias_info is not None for value in first.returns)


def overloads_of(name: str) -> list[OpOverload]:
    """The overloads of the operator ``name`` without ``out=``; none where it is no operator."""
    namespace, separator, operator = name.partition("::")
    if not separator or not operator.isidentifier():
        return []
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return []
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [
        overload
        for overload in overloads
        if runs_eagerly(overload)
        and not any(argument.is_out for argument in overload._schema.arguments)
    ]
