"""Calls of the family ``rows``, as graphs name them.

rows              layers joined by activations, of ``(rows, in)``
rows_panels       a weight laid out anew, so that many rows read it without packing it
rows_of_panels    ``rows`` of such weights

Generated code calls a function that was made for one MLP, as with those of ``gpu_calls``.

The last two are for weights that Inductor is told to take for constants (``freezing``). It computes
once what follows from constants alone, and keeps that in their place, in the code that it is for.
Of other weights nothing is kept between calls: no counter tells of every write to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import extern_calls
from fusion_backend.compat.extern_calls import Made, Result, contiguous
from fusion_backend.mlp.norms import Norm
from fusion_backend.operators import cpu_training_calls, flops
from fusion_backend.operators.cpu_buffers import (
    can_be_called,
    in_rows,
    kinds,
    readable,
    strides,
)

_OTHERS = (
    "Tensor?[] biases, Tensor[]? operands, Tensor? residual, Tensor? norm_weight, "
    "Tensor? norm_bias, str[] activations, bool gated, str norm"
)
_SCHEMA = f"rows(Tensor x, Tensor[] weights, {_OTHERS}) -> Tensor"
_PANELS_SCHEMA = "rows_panels(Tensor weight) -> Tensor"
_OF_PANELS_SCHEMA = (
    f"rows_of_panels(Tensor x, Tensor[] panels, int[] out_features, {_OTHERS}) -> Tensor"
)


def register(library: torch.library.Library) -> None:
    """Define the operators."""
    functions: dict[str, tuple[Any, Any]] = {
        _SCHEMA: (_run, _fake),
        _PANELS_SCHEMA: (_panels, _fake_panels),
        _OF_PANELS_SCHEMA: (_run_panels, _fake_of_panels),
    }
    for schema, (function, fake) in functions.items():
        name = schema[: schema.index("(")]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    flops.register(torch.ops.fusedmlp.rows.default)
    flops.register(torch.ops.fusedmlp.rows_of_panels.default)
    cpu_training_calls.register(library)


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor] | None,
    residual: Tensor | None,
    *norm_and_layers: Any,
) -> Tensor:
    from fusion_backend.kernels.cpu_rows import launch

    norm_weight, norm_bias, activations, gated, norm = norm_and_layers
    around = (residual, Norm.of(norm, norm_weight, norm_bias))
    return launch.run(x, weights, biases, operands or (), around, activations, gated)


def _fake(x: Tensor, weights: Sequence[Tensor], *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], weights[-1].shape[0]))


def _panels(weight: Tensor) -> Tensor:
    from fusion_backend.kernels.cpu_rows import launch

    return launch.panels(weight)


def _fake_panels(weight: Tensor) -> Tensor:
    from fusion_backend.kernels.cpu_rows import launch

    out_features, in_features = weight.shape
    width = launch.panel_width(weight.dtype)
    return weight.new_empty((-(-out_features // width), in_features, width))


def _run_panels(
    x: Tensor, panels: Sequence[Tensor], out_features: Sequence[int], *others: Any
) -> Tensor:
    from fusion_backend.kernels.cpu_rows import launch

    return _run(x, [*map(launch.from_panels, panels, out_features)], *others)


def _fake_of_panels(
    x: Tensor, panels: Sequence[Tensor], out_features: Sequence[int], *others: Any
) -> Tensor:
    return x.new_empty((x.shape[0], out_features[-1]))


def install_lowering() -> None:
    """Teach Inductor to call the function; once a process, and only where Inductor is used."""
    extern_calls.install(torch.ops.fusedmlp.rows.default, _lowering)
    extern_calls.install(torch.ops.fusedmlp.rows_panels.default, _lowering_panels)
    extern_calls.install(torch.ops.fusedmlp.rows_of_panels.default, _lowering_of_panels)
    cpu_training_calls.install_lowering()


def _lowering() -> Callable[..., Any]:
    by_dispatcher = extern_calls.by_dispatcher(torch.ops.fusedmlp.rows.default)

    def lower(x: Any, weights: Any, *others: Any) -> Any:
        if not can_be_called(weights):
            return by_dispatcher(x, weights, *others)
        layers = [*map(readable, weights)]
        features = [layer.get_size()[0] for layer in layers]
        return _call(x, layers, features, [*map(strides, layers)], *others)

    return lower


def _lowering_panels() -> Callable[..., Any]:
    """Panels that are still to be made are of weights that are no constants: none are made."""
    return lambda weight: weight


def _lowering_of_panels() -> Callable[..., Any]:
    from fusion_backend.kernels.cpu_rows.launch import IN_PANELS

    def lower(x: Any, panels: Any, out_features: Any, *others: Any) -> Any:
        are_panels = [len(each.get_size()) == 3 for each in panels]  # or weights, as is said above
        layers = [
            contiguous(each) if made else readable(each)
            for each, made in zip(panels, are_panels, strict=True)
        ]
        layouts = [
            IN_PANELS if made else strides(each)
            for each, made in zip(layers, are_panels, strict=True)
        ]
        return _call(x, layers, out_features, layouts, *others)

    return lower


def _call(
    x: Any,
    layers: Sequence[Any],
    out_features: Sequence[Any],
    layouts: Sequence[tuple[int, ...]],
    *others: Any,
) -> Any:
    """A call of what is made for layers with these features and strides."""
    biases, operands, residual, norm_weight, norm_bias, activations, gated, norm = others
    operands, x = operands or (), in_rows(x)
    beside = map(contiguous, (*biases, *operands, residual, norm_weight, norm_bias))
    widths = (layers[0].get_size()[1], *out_features[gated:])
    known = (
        str(x.get_dtype()),
        tuple(activations),
        bool(gated),
        kinds(operands),
        tuple(map(int, widths)),
        tuple(layouts),
        norm,
    )
    function = Made("fusedmlp_rows", f"{cpu_training_calls.KERNELS}.launch", "caller_of", known)
    result = Result((x.get_size()[0], widths[-1]), (widths[-1], 1), x.get_dtype())
    return extern_calls.returning(function, (x, *layers, *beside), result)
