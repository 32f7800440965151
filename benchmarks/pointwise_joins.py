"""Which linear layers read pointwise work on other linear layers: counted while a model runs.

This looks at the ATen calls of an eager run and shares no code with the matcher, so that it can say
what the matcher missed. It knows products with a parameter as it is stored or a view of it; layers
whose weight is computed, convolutions and experts are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_PRODUCTS = ("addmm", "mm", "linear")
_REARRANGING = (
    *("view", "_unsafe_view", "reshape", "alias", "detach", "clone", "contiguous", "_to_copy"),
    *("t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "as_strided"),
    *("slice", "select", "split", "split_with_sizes", "unbind"),
)
_LINEAR = (
    *("add", "add_", "sub", "sub_", "rsub", "neg", "mul", "mul_", "div", "div_", "copy_"),
    *("addcmul", "lerp"),
)


class PointwiseJoins(TorchDispatchMode):
    """While it is active, notes the linear layers of a model that end an MLP.

    Attributes:
        joined: names of the weights of linear layers whose input is made of other linear layers'
            results by pointwise functions, one of them nonlinear, and by views.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.joined: set[str] = set()
        self._names = storages(model)
        # Tensors that are made of linear layers' results: whether a nonlinear function took part.
        self._bends: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        bends = self._judge(func, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._bends.pop(result, None)
                if bends is not None:
                    self._bends[result] = bends
        return results

    def _judge(self, func: Any, operands: list[Tensor]) -> bool | None:
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS:
            source, weight = operands[:2] if name == "linear" else operands[-2:]
            layer = self._names.get(weight.untyped_storage().data_ptr())
            if layer is None:
                return None  # a product of two activations
            if self._bends.get(source):
                self.joined.add(layer)
            return False
        reached = [self._bends[tensor] for tensor in operands if tensor in self._bends]
        if not reached:
            return None
        if name in _REARRANGING:
            return reached[0]
        if name == "glu":
            return True
        if torch.Tag.pointwise not in func.tags:
            return None
        linear = name in _LINEAR and not (name.startswith(("mul", "div")) and len(reached) > 1)
        return any(reached) or not linear


def storages(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters by the addresses of their memory."""
    return {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}


def joined_layers(model: nn.Module, call: Callable[[], Any]) -> set[str]:
    """The weights of the last layers of all MLPs that ``call`` runs through."""
    with PointwiseJoins(model) as joins:
        call()
    return joins.joined
