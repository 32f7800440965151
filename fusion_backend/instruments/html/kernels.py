"""The kernels behind fused calls: their sources and what they take of the machine.

For a GPU, which need not be there, another process compiles them (``kernel_compiler``). On a CPU
their C++ is printed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusion_backend.compat import traced_calls
from fusion_backend.compat.tensors import number_of
from fusion_backend.compat.traced_calls import Called, Described, Launch
from fusion_backend.errors import ExplainError
from fusion_backend.fusion.views.node import value_of
from fusion_backend.instruments.cpu_operators import does_no_work
from fusion_backend.kernels.registry import ROWS
from fusion_backend.mlp.operands import kind_of
from fusion_backend.operators import OPERATORS
from fusion_backend.operators.arguments import Backward
from fusion_backend.operators.autograd import in_rows
from fusion_backend.planning.gpus import Gpu

# The other process imports torch and compiles: a minute is usual on a slow machine.
_LONGEST_SECONDS = 600


@dataclass(frozen=True)
class Kernel:
    """A kernel that a fused call launches.

    Attributes:
        name: of its function; of an operator that computes within, its name.
        language: ``Triton``, ``Gluon`` or ``C++``; ``operator`` for one of PyTorch; ``left to
            Inductor`` for several of which it makes loops.
        source: of the function.
        generated: what was generated for this MLP and that it calls, by name.
        registers: of each thread; ``None``, as all that follow, where it is not known.
        spilled: bytes of registers that each thread keeps in memory.
        shared_memory: of a program, in bytes.
        warps: of a program.
        machine_code: in bytes.
        backward: whether the backward pass launches it.
    """

    name: str
    language: str
    source: str = ""
    generated: Mapping[str, str] = field(default_factory=dict)
    registers: int | None = None
    spilled: int | None = None
    shared_memory: int | None = None
    warps: int | None = None
    machine_code: int | None = None
    backward: bool = False


# Operators of ATen that stay calls of a library, whatever stands beside them.
_WHOLE = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_addmm_activation"})
# Operators that compute nothing: compiled code reads what they copy, or has numbers in its place.
_MOVES = frozenset({"clone", "full", "_to_copy", "constant_pad_nd"})


class Launches(NamedTuple):
    """The kernels of fused calls that are alike.

    Attributes:
        sites: their numbers in the report.
        operator: which is called, such as ``mlp``.
        kernels: in the order in which they are launched.
    """

    sites: tuple[int, ...]
    operator: str
    kernels: tuple[Kernel, ...]

    @property
    def trained(self) -> bool:
        """Whether kernels of a backward pass are among them."""
        return any(kernel.backward for kernel in self.kernels)


def launches_of(
    calls: Sequence[tuple[int, Node]], gpu: Gpu | None
) -> tuple[list[Launches], str | None]:
    """The kernels of fused calls, and why there are none to show, if there are none.

    Args:
        calls: the number of each site with the call that takes its place.
        gpu: what to compile for; ``None`` for this machine's CPU.
    """
    alike: dict[str, list[int]] = {}
    for number, node in calls:
        alike.setdefault(json.dumps(_described(node)), []).append(number)
    described = [json.loads(text) for text in alike]
    if not described:
        return [], None
    try:
        found = [on_cpu(call) for call in described] if gpu is None else _on_gpu(described, gpu)
    except Exception as error:  # the report has all else
        line = next(iter(str(error).strip().splitlines()[-1:]), "")
        return [], f"{type(error).__name__}: {line}"
    return [
        Launches(tuple(numbers), call["operator"], tuple(kernels))
        for numbers, call, kernels in zip(alike.values(), described, found, strict=True)
    ], None


def _described(node: Node) -> dict[str, Any]:
    """A call without its tensors' contents, as JSON has it; symbolic sizes as they were seen."""
    return {
        "operator": str(node.target).split(".")[1],
        "args": [_argument(argument) for argument in node.args],
        "kwargs": {name: _argument(argument) for name, argument in node.kwargs.items()},
        "training": _requires_grad(node),
    }


def _argument(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_argument(each) for each in argument]
    value = value_of(argument) if isinstance(argument, Node) else argument
    if not isinstance(value, torch.Tensor):
        return number_of(value)
    size, stride = (list(map(number_of, each)) for each in (value.shape, value.stride()))
    dtype = str(value.dtype).removeprefix("torch.")
    return {"tensor": [size, stride, dtype, value.requires_grad]}


def _requires_grad(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _on_gpu(calls: list[dict[str, Any]], gpu: Gpu) -> list[list[Kernel]]:
    """By a process that believes in the GPU."""
    request = {"gpu": {"properties": _properties(gpu), "architecture": gpu.architecture}}
    done = subprocess.run(
        [sys.executable, "-m", "fusion_backend.instruments.html.kernel_compiler"],
        input=json.dumps({**request, "calls": calls}),
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_SECONDS,
        env={name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    if done.returncode:
        raise ExplainError(done.stderr)
    return [[Kernel(**kernel) for kernel in kernels] for kernels in json.loads(done.stdout)]


def _properties(gpu: Gpu) -> dict[str, Any]:
    """What torch tells of a GPU, as far as planning and compiling ask."""
    return {
        "name": gpu.name,
        "major": gpu.capability[0],
        "minor": gpu.capability[1],
        "gcnArchName": gpu.gfx,
        "multi_processor_count": gpu.multiprocessors,
        "shared_memory_per_block": gpu.shared_memory,
        "shared_memory_per_block_optin": gpu.shared_memory,
        "warp_size": 32,
    }


def on_cpu(call: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a described call on a CPU."""
    return of_both_passes(call, "cpu", _printed)


def of_both_passes(
    call: Mapping[str, Any],
    device: str,
    kernels: Callable[[Launch | Called], Iterator[Kernel]],
) -> list[Kernel]:
    """The kernels of a described call, those of its backward pass last.

    Args:
        call: what :func:`launches_of` describes.
        device: type of the device.
        kernels: makes kernels of a launch.
    """
    forward, backward = traced(call, device)
    return [
        *_joined([kernel for launch in forward for kernel in kernels(launch)]),
        *(
            replace(kernel, backward=True)
            for kernel in _joined([each for launch in backward for each in kernels(launch)])
        ),
    ]


def _joined(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """The kernels, with operators in a row that a compiler makes loops of as one."""
    for is_loop, group in groupby(kernels, _is_loop):
        if not is_loop:
            yield from group
            continue
        names = dict.fromkeys(kernel.name.removeprefix("aten.") for kernel in group)
        if shown := [name for name in names if name not in _MOVES]:
            yield Kernel(", ".join(shown), "left to Inductor")


def _is_loop(kernel: Kernel) -> bool:
    namespace, _, name = kernel.name.rpartition(".")
    return kernel.language == "operator" and namespace == "aten" and name not in _WHOLE


def _printed(launch: Launch | Called) -> Iterator[Kernel]:
    if not isinstance(launch, Called):
        return
    namespace, name, *_ = launch.name.split(".")
    if namespace == "fusedmlp" and name in _CPP:
        yield _CPP[name](name, *launch.arguments)
    elif not does_no_work(f"{namespace}::{name}"):
        yield Kernel(f"{namespace}.{name}", "operator")


def _rows(name: str, x: torch.Tensor, *others: Any) -> Kernel:
    """The C++ of a call of the CPU's operator, whole, and what of it is made for this MLP."""
    _, _, operands, *_, activations, gated, _ = others
    return _forward(name, x, operands, tuple(activations), gated)


def _rows_saving(name: str, x: torch.Tensor, *others: Any) -> Kernel:
    _, _, operands, activation, gated = others
    return _forward(name, x, operands, (activation,), gated)


def _forward(
    name: str, x: torch.Tensor, operands: Any, activations: tuple[str, ...], gated: bool
) -> Kernel:
    from fusion_backend.kernels.cpu_rows import source

    kernel = source.Kernel(x.dtype, activations, gated, _kinds(operands))
    generated = "".join(source.generated(kernel)).strip()
    return Kernel(name, "C++", source.source(kernel), {"activation": generated})


def _rows_gradients(name: str, _: torch.Tensor, x: torch.Tensor, *others: Any) -> Kernel:
    from fusion_backend.kernels.cpu_rows import gradient_source

    weight_gate, *_rest, operands, activation, needs = others
    wanted = tuple(i for i, need in enumerate(needs[7:]) if need)
    gated = weight_gate is not None
    kernel = gradient_source.GradientKernel(x.dtype, activation, gated, _kinds(operands), wanted)
    generated = "".join(gradient_source.generated(kernel)).strip()
    return Kernel(name, "C++", gradient_source.source(kernel), {"activation": generated})


def _kinds(operands: Any) -> tuple[Any, ...]:
    return tuple((kind_of(operand), operand.dtype) for operand in operands or ())


#: Operators of the CPU's family whose kernels are printed.
_CPP: dict[str, Callable[..., Kernel]] = {
    ROWS.name: _rows,
    "rows_saving": _rows_saving,
    "rows_gradients": _rows_gradients,
}


def traced(
    call: Mapping[str, Any], device: str
) -> tuple[list[Launch | Called], list[Launch | Called]]:
    """What a described call launches on a type of device: forward, and backward if it is trained.

    Autograd is left out: without a GPU it cannot be asked for gradients of one. What it would call
    is called here instead.
    """
    described = _tensors_in([call["args"], call["kwargs"]])
    tensors = [Described(*each["tensor"][:3]) for each in described]
    if not call["training"]:
        operator = getattr(torch.ops.fusedmlp, call["operator"]).default

        def whole(*values: Any) -> Any:
            following = iter(values)
            args = _filled(call["args"], following)
            return operator(*args, **_filled(call["kwargs"], following))

        return traced_calls.traced(whole, tensors, device), []

    declared = next(each for each in OPERATORS if each.name == call["operator"])
    results = []

    def arguments(values: Sequence[Any]) -> list[Any]:
        x, *others = _filled(call["args"], iter(values))
        return in_rows(x, others, declared.position_of_operands)

    def forward(*values: Any) -> Any:
        found = declared.keeping(*arguments(values))
        results.append(found[0])
        return found

    def both(grad_output: Any, *values: Any) -> Any:
        given = arguments(values)
        _, *kept = declared.keeping(*given)
        needs = _needs(call["args"])
        return declared.gradients(Backward(grad_output, declared.read(*given), kept, needs))

    first = traced_calls.traced(forward, tensors, device)
    rows, out = map(int, results[0].shape)
    grad_output = Described((rows, out), (out, 1), tensors[0].dtype)
    return first, traced_calls.traced(both, [grad_output, *tensors], device)[len(first) :]


def _needs(arguments: Sequence[Any]) -> list[bool]:
    """Which gradients are asked for: of each tensor, those in lists one after the other."""
    *given, _, _ = arguments
    flat = [each for value in given for each in (value if isinstance(value, list) else [value])]
    return [each is not None and bool(each["tensor"][3]) for each in flat]


def _tensors_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The places of tensors in arguments, in order."""
    if isinstance(value, dict) and "tensor" in value:
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _filled(value: Any, tensors: Iterator[Any]) -> Any:
    """The arguments with the next tensors in their places."""
    if isinstance(value, dict):
        if "tensor" in value:
            return next(tensors)
        return {name: _filled(each, tensors) for name, each in value.items()}
    return [_filled(each, tensors) for each in value] if isinstance(value, list) else value
