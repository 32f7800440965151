"""The rewrite as a pass of Inductor, for those who keep ``backend="inductor"``.

torch._inductor.config.pre_grad_custom_pass = FusionPass()
torch.compile(model)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fusion_backend.compat import inductor, logs, triton_features
from fusion_backend.compat.passes import CustomGraphPass
from fusion_backend.fingerprint import source_hash
from fusion_backend.fusion import journal
from fusion_backend.fusion.forms import forms_of
from fusion_backend.fusion.fuse import fuse_in_place
from fusion_backend.fusion.nested_graphs import copy_graphs
from fusion_backend.fusion.sites import Site
from fusion_backend.operators import cpu_calls, gpu_calls
from fusion_backend.options import Options, own_options
from fusion_backend.planning import user_table


class FusionPass(CustomGraphPass):
    """Fuses the MLPs of a graph before Inductor differentiates and lowers it.

    Args:
        options: an :class:`Options`, or a mapping with keys such as ``"fusedmlp.policy"``; the rest
            is that of :meth:`Options.from_environment`.

    Attributes:
        options: those that are in force.
        sites: what was found in the graph of the last call.

    Raises:
        OptionError: an option is unknown or has a wrong value.
    """

    def __init__(self, options: Options | Mapping[str, Any] | None = None) -> None:
        self.options = own_options(options)
        self.sites: tuple[Site, ...] = ()

    def __call__(self, graph: Graph) -> None:
        owner = graph.owning_module
        graph_module = (
            owner if isinstance(owner, GraphModule) else GraphModule(torch.nn.Module(), graph)
        )
        before = copy_graphs(graph_module) if journal.shows_graphs() else graph_module
        with logs.timed("fusedmlp.fuse"):
            self.sites = fuse_in_place(graph_module, self.options).sites
        journal.record(before, graph_module, self.sites)
        gpu_calls.install_lowering()
        cpu_calls.install_lowering()
        triton_features.use_torchs_assembler()

    def uuid(self) -> Any:
        """Identifies the pass in Inductor's caches: all that its code depends on but the graph."""
        forms, owns = forms_of(self.options).tried, inductor.backward_owns_what_is_saved()
        identity = f"{source_hash()} {self.options} {forms} {user_table.content_hash()} {owns}"
        return hashlib.sha256(identity.encode()).digest()
