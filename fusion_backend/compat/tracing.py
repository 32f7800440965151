"""What traces tensors, and takes results apart: torch 2.11 to 2.14 keep it in private modules."""

from __future__ import annotations

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "TorchDispatchMode",
    "detect_fake_mode",
    "is_traceable_wrapper_subclass_type",
    "tree_leaves",
    "tree_map",
]
