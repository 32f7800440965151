"""Launch configurations of several chains of one input in one launch, its *towers*.

All towers are launched with as many warps and stages, and either keep their weights in shared
memory or do not. The sizes of its tiles each has for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusion_backend.kernels.chain.config import ChainProblem, fits, preferences
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.targets import Target

#: More towers make a kernel of more parameters, and more that differ one that compiles slowly.
MOST_TOWERS, MOST_DIFFERENT = 16, 8


class _Launch(NamedTuple):
    """What the towers of a launch have in common."""

    num_warps: int
    num_stages: int
    programs: int
    resident: bool


def chosen(problems: Sequence[ChainProblem], target: Target) -> tuple[Config, ...] | None:
    """A configuration for each tower, or ``None`` where no launch suits all of them.

    Each is as far up among the :func:`config.preferences` of its tower as the others allow.
    """
    if len(problems) > MOST_TOWERS or len(set(problems)) > MOST_DIFFERENT:
        return None
    ranked = [_by_launch(problem, target) for problem in problems]
    common = [launch for launch in ranked[0] if all(launch in each for each in ranked[1:])]
    if not common:
        return None
    best = min(common, key=lambda launch: sum(list(each).index(launch) for each in ranked))
    return tuple(each[best] for each in ranked)


def are_best_alone(
    configs: Sequence[Config], problems: Sequence[ChainProblem], target: Target
) -> bool:
    """Whether each tower would be launched by itself as it is together with the others."""
    return all(
        next(iter(_by_launch(problem, target).values())) == config
        for config, problem in zip(configs, problems, strict=True)
    )


def _by_launch(problem: ChainProblem, target: Target) -> dict[_Launch, Config]:
    """The best configuration for each launch that can run a chain, best first."""
    found: dict[_Launch, Config] = {}
    for config in preferences(problem, target):
        launch = _Launch(config.num_warps, config.num_stages, config.programs, config.resident)
        if launch not in found and fits(config, problem, target):
            found[launch] = config
    return found
