"""Calls of the family ``rows`` in training, as those of ``cpu_calls``; they have several results.

rows_saving       result and pre-activations
rows_gradients    the gradients that are asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import extern_calls
from fusion_backend.compat.extern_calls import Made, Result, contiguous, fixed, realized
from fusion_backend.mlp.weights import Weights, is_transposed
from fusion_backend.operators import flops
from fusion_backend.operators.cpu_buffers import (
    can_be_called,
    in_rows,
    kinds,
    readable,
    strides,
)
from fusion_backend.operators.launches import is_transposed as is_transposed_node

#: The package of the functions that generated code calls.
KERNELS = "fusion_backend.kernels.cpu_rows"

_SCHEMAS = {
    "rows_saving": "(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[]? operands, "
    "str activation, bool gated) -> Tensor[]",
    "rows_gradients": "(Tensor grad_output, Tensor? x, Tensor? weight_gate, Tensor? bias_gate, "
    "Tensor weight_up, Tensor? bias_up, Tensor weight_down, Tensor? preact_gate, "
    "Tensor? preact_up, Tensor[]? operands, str activation, bool[] needs) -> Tensor[]",
}


def register(library: torch.library.Library) -> None:
    """Define the operators, of ``(rows, in)``."""
    functions: dict[str, tuple[Any, Any]] = {
        "rows_saving": (_save, _saved),
        "rows_gradients": (_differentiate, _gradients),
    }
    for name, (function, fake) in functions.items():
        library.define(f"{name}{_SCHEMAS[name]}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
        flops.register(getattr(torch.ops.fusedmlp, name).default)


def _save(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor] | None,
    activation: str,
    gated: bool,
) -> list[Tensor]:
    from fusion_backend.kernels.cpu_rows import launch

    return launch.run_saving(x, weights, biases, operands or (), activation, gated)


def _saved(x: Tensor, weights: Sequence[Tensor], *others: Any) -> list[Tensor]:
    rows, hidden = x.shape[0], weights[0].shape[0]
    preacts = [x.new_empty((rows, hidden)) for _ in weights[:-1]]
    return [x.new_empty((rows, weights[-1].shape[0])), *preacts]


def _differentiate(grad_output: Tensor, x: Tensor | None, *others: Any) -> list[Tensor]:
    from fusion_backend.kernels.cpu_rows import gradient_launch

    *layers, gate, up, operands, activation, needs = others
    weights, preacts = Weights._make((*layers, None)), (gate, up)
    return gradient_launch.run(grad_output, x, weights, preacts, operands or (), activation, needs)


def _gradients(grad_output: Tensor, x: Tensor | None, *others: Any) -> list[Tensor]:
    gate, _, up, _, down, _, _, operands, _, needs = others
    like = [up if gate is None else gate, up, down]
    of_x = (grad_output.shape[0], up.shape[1])
    shapes = _shapes([tuple(weight.shape) for weight in like], of_x)
    turned = _with_biases([*map(is_transposed, like)])
    found = [
        _empty(grad_output, shape, is_turned)
        for shape, is_turned in zip(shapes, turned, strict=True)
    ]
    found += [torch.empty_like(o, memory_format=torch.contiguous_format) for o in operands or ()]
    return [gradient for gradient, need in zip(found, needs, strict=True) if need]


def _empty(like: Tensor, shape: tuple[Any, ...], is_turned: bool) -> Tensor:
    return like.new_empty(shape[::-1]).t() if is_turned else like.new_empty(shape)


def _shapes(weights: Sequence[tuple[Any, ...]], x: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Of the gradients of x, and of each weight and its bias."""
    return [x, *(shape for weight in weights for shape in (weight, weight[:1]))]


def install_lowering() -> None:
    """Teach Inductor to call the functions, as :func:`cpu_calls.install_lowering` does."""
    operators = torch.ops.fusedmlp
    extern_calls.install(operators.rows_saving.default, _saving_lowering)
    extern_calls.install(operators.rows_gradients.default, _gradient_lowering)


def _saving_lowering() -> Callable[..., Any]:
    by_dispatcher = extern_calls.by_dispatcher(torch.ops.fusedmlp.rows_saving.default)

    def lower(
        x: Any, weights: Any, biases: Any, operands: Any, activation: str, gated: bool
    ) -> Any:
        if not can_be_called(weights):
            return by_dispatcher(x, weights, biases, operands, activation, gated)
        operands = operands or ()
        x, *others = (in_rows(x), *map(contiguous, (*biases, *operands)))
        layers = [*map(readable, weights)]
        inner, hidden = int(layers[0].get_size()[1]), int(layers[0].get_size()[0])
        out, rows, dtype = int(layers[-1].get_size()[0]), x.get_size()[0], x.get_dtype()
        known = (
            str(dtype),
            (activation,),
            bool(gated),
            kinds(operands),
            (inner, hidden, out),
            tuple(map(strides, layers)),
            "",
        )
        function = Made("fusedmlp_rows_saving", f"{KERNELS}.launch", "saving_caller_of", known)
        preacts = [Result((rows, hidden), (hidden, 1), dtype)] * (1 + gated)
        results = [Result((rows, out), (out, 1), dtype), *preacts]
        return extern_calls.returning_list(function, (x, *layers, *others), results)

    return lower


def _gradient_lowering() -> Callable[..., Any]:
    by_dispatcher = extern_calls.by_dispatcher(torch.ops.fusedmlp.rows_gradients.default)

    def lower(grad_output: Any, x: Any, *others: Any) -> Any:
        *layers, gate, up, operands, activation, needs = others
        weights = [layer for layer in layers[::2] if layer is not None]
        if not can_be_called(weights):
            return by_dispatcher(grad_output, x, *others)
        turned = [each is not None and is_transposed_node(fixed(each)) for each in layers[::2]]
        layers = [
            contiguous(layer) if i % 2 or layer is None else readable(layer)
            for i, layer in enumerate(layers)
        ]
        dy, x = realized(grad_output), None if x is None else in_rows(x)
        operands = operands or ()
        hidden, inner = map(int, layers[2].get_size())
        out = int(layers[4].get_size()[0])
        dtype = dy.get_dtype()
        known = (
            str(dtype),
            activation,
            layers[0] is not None,
            kinds(operands),
            (inner, hidden, out),
            tuple((0, 0) if layer is None else strides(layer) for layer in layers[::2]),
            (*turned,),
            (*map(bool, needs),),
            up is None,
        )
        of_x = (dy.get_size()[0], inner)
        shapes = _shapes([(hidden, inner), (hidden, inner), (out, hidden)], of_x)
        results = [
            Result(shape, (1, shape[0]) if is_turned else _contiguous(shape), dtype)
            for shape, is_turned in zip(shapes, _with_biases(turned), strict=True)
        ]
        for operand in operands:
            size = tuple(operand.get_size())
            results.append(Result(size, _contiguous(size), operand.get_dtype()))
        function = Made("fusedmlp_rows_gradients", f"{KERNELS}.gradient_launch", "caller_of", known)
        tensors = (dy, x, *layers, *map(contiguous, (gate, up, *operands)))
        asked = [result for result, need in zip(results, needs, strict=True) if need]
        return extern_calls.returning_list(function, tensors, asked)

    return lower


def _with_biases(turned: Sequence[bool]) -> Iterator[bool]:
    """Whether gradients of x, and of each weight and its bias, are laid out turned."""
    yield False
    for each in turned:
        yield each
        yield False


def _contiguous(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return (size[1], 1) if len(size) == 2 else (1,) * len(size)
