"""How a form of MLP is declared.

A form is data: what the variables of the activation are, and an example. The matcher
(:mod:`fusion_backend.fusion.matching`) does the rest, so a file in ``patterns/`` is a declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Projection:
    """A variable of the activation that is one linear layer of the MLP's input."""


@dataclass(frozen=True)
class PackedProjection:
    """A variable that is a slice of the features of one linear layer, which all variables share."""


@dataclass(frozen=True)
class Form:
    """One way in which MLPs stand in graphs.

    Attributes:
        name: short stable name, shown in reports.
        summary: the form as a formula.
        hidden: what each variable of the activation is, in the order of their first use.
        example: makes a module of this form and its inputs, for the documentation and the tests.
    """

    name: str
    summary: str
    hidden: tuple[Projection | PackedProjection, ...]
    example: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
