"""Configurations that are compared where the number of rows is known, and when another is taken.

The lists in ``preferences`` have one configuration for a class of rows. Which is best within a
class depends on how many tiles there are, and how many of their rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from fusion_backend.kernels.host.config_times import (
    FITTED,
    Factors,
    is_sure,
    predicted,
    speaks_of,
)
from fusion_backend.kernels.host.configs import Config, Kernel, fits
from fusion_backend.kernels.host.problems import Problem
from fusion_backend.kernels.host.targets import Target

_PLAIN = (
    Config(16, 32, 128, num_stages=5),
    Config(16, 64, 128, num_stages=4),
    Config(32, 64, 128, num_stages=4),
    Config(64, 32, 64, num_stages=4),
    Config(64, 32, 128, num_stages=4),
    Config(64, 64, 64, num_stages=5),
    Config(64, 64, 128, num_stages=3),
    Config(64, 128, 64, parts=2, num_stages=4),
    Config(64, 128, 128, parts=2, num_stages=3),
    Config(128, 128, 64, parts=4, num_warps=8, num_stages=4),
)
_GATED = (
    Config(16, 32, 128, num_stages=4),
    Config(16, 64, 128, num_stages=3),
    Config(32, 64, 64, num_stages=4),
    Config(64, 32, 64, num_stages=3),
    Config(64, 32, 128, num_stages=3),
    Config(64, 64, 64, num_stages=3),
    Config(64, 64, 64, parts=2, num_stages=4),
    Config(128, 64, 64, parts=2, num_stages=3),
    Config(128, 128, 64, parts=4, num_warps=8, num_stages=4),
)


def candidates(kernel: Kernel, problem: Problem) -> Sequence[Config]:
    """What may be faster than what the lists have for a problem; not all need fit."""
    if kernel != "epilogue":
        return ()
    return _GATED if problem.gated else _PLAIN


@functools.lru_cache(4096)
def faster(kernel: Kernel, problem: Problem, target: Target, listed: Config) -> Config:
    """The fastest candidate, where the model is sure that it is faster than the listed one."""
    if not speaks_of(kernel, problem, target):
        return listed
    fitting = [each for each in candidates(kernel, problem) if fits(kernel, each, problem, target)]
    return surely_fastest(kernel, problem, target, listed, fitting)


def surely_fastest(
    kernel: Kernel,
    problem: Problem,
    target: Target,
    listed: Config,
    others: Sequence[Config],
    fitted: Mapping[Kernel, Factors] = FITTED,
) -> Config:
    """The other configuration with the shortest predicted time, or the listed one in doubt.

    Args:
        kernel: which.
        problem: one that the model speaks of.
        target: the GPU.
        listed: what is taken where nothing is known to be faster.
        others: that fit, too.
        fitted: what kernels reach.
    """
    times = {each: predicted(kernel, each, problem, target, fitted) for each in (listed, *others)}
    best = min(times, key=lambda each: times[each])
    return best if is_sure(kernel, times[listed] / times[best], fitted) else listed
