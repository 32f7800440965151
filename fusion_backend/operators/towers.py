"""``torch.ops.fusedmlp.towers``: one call is several chains of linear layers of the same input.

The plan is ``chain`` (one Triton kernel) or ``reference``. Training keeps the arguments alone. The
backward pass is that of each chain, and the gradients of x are added in the order of autograd: that
of the last chain comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import below_autograd, transforming
from fusion_backend.compat.dynamo import kept_whole
from fusion_backend.kernels import registry
from fusion_backend.mlp.weights import Tower
from fusion_backend.operators import autocast, dispatch, fakes
from fusion_backend.operators.arguments import Backward, Given, as_rows, restore_rows
from fusion_backend.operators.autograd import gradients_of_composed, in_rows, wants_gradients
from fusion_backend.operators.chain import Chain
from fusion_backend.operators.registration import Rules, declare, register

_SCHEMA = (
    "towers(Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations, int[] layers, "
    "str plan) -> Tensor[]"
)


class Towers:
    """``y_t = … f_1(f_0(x W_0ᵀ + b_0) W_1ᵀ + b_1) …`` of each tower t, features last.

    Args:
        x: ``(..., in)``.
        weights: those of the first tower, then of the next; as ``fusedmlp::chain`` takes them.
        biases: one a weight, ``(out_features,)`` or ``None``.
        activations: those of the first tower, then of the next: of each one less than weights.
        layers: how many weights each tower has, at least two.
        plan: the family that runs them, of ``registry.of_towers``.

    Returns:
        ``(..., out)`` of each tower, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, or an activation is none of x.
        ValueError: numbers, shapes, dtypes or devices of the operands do not fit.
    """

    name = "towers"

    def __init__(self, library: torch.library.Library, chain: Chain) -> None:
        """Define the operator in a library, by the chains that it is made of."""
        self.chain = chain
        rules = Rules(self._forward, self._fake, self._differentiable, autocast.casting)
        self.whole = declare(library, _SCHEMA)
        register(library, self.whole, rules)
        library.impl(self.name, self.composed, "FuncTorchBatched")

    def read(self, *arguments: Any) -> list[Given]:
        """Each tower as a call of a chain."""
        x, weights, biases, activations, layers, plan = arguments
        lengths = (len(weights), len(biases), len(activations) + len(layers))
        if not layers or min(layers) < 2 or {*lengths} != {sum(layers)}:
            raise ValueError(
                f"towers must have at least two layers each, a bias (or None) for each weight and "
                f"an activation between two, got {list(layers)} layers, {len(weights)} weights, "
                f"{len(biases)} biases and {len(activations)} activations"
            )
        rest = (iter(weights), iter(biases), iter(activations))
        return [
            self.chain.read(x, *map(list, map(islice, rest, (n, n, n - 1))), plan) for n in layers
        ]

    def composed(self, *arguments: Any) -> list[Tensor]:
        """The operator as ATen operators, for all that looks at each of them."""
        *tensors_and_others, _ = arguments
        return self._forward(*tensors_and_others, registry.REFERENCE.name)

    def _checked(self, *arguments: Any) -> list[Given]:
        chains = self.read(*arguments)
        for given in chains:
            self.chain.check(given)
        return chains

    def _forward(self, *arguments: Any) -> list[Tensor]:
        chains = self._checked(*arguments)
        x, plan = chains[0].x, chains[0].plan
        family = registry.named(plan, registry.of_towers(), "the plan of towers")
        family.check_device(x.device)
        towers = [
            Tower(*given.chained, dispatch.expressions_of(self.chain, family, given))
            for given in chains
        ]
        return [restore_rows(y, x) for y in family.run_towers(as_rows(x), towers)]

    def _fake(self, *arguments: Any) -> list[Tensor]:
        return [*map(fakes.result, self._checked(*arguments))]

    def _differentiable(self, overload: Callable[..., Any]) -> Callable[..., Any]:
        """As :func:`autograd.differentiable`, of several results."""

        def kernel(*arguments: Any) -> list[Tensor]:
            if transforming():
                return self.composed(*arguments)
            if not wants_gradients(arguments):
                with below_autograd():
                    return list(overload(*arguments))
            x, *others = arguments
            self._checked(*arguments)
            call, tensors = _Call.of(self, in_rows(x, others, None))
            found = _Recorded.apply(call, *tensors)
            return [y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1]) for y in found]

        return kernel

    def gradients(
        self,
        grad_outputs: Sequence[Tensor | None],
        chains: Sequence[Given],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of x, of each weight and of each bias.

        Args:
            grad_outputs: ``None`` of a tower that nothing was made of.
            chains: the towers.
            needs: which to compute; the others are ``None``. None of such a tower.
        """
        layers = [1 + len(given.further) for given in chains]
        total = sum(layers)
        found: list[Tensor | None] = [None] * (1 + 2 * total)
        ends = list(itertools.accumulate(layers))
        for grad, given, count, end in reversed(
            [*zip(grad_outputs, chains, layers, ends, strict=True)]
        ):
            first = 1 + end - count
            of_weights, of_biases = (slice(i, i + count) for i in (first, first + total))
            own = [needs[0], *needs[of_weights], *needs[of_biases]]
            if grad is None or not any(own):
                continue
            of_x, *others = self.chain.gradients(Backward(grad, given, (), own))
            found[of_weights], found[of_biases] = others[:count], others[count:]
            if needs[0] and of_x is not None:
                found[0] = of_x if found[0] is None else found[0] + of_x
        return [each if need else None for each, need in zip(found, needs, strict=True)]


class _Call(NamedTuple):
    """A call without its tensors.

    Attributes:
        operator: that is called.
        weights: how many there are, and biases.
        others: activations, layers and plan.
    """

    operator: Towers
    weights: int
    others: tuple[Any, ...]

    @classmethod
    def of(cls, operator: Towers, arguments: Sequence[Any]) -> tuple[_Call, list[Tensor | None]]:
        """A call, and its tensors one after the other."""
        x, weights, biases, *others = arguments
        return cls(operator, len(weights), tuple(others)), [x, *weights, *biases]

    def arguments(self, tensors: Iterable[Any]) -> list[Any]:
        """The arguments, with these tensors."""
        x, *rest = tensors
        return [x, rest[: self.weights], rest[self.weights :], *self.others]

    def reached(self, needs: Sequence[bool], grad_outputs: Sequence[Tensor | None]) -> list[bool]:
        """The gradients that are asked for, without those of towers that nothing was made of."""
        _, layers, _ = self.others
        of_towers = [grad is not None for grad in grad_outputs]
        of_layers = [used for used, n in zip(of_towers, layers, strict=True) for _ in range(n)]
        reached = (any(of_towers), *of_layers, *of_layers)
        return [need and there for need, there in zip(needs, reached, strict=True)]


class _Recorded(torch.autograd.Function):
    """Takes a call and its tensors; returns the results."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            results = call.operator.whole(*call.arguments(tensors))
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, call = ctx.saved_tensors, ctx.call
        arguments = call.arguments(tensors)
        needs = call.reached(ctx.needs_input_grad[1:], grad_outputs)
        if not torch.is_grad_enabled():
            chains = call.operator.read(*arguments)
            return (None, *call.operator.gradients(grad_outputs, chains, needs))
        # create_graph=True: what is composed is differentiable itself
        results = kept_whole(call.operator.composed)(*arguments)
        given = [y for y, grad in zip(results, grad_outputs, strict=True) if grad is not None]
        grads = [grad for grad in grad_outputs if grad is not None]
        return (None, *gradients_of_composed(given, tensors, grads, needs))
