"""Libraries that run MLPs in functions or modules of their own: cuBLASLt, Liger, QuACK.

Their modules are given the benchmark's weights, and are made anew for each set of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend.bench.cells import Cell
from fusion_backend.bench.peer import Peer, Refusal, Runner
from fusion_backend.compat.operators import addmm_activation
from fusion_backend.instruments.timing import Operands
from fusion_backend.kernels.library import library_supports
from fusion_backend.mlp.weights import Weights


def _cublaslt(cell: Cell) -> Runner:
    use_gelu = cell.activation == "gelu_tanh(x)"

    def run(x: Tensor, *w: Tensor) -> Tensor:
        postact = addmm_activation(w[3], x, w[2].t(), use_gelu=use_gelu)
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

    modules = _liger_modules(LigerMLP, cell)

    def operands(x: Tensor, weights: Weights) -> Operands:
        return x.unsqueeze(0), modules(weights)  # it takes three dimensions only

    return Runner(lambda x, module: module(x).squeeze(0), operands)


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


def _only(*activations: str) -> Refusal:
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


CUBLASLT = Peer("cublaslt", "torch._addmm_activation: cuBLASLt's epilogue", _cublaslt, _no_cublaslt)
LIGER = Peer(
    "liger",
    "LigerSwiGLUMLP, LigerGEGLUMLP",
    _liger,
    _only("silu(g) * u", "gelu_tanh(g) * u"),
    "liger-kernel",
)
LIGER_MLP = Peer("liger-mlp", "LigerMLP", _liger_mlp, _only("silu(g) * u"), "liger-kernel")
QUACK = Peer("quack", "quack.mlp.MLP", _quack, _no_quack, "quack-kernels")
