"""The family ``chain``: three and more narrow layers in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.kernels.chain.config import MOST_LAYERS
from fusion_backend.kernels.family import TritonFamily
from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import Tower


class Chain(TritonFamily):
    """It runs no MLP of two layers: ``back_to_back`` does."""

    name = "chain"
    chains = "one Triton kernel for all layers, the hidden activations stay on the chip"
    most_layers = MOST_LAYERS
    towers = "one Triton kernel for all layers of MLPs of the same input"
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
            return "norms, sums and concatenations between layers are computed in inference"
        steps = Steps.of(mlp.steps, len(mlp.further_features) + 1)
        if not can_chain(mlp.layer_widths, mlp.dtype, target, steps):
            return "its layers are too many or too wide"
        if mlp.known_rows == 1 and rounds(mlp.dtype, target):
            return "a single row is multiplied without TF32 by cuBLAS, and would not be here"
        return None

    def why_not_together(self, mlps: Sequence[MLP], target: Target | None) -> str | None:
        """Narrow layers: those that :func:`can_tower` says."""
        widths = [mlp.layer_widths for mlp in mlps]
        known = [each for each in widths if each is not None]
        rows, dtype = mlps[0].rows, mlps[0].dtype
        if len(known) < len(widths):
            return "their widths must be known"
        if not can_tower(known, rows, dtype, target):
            return "they are too many, or their layers too wide"
        if mlps[0].known_rows == 1 and rounds(dtype, target):
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

    def run_towers(self, x: Tensor, towers: Sequence[Tower]) -> list[Tensor]:
        """As :meth:`Family.run_towers`."""
        from fusion_backend.kernels.chain import towers_launch

        return towers_launch.towers(x, towers)


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


def can_tower(
    all_widths: Sequence[Sequence[int]],
    rows: Any,
    dtype: torch.dtype,
    target: Target | None = None,
) -> bool:
    """Whether ``towers_launch.towers`` can run chains of one input in one launch.

    Args:
        all_widths: of each chain of two and more layers, as for :func:`can_chain`.
        rows: how many, perhaps a symbolic number.
        dtype: of all tensors.
        target: as for :func:`can_chain`.
    """
    from fusion_backend.kernels.chain import config, towers_config

    target = target or here()
    if not target.runs_triton:
        return False
    how = (dtype, config.product_precision(dtype, target))
    of_rows = config.chain_rows(rows)
    problems = [config.ChainProblem(of_rows, tuple(widths), *how) for widths in all_widths]
    return towers_config.chosen(problems, target) is not None


def rounds(dtype: torch.dtype, target: Target | None = None) -> bool:
    """Whether ``launch.chain`` rounds operands to TF32; see :func:`can_chain`."""
    from fusion_backend.kernels.chain import config

    return config.product_precision(dtype, target or here()) == "tf32"
