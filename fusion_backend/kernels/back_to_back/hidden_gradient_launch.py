"""Launches of the kernel in ``hidden_gradient_kernel``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.kernels.back_to_back.hidden_gradient_kernel import (
    fusedmlp_narrow_hidden_gradient,
)
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.configs import Config, narrow_hidden_gradient_config, padded
from fusion_backend.kernels.host.problems import back_to_back_problem
from fusion_backend.kernels.invocations import Invocation, cdiv, dense, is_empty, run, strides
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.weights import Weights, is_transposed


class Wanted(NamedTuple):
    """Which results are wanted.

    Attributes:
        x: the gradient of x.
        preact: that of the pre-activations.
        postact: the activation.
        sums: what gradients of biases are sums of.
    """

    x: bool = True
    preact: bool = True
    postact: bool = True
    sums: bool = True


class Found(NamedTuple):
    """What was computed; ``None`` for what was not wanted.

    Attributes:
        x: ``(rows, in)``, as all with the dtype of x.
        preact: ``(rows, hidden)``.
        postact: ``(rows, hidden)``.
        sums: ``(any, hidden + out)`` in float32, whose rows add up to the gradients of bias_up and
            of bias_down, one after the other.
    """

    x: Tensor | None
    preact: Tensor | None
    postact: Tensor | None
    sums: Tensor | None


def narrow_hidden_gradient(
    x: Tensor,
    grad_output: Tensor,
    weights: Weights,
    activation: Expression,
    wanted: Wanted,
    config: Config | None = None,
) -> Found:
    """What the gradients of a plain MLP are made of, from x, for ``family.can_recompute``.

    Args:
        x: ``(rows, in)``; any strides, as all.
        grad_output: ``(rows, out)``.
        weights: ``weight_up`` ``(hidden, in)``, ``bias_up`` and ``weight_down`` ``(out, hidden)``
            are read.
        activation: as in the forward pass.
        wanted: which results to compute.
        config: how to launch; ``None`` chooses by shape.
    """
    rows: Any = x.shape[0]
    hidden, inner, out = *map(int, weights.weight_up.shape), int(weights.weight_down.shape[0])
    target = targets.target_of(x.device)
    if config is None:
        layers = (None, weights.weight_up, weights.weight_down)
        problem = back_to_back_problem(x, *layers, target)
        config = narrow_hidden_gradient_config(problem, target, wanted.sums)
    blocks = 1 if is_empty(x) else cdiv(rows, config.block_m)
    found = Found(
        x=x.new_empty((rows, inner)) if wanted.x else None,
        preact=x.new_empty((rows, hidden)) if wanted.preact else None,
        postact=x.new_empty((rows, hidden)) if wanted.postact else None,
        sums=x.new_empty((blocks, hidden + out), dtype=torch.float32) if wanted.sums else None,
    )
    if is_empty(x):
        return found._replace(sums=None if found.sums is None else torch.zeros_like(found.sums))
    invocation = narrow_hidden_gradient_invocation(x, grad_output, weights, found, config)
    run(invocation, activation, target)
    return found


def narrow_hidden_gradient_invocation(
    x: Tensor,
    grad_output: Tensor,
    weights: Weights,
    results: Found,
    config: Config,
) -> Invocation:
    """The launch of ``narrow_hidden_gradient``, into ``results``."""
    up, down = map(_readable, (weights.weight_up, weights.weight_down))
    (hidden, inner), out = map(int, up.shape), int(down.shape[0])
    of_up, of_down = strides(up), strides(down)
    arguments = {
        "x": dense(x),
        "grad_output": dense(grad_output),
        "weight_up": up,
        "bias_up": dense(weights.bias_up),
        "weight_down": down,
        "grad_x": results.x,
        "grad_preact": results.preact,
        "postact": results.postact,
        "sums": results.sums,
        "rows": x.shape[0],
        "UP_ROW_STRIDE": of_up[0],
        "UP_COLUMN_STRIDE": of_up[1],
        "DOWN_ROW_STRIDE": of_down[0],
        "DOWN_COLUMN_STRIDE": of_down[1],
        "IN": inner,
        "HIDDEN": hidden,
        "OUT": out,
        "BLOCK_M": config.block_m,
        "BLOCK_IN": padded(inner),
        "BLOCK_H": config.block_n,
        "BLOCK_OUT": padded(out),
    }
    grid = (cdiv(x.shape[0], config.block_m),)
    return Invocation(fusedmlp_narrow_hidden_gradient, grid, arguments, config)


def _readable(weight: Tensor) -> Tensor:
    """A weight, contiguous or the transpose of what is."""
    return weight if is_transposed(weight) else weight.contiguous()
