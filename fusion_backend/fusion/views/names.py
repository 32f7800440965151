"""What a node is called in the model that the graph was captured from."""

from __future__ import annotations

import re

from torch.fx import Node

# Dynamo names a module by the Python expression that reaches it: L['self'].h.0.mlp.c_fc,
# G['model'].h.0 for a global, L['forward'].__self__.h.0 for a bound method.
_ROOT = re.compile(r"^[LG]\[[^\]]*\](\[[^\]]*\])*(\.__self__)?")
# Dynamo spells the input self.mlp.fc.weight l_self_modules_mlp_modules_fc_parameters_weight_
_LEVELS = re.compile("_modules_|_parameters_|_buffers_")


def parameter_path(node: Node) -> str:
    """A parameter or buffer as the model calls it; the name of any other node."""
    root, *levels = _LEVELS.split(node.name)
    return ".".join(levels).rstrip("_") or root


def module_stack(node: Node) -> list[str]:
    """Names of the modules from the model down to the one whose forward makes the call."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return []
    path = list(stack.values())[-1][0]
    path = _ROOT.sub("", str(path)).replace("._modules", "").lstrip(".")
    return [name for name in re.split(r"\.|\['|'\]", path) if name]
