# mypy: ignore-errors
"""The norm of the rows that a program holds whole: before an MLP, or between the layers of a chain.

    layer_norm   (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    rms_norm     x / sqrt(mean(x²) + eps) * weight

Statistics are taken in fp32, the variance of centred values.
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
    """A tile of whole rows, padded with zeros, after its norm; padded with zeros still.

    The result is rounded to the dtype of the tile, as it is where a kernel of its own stores it:
    products see the same values.
    """
    values = normed(tile.to(tl.float32), weight, bias, NORM, EPS, WIDTH, WHOLE)
    return values.to(tile.dtype)


@triton.jit
def normed(
    values,
    weight,
    bias,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The norm of an fp32 tile of whole rows, padded with zeros, in fp32."""
    columns = tl.arange(0, values.shape[1])
    if NORM == "layer_norm":
        values -= tl.sum(values, 1)[:, None] / WIDTH
        if not WHOLE:
            values = tl.where(columns[None, :] < WIDTH, values, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPS)[:, None]
    if weight is not None:
        values *= load_bias(weight, columns, WIDTH, WHOLE)
    if bias is not None:
        values += load_bias(bias, columns, WIDTH, WHOLE)
    return values
