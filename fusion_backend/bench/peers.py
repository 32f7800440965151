"""Who is benchmarked: the ways to run an MLP that a person could choose instead of this package.

All are handed the same tensors. Eager and the compilers get the MLP as a person writes it, the
libraries get it in modules or functions of their own.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.backend import backend_with_observer
from fusion_backend.bench.cells import Cell, as_written
from fusion_backend.dispatch import PLANS
from fusion_backend.errors import CommandError
from fusion_backend.isolation import private_frame
from fusion_backend.library import library_supports
from fusion_backend.sites import Site
from fusion_backend.timing import Operands
from fusion_backend.weights import Weights

#: As in mode ``max-autotune-no-cudagraphs``, and Inductor's best templates for Hopper beside.
MAX_AUTOTUNE = {"max_autotune": True, "triton.enable_persistent_tma_matmul": True}
BACK_TO_BACK = {"b2b_gemm_pass": True}


def _input_and_weights(x: Tensor, weights: Weights) -> Operands:
    return (x, *weights)


@dataclass(frozen=True)
class Runner:
    """One way to run one cell.

    Attributes:
        function: of what ``operands`` returns.
        operands: the arguments of one call, from the input and one set of weights.
        sites: where fusedmlp says what it did, filled in the first call.
    """

    function: Callable[..., Tensor]
    operands: Callable[[Tensor, Weights], Operands] = _input_and_weights
    sites: list[Site] = field(default_factory=list)


def _takes_all(cell: Cell, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """Someone who runs MLPs.

    Attributes:
        name: in tables and on the command line.
        what: in a few words.
        build: makes a runner; what has to be compiled is compiled in its first call.
        refuses: why a cell cannot be run on a device, ``None`` if it can.
        distribution: the package that must be installed.
        compiles: whether the first call takes seconds, which :mod:`warm_up` can take in parallel.
        whole: ``False`` if less than the MLP is computed.
    """

    name: str
    what: str
    build: Callable[[Cell], Runner]
    refuses: Callable[[Cell, torch.device], str | None] = _takes_all
    distribution: str | None = None
    compiles: bool = False
    whole: bool = True

    @property
    def version(self) -> str | None:
        """Of the package that must be installed; ``None`` if it is not, or none is needed."""
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else None
        except importlib.metadata.PackageNotFoundError:
            return None

    def absence(self, cell: Cell, device: torch.device) -> str | None:
        """Why there is nothing to measure, ``None`` if there is."""
        if self.distribution is not None and self.version is None:
            return f"{self.distribution} is not installed"
        return self.refuses(cell, device)


def _eager(cell: Cell) -> Runner:
    return Runner(as_written(cell))


def _bare(cell: Cell) -> Runner:
    def plain(x: Tensor, *w: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w[2].t()), w[4].t())

    def gated(x: Tensor, *w: Tensor) -> Tensor:
        torch.mm(x, w[0].t())
        return torch.mm(torch.mm(x, w[2].t()), w[4].t())

    return Runner(gated if cell.gated else plain)


def _compiled(function: Callable[..., Tensor], **settings: Any) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(
        private_frame(function), dynamic=False, **settings
    )
    return compiled


def _inductor(cell: Cell) -> Runner:
    return Runner(_compiled(as_written(cell)))


def _max_autotune(cell: Cell) -> Runner:
    return Runner(_compiled(as_written(cell), options=MAX_AUTOTUNE))


def _no_max_autotune(cell: Cell, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "its CPU templates take constant weights only"


def _b2b(cell: Cell) -> Runner:
    return Runner(_compiled(as_written(cell), options=BACK_TO_BACK))


def _no_b2b(cell: Cell, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    if cell.gated or cell.has_bias:
        return "it takes plain MLPs without biases only"
    return None


def _cublaslt(cell: Cell) -> Runner:
    use_gelu = cell.activation == "gelu_tanh(x)"

    def run(x: Tensor, *w: Tensor) -> Tensor:
        postact = torch._addmm_activation(w[3], x, w[2].t(), use_gelu=use_gelu)
        return F.linear(postact, w[4], w[5])

    return Runner(run)


def _no_cublaslt(cell: Cell, device: torch.device) -> str | None:
    supported = library_supports(
        cell.activation,
        cell.dtype,
        device_type=device.type,
        has_bias_up=cell.has_bias and not cell.gated,
        rows=cell.rows,
        in_features=cell.width,
        hidden_features=cell.hidden,
    )
    return None if supported else "its epilogue is not exactly this MLP's"


def _runner_of_modules(modules: Callable[[Weights], nn.Module]) -> Runner:
    def operands(x: Tensor, weights: Weights) -> Operands:
        return x, modules(weights)

    return Runner(lambda x, module: module(x), operands)


def _parameter(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def _liger(cell: Cell) -> Runner:
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    module = LigerSwiGLUMLP if cell.activation == "silu(g) * u" else LigerGEGLUMLP
    return _runner_of_modules(_liger_modules(module, cell))


def _liger_mlp(cell: Cell) -> Runner:
    from liger_kernel.transformers.mlp import LigerMLP

    return _runner_of_modules(_liger_modules(LigerMLP, cell))


def _liger_modules(module_class: type[nn.Module], cell: Cell) -> Callable[[Weights], nn.Module]:
    config = SimpleNamespace(
        hidden_size=cell.width, intermediate_size=cell.hidden, hidden_act="silu"
    )

    def made(weights: Weights) -> nn.Module:
        with torch.device("meta"):
            module: Any = module_class(config)
        module.gate_proj.weight = _parameter(weights.weight_gate)
        module.up_proj.weight = _parameter(weights.weight_up)
        module.down_proj.weight = _parameter(weights.weight_down)
        return module  # type: ignore[no-any-return]

    return made


def _only(*activations: str) -> Callable[[Cell, torch.device], str | None]:
    """Refuses all that is no gated MLP with one of the activations, without biases, on a GPU."""

    def refuses(cell: Cell, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it needs a GPU"
        if cell.activation not in activations or cell.has_bias or cell.out_width != cell.width:
            return "it has no module for this MLP"
        return None

    return refuses


_QUACK = {
    "gelu_tanh(x)": "gelu_tanh_approx",
    "relu(x)": "relu",
    "silu(x)": "silu",
    "silu(g) * u": "swiglu",
    "gelu_tanh(g) * u": "geglu",
    "relu(g) * u": "reglu",
}


def _quack(cell: Cell) -> Runner:
    from quack.mlp import MLP

    def made(weights: Weights) -> nn.Module:
        with torch.device("meta"):
            module: Any = MLP(
                cell.width,
                cell.hidden,
                cell.out_width,
                bias1=cell.has_bias,
                bias2=cell.has_bias,
                activation=_QUACK[cell.activation],
                dtype=cell.dtype,
            )
        module.fc1.weight = _parameter(_alternating(weights.weight_gate, weights.weight_up))
        module.fc2.weight = _parameter(weights.weight_down)
        if cell.has_bias:
            assert weights.bias_up is not None
            module.fc1.bias = _parameter(_alternating(weights.bias_gate, weights.bias_up))
            module.fc2.bias = _parameter(weights.bias_down)
        return module  # type: ignore[no-any-return]

    return _runner_of_modules(made)


def _alternating(gate: Tensor | None, up: Tensor) -> Tensor:
    """Rows of gate and up in turns, as QuACK keeps them."""
    return up if gate is None else torch.stack((gate, up), dim=1).flatten(0, 1)


def _no_quack(cell: Cell, device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "it needs a GPU of capability 9.0 or newer"
    if cell.activation not in _QUACK or cell.dtype == torch.float32:
        return "it has no module for this MLP"
    if any(width % 8 for width in (cell.width, cell.hidden, cell.out_width)):
        return "it takes widths divisible by 8 only"
    return None


def _fusedmlp(cell: Cell) -> Runner:
    sites: list[Site] = []
    backend = backend_with_observer(lambda _, result: sites.extend(result.sites))
    return Runner(_compiled(as_written(cell), backend=backend), sites=sites)


PEERS = (
    Peer("eager", "PyTorch without compilation", _eager),
    Peer("bare", "the cuBLAS products alone: no bias, no activation", _bare, whole=False),
    Peer("inductor", "torch.compile, default mode", _inductor, compiles=True),
    Peer(
        "max-autotune",
        "torch.compile, max-autotune with persistent TMA templates",
        _max_autotune,
        _no_max_autotune,
        compiles=True,
    ),
    Peer("b2b", "torch.compile with Inductor's b2b_gemm_pass", _b2b, _no_b2b, compiles=True),
    Peer("cublaslt", "torch._addmm_activation: cuBLASLt's epilogue", _cublaslt, _no_cublaslt),
    Peer(
        "liger",
        "LigerSwiGLUMLP, LigerGEGLUMLP",
        _liger,
        _only("silu(g) * u", "gelu_tanh(g) * u"),
        "liger-kernel",
    ),
    Peer("liger-mlp", "LigerMLP", _liger_mlp, _only("silu(g) * u"), "liger-kernel"),
    Peer("quack", "quack.mlp.MLP", _quack, _no_quack, "quack-kernels"),
    Peer("fusedmlp", 'torch.compile(backend="fusedmlp")', _fusedmlp, compiles=True),
)


def plan_peer(plan: str) -> Peer:
    """One plan of fusedmlp, compiled whether or not the planner would take it."""

    def build(cell: Cell) -> Runner:
        activation = cell.activation

        def call(x: Tensor, *weights: Tensor | None) -> Tensor:
            result: Tensor = torch.ops.fusedmlp.mlp(x, *weights, activation, plan)
            return result

        return Runner(_compiled(call))

    return Peer(f"fusedmlp:{plan}", f"fusedmlp's plan {plan}", build, compiles=True)


def chosen(names: list[str] | None) -> tuple[Peer, ...]:
    """The peers of these names, by default all but the single plans.

    Raises:
        CommandError: there is no such peer.
    """
    known = {peer.name: peer for peer in (*PEERS, *map(plan_peer, PLANS))}
    if names is None:
        return PEERS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CommandError(f"a peer must be one of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(known[name] for name in names)
