"""Which memory is behind the tensors of a value: views share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusion_backend.compat.tracing import is_traceable_wrapper_subclass_type, tree_leaves

ANYWHERE = 0
"""Stands for the storage of a tensor that does not say which it has: it may be any."""


def storages(value: Any) -> frozenset[int]:
    """Identities of the storages behind all tensors in a value; views share them."""
    if isinstance(value, Tensor):
        return frozenset(_storages_of_tensor(value))
    if isinstance(value, (list, tuple, dict)):
        return frozenset[int]().union(*map(storages, tree_leaves(value)))
    return frozenset()


def _storages_of_tensor(tensor: Tensor) -> Iterator[int]:
    kind: type = type(tensor)
    if is_traceable_wrapper_subclass_type(kind):
        wrapper: Any = tensor
        for name in wrapper.__tensor_flatten__()[0]:
            yield from storages(getattr(wrapper, name))
        return
    try:
        yield int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        yield ANYWHERE  # sparse tensors, and those within a transform of torch.func
