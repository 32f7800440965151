"""What a page shows of results.

Explanations and comparisons make their pages themselves. So a page knows them by what they have,
not by their classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.fx import GraphModule

from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.backend_rows import KernelCounts
from fusion_backend.instruments.claims import SiteLaunches
from fusion_backend.instruments.timelines import Launch


class Explained(Protocol):
    """What became of the MLPs of a model, as :class:`fusion_backend.Explanation` has it."""

    @property
    def sites(self) -> Sequence[Site]: ...

    @property
    def graphs(self) -> Sequence[tuple[GraphModule, GraphModule]]: ...

    @property
    def sites_by_graph(self) -> Sequence[Sequence[Site]]: ...

    @property
    def graph_breaks(self) -> Sequence[str]: ...

    @property
    def target(self) -> str | None: ...


class Compared(Protocol):
    """What was measured of a model, as :class:`fusion_backend.Comparison` has it."""

    @property
    def rows(self) -> Sequence[KernelCounts]: ...

    @property
    def device(self) -> str: ...

    @property
    def counted(self) -> str: ...

    @property
    def backward(self) -> bool: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def sites(self) -> Sequence[SiteLaunches]: ...

    @property
    def gradients(self) -> Mapping[str, int]: ...

    @property
    def timelines(self) -> Mapping[str, Sequence[Launch]]: ...

    @property
    def mlps(self) -> Sequence[Site]: ...
