"""Whether some family of kernels is expected to beat Inductor's own code for a site.

Nothing is believed that was not measured: on GPUs by the tables that ship with the package, on CPUs
by the rule of ``onednn``. Where nothing was measured, nothing is fused.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_backend import compat
from fusion_backend.measurements import WORTHWHILE, Kind, Measurement, table_for
from fusion_backend.onednn import onednn_is_faster
from fusion_backend.setting import Setting

# Symbolic rows are told apart at these bounds, and by no more of them than needed.
_ROW_BOUNDS = (64, 1024)
_NOISE = 0.98


@dataclass(frozen=True)
class Verdict:
    """The family that pays, if one does, and on what grounds: the end of a sentence."""

    family: str | None
    grounds: str


def best(families: Sequence[str], setting: Setting) -> Verdict:
    """The fastest of the families that can run a site, if it beats Inductor's default mode."""
    if setting.widths is None or not setting.rows_can_be_compared:
        return Verdict(None, "its sizes are not known before the run")
    if setting.device.type == "cpu":
        return _on_cpu(families, setting, setting.widths)
    return _on_gpu(families, setting, setting.widths)


def _on_cpu(families: Sequence[str], setting: Setting, widths: tuple[int, int, int]) -> Verdict:
    if "onednn" not in families:
        return Verdict(None, "the interpreter runs kernels to check them, not to be fast")
    if compat.weights_are_frozen():
        return Verdict(None, "with frozen weights Inductor packs them for oneDNN itself")
    if not setting.plain_layout:
        return Verdict(None, "oneDNN would copy weights that are not contiguous")
    if onednn_is_faster(setting.rows, *widths, setting.gated, setting.dtype, setting.activation):
        return Verdict("onednn", "measured to be faster than Inductor on CPUs")
    return Verdict(None, "oneDNN was not measured to be faster at this size")


def _on_gpu(families: Sequence[str], setting: Setting, widths: tuple[int, int, int]) -> Verdict:
    table = table_for(torch.cuda.get_device_capability(setting.device))
    if table is None:
        return Verdict(None, "nothing was measured on this kind of GPU")
    kind = Kind(_form(setting), setting.training, _precision(setting.dtype))
    column = table.column(kind, widths)
    if not column:
        return Verdict(None, f"nothing of these widths was measured on an {table.gpu}")
    if setting.known_rows is None:
        members = _class_of(families, setting, column)
    else:
        members = [_nearest(setting.known_rows, column)]
    if not members:
        return Verdict(None, f"nothing of so many rows was measured on an {table.gpu}")
    family = _fastest(families, members)
    tried = family or max(families, key=lambda family: _speedup(family, members))
    rows = " to ".join(dict.fromkeys(str(m.rows) for m in (*members[:1], *members[-1:])))
    said = f"{_speedup(tried, members):.2f} times as fast as Inductor on an {table.gpu}"
    what = ", forward and backward" if setting.training else ""
    return Verdict(family, f"{said} at {rows} rows of {_widths(column[0])}{what}")


def _widths(measured: Measurement) -> str:
    return f"{measured.width}→{measured.hidden}→{measured.width}"


def _form(setting: Setting) -> str:
    if setting.gated:
        return "swiglu"
    return "gelu" if "gelu(" in setting.activation or "erf(" in setting.activation else "gelu_tanh"


def _precision(dtype: torch.dtype) -> str:
    """The arithmetic of a product: the halves run alike, float32 as torch is set to run it."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


def _fastest(families: Sequence[str], members: Sequence[Measurement]) -> str | None:
    """The fastest family over some measured MLPs: faster than Inductor, and nowhere slower."""
    speedups = {family: _speedup(family, members) for family in families}
    family = max(speedups, key=speedups.__getitem__)
    nowhere_slower = all((m.speedup(family) or 0.0) >= _NOISE for m in members)
    return family if speedups[family] >= WORTHWHILE and nowhere_slower else None


def _speedup(family: str, members: Sequence[Measurement]) -> float:
    """Geometric mean over measured MLPs; 0 where the family did not run one of them."""
    speedups = [measured.speedup(family) or 0.0 for measured in members]
    return math.prod(speedups) ** (1 / len(speedups)) if speedups else 0.0


def _nearest(rows: int, column: Sequence[Measurement]) -> Measurement:
    """The measurement whose number of rows is nearest in proportion."""
    return min(column, key=lambda measured: abs(math.log(max(rows, 1) / measured.rows)))


def _class_of(
    families: Sequence[str], setting: Setting, column: Sequence[Measurement]
) -> Sequence[Measurement]:
    """The measurements that speak for a symbolic number of rows.

    Rows are compared only with those bounds at which the fastest family changes, because each
    comparison becomes a guard, and each side of it compiled code of its own.
    """
    classes, lower = [], 0
    for upper in (*_ROW_BOUNDS, sys.maxsize):
        classes.append((upper, [m for m in column if lower < m.rows <= upper]))
        lower = upper
    for (upper, members), (_, following) in itertools.pairwise(classes):
        changes = _fastest(families, members) != _fastest(families, following)
        if changes and setting.rows <= upper:
            return members
    return classes[-1][1]
