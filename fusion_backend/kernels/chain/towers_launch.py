"""The launch of several chains of one input, its *towers*: on real tensors or under tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import wrap_triton

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.chain.config import chain_problem
from fusion_backend.kernels.chain.launch import chain_code, operands_of, programs_of
from fusion_backend.kernels.chain.towers_config import chosen
from fusion_backend.kernels.chain.towers_source import TowersCode, towers_kernel
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.targets import target_of
from fusion_backend.kernels.invocations import is_empty, row_units, with_known_columns
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import Tower


def towers(
    x: Tensor, chains: Sequence[Tower], configs: Sequence[Config] | None = None
) -> list[Tensor]:
    """Several chains of two and more layers of one input, in one launch.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        chains: those of which ``family.can_tower`` holds.
        configs: how to launch each, in which warps, stages, programs and residency are the same;
            ``None`` chooses by shapes.

    Returns:
        ``(rows, out)`` of each, contiguous and with the dtype of x.

    Raises:
        ValueError: no launch suits all of them.
    """
    results = [x.new_empty((x.shape[0], each.weights[-1].shape[0])) for each in chains]
    if is_empty(x):
        return results
    target = target_of(x.device)
    problems = [
        chain_problem(x, each.weights, target, Steps.of("", len(each.weights))) for each in chains
    ]
    configs = chosen(problems, target) if configs is None else configs
    if configs is None:
        raise ValueError(f"no launch suits all towers of {problems} on {target}")
    x = with_known_columns(x)
    code = TowersCode(
        tuple(
            chain_code(x, *each, (), problem, config, target)
            for each, problem, config in zip(chains, problems, configs, strict=True)
        )
    )
    tensors: list[Tensor] = []
    for each, y in zip(chains, results, strict=True):
        tensors += [*operands_of(each.weights, each.biases), y]
    grid = (_programs(configs, x.shape[0], target.multiprocessors),)
    kernel = towers_kernel(code)
    if not triton_is_interpreted():
        kernel = wrap_triton(kernel)
    warps, stages = configs[0].num_warps, configs[0].num_stages
    arguments = (x, *tensors, x.shape[0], row_units(x)[0])
    kernel[grid](*arguments, num_warps=warps, num_stages=stages)
    return results


def _programs(configs: Sequence[Config], rows: Any, multiprocessors: int) -> Any:
    """How many programs there are: for each tower as many as the one with the most tiles wants.

    Those that stay share the multiprocessors.
    """
    own = max(1, multiprocessors // len(configs))
    lowest = min(configs, key=lambda config: config.block_m)
    return len(configs) * programs_of(lowest, rows, own)
