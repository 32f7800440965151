"""The numbers in the arguments of random programs."""

from __future__ import annotations

import math

import torch

# Zeros, both sides of the kinks of common activations, where exponentials under- and overflow.
POINTS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 1e-3, -1e-3, 1e-8, -1e-8),
    *(20.0, -20.0, 30.0, -30.0, 60.0, -60.0, 120.0, -120.0, 1.5, -2.5, 0.1, -0.1),
)
NOT_FINITE = (math.inf, -math.inf, math.nan)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers, halved."""
    return torch.randn(shape, generator=generator) / 2


def points(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The points of interest, in random order and over and over; a NaN would spoil a whole row."""
    known = torch.tensor(POINTS + NOT_FINITE if shape[-1:] == (1,) else POINTS)
    count = math.prod(shape)
    order = torch.randperm(max(count, len(known)), generator=generator)[:count]
    return known[order % len(known)].reshape(shape)


def selecting(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Ones on a diagonal, of matrices; small numbers, of vectors: products are exact."""
    if len(shape) < 2:
        return torch.randint(1, 4, shape, generator=generator) / 2
    rows, columns = shape
    first = int(torch.randint(columns, (), generator=generator))
    return torch.eye(columns).roll(first, 0).repeat(rows // columns + 1, 1)[:rows].clone()
