"""What all operators have in common: one way from arguments to results, and one way back.

    NAME             the result
    NAME_forward     the result and the pre-activations, which training keeps
    NAME_backward    the gradients that are asked for

An operator has the parts that its declaration gives a schema. Activations travel as text, such as
``silu(g) * u``, and the family of kernels as the name of a plan: a graph that calls these operators
shows all that they do, and needs nothing but them to run.

Ahead-of-time autograd takes the operators apart into kernel launches and ATen products, so that
Inductor inlines the former and compiles the latter. They stay whole where launches cannot be
traced or should not be seen; see :mod:`fusion_backend.operators.registration`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.operators import argument_names
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import FirstLayer, Layer
from fusion_backend.operators import autocast, autograd, dispatch, fakes
from fusion_backend.operators.arguments import Backward, Given, or_empty
from fusion_backend.operators.registration import Rules, register


class Operator:
    """An operator of ``torch.ops.fusedmlp``; a subclass declares it.

    Attributes:
        name: of the operator.
        arguments: of the operator and of its part that saves, as in a schema: tensors, activations
            and plan. A pair of braces is where the operator itself takes None for an empty list.
        around: arguments by keyword that only the operator itself takes.
        kept_by_autocast: those of them that keep their dtype under autocast.
        saved: the results of the part that saves; empty where training keeps arguments alone.
        backward: the arguments of the part that differentiates. It is an operator, so that Dynamo
            does not look into it where it compiles a backward pass of eager code.
        families: those that can run it.
        whose_plan: what the plan is of, for an error.
    """

    name: str
    arguments: str
    around: str = ""
    kept_by_autocast: tuple[str, ...] = ()
    saved: str = ""
    backward: str
    families: Callable[[], tuple[Family, ...]]
    whose_plan: str = "plan"
    is_chain: bool = False

    def __init__(self, library: torch.library.Library) -> None:
        """Define the operator and its parts in a library."""
        schema = f"{self.name}({self.arguments.format('?')}{self.around}) -> Tensor"
        names = argument_names(schema)
        #: Where the operands of the activation are among the arguments, if they are.
        self.position_of_operands = names.index("operands") if "operands" in names else None
        kept = (self.position_of_operands, *self.kept_by_autocast)
        casting = partial(autocast.casting, kept=kept)
        differentiable = partial(autograd.differentiable, self)
        rules = Rules(self._forward, self._fake, differentiable, casting)
        self._whole = register(library, schema, rules)
        library.impl(self.name, self.composed, "FuncTorchBatched")
        refusing = partial(autograd.not_differentiable, self._whole.name())
        self._saving = None
        if self.saved:
            schema = f"{self.name}_forward({self.arguments.format('')}) -> ({self.saved})"
            rules = Rules(self._forward_saving, self._fake_saving, refusing, casting)
            self._saving = register(library, schema, rules)
        schema = f"{self.name}_backward({self.backward}) -> Tensor[]"
        rules = Rules(self._backward, self._fake_backward, refusing, autocast.passing)
        self._differentiating = register(library, schema, rules)

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
        fakes.check(given)

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

    def read_backward(self, *arguments: Any) -> Backward:
        """The arguments of the part that differentiates."""
        grad_output, x, gate, up, *down, preact_gate, preact_up = arguments[:-4]
        operands, activation, plan, needs = arguments[-4:]
        first, after = FirstLayer(gate, None, up, None), tuple(Layer(each, None) for each in down)
        given = Given(x, first, after, (activation,), plan, operands)
        return Backward(grad_output, given, (preact_gate, preact_up), needs)

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

    def composed(self, *arguments: Any, **around: Any) -> Tensor:
        """The operator as ATen operators, for all that looks at each of them."""
        *tensors_and_activations, _ = arguments
        return self._forward(*tensors_and_activations, registry.REFERENCE.name, **around)

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

    def keeping(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The result, and what training keeps beside the arguments."""
        if self._saving is not None:
            return tuple(self._saving(*arguments))
        return (self._whole(*arguments),)

    def gradients(self, call: Backward) -> Sequence[Tensor | None]:
        """:meth:`differentiate`, by the part that does it."""
        found: list[Tensor] = self._differentiating(*self.arguments_of(call))
        return found

    def _forward(self, *arguments: Any, **around: Any) -> Tensor:
        given = self.given(*arguments, **around)
        self.check(given)
        return dispatch.forward(self, given)

    def _fake(self, *arguments: Any, **around: Any) -> Tensor:
        given = self.given(*arguments, **around)
        self.check(given)
        return fakes.result(given)

    def _forward_saving(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = self.read(*arguments)
        self.check(given)
        result, gate, up = dispatch.forward_saving(self, given)
        return result, or_empty(gate, given.x), up

    def _fake_saving(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = self.read(*arguments)
        self.check(given)
        return fakes.result(given), *fakes.saved(given, self.recomputes(given))

    def _backward(self, *arguments: Any) -> list[Tensor]:
        call = self.read_backward(*arguments)
        return [or_empty(found, call.given.x) for found in self.differentiate(call)]

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        return fakes.gradients(self, self.read_backward(*arguments))
