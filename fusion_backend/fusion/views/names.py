"""What a node is called in the model that the graph was captured from."""

from __future__ import annotations

import re

from torch.fx import Node

from fusion_backend.compat.dynamo import source_of

# Dynamo names a module by the Python expression that reaches it: L['self'].h.0.mlp.c_fc,
# G['model'].h.0 for a global, L['forward'].__self__.h.0 for a bound method.
_ROOT = re.compile(r"^[LG]\[[^\]]*\](\[[^\]]*\])*(\.__self__)?")
# It says how it got there: where a module looks its parts up by itself, as PEFT's does, that is
# L['self'].__dict__['_modules']['base_model'], and for parameters ._parameters['weight'].
_KINDS = "_(?:modules|parameters|buffers)"
_HOLDERS = re.compile(rf"\.__dict__\['{_KINDS}'\]|\.{_KINDS}\b")
# Dynamo spells the input self.mlp.fc.weight l_self_modules_mlp_modules_fc_parameters_weight_
_LEVELS = re.compile("_modules_|_parameters_|_buffers_")
_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')
# What calls a layer there is no line of the user's.
_NOT_THE_USERS = re.compile(r"[/\\](torch[/\\](nn|_dynamo|export|fx)|fusion_backend)[/\\]")


def parameter_path(node: Node) -> str:
    """A parameter or buffer as the model calls it; the name of any other node."""
    source = source_of(node)
    if source is not None and _HOLDERS.search(source):
        return ".".join(_levels(source))
    root, *levels = _LEVELS.split(node.name)
    return ".".join(levels).rstrip("_") or root


def module_stack(node: Node) -> list[str]:
    """Names of the modules from the model down to the one whose forward makes the call."""
    stack = node.meta.get("nn_module_stack") or {}
    return _levels(str(list(stack.values())[-1][0])) if stack else []


def _levels(expression: str) -> list[str]:
    """The names in an expression of Dynamo's, such as ``L['self']._modules['h'].0.mlp``."""
    path = _HOLDERS.sub("", _ROOT.sub("", expression))
    return [name for name in re.split(r"\.|\['|'\]", path) if name]


def source_line(node: Node) -> str:
    """Where the model makes a call: ``/path/of/model.py:12``; empty where that is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame[0])]
    return ":".join(own[-1]) if own else ""
