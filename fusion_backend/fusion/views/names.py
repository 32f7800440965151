"""What a node is called in the model that the graph was captured from."""

from __future__ import annotations

import re

from torch.fx import Node

# Dynamo spells the input self.mlp.fc.weight l_self_modules_mlp_modules_fc_parameters_weight_
_LEVELS = re.compile("_modules_|_parameters_|_buffers_")


def parameter_path(node: Node) -> str:
    """A parameter or buffer as the model calls it; the name of any other node."""
    root, *levels = _LEVELS.split(node.name)
    return ".".join(levels).rstrip("_") or root
