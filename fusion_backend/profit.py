"""Whether some family of kernels is expected to beat Inductor's own code for a site.

Nothing is believed that was not measured: on GPUs by the tables that ship with the package, on CPUs
by the rule of ``onednn``. Where nothing was measured, nothing is fused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_backend import compat
from fusion_backend.measurements import WORTHWHILE, Kind, Measurement, table_for
from fusion_backend.onednn import onednn_is_faster
from fusion_backend.setting import Setting


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
    measured, family = _range_of(setting, [(m, _fastest(families, m)) for m in column])
    speedup = measured.speedup(family or _tried(families, measured))
    size = f"{measured.rows}×{measured.width}→{measured.hidden}→{measured.width}"
    said = "not run" if speedup is None else f"{speedup:.2f} times as fast as Inductor"
    return Verdict(family, f"{said} on an {table.gpu} at {size}")


def _form(setting: Setting) -> str:
    if setting.gated:
        return "swiglu"
    return "gelu" if "gelu(" in setting.activation or "erf(" in setting.activation else "gelu_tanh"


def _precision(dtype: torch.dtype) -> str:
    """The arithmetic of a product: the halves run alike, float32 as torch is set to run it."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


def _fastest(families: Sequence[str], measured: Measurement) -> str | None:
    """The fastest family for a measured MLP, if it was faster than Inductor by more than noise."""
    speedups = {family: measured.speedup(family) or 0.0 for family in families}
    family = max(speedups, key=speedups.__getitem__)
    return family if speedups[family] >= WORTHWHILE else None


def _tried(families: Sequence[str], measured: Measurement) -> str:
    return max(families, key=lambda family: measured.speedup(family) or 0.0)


def _range_of(
    setting: Setting, column: list[tuple[Measurement, str | None]]
) -> tuple[Measurement, str | None]:
    """The measurement that speaks for the site's rows, and the family that it chose.

    A measured row count speaks for those nearest to it in proportion. Where the site's rows are
    symbolic, each comparison becomes a guard of the compiled code, so rows are compared only with
    the bounds at which the family changes.
    """
    for (measured, family), (above, following) in itertools.pairwise(column):
        matters = family != following or setting.known_rows is not None
        if matters and setting.rows <= math.isqrt(measured.rows * above.rows):
            return measured, family
    return column[-1]
