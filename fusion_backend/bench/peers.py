"""Who is benchmarked: the ways to run an MLP that a person could choose instead of this package.

All are handed the same tensors. Eager and the compilers get the MLP as a person writes it, the
libraries get it in modules or functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.backend import backend_with_observer
from fusion_backend.bench.cells import Cell, as_written
from fusion_backend.bench.cpu_peers import FREEZING, ONNX_RUNTIME, OPENVINO, TEMPLATES
from fusion_backend.bench.library_peers import CUBLASLT, LIGER, LIGER_MLP, QUACK
from fusion_backend.bench.peer import Peer, Runner
from fusion_backend.compat import inductor
from fusion_backend.errors import CommandError
from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.isolation import private_frame
from fusion_backend.kernels import registry
from fusion_backend.options import nearest

#: As in mode ``max-autotune-no-cudagraphs``, and Inductor's best templates for Hopper beside; but
#: without coordinate descent, which tunes pointwise kernels only. In a trial (16 × 768/3072 on an
#: H200) it took 5 s more, and the MLP was no faster for it.
MAX_AUTOTUNE = {
    "max_autotune": True,
    "triton.enable_persistent_tma_matmul": True,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
BACK_TO_BACK = {"b2b_gemm_pass": True}
#: Products by CUTLASS, with the activation in their epilogues (EVT).
CUTLASS = {
    **MAX_AUTOTUNE,
    "max_autotune_gemm_backends": "ATEN,CUTLASS",
    "cuda.cutlass_epilogue_fusion_enabled": True,
}


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
    return (
        None
        if device.type == "cuda"
        else "its CPU templates take constant weights only: see freezing-max"
    )


def _b2b(cell: Cell) -> Runner:
    return Runner(_compiled(as_written(cell), options=BACK_TO_BACK))


def _no_b2b(cell: Cell, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    if cell.gated or cell.has_bias:
        return "it takes plain MLPs without biases only"
    return None


def _cutlass(cell: Cell) -> Runner:
    return Runner(_compiled(as_written(cell), options=CUTLASS))


def _no_cutlass(cell: Cell, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    if not inductor.has_cutlass():
        return "CUTLASS is not here: TORCHINDUCTOR_CUTLASS_DIR names the directory of its sources"
    return None


def _fusedmlp(cell: Cell) -> Runner:
    sites: list[Site] = []
    backend = backend_with_observer(lambda _, result: sites.extend(result.sites))
    return Runner(_compiled(as_written(cell), backend=backend), sites=sites)


PEERS = (
    Peer("eager", "PyTorch without compilation", _eager),
    Peer("bare", "the matrix products alone: no bias, no activation", _bare, whole=False),
    Peer("inductor", "torch.compile, default mode", _inductor, compiles=True),
    Peer(
        "max-autotune",
        "torch.compile, max-autotune with persistent TMA templates",
        _max_autotune,
        _no_max_autotune,
        compiles=True,
    ),
    Peer("b2b", "torch.compile with Inductor's b2b_gemm_pass", _b2b, _no_b2b, compiles=True),
    Peer(
        "cutlass",
        "torch.compile, max-autotune with CUTLASS and its epilogues",
        _cutlass,
        _no_cutlass,
        compiles=True,
    ),
    CUBLASLT,
    LIGER,
    LIGER_MLP,
    QUACK,
    FREEZING,
    TEMPLATES,
    ONNX_RUNTIME,
    OPENVINO,
    Peer("fusedmlp", 'torch.compile(backend="fusedmlp")', _fusedmlp, compiles=True),
)


def plan_peer(plan: str) -> Peer:
    """One plan of fusedmlp, compiled whether or not the planner would take it."""

    def build(cell: Cell) -> Runner:
        activation = cell.activation

        def call(x: Tensor, *weights: Tensor | None) -> Tensor:
            result: Tensor = torch.ops.fusedmlp.mlp(x, *weights, [], activation, plan)
            return result

        return Runner(_compiled(call))

    return Peer(f"fusedmlp:{plan}", f"fusedmlp's plan {plan}", build, compiles=True)


def chosen(names: list[str] | None) -> tuple[Peer, ...]:
    """The peers of these names, by default all but the single plans.

    Raises:
        CommandError: there is no such peer.
    """
    plans = [family.name for family in registry.of_mlps()]
    known = {peer.name: peer for peer in (*PEERS, *map(plan_peer, plans))}
    if names is None:
        return PEERS
    unknown = [name for name in names if name not in known]
    if unknown:
        got = ", ".join(f"{name!r}{nearest(name, known)}" for name in unknown)
        raise CommandError(f"a peer must be one of {', '.join(known)}, got {got}")
    return tuple(known[name] for name in names)
