"""Whether oneDNN's products with an activation beat Inductor's code on a CPU, as measured."""

from __future__ import annotations

import functools

import torch


def onednn_is_faster(
    rows: int,
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    activation: str = "",
) -> bool:
    """Whether the family ``onednn`` was measured to beat what Inductor makes in its default mode.

    Measured on a Xeon with AVX-512 and AMX, 2 threads, torch 2.14.1, weights not frozen: Inductor's
    time over ours, as ratios of minima, interleaved; tanh, erf and leaky are the activations
    ``gelu_tanh(x)``, ``gelu(x)`` and ``leaky_relu(x, 0.01)``, the last as cheap as one can be:

        rows × in → hidden → out     float32             bfloat16            float16
                                     tanh  erf  leaky    tanh  erf  leaky    tanh  erf  leaky
            1 × 768 → 3072 → 768     0.71  0.71  0.70    0.99  0.90  0.91    0.55  0.57  0.53
           64 × 768 → 3072 → 768     1.06  1.03  1.02    1.26  0.97  0.88     -     -     -
          128 × 768 → 3072 → 768     1.08  0.98  0.96    1.18  1.01  1.09     -     -     -
          512 × 768 → 3072 → 768     1.04  1.01  0.99    1.38  1.01  1.02     -     -    1.00
         1576 × 768 → 3072 → 768     1.01  0.96  0.95    1.55   -     -       -     -     -
          512 × 2048 → 8192 → 2048   1.04  1.01  1.00     -     -     -      1.14  1.06  1.14
          256 × 64 → 256 → 64        0.89  0.64  0.68    1.08  0.97  0.92    0.97   -    0.89
         1024 × 64 → 256 → 64        1.24  0.89  0.85    1.36   -    1.02     -     -     -
         4096 × 64 → 256 → 64        1.58  1.17  1.07    1.45  1.28  1.15    1.56  1.16  1.07
        65536 × 64 → 256 → 64        1.65  1.49  1.21    1.91   -    1.40    1.44  1.76  1.44
         4096 × 128 → 512 → 128      1.37  1.15  1.46     -    1.22  1.11    1.85  1.23  1.09

    With a hidden layer beyond 16 MiB, since it is computed in blocks (float32, the same CPU):

                                     tanh  erf  gated
         4096 × 64 → 256 → 64        1.62  1.22  0.89    not in blocks
         8192 × 64 → 256 → 64                    1.37
        16384 × 64 → 256 → 64                    0.95    Inductor takes 6 or 15 ms, ours 6.4
        32768 × 64 → 256 → 64              2.24
        65536 × 64 → 256 → 64        3.15  2.26  2.15
        16384 × 128 → 512 → 128                  1.75
        65536 × 128 → 512 → 128            1.91  1.59
        65536 × 64 → 256 → 64              2.63  3.24    bfloat16
        16384 × 64 → 256 → 64                    1.03    bfloat16

    Other gated MLPs came out between 0.76 and 1.05 in float32 (128 × 768: 0.97) and at 0.95 to 1.04
    in bfloat16. Inductor spends its time on the tanh form of GELU; elsewhere only narrow layers,
    whose products are cheap beside the passes over the activation that we save, gain beyond doubt:
    at 512 × 768 → 3072 the two products alone are nine tenths of Inductor's time.

    On an EPYC with AVX2 only, in float32, just what is computed in blocks gains (512 × 768: 0.8):

                                     tanh  erf  leaky  SiLU  SwiGLU
        16384 × 64 → 256 → 64        1.00  1.16                0.93    not in blocks
        32768 × 64 → 256 → 64        1.06  1.48  1.25  1.16    1.39
        65536 × 64 → 256 → 64        1.15  1.62  1.54  1.43    1.69
       131072 × 64 → 256 → 64        1.05  1.53                1.56
        16384 × 128 → 512 → 128      0.89  1.09                1.20
        32768 × 128 → 512 → 128                  1.39  1.29
        65536 × 128 → 512 → 128      0.99  1.27  1.34  1.27    1.22

    Args:
        rows: number of rows.
        in_features: width of the input.
        hidden_features: width between the layers.
        out_features: width of the output.
        gated: whether there are two first layers.
        dtype: of all tensors.
        activation: the canonical text of the expression, if it is known.
    """
    hidden_elements = rows * hidden_features
    beyond_cache = hidden_elements * dtype.itemsize >= 2**25
    narrow = max(in_features, out_features) <= 128
    is_tanh = activation == "gelu_tanh(x)"
    if not was_measured(dtype):
        return _was_measured_in_blocks(dtype) and narrow and beyond_cache and not is_tanh
    if gated:
        return beyond_cache and narrow and dtype != torch.float16
    if is_tanh:
        return hidden_elements >= 2**18
    return hidden_elements >= 2**20 and narrow


def was_measured(dtype: torch.dtype) -> bool:
    """Whether this CPU is like the Xeon that was measured, as far as ``dtype`` is concerned."""
    needed = {torch.float32: "avx512_f", torch.float16: "avx512_fp16", torch.bfloat16: "amx_bf16"}
    return dtype in needed and has_instructions(needed[dtype])


def _was_measured_in_blocks(dtype: torch.dtype) -> bool:
    """Whether it is like the EPYC, of which only what is computed in blocks is known to gain."""
    return dtype == torch.float32 and has_instructions("avx2")


@functools.cache
def has_instructions(instructions: str) -> bool:
    """Whether this CPU has instructions of a name such as ``amx_bf16``."""
    return bool(torch.cpu.get_capabilities().get(instructions, False))
