"""A generated kernel, compiled for a GPU that need not be in this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusion_backend.kernels.back_to_back.launch import back_to_back_invocation
from fusion_backend.kernels.codegen.activation import emit
from fusion_backend.kernels.codegen.specialize import specialize
from fusion_backend.kernels.host.problems import MANY_ROWS, back_to_back_problem
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.invocations import How, Invocation
from fusion_backend.kernels.preferences import preferences
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import Weights

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class CompiledKernel:
    """What became of a kernel.

    Attributes:
        name: of the kernel.
        activation: Triton source of the function that stands for the activation in it.
        architecture: what it is compiled for, such as ``"sm_90"``.
        machine_code: bytes of machine code.
        shared_memory: bytes that one program has.
        warps: of one program.
        products: instructions that start a product on tensor cores.
    """

    name: str
    activation: str
    architecture: str
    machine_code: int
    shared_memory: int
    warps: int
    products: int

    def __str__(self) -> str:
        facts = (
            f"{self.name}, compiled for {self.architecture}: {self.machine_code / 1024:.0f} KiB of "
            f"machine code, {self.warps} warps and {self.shared_memory / 1024:.0f} KiB of shared "
            f"memory a program, {self.products} instructions for products on tensor cores"
        )
        return f"{facts}.\n\n{self.activation}"


def compile_for_h100(activation: str, in_features: int, hidden_features: int) -> CompiledKernel:
    """Compile the kernel that runs a whole narrow MLP in bfloat16, ``in_features`` wide outside.

    Neither a GPU nor a driver is needed; it takes seconds.

    Args:
        activation: an expression of ``x``, such as ``"gelu_tanh(x)"``.
        in_features: width of x and y, a power of two to 128.
        hidden_features: width between the layers.

    Raises:
        ExpressionError: the activation is no expression of ``x``.
    """
    expression = parse(activation)
    launch = _launch(in_features, hidden_features)
    kernel = specialize(launch.template, expression, torch.bfloat16)
    config = launch.config
    compiled = triton.compile(
        source_of(kernel, launch),
        target=GPUTarget("cuda", H100.capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return CompiledKernel(
        name=compiled.metadata.name,
        activation=emit(expression, torch.bfloat16).forward.src.strip(),
        architecture=f"sm_{H100.capability}",
        machine_code=len(compiled.asm["cubin"]),
        shared_memory=compiled.metadata.shared,
        warps=config.num_warps,
        products=compiled.asm["ptx"].count("wgmma.mma_async"),
    )


def _launch(in_features: int, hidden_features: int) -> Invocation:
    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, y = matrix(MANY_ROWS, in_features), matrix(MANY_ROWS, in_features)
    up, down = matrix(hidden_features, in_features), matrix(in_features, hidden_features)
    problem = back_to_back_problem(x, None, up, down, H100)
    config = preferences("back_to_back", problem, H100)[0]
    weights = Weights(None, None, up, matrix(hidden_features), down, matrix(in_features))
    return back_to_back_invocation(x, weights, y, How(problem.precision, config, H100))


def source_of(kernel: Any, launch: Invocation) -> ASTSource:
    """What Triton compiles for a launch whose tensors are aligned."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for position, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        pointer = isinstance(value, Tensor)
        signature[parameter.name] = f"*{_NAMES[value.dtype]}" if pointer else "i32"
        if pointer or value % 16 == 0:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)
