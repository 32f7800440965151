"""Whether a new call returns what its site returned, as far as shapes and dtypes go.

The call is run once on the example values, as a compiler will run it later: what its operator
refuses is found out while the graph can still be left as it was.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.compat.dispatcher import below_autocast
from fusion_backend.compat.tracing import FakeTensor, FakeTensorMode, tree_leaves, tree_map
from fusion_backend.errors import RewriteError
from fusion_backend.fusion.views.node import value_of


def returned(call: Node, old: Tensor) -> Any:
    """The example value of a call of a fused operator, made of those of its arguments: a tensor.

    Of a call of several results it is a list of tensors.

    Args:
        call: of which all arguments have example values.
        old: what the call takes the place of, which tells the dtype: under autocast the operator
            casts what it is given.
    """
    leaves = tree_leaves((call.args, call.kwargs))
    values = [value for leaf in leaves if isinstance(value := value_of(leaf), Tensor)]
    mode = next((v.fake_mode for v in (old, *values) if isinstance(v, FakeTensor)), None)
    mode = FakeTensorMode() if mode is None else mode

    def example(leaf: Any) -> Any:
        value = value_of(leaf)
        if not isinstance(value, Tensor):
            return value
        fake = (
            value if isinstance(value, FakeTensor) else mode.from_tensor(value, static_shapes=True)
        )
        return fake.to(old.dtype) if fake.is_floating_point() else fake

    kind = old.device.type
    outside = below_autocast(kind) if kind in ("cpu", "cuda") else nullcontext()
    with mode, torch.no_grad(), outside:
        args, kwargs = tree_map(example, (call.args, call.kwargs))
        return call.target(*args, **kwargs)  # type: ignore[operator]


def check_same(new: Tensor, old: Tensor) -> None:
    """Refuse a value of another shape, dtype or device; sizes are compared without a guard.

    Raises:
        RewriteError: they differ.
    """
    differ = new.dim() != old.dim() or any(
        statically_known_true(a != b) for a, b in zip(new.shape, old.shape, strict=False)
    )
    if differ or new.dtype != old.dtype or new.device != old.device:
        raise RewriteError(
            f"the fused operator must return {old.dtype} {tuple(old.shape)} on {old.device}, "
            f"got {new.dtype} {tuple(new.shape)} on {new.device}"
        )
