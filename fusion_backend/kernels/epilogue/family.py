"""The family ``epilogue``: first layers and activation in one kernel, then the second product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels.epilogue.calls import CALLS
from fusion_backend.kernels.epilogue.training import TrainedByEpilogue
from fusion_backend.kernels.family import Operands
from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import FirstLayer, Weights


class Epilogue(TrainedByEpilogue):
    """Many rows: two launches."""

    name = "epilogue"
    mlps = "first product and activation in one Triton kernel, then the second product"
    first_layers = "first product and activation in one Triton kernel"
    adds_residual = True
    marked_launches = (1, 2)  # on Hopper the second product, too, where it adds a residual
    calls = CALLS

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """It runs all widths and dtypes."""
        return None

    def takes_residual(self, mlp: MLP, target: Target | None) -> bool:
        """On Hopper, in inference: elsewhere a sum of its own is all there is."""
        if mlp.training or mlp.widths is None:
            return False
        _, hidden_features, out_features = mlp.widths
        return can_add_residual(hidden_features, out_features, mlp.dtype, target)

    def runs_made_for_hopper(
        self,
        rows: Any,
        widths: Sequence[int],
        gated: bool,
        dtype: torch.dtype,
        transposed: bool,
        target: Target | None,
    ) -> bool:
        """As :meth:`Family.runs_made_for_hopper`; a plain weight may be transposed."""
        from fusion_backend.kernels.epilogue import config_sm90
        from fusion_backend.kernels.host.problems import inference_problem

        target = target or here()
        if transposed and gated:
            return False
        in_features, hidden_features, _ = widths  # the width of y is the second product's
        problem = inference_problem(rows, (in_features, hidden_features, 0), gated, dtype, target)
        return problem is not None and config_sm90.runs(problem._replace(tma=True), rows, target)

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
        from fusion_backend.kernels.epilogue import launch

        first = FirstLayer(*weights[:4])
        postact, _, _ = launch.epilogue(x, first, activation, False, operands)
        layer = weights.weight_down, weights.bias_down
        if residual is None:
            return F.linear(postact, *layer)
        return launch.linear(postact, *layer, residual)

    def run_first_layers(
        self, x: Tensor, first: FirstLayer, activation: Expression, operands: Operands, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As :meth:`Family.run_first_layers`."""
        from fusion_backend.kernels.epilogue import launch

        return launch.epilogue(x, first, activation, save, operands)


def can_add_residual(
    hidden_features: int, out_features: int, dtype: torch.dtype, target: Target | None = None
) -> bool:
    """Whether ``launch.linear`` adds a residual in the kernel of an MLP's last layer.

    Args:
        hidden_features: width between the layers.
        out_features: width of y.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    from fusion_backend.kernels.epilogue import config_sm90

    wide_enough = config_sm90.can(hidden_features, out_features, target or here())
    return dtype.itemsize == 2 and wide_enough
