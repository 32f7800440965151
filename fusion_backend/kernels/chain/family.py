"""The family ``chain``: three and more narrow layers in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_backend.kernels.family import TritonFamily
from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.steps import Steps


class Chain(TritonFamily):
    """It runs no MLP of two layers: ``back_to_back`` does."""

    name = "chain"
    chains = "one Triton kernel for all layers, the hidden activations stay on the chip"
    launches = 1
    computes_steps = True
    mark = r"fusedmlp_chain\w*"

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Narrow chains: those that :func:`can_chain` says."""
        if not mlp.is_chain:
            return "it runs three and more layers"
        if mlp.layer_widths is None:
            return "its widths must be known"
        if mlp.steps and mlp.training:
            return "norms and sums between layers are computed in inference"
        steps = Steps.of(mlp.steps, len(mlp.further_features) + 1)
        if not can_chain(mlp.layer_widths, mlp.dtype, target, steps):
            return "its layers are too many or too wide"
        if mlp.known_rows == 1 and rounds(mlp.dtype, target):
            return "a single row is multiplied without TF32 by cuBLAS, and would not be here"
        return None

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
        from fusion_backend.kernels.chain import launch

        return launch.chain(x, weights, biases, activations, steps=steps, norms=norms)


def can_chain(
    widths: Sequence[int],
    dtype: torch.dtype,
    target: Target | None = None,
    steps: Steps | None = None,
) -> bool:
    """Whether ``launch.chain`` can run a chain of linear layers.

    Args:
        widths: of the input, of each hidden value and of the output.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
        steps: what it computes; by default its layers, and an activation between each two.
    """
    from fusion_backend.kernels.chain import config

    target = target or here()
    inner = None if steps is None or steps.is_plain else steps
    return target.runs_triton and config.can_chain(widths, dtype, target, inner)


def rounds(dtype: torch.dtype, target: Target | None = None) -> bool:
    """Whether ``launch.chain`` rounds operands to TF32; see :func:`can_chain`."""
    from fusion_backend.kernels.chain import config

    return config.product_precision(dtype, target or here()) == "tf32"
