"""The family ``library``: the activation in the epilogue of cuBLASLt's own product.

    postact = f(x W_upᵀ + b_up)               torch._addmm_activation: one kernel
    y       = postact W_downᵀ + b_down        addmm

Torch's CUDA implementation (``aten/src/ATen/native/cuda/Blas.cpp``, ``isInputCompliesAddmmCudaLt``)
gives ``_addmm_activation`` to cuBLASLt when ``beta`` is 1, the bias is one-dimensional and
contiguous, the result is contiguous (a fresh one is), the dtype is float64, float32, float16 or
bfloat16, every side of both matrices is longer than 1, and ``DISABLE_ADDMM_CUDA_LT`` is not 1.
Where one of these fails, or cuBLASLt finds no algorithm, it runs a product followed by a separate
activation: still right, but no longer one kernel. cuBLASLt has two activations, ReLU and the *tanh*
form of GELU, and computes both on the float32 accumulator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat.operators import addmm_activation
from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.kernels.epilogue.family import Epilogue
from fusion_backend.kernels.family import Family, Operands
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import FirstLayer, Weights

ACTIVATIONS = ("gelu_tanh(x)", "relu(x)")
# In float32 its GELU was measured to be five times less exact than eager's, and not faster.
DTYPES = (torch.bfloat16, torch.float16)


def library_supports(
    activation: str,
    dtype: torch.dtype,
    *,
    device_type: str,
    has_bias_up: bool,
    rows: int | None,
    in_features: int,
    hidden_features: int,
) -> bool:
    """Whether :func:`forward` runs an MLP as two kernels; for inference only.

    Args:
        activation: the canonical text of the expression.
        dtype: of all tensors of the MLP.
        device_type: such as ``"cuda"``.
        has_bias_up: whether the first layer has a bias, which the epilogue cannot do without.
        rows: number of rows, ``None`` where it is symbolic and known to be more than 1.
        in_features: width of the input.
        hidden_features: width between the layers.
    """
    return (
        device_type == "cuda"
        and torch.version.hip is None
        and activation in ACTIVATIONS
        and dtype in DTYPES
        and has_bias_up
        and (rows is None or rows > 1)
        and in_features > 1
        and hidden_features > 1
    )


class Library(Family):
    """For inference on GPUs of NVIDIA."""

    name = "library"
    mlps = "cuBLASLt applies the activation in its own epilogue, then the second product"
    first_layers = "cuBLASLt applies the activation in its own epilogue"
    mark = r"aten::_addmm_activation"

    def is_for(self, device_type: str) -> bool:
        """GPUs."""
        return device_type != "cpu"

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """What :func:`library_supports`, in inference."""
        if mlp.training:
            return "it runs MLPs in inference"
        supported = (target is None or target.backend == "cuda") and library_supports(
            mlp.activation,
            mlp.dtype,
            device_type=mlp.device.type,
            has_bias_up=mlp.has_bias_up,
            rows=mlp.known_rows,
            in_features=mlp.in_features,
            hidden_features=mlp.hidden_features,
        )
        return None if supported else "cuBLASLt has no such epilogue"

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
        return forward(x, weights, str(activation))

    def run_first_layers(
        self, x: Tensor, first: FirstLayer, activation: Expression, operands: Operands, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As :meth:`Family.run_first_layers`; where pre-activations are kept, by ATen operators."""
        if not save:
            return first_layer(x, first, str(activation)), None, None
        up = F.linear(x, first.weight_up, first.bias_up)
        return reference.activate(None, up, activation), None, up


def forward(x: Tensor, weights: Weights, activation: str) -> Tensor:
    """The MLP of ``x`` ``(rows, in)`` as ``(rows, out)``.

    Raises:
        PlanError: as :func:`first_layer`.
    """
    postact = first_layer(x, FirstLayer(*weights[:4]), activation)
    return F.linear(postact, weights.weight_down, weights.bias_down)


def first_layer(x: Tensor, first: FirstLayer, activation: str) -> Tensor:
    """The activation ``(rows, hidden)`` of the first layer of ``x`` ``(rows, in)``.

    Raises:
        PlanError: the device has no cuBLASLt, there is no bias to add, or the epilogue does not
            know the activation.
    """
    if x.device.type != "cuda":
        # The CPU's _addmm_activation means the erf form of GELU: it must not run in our place.
        raise PlanError(
            f"plan {Library.name!r} needs a CUDA device, got {x.device.type}; "
            f"use plan {reference.NAME!r}"
        )
    if activation not in ACTIVATIONS or first.weight_gate is not None:
        raise PlanError(
            f"plan {Library.name!r} knows the activations {', '.join(ACTIVATIONS)}, "
            f"got {activation!r}; use plan {Epilogue.name!r}"
        )
    if first.bias_up is None:
        raise PlanError(
            f"plan {Library.name!r} needs bias_up, got None; use plan {Epilogue.name!r}"
        )
    use_gelu = activation == "gelu_tanh(x)"
    found: Tensor = addmm_activation(first.bias_up, x, first.weight_up.t(), use_gelu=use_gelu)
    return found
