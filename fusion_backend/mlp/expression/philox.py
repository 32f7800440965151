"""Random bits of dropout: Philox-4x32 with ten rounds, as Triton's ``tl.philox`` computes it.

    J. K. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011)

The generator is a function of a key and a counter, so a mask is drawn again instead of kept. The
key is the seed. Four neighbouring columns share a counter, (column // 4, row, 0, 0), and take one
of its four words each: a word costs a quarter of what it would cost alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

WORDS = 4  # that one counter gives


def kept(seed: Tensor, p: float, shape: torch.Size) -> Tensor:
    """Which elements a dropout of probability ``p`` keeps, of a tensor of this shape.

    Args:
        seed: one int64 value.
        p: probability to drop an element, in [0, 1].
        shape: ``(..., columns)``; the leading dimensions are counted as rows.

    Returns:
        A bool tensor of that shape on the device of the seed.
    """
    columns = shape[-1]
    groups = (columns + WORDS - 1) // WORDS
    rows = torch.arange(math.prod(shape[:-1]), device=seed.device).unsqueeze(1)
    words = _philox(seed, torch.arange(groups, device=seed.device), rows)
    kept_words = torch.stack([word >= threshold(p) for word in words], -1)
    return kept_words.flatten(-2)[:, :columns].reshape(shape)


def threshold(p: float) -> int:
    """The 32 random bits from which on an element is kept."""
    return min(round(p * 2.0**32), _WORD)


def scale(p: float) -> float:
    """What kept elements are multiplied by; no element is kept where ``p`` is 1."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of the counters (first, second, 0, 0), all as int64.

    A product of two words may wrap to a negative number; its halves are right all the same.
    """
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    # Masked, an index is no longer one to Inductor, whose products of indices are of 32 bits.
    c0, c1 = first & _WORD, second & _WORD
    c2 = c3 = torch.zeros_like(k0)
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((b >> 32) & _WORD) ^ c1 ^ k0, ((a >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = b & _WORD, a & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
