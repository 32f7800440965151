"""How a form of MLP is declared.

A form is data: what is matched, what it becomes, a program that has it and the nearest that has it
not. The matcher (:mod:`fusion_backend.fusion.matching`) does the rest, so a file in ``patterns/``,
or in a package of your own, is a declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from fusion_backend.errors import FormError

Program = tuple[nn.Module, tuple[Any, ...]]
"""A module and its inputs."""

Operator = Literal["mlp", "activated_linear", "chain", "towers"]

#: What the operators call the results of their first layers.
_NAMES = ((), ("x",), ("g", "u"))


@dataclass(frozen=True)
class Projection:
    """A variable of the activation that is one linear layer of the MLP's input.

    Attributes:
        name: as in the text of the activation: ``x``, or ``g`` and ``u`` of two.
        linear: of the layers that could be it, it is one that enters linearly, if there is one. So
            the layer that is activated is the gate, whichever of the two the model computes first.
    """

    name: str
    linear: bool = False


@dataclass(frozen=True)
class PackedProjection:
    """A variable that is a slice of the features of one linear layer of the MLP's input.

    Attributes:
        name: see :class:`Projection`.
        linear: see :class:`Projection`.
    """

    name: str
    linear: bool = False


@dataclass(frozen=True)
class NearMiss:
    """The nearest program that does not have a form.

    Attributes:
        program: makes the module and its inputs.
        reason: the code for which it is left alone.
    """

    program: Callable[[], Program]
    reason: str


@dataclass(frozen=True)
class Form:
    """One way in which MLPs stand in graphs.

    Attributes:
        name: short stable name, shown in reports; small letters, digits and ``_``.
        summary: the form as a formula.
        hidden: what is matched: the variables of the activation, each a layer or a part of one.
            Every layer reads the MLP's input. Empty where the form is made of sites of others.
        becomes: the operator of ``torch.ops.fusedmlp`` that takes its place.
        links: sites of this form that follow each other can become a chain.
        example: makes a module of this form and its inputs, for the documentation and the tests.
        near_miss: the nearest program that is not of this form, and why it is left alone.

    Raises:
        FormError: the name or the variables are none that there can be.
    """

    name: str
    summary: str
    hidden: tuple[Projection | PackedProjection, ...]
    example: Callable[[], Program] = field(repr=False, compare=False)
    near_miss: NearMiss | None = field(default=None, repr=False, compare=False)
    becomes: Operator = "mlp"
    links: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise FormError(
                f"a form's name must be small letters, digits and _, such as 'gated', "
                f"got {self.name!r}"
            )
        object.__setattr__(self, "hidden", tuple(self.hidden))  # a list is as good
        names = tuple(variable.name for variable in self.hidden)
        if names not in _NAMES:
            raise FormError(
                f"the variables of the form {self.name!r} must be called x, or g and u, got "
                f"{', '.join(names)}"
            )
