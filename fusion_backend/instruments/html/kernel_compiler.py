"""A program: lists the kernels that fused calls launch on a GPU, with their sources and needs.

It reads a request from its standard input and writes the answer to its standard output, both JSON:

    {"gpu": {"properties": {…}, "architecture": "sm_90"}, "calls": [{"operator": "mlp", …}, …]}
    [[{"name": …, "language": …, "source": …, …}, …], …]

It is a process of its own because it makes torch and Triton believe in a GPU that is not there.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fusion_backend.compat import pretended_gpu
from fusion_backend.compat.traced_calls import Called, Launch, with_missing
from fusion_backend.instruments.cpu_operators import does_no_work
from fusion_backend.instruments.html.kernels import Kernel, of_both_passes
from fusion_backend.kernels import registry
from fusion_backend.operators.launches import Operand, described, split


def main() -> int:
    """Answer one request."""
    request = json.load(sys.stdin)
    gpu = request["gpu"]
    pretended_gpu.pretend(gpu["properties"], gpu["architecture"])
    answer = [
        [asdict(kernel) for kernel in kernels_of(call, gpu["architecture"])]
        for call in request["calls"]
    ]
    json.dump(answer, sys.stdout)
    return 0


def kernels_of(call: Mapping[str, Any], architecture: str) -> list[Kernel]:
    """What one fused call launches, in order."""
    return of_both_passes(call, "cuda", partial(shown, architecture=architecture))


def shown(launch: Launch | Called, architecture: str) -> Iterator[Kernel]:
    """The kernels behind a launch, or behind an operator of ours; what else computes, by name."""
    if isinstance(launch, Launch):
        from fusion_backend.kernels.back_to_back.compiled import source_of

        arguments = SimpleNamespace(arguments=with_missing(launch))
        source = source_of(launch.kernel, arguments)  # type: ignore[arg-type]
        made = pretended_gpu.compiled(source, architecture, launch.options)
        yield kernel_of(launch.kernel, "Triton", made)
        return
    namespace, name, *_ = launch.name.split(".")
    ours = {call.name: call for family in registry.FAMILIES for call in family.calls}
    if namespace == "fusedmlp" and name in ours:
        call = ours[name]
        rows = int(launch.arguments[0].shape[0])
        tensors, rest = split(launch.arguments)
        operands = [None if each is None else Operand.of_tensor(each) for each in tensors]
        known = described(call, operands, rest)
        for language, function, made in compiled_by(call, rows, known):
            yield kernel_of(function, language, made)
    elif not does_no_work(f"{namespace}::{name}"):
        yield Kernel(name=f"{namespace}.{name}", language="operator")


def compiled_by(call: Any, rows: int, what: tuple[Any, ...]) -> list[tuple[str, Any, Any]]:
    """Kernels that a module starts to compile when generated code is about to call it."""
    from fusion_backend.kernels.host.ahead import Ahead

    found: list[tuple[str, Any, Any]] = []

    def start(self: Ahead, *arguments: Any) -> None:
        made = self.compiling(*arguments)
        function = made.src.fn
        gluon = type(function).__name__ == "GluonJITFunction" or function.is_gluon()
        found.append(("Gluon" if gluon else "Triton", function, made))

    before, Ahead.start = Ahead.start, start  # type: ignore[method-assign]
    try:
        getattr(import_module(call.module), call.prepare)(rows, *what)
    finally:
        Ahead.start = before  # type: ignore[method-assign]
    return found


def kernel_of(function: Any, language: str, made: Any) -> Kernel:
    """A compiled kernel with the source of its function, and of the activation in it."""
    activation = function.fn.__globals__.get("activation")
    parts = [] if activation is None else [("activation", activation.src)]
    taken = pretended_gpu.resources(made)._asdict()
    return Kernel(
        name=function.__name__,
        language=language,
        source=inspect.cleandoc(function.src),
        generated=dict(parts),
        **taken,
    )


if __name__ == "__main__":
    sys.exit(main())
