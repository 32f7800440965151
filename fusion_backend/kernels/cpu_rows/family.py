"""The family ``rows``: on the CPU, all layers in one C++ kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.kernels.family import Family, Operands, why_not_on_cpu
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import Kind
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import Weights


class Rows(Family):
    """Blocks of rows go through all layers; hidden values stay in the cache of a core."""

    name = "rows"
    mlps = "one C++ kernel, the hidden activation stays in the cache of a core"
    trained = "two C++ kernels, forward and backward: hidden values stay in the cache of a core"
    chains = "one C++ kernel for all layers, the hidden activations stay in the cache of a core"
    launches = 1
    mark = r"fusedmlp::rows"
    gradient_mark = r"fusedmlp::rows_gradients"
    computes_norm = True
    adds_residual = True

    def is_for(self, device_type: str) -> bool:
        """CPUs."""
        return device_type == "cpu"

    def check_device(self, device: torch.device) -> None:
        """Refuse what is no CPU."""
        if device.type not in ("cpu", "meta"):
            raise PlanError(
                f"plan {self.name!r} is for CPUs, got {device.type}; use plan {reference.NAME!r}"
            )

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Whole MLPs and chains, as far as is known without compiling."""
        from fusion_backend.kernels.cpu_rows import support

        cannot = why_not_on_cpu(mlp) or cannot_run(mlp.dtype, mlp.texts)
        if cannot is None and mlp.steps:
            return "its kernels compute no norms, sums or concatenations between layers"
        if cannot is None and mlp.is_chain:
            return support.why_not_chained(mlp.layer_widths, mlp.training)
        if cannot is not None or not mlp.training:
            return cannot
        return support.why_no_gradients(mlp.activation, mlp.gated)

    def compile_ahead(self, mlp: MLP) -> str | None:
        """As :meth:`Family.compile_ahead`: there may be no compiler, or one that refuses."""
        from fusion_backend.kernels.cpu_rows import support

        kernels = (mlp.dtype, mlp.texts, mlp.gated, mlp.operands, mlp.training)
        return support.why_not_compiled(*kernels)

    def untaken(self, kinds: Sequence[Kind], training: bool) -> int | None:
        """It reads all."""
        return None

    def run(
        self,
        x: Tensor,
        weights: Weights,
        activation: Expression,
        operands: Operands,
        residual: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """As :meth:`Family.run`."""
        from fusion_backend.kernels.cpu_rows import launch

        gated, f = weights.weight_gate is not None, (str(activation),)
        return launch.rows(x, *weights.by_kind(), operands, f, gated, residual, norm)

    def saves(
        self, widths: Sequence[Any], gated: bool, dtype: torch.dtype, operands: Sequence[Any]
    ) -> Literal["preact", "x"]:
        """As :meth:`Family.saves`."""
        from fusion_backend.kernels.cpu_rows import support

        return "x" if 0 not in widths and support.recomputes_from(widths[0]) else "preact"

    def run_saving(
        self, x: Tensor, weights: Weights, activation: Expression, operands: Operands
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As :meth:`Family.run_saving`; without any features there is nothing to do."""
        if _has_no_features(weights):
            return super().run_saving(x, weights, activation, operands)
        from fusion_backend.kernels.cpu_rows import launch

        gated, f = weights.weight_gate is not None, str(activation)
        y, *preacts = launch.rows_saving(x, *weights.by_kind(), operands, f, gated)
        return y, preacts[0] if gated else None, preacts[-1]

    def gradients(
        self,
        grad_output: Tensor,
        x: Tensor,
        weights: Weights,
        preacts: tuple[Tensor | None, Tensor | None],
        operands: Operands,
        activation: Expression,
        needs: Sequence[bool],
    ) -> list[Tensor] | None:
        """As :meth:`Family.gradients`."""
        if _has_no_features(weights):
            return None
        from fusion_backend.kernels.cpu_rows import gradient_launch

        f = str(activation)
        return gradient_launch.gradients(grad_output, x, weights, preacts, operands, f, needs)

    def run_chain(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activations: Sequence[Expression],
        steps: Steps | None = None,
        norms: Sequence[Norm] = (),
    ) -> Tensor:
        """As :meth:`Family.run_chain`."""
        from fusion_backend.kernels.cpu_rows import launch

        return launch.rows(x, weights, biases, [], [*map(str, activations)], gated=False)


def _has_no_features(weights: Weights) -> bool:
    return 0 in (*weights.weight_up.shape, weights.weight_down.shape[0])


def cannot_run(dtype: torch.dtype, activations: Sequence[str]) -> str | None:
    """Why the family is not for layers with these activations, as far as is known uncompiled."""
    if compiles_to_cpp():
        return "code that AOTInductor generates cannot call the CPU's kernels"
    from fusion_backend.kernels.cpu_rows import support

    return support.why_not(dtype, activations)
