"""The family ``rows``: on the CPU, all layers in one C++ kernel."""

from __future__ import annotations

from collections.abc import Sequence

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
from fusion_backend.mlp.weights import Weights


class Rows(Family):
    """Blocks of rows go through all layers; hidden values stay in the cache of a core."""

    name = "rows"
    mlps = "one C++ kernel, the hidden activation stays in the cache of a core"
    chains = "one C++ kernel for all layers, the hidden activations stay in the cache of a core"
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
        """Whole MLPs in inference, as far as is known without compiling."""
        return why_not_on_cpu(mlp) or cannot_run(mlp.dtype, (mlp.activation,))

    def compile_ahead(self, mlp: MLP, activations: Sequence[str]) -> str | None:
        """As :meth:`Family.compile_ahead`: there may be no compiler, or one that refuses."""
        from fusion_backend.kernels.cpu_rows import support

        sizes = (mlp.dtype, tuple(activations), mlp.gated, mlp.operands)
        return cannot_run(mlp.dtype, activations) or support.why_not_compiled(*sizes)

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

        gated = weights.weight_gate is not None
        first, biases = (0, weights[1::2]) if gated else (1, weights[3::2])
        matrices = [matrix for matrix in weights[2 * first :: 2] if matrix is not None]
        f = (str(activation),)
        return launch.rows(x, matrices, biases, operands, f, gated, residual, norm)

    def run_chain(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activations: Sequence[Expression],
    ) -> Tensor:
        """As :meth:`Family.run_chain`."""
        from fusion_backend.kernels.cpu_rows import launch

        return launch.rows(x, weights, biases, [], [*map(str, activations)], gated=False)


def cannot_run(dtype: torch.dtype, activations: Sequence[str]) -> str | None:
    """Why the family is not for layers with these activations, as far as is known uncompiled."""
    if compiles_to_cpp():
        return "code that AOTInductor generates cannot call the CPU's kernels"
    from fusion_backend.kernels.cpu_rows import support

    return support.why_not(dtype, activations)
