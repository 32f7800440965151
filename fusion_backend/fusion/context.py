"""What all sites of a graph have in common on their way through the pass."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch.fx import Graph, Node

from fusion_backend.fusion.failures import Failures
from fusion_backend.fusion.forms import Forms
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.settings import setting_of
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.options import Options
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.planner import may_take_steps, most_layers
from fusion_backend.planning.setting import Setting


class PassContext(NamedTuple):
    """What all sites of a graph have in common."""

    graph: Graph
    dependence: Dependence
    options: Options
    target: Gpu | None
    failures: Failures
    forms: Forms

    def setting(self, match: Match) -> Setting:
        """What the planner is told of a site."""
        return setting_of(match, self.target)

    def takes_steps(self, node: Node) -> bool:
        """Whether a chain that computes a node may have more than activations between layers."""
        return may_take_steps(self._runs_on(node))

    def most_layers(self, node: Node) -> float:
        """How many layers kernels run of a chain that computes a node."""
        return most_layers(self._runs_on(node))

    def _runs_on(self, node: Node) -> str:
        result = tensor_of(node)
        return "cuda" if self.target is not None or result is None else result.device.type

    def without_measuring(self) -> PassContext:
        """The same, but for sites that are not worth the time."""
        return self._replace(options=replace(self.options, measure=False))
