"""Whether a call is linear in the tensor that it reads, told by what autograd keeps of it.

The derivative of a linear function is the same everywhere, so autograd keeps sizes at most. Of a
nonlinear one it keeps something that was computed from the operand: of a softmax the result, of a
maximum the places of the elements that it took. The call runs on stand-ins, without any data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from fusion_backend.compat import tensors
from fusion_backend.compat.tracing import TorchDispatchMode, tree_map
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.fusion.views.observation import StandIns, function_of
from fusion_backend.fusion.views.storages import storages


def is_nonlinear(node: Node) -> bool:
    """Whether a call reads one tensor, of floats, and its derivative depends on their values.

    ``False`` where the call reads more tensors, or could not be run.
    """
    read = [each for each in node.all_input_nodes if tensor_of(each) is not None]
    value = tensor_of(read[0]) if len(read) == 1 else None
    if value is None or not value.is_floating_point():
        return False
    flow, kept = _Flow(), list[frozenset[int]]()
    stand_ins = StandIns(tensors.fake_mode_of_its_own())
    try:
        with tensors.nothing_else_traced(), torch.enable_grad():
            given = tree_map(flow.enter, stand_ins.of((node.args, node.kwargs)))
            hooks = saved_tensors_hooks(_noting(kept), lambda packed: packed)
            with stand_ins.mode, flow, hooks:
                function_of(node)(*given[0], **given[1])
    except Exception:  # whatever it is, nothing is known of the call
        return False
    return any(each & flow.computed for each in kept)


def _noting(kept: list[frozenset[int]]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        kept.append(storages(tensor))
        return tensor

    return pack


class _Flow(TorchDispatchMode):
    """Notes the storages of an operand and of all that is computed from it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: frozenset[int] = frozenset()

    def enter(self, argument: Any) -> Any:
        """An argument; the operand as a tensor that has a gradient and may be written to."""
        if not isinstance(argument, Tensor):
            return argument
        self.computed |= storages(argument)
        return argument.requires_grad_().view_as(argument)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if storages((args, kwargs)) & self.computed:
            self.computed |= storages(result)
        return result
