"""What a node is called in the model that the graph was captured from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

# Dynamo names a module by the Python expression that reaches it: L['self'].h.0.mlp.c_fc,
# G['model'].h.0 for a global, L['forward'].__self__.h.0 for a bound method.
_ROOT = re.compile(r"^[LG]\[[^\]]*\](\[[^\]]*\])*(\.__self__)?")
# Dynamo spells the input self.mlp.fc.weight l_self_modules_mlp_modules_fc_parameters_weight_
_LEVELS = re.compile("_modules_|_parameters_|_buffers_")

# A line of a traceback.
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_OF_TORCH = str(Path(torch.__file__).parent)


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


def source_line(first: Node, last: Node | None = None) -> str:
    """The line of the program, outside of PyTorch, that makes a call: ``path/model.py:12``.

    Of two calls it is the line of the innermost function that makes both, where it makes the first.
    Empty where the graph does not tell, as after ``torch.fx.symbolic_trace``.
    """
    frames = _frames(first)
    if last is not None:
        others = _frames(last)
        pairs = zip(frames, others, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(others))
        inside = same < len(frames) and same < len(others) and frames[same][0] == others[same][0]
        frames = frames[: same + inside]
    return ":".join(frames[-1]) if frames else ""


def _frames(node: Node) -> list[tuple[str, str]]:
    """Files and lines of the program that call a node, the outermost first."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    return [frame for frame in frames if not frame[0].startswith(_OF_TORCH)]
