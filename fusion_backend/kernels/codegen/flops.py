"""How many floating-point operations a launch of a Triton kernel is: those of its products.

The partitioner of ahead-of-time autograd looks formulas up by the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch.utils.flop_counter import flop_registry, register_flop_formula


def register(kernel: Any) -> None:
    """Register the formula for a kernel; the interpreter's stand-ins have none."""
    if isinstance(kernel, triton.JITFunction) and kernel not in flop_registry:
        register_flop_formula(kernel, get_raw=True)(_of_launch)


def _of_launch(*args: Any, out_val: Any = None, **launch: Any) -> int:
    return flops_of_arguments(launch["kwargs"])


def flops_of_arguments(given: Mapping[str, Any]) -> int:
    """The floating-point operations of a kernel, by the names of its arguments.

    A kernel multiplies its rows by each weight. One that is given x and the gradient of the result
    computes the first layers again, and two gradients of every layer; of one that stores the
    gradient of the pre-activations, those of weights are products of others.
    """
    weights = {name: value for name, value in given.items() if name.startswith("weight")}
    counts = {name: value.numel() for name, value in weights.items() if value is not None}
    rows = next(given[name] for name in ("x", "grad_output", "hidden") if name in given)
    total = sum(counts.values())
    if "x" in given and "grad_output" in given:
        total = (2 if "grad_preact" in given else 3) * total - counts["weight_down"]
    return 2 * int(rows.shape[0]) * int(total)
