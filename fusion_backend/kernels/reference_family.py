"""The family ``reference``: ATen operators, right on every device and dtype. See ``reference``."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels import reference
from fusion_backend.kernels.family import Family, Operands
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import Kind
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import FirstLayer, Tower, Weights


class Reference(Family):
    """What every MLP runs on that no kernels run; it is never offered as one of them."""

    name = reference.NAME
    mlps = first_layers = chains = towers = "ATen operators, which Inductor compiles"
    is_composed = True

    def is_for(self, device_type: str) -> bool:
        """Any."""
        return True

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """It runs all."""
        return None

    def why_not_together(self, mlps: Sequence[MLP], target: Target | None) -> str | None:
        """It runs all."""
        return None

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
        return reference.forward(x, weights, activation, operands)

    def run_first_layers(
        self, x: Tensor, first: FirstLayer, activation: Expression, operands: Operands, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As :meth:`Family.run_first_layers`; pre-activations are there in any case."""
        gate = None
        if first.weight_gate is not None:
            gate = F.linear(x, first.weight_gate, first.bias_gate)
        up = F.linear(x, first.weight_up, first.bias_up)
        hidden = reference.activate(gate, up, activation, operands).contiguous()
        # An activation may be one of its variables; what is returned must be a tensor of its own.
        return hidden.clone() if hidden is gate or hidden is up else hidden, gate, up

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
        return reference.chain(x, weights, biases, activations, steps, norms)

    def run_towers(self, x: Tensor, towers: Sequence[Tower]) -> list[Tensor]:
        """As :meth:`Family.run_towers`, one after the other."""
        return [reference.chain(x, *tower) for tower in towers]
