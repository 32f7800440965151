"""The family ``back_to_back``: a narrow MLP in one kernel, its hidden values on the chip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.epilogue.training import TrainedByEpilogue
from fusion_backend.kernels.family import Call, Operands
from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import Weights


class BackToBack(TrainedByEpilogue):
    """In training of plain MLPs it keeps x alone."""

    name = "back_to_back"
    mlps = "one Triton kernel, the hidden activation stays on the chip"
    launches = 1
    computes_norm = True
    adds_residual = True
    calls = (
        Call(
            "back_to_back",
            "Tensor x, Tensor weight_up, Tensor weight_down, Tensor? bias_up, Tensor? bias_down, "
            "Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, str activation, str norm",
            f"{__package__}.launch_sm90",
        ),
    )

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Whole narrow MLPs; in training those whose pre-activations are computed again."""
        if mlp.activated:
            return "it runs whole MLPs"
        if mlp.widths is None:
            return "its widths must be known"
        if not can_back_to_back(*mlp.widths, mlp.gated, mlp.dtype, target):
            return "its layers are too wide"
        if mlp.training and self.saves(mlp.widths, mlp.gated, mlp.dtype, mlp.operands) != "x":
            return "it trains plain MLPs in 16 bits whose activation has no operands"
        if mlp.training and mlp.first_frozen:
            return "it keeps the input for training, which frozen first layers do not"
        return None

    def saves(
        self, widths: Sequence[Any], gated: bool, dtype: torch.dtype, operands: Sequence[Any]
    ) -> Literal["preact", "x"]:
        """As :meth:`Family.saves`."""
        in_features, hidden_features, out_features = widths
        sizes = (in_features, hidden_features, out_features)
        return "x" if can_recompute(*sizes, gated, dtype, operands) else "preact"

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
        from fusion_backend.kernels.back_to_back import launch_sm90
        from fusion_backend.kernels.host.problems import inference_problem

        target = target or here()
        problem = None if transposed else inference_problem(rows, widths, gated, dtype, target)
        return problem is not None and launch_sm90.runs(problem, rows, target)

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
        from fusion_backend.kernels.back_to_back import launch

        return launch.back_to_back(x, weights, activation, operands, residual=residual, norm=norm)

    def gradient_of_x(
        self,
        x: Tensor,
        grad_output: Tensor,
        weights: Weights,
        activation: Expression,
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """As :meth:`Family.gradient_of_x`."""
        from fusion_backend.kernels.back_to_back import launch

        layers = (weights.weight_up, weights.bias_up, weights.weight_down)
        return launch.narrow_gradient(x, grad_output, *layers, activation, needs_x)

    def hidden_gradient_of_x(
        self,
        x: Tensor,
        grad_output: Tensor,
        weights: Weights,
        activation: Expression,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None:
        """As :meth:`Family.hidden_gradient_of_x`, where not all gradients fit in registers."""
        (hidden, inner), out = weights.weight_up.shape, weights.weight_down.shape[0]
        if gradients_fit(inner, hidden, out):
            return None
        from fusion_backend.kernels.back_to_back import hidden_gradient_launch as launch

        of_x, _, _, of_up, of_bias_up, of_down, of_bias_down = needs
        wanted = launch.Wanted(of_x, of_up, of_down, of_bias_up or of_bias_down)
        return launch.narrow_hidden_gradient(x, grad_output, weights, activation, wanted)


def can_back_to_back(
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    target: Target | None = None,
) -> bool:
    """Whether ``launch.back_to_back`` can run an MLP.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, precision
    from fusion_backend.kernels.preferences import has_any

    target = target or here()
    widths = (in_features, hidden_features, out_features)
    problem = Problem(MANY_ROWS, *widths, gated, dtype, precision(dtype, target))
    return has_any("back_to_back", problem, target)


def can_recompute(
    in_features: Any,
    hidden_features: Any,
    out_features: Any,
    gated: bool,
    dtype: torch.dtype,
    operands: Sequence[Any] = (),
) -> bool:
    """Whether an MLP is differentiated from x alone.

    Of wider layers, whose tiles leave no room for a second program on a multiprocessor, a step took
    up to 1.5 times as long as with pre-activations that are kept.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        operands: of the activation.
    """
    from fusion_backend.kernels.host.configs import WIDEST_HIDDEN_GRADIENT

    widths = (in_features, hidden_features, out_features)
    if gated or operands or not all(isinstance(width, int) for width in widths):
        return False
    if dtype.itemsize != 2 and not triton_is_interpreted():
        return False
    return gradients_fit(*widths) or max(in_features, out_features) <= WIDEST_HIDDEN_GRADIENT


def gradients_fit(in_features: int, hidden_features: int, out_features: int) -> bool:
    """Whether one program sums the gradients of both weights in its registers.

    ``launch.narrow_gradient`` does so. Wider layers take ``narrow_hidden_gradient``, and products.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
    """
    from fusion_backend.kernels.host.configs import MOST_SUMS, padded

    return padded(hidden_features) * (padded(in_features) + padded(out_features)) <= MOST_SUMS
