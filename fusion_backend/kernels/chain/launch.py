"""The launch of ``chain``: like those of ``launch``, on real tensors or under tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import wrap_triton

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.chain.config import ChainProblem, blocked, chain_problem, chosen
from fusion_backend.kernels.chain.source import ChainCode, chain_kernel
from fusion_backend.kernels.host.configs import Config, padded
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.kernels.invocations import (
    cdiv,
    dense,
    is_wide,
    row_units,
    strides,
    with_known_columns,
)
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.steps import Steps


def chain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[Expression],
    config: Config | None = None,
    steps: Steps | None = None,
    norms: Sequence[Norm] = (),
) -> Tensor:
    """A chain of linear layers in one launch, of widths of which ``support.can_chain`` holds.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weights: one ``(out_features, in_features)`` a layer; any strides. A layer that reads x
            beside the value before it has the features of both.
        biases: one ``(out_features,)`` a layer, or ``None``.
        activations: those of the steps, in their order.
        config: how to launch; ``None`` chooses by shape.
        steps: what the chain computes; by default its layers, and an activation between each two.
        norms: those of the steps, in their order.

    Returns:
        ``(rows, out)``, contiguous and with the dtype of x.

    Raises:
        ValueError: ``config`` cannot run on this GPU with these operands, or nothing can.
    """
    y = x.new_empty((x.shape[0], weights[-1].shape[0]))
    if isinstance(x.shape[0], int) and x.shape[0] == 0:
        return y
    target = target_of(x.device)
    problem = chain_problem(x, weights, target, steps or Steps.of("", len(weights)))
    config = chosen(problem, target, config)
    x = with_known_columns(x)
    code = chain_code(x, weights, biases, activations, norms, problem, config, target)
    kernel = chain_kernel(code)
    tensors = operands_of(weights, biases, norms)
    programs = programs_of(config, x.shape[0], target.multiprocessors)
    if not triton_is_interpreted():
        kernel = wrap_triton(kernel)
    arguments = (x, *tensors, y, x.shape[0], row_units(x)[0])
    kernel[(programs,)](*arguments, num_warps=config.num_warps, num_stages=config.num_stages)
    return y


def operands_of(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], norms: Sequence[Norm] = ()
) -> list[Tensor]:
    """What the kernel reads beside x, in its order."""
    operands = [t for pair in zip(weights, map(dense, biases), strict=True) for t in pair]
    operands += [dense(t) for norm in norms for t in (norm.weight, norm.bias)]
    return [tensor for tensor in operands if tensor is not None]


def programs_of(config: Config, rows: Any, multiprocessors: int) -> Any:
    """How many programs share the rows, of which there may be a symbolic number."""
    programs = cdiv(rows, config.block_m)
    if not config.programs:
        return programs
    persistent = config.programs * multiprocessors
    return min(programs, persistent) if isinstance(programs, int) else persistent


def chain_code(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[Expression],
    norms: Sequence[Norm],
    problem: ChainProblem,
    config: Config,
    target: Target,
) -> ChainCode:
    """What the kernel for these operands is printed from."""
    blocks = [padded(width) for width in problem.widths]
    tiles = [
        (strides(weight), (blocks[i + 1], max(blocks[i], blocks[0] if i in problem.joined else 0)))
        for i, weight in enumerate(weights)
    ]
    return ChainCode(
        widths=problem.widths,
        activations=tuple(activations),
        biases=tuple(bias is not None for bias in biases),
        strides=tuple(strides(weight) for weight in weights),
        x_row_unit=row_units(x)[1],
        x_column_stride=int(x.stride(1)),
        wide=is_wide((x.stride(), (config.block_m, blocks[0])), *tiles),
        precision=problem.precision,
        blocked=blocked(config, problem, target),
        config=config,
        accuracy=target.accuracy_of_activations(x.dtype),
        steps=problem.steps,
        norms=tuple((norm.weight is not None, norm.bias is not None) for norm in norms),
    )
