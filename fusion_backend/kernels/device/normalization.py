# mypy: ignore-errors
"""The norm before an MLP, of the rows that a program holds whole.

    layer_norm   (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    rms_norm     x / sqrt(mean(x²) + eps) * weight

Statistics are taken in fp32, the variance of centred values. The result is rounded to the dtype of
x, as it is where a kernel of its own stores it: products see the same values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import load_bias


@triton.jit
def normalized(
    tile,
    weight,
    bias,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of whole rows, padded with zeros, after its norm; padded with zeros still."""
    columns = tl.arange(0, tile.shape[1])
    values = tile.to(tl.float32)
    if NORM == "layer_norm":
        values -= tl.sum(values, 1)[:, None] / WIDTH
        if not WHOLE:
            values = tl.where(columns[None, :] < WIDTH, values, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPS)[:, None]
    if weight is not None:
        values *= load_bias(weight, columns, WIDTH, WHOLE)
    if bias is not None:
        values += load_bias(bias, columns, WIDTH, WHOLE)
    return values.to(tile.dtype)
