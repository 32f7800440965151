"""The C++ of kernels: what differs between MLPs, around the headers here, which do not.

Products are a library of their own, one an element type, so that compiling a kernel is compiling an
activation and little more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fusion_backend.errors import PlanError
from fusion_backend.kernels.cpu_rows.printed import activation_function
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.operands import Kind

ELEMENTS = {torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}
_OPERANDS = {**ELEMENTS, torch.float64: "double"}

# What of `products` a task of this kernel has, and the types that common.h gives these.
_OFFERED = {"product": "Product", "element_product": "ElementProduct", "pack": "Pack"}

_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"


class Kernel(NamedTuple):
    """What a kernel is compiled for. All else, sizes and what may be missing, it is told at a call.

    Attributes:
        dtype: of input, weights, biases, residual and result.
        activations: after each layer but the last, as text.
        gated: whether there are two first layers, of the same input; then there are two layers.
        operands: kind and dtype of each operand of the (one) activation.
    """

    dtype: torch.dtype
    activations: tuple[str, ...]
    gated: bool = False
    operands: tuple[tuple[Kind, torch.dtype], ...] = ()

    @property
    def layers(self) -> int:
        """How many layers follow each other."""
        return len(self.activations) + 1

    @property
    def weights(self) -> int:
        """How many weights there are: a gate comes first."""
        return self.layers + self.gated

    @property
    def row_distances(self) -> tuple[int, ...]:
        """The operands that have rows."""
        return tuple(i for i, (kind, _) in enumerate(self.operands) if kind == "elementwise")


def arguments(kernel: Kernel) -> list[str]:
    """Names of the kernel's arguments, all of them ``int64_t``; what is missing has the address 0.

    The first are addresses; ``product``, ``element_product`` and ``pack`` are what
    :func:`products` offers.
    """
    weights = range(kernel.weights)
    return [
        *("x", "y", "memory"),
        *(f"weight{i}" for i in weights),
        *(f"bias{i}" for i in weights),
        *(f"p{i}" for i in range(len(kernel.operands))),
        *("residual", "norm_weight", "norm_bias", "kept_gate", "kept_up"),
        *("rows", "ldx", "block_rows", "chunk", "shares", "threads", "packs"),
        *(f"ld{i}" for i in kernel.row_distances),
        *(*_OFFERED, "norm_kind", "norm_eps"),
        *(f"width{i}" for i in range(kernel.layers + 1)),
        *(f"{which}{i}" for i in weights for which in ("stride_n", "stride_k")),
    ]


@functools.cache
def source(kernel: Kernel) -> str:
    """The C++ of a kernel, complete: a function ``kernel``."""
    generated_part = "".join(generated(kernel))
    return "\n".join(
        [
            element(kernel.dtype),
            *headers("common.h", "activations.h"),
            f"namespace {{\n\n{generated_part}\n}}  // namespace\n",
            *headers("rows.h"),
            _entry(kernel),
        ]
    )


def generated(kernel: Kernel) -> Iterator[str]:
    """What of the C++ is made for a kernel: its constants, and its activations."""
    kinds = [kind for kind, _ in kernel.operands]
    yield from _constants(kernel)
    yield _DECLARATION
    for i, text in enumerate(kernel.activations):
        yield activation_function(i, parse(text), kinds)


@functools.cache
def products(dtype: torch.dtype) -> str:
    """The C++ of an element type's products: ``kernel`` writes what they offer."""
    return "\n".join([element(dtype), *headers("common.h", "matrix_units.h", "products.h")])


_DECLARATION = """
template <int LAYER>
inline Vec activation(
    Vec g, Vec u, int64_t row, int64_t column, int64_t count, const Operands& operands);

"""


def element(dtype: torch.dtype) -> str:
    """With what a source begins: Inductor's header, and the element type.

    Raises:
        PlanError: there is no kernel for the dtype, as after a fused program became another one.
    """
    if dtype not in ELEMENTS:
        name, known = str(dtype).removeprefix("torch."), [str(each)[6:] for each in ELEMENTS]
        raise PlanError(
            f"plan 'rows' computes {', '.join(known)}, got {name}; fuse the program when it has "
            f"that dtype"
        )
    return f"{_PREFIX}\nnamespace {{\nusing Element = {ELEMENTS[dtype]};\n}}\n"


def headers(*names: str) -> Iterator[str]:
    """The texts of files beside this one."""
    for name in names:
        yield (Path(__file__).parent / name).read_text()


def operand_type(kind: Kind, dtype: torch.dtype) -> str:
    """The C++ of an operand's elements."""
    return "int64_t" if kind == "seed" else _OPERANDS[dtype]


def _constants(kernel: Kernel) -> Iterator[str]:
    yield f"constexpr int LAYERS = {kernel.layers};\n"
    yield f"constexpr bool GATED = {str(kernel.gated).lower()};\n"
    yield "struct Operands {\n"
    for i, (kind, dtype) in enumerate(kernel.operands):
        yield f"  const {operand_type(kind, dtype)}* p{i};\n"
    for i in kernel.row_distances:
        yield f"  int64_t ld{i};\n"
    yield "};\n"


def _entry(kernel: Kernel) -> str:
    """The function that Python calls: it puts a task together and runs it."""
    parameters = ", ".join(f"int64_t {name}" for name in arguments(kernel))
    body = "".join(f"  {line}\n" for line in _statements(kernel))
    return f'extern "C" void kernel(\n    {parameters}) {{\n{body}}}\n'


def _statements(kernel: Kernel) -> Iterator[str]:
    yield "Task task{};"
    for name in ("x", "residual"):
        yield f"task.{name} = reinterpret_cast<const Element*>({name});"
    yield "task.y = reinterpret_cast<Element*>(y);"
    yield "task.norm = norm_of(norm_kind, norm_eps, norm_weight, norm_bias);"
    for name, kind in _OFFERED.items():
        yield f"task.{name} = reinterpret_cast<{kind}>({name});"
    kept = (f"reinterpret_cast<Element*>({name})" for name in ("kept_gate", "kept_up"))
    yield f"task.kept = {{{', '.join(kept)}, width{kernel.layers - 1}}};"
    for name in ("rows", "ldx", "block_rows", "chunk", "shares"):
        yield f"task.{name} = {name};"
    yield "auto* next = reinterpret_cast<float*>(memory);"
    for i in range(kernel.weights):
        position = i - kernel.gated
        layer = "task.gate" if position < 0 else f"task.layers[{position}]"
        width = max(position, 0)
        fields = f"weight{i}, stride_n{i}, stride_k{i}, bias{i}, width{width + 1}, width{width}"
        yield f"{layer} = layer_of({fields}, packs ? &next : nullptr);"
    yield "task.sums = next;"
    for i, (kind, dtype) in enumerate(kernel.operands):
        yield f"task.operands.p{i} = reinterpret_cast<const {operand_type(kind, dtype)}*>(p{i});"
    for i in kernel.row_distances:
        yield f"task.operands.ld{i} = ld{i};"
    yield "run(task, threads);"
