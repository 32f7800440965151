"""Kernels that Inductor calls, because it cannot inline them: Gluon's.

In a graph ``torch.ops.fusedmlp.back_to_back`` stands for the launch of such a kernel. By itself
Inductor calls an operator through PyTorch's dispatcher and back into Python, which takes the host
longer than the GPU computes; with the lowering here it calls the function that launches the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCHEMA = (
    "back_to_back(Tensor x, Tensor weight_up, Tensor weight_down, Tensor? bias_up, "
    "Tensor? bias_down, Tensor? residual, str activation, Tensor? norm_weight=None, "
    "Tensor? norm_bias=None, str norm='') -> Tensor"
)
_IMPORT = "from fusion_backend.kernels.hopper import call_back_to_back as fusedmlp_back_to_back"


def register(library: torch.library.Library) -> None:
    """Define ``back_to_back``: an MLP of ``(rows, in)``, as ``hopper.back_to_back``."""
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("back_to_back", _launch, "CUDA")
    torch.library.register_fake(f"{library.ns}::back_to_back", _fake, lib=library)


def _launch(*arguments: Any) -> Tensor:
    from fusion_backend.kernels import hopper

    return hopper.back_to_back(*arguments)


def _fake(x: Tensor, weight_up: Tensor, weight_down: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight_down.shape[0]))


def install_lowering() -> None:
    """Teach Inductor to call the function; once a process, and only where Inductor is used."""
    from torch._inductor import ir, lowering

    operator = torch.ops.fusedmlp.back_to_back.default
    if operator in lowering.lowerings:
        return

    class Call(ir.ExternKernelAlloc):
        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(_IMPORT)
            super().codegen(wrapper)

    def lower(
        x: Any,
        weight_up: Any,
        weight_down: Any,
        bias_up: Any,
        bias_down: Any,
        residual: Any,
        activation: str,
        norm_weight: Any = None,
        norm_bias: Any = None,
        norm: str = "",
    ) -> Any:
        others = [bias_up, bias_down, residual, norm_weight, norm_bias]
        inputs = [
            ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(operand))
            for operand in (x, weight_up, weight_down, *others)
            if operand is not None
        ]
        shape = [x.get_size()[0], weight_down.get_size()[0]]
        call = Call(
            ir.FixedLayout(x.get_device(), x.get_dtype(), shape, [shape[1], 1]),
            inputs,
            kwargs={
                "activation": activation,
                "norm": norm,
                "present": tuple(other is not None for other in others),
            },
            python_kernel_name="fusedmlp_back_to_back",
        )
        return ir.TensorBox.create(call)

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
