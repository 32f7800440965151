"""A way to run MLPs, as the benchmark sees it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_backend.bench.cells import Cell
from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.timing import Operands
from fusion_backend.mlp.weights import Weights

Refusal = Callable[[Cell, torch.device], "str | None"]


def _input_and_weights(x: Tensor, weights: Weights) -> Operands:
    return (x, *weights)


@dataclass(frozen=True)
class Runner:
    """One way to run one cell.

    Attributes:
        function: of what ``operands`` returns.
        operands: the arguments of one call, from the input and one set of weights.
        sites: where fusedmlp says what it did, filled in the first call.
    """

    function: Callable[..., Tensor]
    operands: Callable[[Tensor, Weights], Operands] = _input_and_weights
    sites: list[Site] = field(default_factory=list)


def _takes_all(cell: Cell, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """Someone who runs MLPs.

    Attributes:
        name: in tables and on the command line.
        what: in a few words.
        build: makes a runner; what has to be compiled is compiled in its first call.
        refuses: why a cell cannot be run on a device, ``None`` if it can.
        distribution: the package that must be installed.
        compiles: whether the first call takes seconds, which :mod:`warm_up` can take in parallel.
        whole: ``False`` if less than the MLP is computed.
    """

    name: str
    what: str
    build: Callable[[Cell], Runner]
    refuses: Refusal = _takes_all
    distribution: str | None = None
    compiles: bool = False
    whole: bool = True

    @property
    def version(self) -> str | None:
        """Of the package that must be installed; ``None`` if it is not, or none is needed."""
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else None
        except importlib.metadata.PackageNotFoundError:
            return None

    def absence(self, cell: Cell, device: torch.device) -> str | None:
        """Why there is nothing to measure, ``None`` if there is."""
        if self.distribution is not None and self.version is None:
            return f"{self.distribution} is not installed"
        return self.refuses(cell, device)
