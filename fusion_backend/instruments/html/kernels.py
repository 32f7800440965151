"""The kernels behind fused calls: their sources and what they take of the machine.

For a GPU, which need not be there, another process compiles them (``kernel_compiler``). On a CPU
their C++ is printed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.compat import traced_calls
from fusion_backend.compat.tensors import number_of
from fusion_backend.compat.traced_calls import Called, Launch
from fusion_backend.errors import ExplainError
from fusion_backend.fusion.views.node import value_of
from fusion_backend.instruments.cpu_operators import does_no_work
from fusion_backend.kernels.registry import ROWS
from fusion_backend.mlp.operands import kind_of
from fusion_backend.planning.gpus import Gpu

# The other process imports torch and compiles: a minute is usual on a slow machine.
_LONGEST_SECONDS = 600


@dataclass(frozen=True)
class Kernel:
    """A kernel that a fused call launches.

    Attributes:
        name: of its function; of an operator that computes within, its name.
        language: ``Triton``, ``Gluon`` or ``C++``; ``operator`` for one of PyTorch.
        source: of the function.
        generated: what was generated for this MLP and that it calls, by name.
        registers: of each thread; ``None``, as all that follow, where it is not known.
        spilled: bytes of registers that each thread keeps in memory.
        shared_memory: of a program, in bytes.
        warps: of a program.
        machine_code: in bytes.
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
    if gpu is not None and any(call["training"] for call in described):
        return [], "those of a training step on a GPU are not listed"
    try:
        found = [_on_cpu(call) for call in described] if gpu is None else _on_gpu(described, gpu)
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
        "training": torch.is_grad_enabled() and _requires_grad(node),
    }


def _argument(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_argument(each) for each in argument]
    value = value_of(argument) if isinstance(argument, Node) else argument
    if not isinstance(value, torch.Tensor):
        return number_of(value)
    size, stride = (list(map(number_of, each)) for each in (value.shape, value.stride()))
    return {"tensor": [size, stride, str(value.dtype).removeprefix("torch.")]}


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


def _on_cpu(call: Mapping[str, Any]) -> list[Kernel]:
    return [kernel for launch in traced(call, "cpu") for kernel in _printed(launch)]


def _printed(launch: Launch | Called) -> Iterator[Kernel]:
    namespace, name, *_ = launch.name.split(".") if isinstance(launch, Called) else ("", "")
    if isinstance(launch, Called) and (namespace, name) == ("fusedmlp", ROWS.name):
        yield _cpp(launch.arguments)
    elif not does_no_work(f"{namespace}::{name}"):
        yield Kernel(f"{namespace}.{name}", "operator")


def _cpp(arguments: Sequence[Any]) -> Kernel:
    """The C++ of a call of the CPU's operator, whole, and what of it is made for this MLP."""
    from fusion_backend.kernels.cpu_rows import source

    x, _, _, operands, *_, activations, gated, _ = arguments
    described = tuple((kind_of(operand), operand.dtype) for operand in operands or ())
    kernel = source.Kernel(x.dtype, tuple(activations), gated, described)
    generated = "".join(source.generated(kernel)).strip()
    return Kernel(ROWS.name, "C++", source.source(kernel), {"activation": generated})


def traced(call: Mapping[str, Any], device: str) -> Iterator[Launch | Called]:
    """What a described call launches on a type of device."""
    operator = getattr(torch.ops.fusedmlp, call["operator"]).default
    tensors = [each["tensor"] for each in _tensors_in([call["args"], call["kwargs"]])]

    def function(*values: Any) -> Any:
        following = iter(values)
        args = _filled(call["args"], following)
        return operator(*args, **_filled(call["kwargs"], following))

    with torch.set_grad_enabled(call["training"]):
        yield from traced_calls.traced(function, tensors, device)


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
