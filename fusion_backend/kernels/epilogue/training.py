"""Families that train on the kernels of ``epilogue``, whatever they infer on."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels.family import Operands, TritonFamily
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.weights import FirstLayer, Weights


class TrainedByEpilogue(TritonFamily):
    """First layers keep their pre-activations, and a kernel computes the gradients of these."""

    mark = r"fusedmlp_(epilogue|back_to_back|stream)\w*"
    gradient_mark = r"fusedmlp_(hidden|narrow|narrow_hidden)_gradient\w*"

    def run_saving(
        self, x: Tensor, weights: Weights, activation: Expression, operands: Operands
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As :meth:`Family.run_saving`."""
        from fusion_backend.kernels.epilogue import gradient_launch, launch

        first = FirstLayer(*weights[:4])
        joined = not operands and gradient_launch.joins(x, weights, activation)
        postact, gate, up = launch.epilogue(x, first, activation, True, operands, joined=joined)
        assert up is not None
        return F.linear(postact, weights.weight_down, weights.bias_down), gate, up

    def hidden_gradient(
        self,
        grad_output: Tensor,
        weight_down: Tensor,
        preacts: tuple[Tensor | None, Tensor],
        activation: Expression,
        operands: Operands,
        wanted: Sequence[int],
    ) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
        """As :meth:`Family.hidden_gradient`."""
        from fusion_backend.kernels.epilogue import gradient_launch as launch

        saved = (*preacts, activation, operands)
        return launch.hidden_and_operand_gradients(grad_output, weight_down, *saved, wanted)

    def summed_hidden_gradient(
        self,
        grad_output: Tensor,
        weight_down: Tensor,
        preacts: tuple[Tensor | None, Tensor],
        activation: Expression,
        has_sums: bool,
        has_output_sums: bool,
    ) -> tuple[Sequence[Tensor], Tensor, Tensor, bool] | None:
        """As :meth:`Family.summed_hidden_gradient`, on Hopper."""
        from fusion_backend.kernels.epilogue import gradient_launch as launch

        return launch.summed_hidden_gradient(
            grad_output, weight_down, *preacts, activation, has_sums, has_output_sums
        )

    def joined_input_gradient(
        self, grad_preacts: Sequence[Tensor], weight_gate: Tensor, weight_up: Tensor
    ) -> Tensor | None:
        """As :meth:`Family.joined_input_gradient`, on Hopper."""
        from fusion_backend.kernels.epilogue import gradient_launch as launch

        return launch.input_gradient(grad_preacts, weight_gate, weight_up)
