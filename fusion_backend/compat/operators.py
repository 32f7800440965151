"""Types of operators, and operators that torch has under private names, torch 2.11 to 2.14."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "ASSERTIONS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "addmm_activation",
    "argument_names",
    "is_frame",
    "native_multi_head_attention",
    "runs_eagerly",
]

#: Functions that raise where a size is not what it should be, and return nothing.
ASSERTIONS: tuple[Any, ...] = (
    *(torch._check, torch._check_value, torch._check_index, torch._check_type, torch._assert),
    torch._check_is_size,
)

#: A linear layer and an activation by cuBLASLt: ``bias, x (rows, in), weight (in, out), use_gelu``.
addmm_activation: Any = torch._addmm_activation

#: What the fast path of ``nn.TransformerEncoderLayer`` runs before its MLP.
native_multi_head_attention: Any = torch._native_multi_head_attention


def argument_names(operator: OpOverload) -> list[str]:
    """The names of an operator's arguments, in their order."""
    return [argument.name for argument in operator._schema.arguments]


def is_frame(overload: OpOverload) -> bool:
    """Whether an operator consists of others, by which it is differentiated and runs."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(overload.has_kernel_for_dispatch_key(implicit))


def runs_eagerly(overload: OpOverload) -> bool:
    """Whether the dispatcher knows an operator: some exist in TorchScript only."""
    return bool(torch._C._dispatch_has_kernel(overload.name()))
