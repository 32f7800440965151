"""Linear layers as Inductor's code calls them where weights are constants: packed beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_linear(weight: Tensor, bias: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """A layer with a weight that is packed now, as Inductor packs it with ``freezing``.

    MKL packs float32 for a number of rows. oneDNN packs 16 bits, where this CPU has instructions
    for them. Nothing else is packed.

    Args:
        weight: ``(out_features, in_features)``, contiguous.
        bias: ``(out_features,)``.
        rows: of the input ``(rows, in_features)``.
    """
    operators, mkldnn = torch.ops.mkldnn, torch.backends.mkldnn
    if not (mkldnn.enabled and mkldnn.is_available()):
        return lambda x: F.linear(x, weight, bias)
    by_onednn = multiplies_natively(weight.dtype) or (
        weight.dtype == torch.float32 and operators._is_mkldnn_acl_supported()
    )
    if by_onednn:
        packed = operators._reorder_linear_weight(weight, rows)
        return lambda x: operators._linear_pointwise(x, packed, bias, "none", [], "")
    if weight.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return lambda x: F.linear(x, weight, bias)
    by_mkl = torch.ops.mkl._mkl_linear
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: by_mkl(x, packed, weight, bias, rows)


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies 16 bits on this CPU, rather than float32 made of them."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(operators._is_mkldnn_fp16_supported())
