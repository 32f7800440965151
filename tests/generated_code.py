"""A program: have Inductor write code for an H200, on a machine without a GPU, and print the calls.

    python tests/generated_code.py

Tensors have no data, no kernel is compiled and none is called: what is stubbed here is what
Inductor asks a GPU for. For each case the operations that the generated code calls are printed in
their order, and those kernels that processes began to compile before the code was loaded.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import async_compile, config
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fusion_backend
from kernel_compilation import HopperDriver, symbolic_size

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    total_memory=141 << 30,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
    clock_rate=1980000,
)


def pretend_there_is_a_gpu() -> None:
    def zero(*arguments: Any) -> int:
        return 0

    for name, value in {
        "is_available": lambda: True,
        "current_device": zero,
        "get_device_properties": lambda *device: H200,
        "_exchange_device": zero,
        "_maybe_exchange_device": zero,
        "get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": zero,
    }.items():
        setattr(torch.cuda, name, value)
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda *device: H200)
    fake_tensor.init_gpu_context = zero
    triton.runtime.driver._active = HopperDriver()
    # Patterns of PyTorch's own, which are traced with tensors on the GPU.
    joint_graph.lazy_init = post_grad.lazy_init = zero


class Gated(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Transposed(nn.Module):
    """Weights as GPT-2 has them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(inner, out))
            for inner, out in ((width, hidden), (hidden, width))
        )
        self.bias_up, self.bias_down = (nn.Parameter(torch.randn(n)) for n in (hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(torch.addmm(self.bias_up, x, self.up), approximate="tanh")
        return torch.addmm(self.bias_down, hidden, self.down)


class Block(nn.Module):
    """An MLP between a norm and a sum."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), plain(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def plain(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))


def chain(width: int, hidden: int) -> nn.Module:
    layers = (nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(hidden, width))


class PolicyAndValue(nn.Module):
    """Two towers of one input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                *(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()),
                nn.Linear(hidden, out),
            )
            for out in (17, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


CASES = {
    "many rows": (plain, 2048, 768, 3072),
    "many rows, transposed": (Transposed, 2048, 768, 3072),
    "many rows, gated": (Gated, 2048, 4096, 14336),
    "by cuBLASLt": (plain, 512, 768, 3072),
    "few rows": (plain, 16, 768, 3072),
    "few rows, gated, wide": (Gated, 16, 4096, 14336),
    "narrow": (plain, 65536, 256, 1024),
    "narrow, 128": (plain, 16384, 128, 512),
    "many rows, norm and sum": (Block, 16384, 768, 3072),
    "many rows, norm and sum, idle tiles": (Block, 4096, 768, 3072),
    "narrow, norm and sum": (Block, 1 << 18, 64, 256),
    "chain": (chain, 1 << 18, 64, 64),
    "towers": (PolicyAndValue, 1024, 348, 64),
}

CALL = re.compile(
    r"\b(?:(?P<kernel>\w+?)(?:_\d+)?\.run|(?:extern_kernels|torch\.ops\.aten)\.(?P<library>\w+)"
    r"(?:\.default)?|(?P<function>fusedmlp_\w+)_[0-9a-f]{8})\("
)


def calls_of(code: str) -> list[str]:
    """What generated code calls, in order: kernels, libraries, and our functions."""
    matches = CALL.finditer(code[code.index("def call(") :])
    return ["".join(filter(None, match.groups())) for match in matches]


def compiled(make: Any, rows: int, widths: tuple[int, int], dynamic: bool) -> None:
    """Compile an MLP in bfloat16 without gradients."""
    with torch.device("meta"):
        model = make(*widths).to(torch.bfloat16).requires_grad_(False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    size = symbolic_size(mode, "rows", rows) if dynamic else rows
    with mode:
        model = model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"))
        x = torch.empty(size, widths[0], dtype=torch.bfloat16, device="cuda")
    graph = torch.fx.symbolic_trace(model)
    with torch.no_grad(), tracing(TracingContext(mode)):
        fusion_backend.fusedmlp(graph, [x], options={"fusedmlp.strict": True})


def main() -> int:
    pretend_there_is_a_gpu()
    config.fx_graph_cache = False
    config.compile_threads = 1  # and no thread compiles what the code calls
    codes: list[str] = []
    begun: list[list[str]] = []
    started: list[str] = []
    generate = GraphLowering.codegen

    def generated(graph: GraphLowering) -> Any:
        started.clear()
        result = generate(graph)
        codes.append(result[0].value)
        begun.append([name for name in started if name.startswith("fusedmlp_")])
        return result

    GraphLowering.codegen = generated
    async_compile.AsyncCompile.wakeup = classmethod(lambda cls: None)
    async_compile.AsyncCompile.use_process_pool = classmethod(lambda cls: True)
    async_compile.AsyncCompile.triton = lambda self, name, *source, **device: started.append(name)
    results = {}
    for name, (make, rows, *widths) in CASES.items():
        for dynamic in (False, True):
            compiled(make, rows, tuple(widths), dynamic)
            calls, early = calls_of(codes.pop()), begun.pop()
            results[f"{name}, dynamic" if dynamic else name] = {"calls": calls, "begun": early}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
