"""What an operator of ``torch.ops.fusedmlp`` declares, and what this says of its arguments.

    NAME             the result
    NAME_forward     the result and the pre-activations, which training keeps
    NAME_backward    the gradients that are asked for

An operator has the parts that its declaration gives a schema. Activations travel as text, such as
``silu(g) * u``, and the family of kernels as the name of a plan: a graph that calls these operators
shows all that they do, and needs nothing but them to run.

Ahead-of-time autograd takes the operators apart into kernel launches and ATen products, so that
Inductor inlines the former and compiles the latter. They stay whole where launches cannot be
traced or should not be seen; see :mod:`fusion_backend.operators.registration`. What they do is
the same for all: see :mod:`fusion_backend.operators.implementation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.operators import argument_names
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import FirstLayer, Layer
from fusion_backend.operators import checks
from fusion_backend.operators.arguments import Backward, Given
from fusion_backend.operators.registration import declare


class Operator:
    """An operator of ``torch.ops.fusedmlp``; a subclass declares it.

    Attributes:
        name: of the operator.
        arguments: of the operator and of its part that saves, as in a schema: tensors, activations
            and plan. A pair of braces is where the operator itself takes None for an empty list.
        around: arguments by keyword that only the operator itself takes.
        kept_by_autocast: those of them that keep their dtype under autocast.
        saved: the results of the part that saves; empty where training keeps arguments alone.
        how_parts_save: an argument by keyword of both parts, if what is saved can be chosen.
        backward: the arguments of the part that differentiates. It is an operator, so that Dynamo
            does not look into it where it compiles a backward pass of eager code.
        families: those that can run it.
        whose_plan: what the plan is of, for an error.
        is_chain: whether its layers are named by their places.
        whole: the operator, once it is declared in a library.
        saving: its part that saves, or ``None``.
        differentiating: its part that differentiates.
        position_of_operands: where the operands of the activation are among the arguments, if they
            are.
    """

    name: str
    arguments: str
    around: str = ""
    kept_by_autocast: tuple[str, ...] = ()
    saved: str = ""
    how_parts_save: str = ""
    backward: str
    families: Callable[[], tuple[Family, ...]]
    whose_plan: str = "plan"
    is_chain: bool = False

    def __init__(self, library: torch.library.Library) -> None:
        """Declare the operator and its parts in a library."""
        arguments = f"{self.arguments.format('?')}{self.around}"
        self.whole = declare(library, f"{self.name}({arguments}) -> Tensor")
        self.saving = None
        if self.saved:
            arguments = f"{self.arguments.format('')}{self.how_parts_save}"
            self.saving = declare(library, f"{self.name}_forward({arguments}) -> ({self.saved})")
        schema = f"{self.name}_backward({self.backward}{self.how_parts_save}) -> Tensor[]"
        self.differentiating = declare(library, schema)
        names = argument_names(self.whole)
        self.position_of_operands = names.index("operands") if "operands" in names else None

    # What a declaration says of its own, and of arguments where there is not one activation

    def read(self, *arguments: Any) -> Given:
        """The arguments, those by keyword left out, as a record."""
        x, *layers, operands, activation, plan = arguments
        first, further = layers[:4], layers[4:]
        after = (Layer(*further),) if further else ()
        return Given(x, FirstLayer(*first), after, (activation,), plan, operands or ())

    def check(self, given: Given) -> None:
        """Refuse tensors that do not fit.

        Raises:
            ValueError: as said.
        """
        checks.check(given)

    def run(self, family: Family, rows: Given, activations: Sequence[Expression]) -> Tensor:
        """The result, of matrices."""
        raise NotImplementedError

    def run_saving(
        self, family: Family, rows: Given, activations: Sequence[Expression]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The result and the pre-activations, of matrices; ``None`` without a gate."""
        raise NotImplementedError

    def recomputes(self, given: Given) -> bool:
        """Whether the backward pass computes the pre-activations again, from x."""
        return False

    def read_backward(self, *arguments: Any, recompute: bool = True) -> Backward:
        """The arguments of the part that differentiates."""
        grad_output, x, gate, up, *down, preact_gate, preact_up = arguments[:-4]
        operands, activation, plan, needs = arguments[-4:]
        first, after = FirstLayer(gate, None, up, None), tuple(Layer(each, None) for each in down)
        given = Given(x, first, after, (activation,), plan, operands)
        return Backward(grad_output, given, (preact_gate, preact_up), needs, recompute)

    def arguments_of(self, call: Backward) -> Sequence[Any]:
        """The arguments that :meth:`read_backward` reads."""
        given = call.given
        weights = (given.first.weight_gate, given.first.weight_up)
        down = (layer.weight for layer in given.further)
        others = (given.operands, *given.activations, given.plan)
        return (call.grad_output, given.x, *weights, *down, *call.kept, *others, call.needs)

    def differentiate(self, call: Backward) -> Sequence[Tensor | None]:
        """The gradients that are asked for, of x, of each layer :meth:`in_order`, of operands."""
        raise NotImplementedError

    def in_order(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
        """What there is for each weight and for each bias, as these follow among the arguments."""
        return [tensor for layer in zip(weights, biases, strict=True) for tensor in layer]

    # What is the same for all

    def family_of(self, plan: str, device: torch.device) -> Family:
        """The family of a plan.

        Raises:
            PlanError: there is none, or its kernels cannot run on ``device``.
        """
        family = registry.named(plan, self.families(), self.whose_plan)
        family.check_device(device)
        return family

    def given(
        self,
        *arguments: Any,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        norm: str = "",
    ) -> Given:
        """All arguments as a record, those by keyword too: the residual, and the norm before."""
        before = Norm.of(norm, norm_weight, norm_bias)
        return self.read(*arguments)._replace(residual=residual, norm=before)

    def checked(self, *arguments: Any, **around: Any) -> Given:
        """:meth:`given`, of tensors that fit.

        Raises:
            ValueError: they do not.
        """
        given = self.given(*arguments, **around)
        self.check(given)
        return given

    def keeping(self, *arguments: Any, recompute: bool = True) -> tuple[Tensor, ...]:
        """The result, and what training keeps beside the arguments.

        Args:
            arguments: of the operator.
            recompute: whether x may be kept in place of the pre-activations.
        """
        if self.saving is not None:
            return tuple(self.saving(*arguments, **self._how(recompute)))
        return (self.whole(*arguments),)

    def _how(self, recompute: bool) -> dict[str, bool]:
        return {} if recompute or not self.how_parts_save else {"recompute": False}

    def gradients(self, call: Backward) -> Sequence[Tensor | None]:
        """:meth:`differentiate`, by the part that does it."""
        how = self._how(call.recompute)
        found: list[Tensor] = self.differentiating(*self.arguments_of(call), **how)
        return found
