"""The family ``stream``: few rows, in two kernels that read each weight once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.epilogue.training import TrainedByEpilogue
from fusion_backend.kernels.family import Call, Operands
from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import Kind
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import Weights


class Stream(TrainedByEpilogue):
    """For inference; it can be trained, as ``epilogue`` is."""

    name = "stream"
    mlps = "two Triton kernels that read each weight once, at the speed of memory"
    few_rows = True
    marked_launches = (2, 2)
    calls = (
        Call(
            "stream",
            "Tensor x, Tensor weight_up, Tensor weight_down, Tensor? bias_up, Tensor? bias_down, "
            "Tensor? weight_gate, Tensor? bias_gate, str activation",
            f"{__package__}.launch_sm90",
            transposed="always",
        ),
    )

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Whole MLPs in 16 bits, in inference."""
        if mlp.activated:
            return "it runs whole MLPs"
        if mlp.training:
            return "it has no kernels for training"
        if mlp.dtype.itemsize != 2 and not triton_is_interpreted():
            return "it is for 16 bits"
        return None

    def untaken(self, kinds: Sequence[Kind], training: bool) -> int | None:
        """No seeds: its shares of columns cut through what one draw serves."""
        if not training and "seed" in kinds:
            return kinds.index("seed")
        return super().untaken(kinds, training)

    def runs_made_for_hopper(
        self,
        rows: Any,
        widths: Sequence[int],
        gated: bool,
        dtype: torch.dtype,
        transposed: bool,
        target: Target | None,
    ) -> bool:
        """As :meth:`Family.runs_made_for_hopper`."""
        from fusion_backend.kernels.stream import launch_sm90

        return launch_sm90.runs(rows, widths, gated, dtype, transposed, target or here())

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
        from fusion_backend.kernels.stream import launch

        return launch.stream(x, weights, activation, operands)
