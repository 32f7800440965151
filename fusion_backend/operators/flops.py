"""How many floating-point operations our operators are: those of their products.

The partitioner prices by these what it computes again to meet an activation-memory budget, and
``torch.utils.flop_counter`` counts by them. What has no formula counts as free.

    layer (rows, in) → (rows, out)     2 · rows · in · out
    its backward pass                  as much for each of the two gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fusion_backend.compat.operators import OpOverload, argument_names


def register(operator: OpOverload) -> None:
    """Register the formula of an operator, such as ``torch.ops.fusedmlp.mlp.default``."""
    packet = operator.overloadpacket
    if packet not in flop_registry:
        formula = _formula(argument_names(operator), operator.name())
        register_flop_formula(packet, get_raw=True)(formula)


def _formula(names: list[str], operator: str) -> Callable[..., int]:
    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        if operator.endswith(("_backward", "_gradients")):
            return _backward(given)
        return sum(_layer(_rows(given), weight) for weight in _weights(given))

    return formula


def _backward(given: dict[str, Any]) -> int:
    """Of a backward pass: two products a layer, but for gradients that are not asked for.

    A third of the first layers, where their pre-activations were not saved.
    """
    rows, weights, needs = _rows(given), _weights(given), given["needs"]
    recomputes = not any(isinstance(each, Tensor) and each.dim() > 1 for each in _preacts(given))
    first = weights if "weights" in given else _weights(given, "weight_gate", "weight_up")
    total = sum(2 * _layer(rows, weight) for weight in weights)
    total += sum(_layer(rows, weight) for weight in first) if recomputes else 0
    return total if needs[0] else total - sum(_layer(rows, weight) for weight in first[:2])


def _preacts(given: dict[str, Any]) -> list[Any]:
    return [given.get("preact_gate"), given.get("preact_up")]


def _weights(given: dict[str, Any], *names: str) -> list[Tensor]:
    """The matrices of the layers."""
    if "weights" in given:
        return [*given["weights"]]
    found = [value for name, value in given.items() if name.startswith("weight")]
    found = [given.get(name) for name in names] if names else found
    return [weight for weight in found if isinstance(weight, Tensor)]


def _rows(given: dict[str, Any]) -> int:
    x: Tensor = next(iter(given.values()))
    return int(x.numel()) // max(int(x.shape[-1]), 1)


def _layer(rows: int, weight: Tensor) -> int:
    return 2 * rows * int(weight.numel())
