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
# Code that torch.fx wrote reaches a part with a number for a name by getattr(…, '0').
_GETATTR = re.compile(r"^getattr\((.+), '([^']*)'\)(.*)$")
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
    while (found := _GETATTR.match(expression)) is not None:  # the outermost comes first
        inner, name, rest = found.groups()
        expression = f"{inner}.{name}{rest}"
    path = _HOLDERS.sub("", _ROOT.sub("", expression))
    return [name for name in re.split(r"\.|\['|'\]", path) if name]


def source_line(node: Node, module: str) -> str:
    """Where a module calls one of its layers: ``/path/of/model.py:12``; empty where not known.

    A layer that is a module of the user's own has a line of its own, within that one.

    Args:
        node: the layer.
        module: path of the module that calls it.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame[0])]
    stack = (node.meta.get("nn_module_stack") or {}).values()
    depth = len(module.split(".")) if module else 0
    inside = [kind for path, kind, *_ in stack if len(_levels(str(path))) > depth]
    further = sum(not _module_of(kind).startswith("torch.nn") for kind in inside)
    kept = own[: max(len(own) - further, 1)]
    return ":".join(kept[-1]) if kept else ""


def _module_of(kind: object) -> str:
    """The module that defines a class, which torch.export gives as text."""
    return kind if isinstance(kind, str) else getattr(kind, "__module__", "")
