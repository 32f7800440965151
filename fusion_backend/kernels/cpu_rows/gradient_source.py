"""The C++ of gradients: what differs between MLPs, around ``gradients.h``, which does not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fusion_backend.kernels.cpu_rows.printed import differentiated_function
from fusion_backend.kernels.cpu_rows.source import element, headers, operand_type
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.operands import Kind

LAYERS = ("gate", "up", "from_down", "from_gate", "from_up")
SUMS = ("gate", "up", "down", "bias_gate", "bias_up", "bias_down")


class GradientKernel(NamedTuple):
    """What a kernel is compiled for. All else it is told at a call.

    Attributes:
        dtype: of input, weights, biases and gradients.
        activation: as text.
        gated: whether there are two first layers.
        operands: kind and dtype of each operand of the activation.
        wanted: of which operands there are gradients.
    """

    dtype: torch.dtype
    activation: str
    gated: bool = False
    operands: tuple[tuple[Kind, torch.dtype], ...] = ()
    wanted: tuple[int, ...] = ()

    @property
    def row_distances(self) -> tuple[int, ...]:
        """The operands that have rows."""
        return tuple(i for i, (kind, _) in enumerate(self.operands) if kind == "elementwise")

    def dtype_of_gradient(self, index: int) -> torch.dtype:
        """What the gradient of an operand is written in: float32 unless it has the MLP's dtype."""
        kind, dtype = self.operands[index]
        return dtype if kind == "elementwise" and dtype == self.dtype else torch.float32


def arguments(kernel: GradientKernel) -> list[str]:
    """Names of the kernel's arguments, all of them ``int64_t``; what is missing has the address 0.

    The first are addresses; ``product``, ``pack`` and ``weight_product`` are the library's.
    """
    return [
        *("x", "dy", "memory", "preact_gate", "preact_up"),
        *("weight_gate", "bias_gate", "weight_up", "bias_up", "weight_down"),
        *(f"p{i}" for i in range(len(kernel.operands))),
        "dx",
        *(f"to_{name}" for name in SUMS),
        *(f"d{i}" for i in kernel.wanted),
        *("rows", "ldx", "dy_row", "dy_column"),
        *("part_rows", "block_rows", "chunk", "parts", "shares", "threads", "packs", "groups"),
        "computes",
        *(f"ld{i}" for i in kernel.row_distances),
        *("product", "pack", "weight_product", "in_features", "hidden", "out", "needs_preact"),
        *("passes_gate", "passes_up"),
        *(f"{field}_{name}" for name in SUMS[:3] for field in ("n", "k", "turned", "direct")),
    ]


@functools.cache
def source(kernel: GradientKernel) -> str:
    """The C++ of a kernel, complete: a function ``kernel``."""
    generated_part = "".join(generated(kernel))
    parameters = ", ".join(f"int64_t {name}" for name in arguments(kernel))
    body = "".join(f"  {line}\n" for line in _statements(kernel))
    return "\n".join(
        [
            element(kernel.dtype),
            *headers("common.h", "activations.h"),
            f"namespace {{\n\n{generated_part}\n}}  // namespace\n",
            *headers("gradients.h"),
            f'extern "C" void kernel(\n    {parameters}) {{\n{body}}}\n',
        ]
    )


def generated(kernel: GradientKernel) -> Iterator[str]:
    """What of the C++ is made for a kernel: its constants, and its activation with derivatives."""
    yield from _constants(kernel)
    yield "\n"
    kinds = [kind for kind, _ in kernel.operands]
    expression = parse(kernel.activation)
    yield differentiated_function(expression, kernel.gated, kinds, kernel.wanted)


def _constants(kernel: GradientKernel) -> Iterator[str]:
    yield f"constexpr bool GATED = {str(kernel.gated).lower()};\n"
    yield f"constexpr int WANTED = {len(kernel.wanted)};\n"
    yield "struct Operands {\n"
    for i, (kind, dtype) in enumerate(kernel.operands):
        yield f"  const {operand_type(kind, dtype)}* p{i};\n"
    for i in kernel.row_distances:
        yield f"  int64_t ld{i};\n"
    for i in _elementwise(kernel):
        yield f"  {_gradient_type(kernel, i)}* d{i};\n"
    yield "  int64_t hidden;\n};\n"


def _elementwise(kernel: GradientKernel) -> tuple[int, ...]:
    return tuple(i for i in kernel.wanted if kernel.operands[i][0] == "elementwise")


def _gradient_type(kernel: GradientKernel, index: int) -> str:
    return operand_type("vector", kernel.dtype_of_gradient(index))


def _statements(kernel: GradientKernel) -> Iterator[str]:
    """Those that put a task together and run it."""
    yield "Task task{};"
    for name in ("x", "dy", "preact_gate", "preact_up"):
        yield f"task.{name} = reinterpret_cast<const Element*>({name});"
    yield "task.dx = reinterpret_cast<Element*>(dx);"
    for name, kind in (("product", "Product"), ("pack", "Pack")):
        yield f"task.{name} = reinterpret_cast<{kind}>({name});"
    yield "task.weight_product = reinterpret_cast<WeightProduct>(weight_product);"
    for name in ("rows", "ldx", "dy_row", "dy_column", "part_rows", "block_rows", "chunk"):
        yield f"task.{name} = {name};"
    for name in (
        "parts",
        "shares",
        "groups",
        "hidden",
        "out",
        "needs_preact",
        "passes_gate",
        "passes_up",
    ):
        yield f"task.{name} = {name};"
    yield "task.in = in_features;"
    yield "auto* next = reinterpret_cast<float*>(memory);"
    yield "float** no_memory = nullptr;"
    for name, fields, used in _layers():
        yield f"task.{name} = layer_of({fields}, packs && {used} ? &next : no_memory);"
    for name, sizes in _sums():
        yield f"task.d_{name} = {{reinterpret_cast<Element*>(to_{name}), {sizes}}};"
        yield f"task.d_{name}.fit(parts, groups, next);"
    for name in SUMS[3:]:
        n = "out" if name == "bias_down" else "hidden"
        yield f"task.d_{name} = {{reinterpret_cast<Element*>(to_{name}), {n}, nullptr}};"
        yield f"task.d_{name}.fit(parts, next);"
    for i, index in enumerate(kernel.wanted):
        if index not in _elementwise(kernel):
            yield f"task.d_operands[{i}] = {{reinterpret_cast<float*>(d{index}), hidden, nullptr}};"
            yield f"task.d_operands[{i}].fit(parts, next);"
    yield "task.dx_sums = next;"
    yield "task.operands.hidden = hidden;"
    for i, (kind, dtype) in enumerate(kernel.operands):
        yield f"task.operands.p{i} = reinterpret_cast<const {operand_type(kind, dtype)}*>(p{i});"
    for i in kernel.row_distances:
        yield f"task.operands.ld{i} = ld{i};"
    for i in _elementwise(kernel):
        yield f"task.operands.d{i} = reinterpret_cast<{_gradient_type(kernel, i)}*>(d{i});"
    yield "run(task, threads);"


def _layers() -> Iterator[tuple[str, str, str]]:
    """Each layer: its name, its fields, and when it is used."""
    for name in ("gate", "up"):
        fields = f"weight_{name}, n_{name}, k_{name}, bias_{name}, hidden, in_features"
        yield name, fields, f"computes && weight_{name}"
    yield "from_down", "weight_down, k_down, n_down, 0, hidden, out", "needs_preact"
    for name in ("gate", "up"):
        fields = f"weight_{name}, k_{name}, n_{name}, 0, in_features, hidden"
        yield f"from_{name}", fields, f"dx && passes_{name}"


def _sums() -> Iterator[tuple[str, str]]:
    """Each gradient of a weight: its name and its fields."""
    for name in SUMS[:3]:
        m, n = ("out", "hidden") if name == "down" else ("hidden", "in_features")
        strides = f"turned_{name} ? 1 : {n}, turned_{name} ? {m} : 1"
        yield name, f"{m}, {n}, {strides}, direct_{name} != 0, nullptr, nullptr"
