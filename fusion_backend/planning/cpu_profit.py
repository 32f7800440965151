"""Whether a family is expected to beat Inductor's own code for a site on this CPU.

Measurements of the very MLP decide, if the user made some. Else rates of products do that were
measured on the machine itself, and what ``cpu_model`` says of activations; oneDNN has a rule of its
own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fusion_backend.kernels import registry
from fusion_backend.planning import cpu_model, cpu_rates, frozen_rates
from fusion_backend.planning.cases import Case, is_described
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE, Widths
from fusion_backend.planning.onednn_profit import onednn_is_faster
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.user_table import UserTable, cell
from fusion_backend.planning.verdict import Verdict, by_times


def best(
    families: Sequence[str], setting: Setting, may_calibrate: bool, tuned: bool = True
) -> Verdict:
    """The family that pays on this CPU, if one does.

    Args:
        families: those that can run the site, at least one.
        setting: the site's circumstances, of known widths and rows that can be compared.
        may_calibrate: whether what was measured on this machine decides, and its rates are measured
            if they are unknown.
        tuned: whether what ``fusedmlp tune`` measured counts.
    """
    assert setting.widths is not None
    if all(registry.named(family).launches_triton for family in families):
        return Verdict(None, "the interpreter runs kernels to check them, not to be fast")
    if setting.frozen:  # oneDNN would read weights as they are
        families = [family for family in families if family == registry.ROWS.name]
    if not families:
        return Verdict(None, "with frozen weights Inductor packs them for oneDNN itself")
    if setting.convolution:
        return Verdict(None, "1×1 convolutions were not measured on CPUs")
    if may_calibrate and tuned and not setting.frozen:
        times = _measured(families, setting)
        if times is not None:
            return by_times(times)
    verdict = Verdict(None, f"nothing says how fast {' and '.join(families)} would be here")
    if registry.ROWS.name in families:
        verdict = _by_rates(setting, may_calibrate, tuned)
        if verdict.family is not None or registry.ONEDNN.name not in families:
            return verdict
    if registry.ONEDNN.name in families:
        by_onednn = _by_onednn(setting, setting.widths)
        return by_onednn if by_onednn.family or registry.ROWS.name not in families else verdict
    return verdict


def _measured(families: Sequence[str], setting: Setting) -> dict[str, float] | None:
    """Microseconds of the very MLP by Inductor and by families that can run it, if it was measured.

    Of a step whose sums of gradients take too much memory, times do not count.
    """
    rows = setting.known_rows
    if rows is None or not is_described(setting):
        return None
    if setting.training and not _sums_are_small(setting, rows):
        return None
    table = UserTable.of_cpu(torch.get_num_threads())
    times = table.mlps().get(cell(Case.of_setting(setting, rows).row()))
    if times is None:
        return None
    return {name: us for name, us in times.items() if name in {INDUCTOR, *families}}


def _sums_are_small(setting: Setting, rows: int) -> bool:
    assert setting.layer_widths is not None
    sizes = (rows, setting.layer_widths, setting.gated)
    return cpu_model.sums_are_small(*sizes, torch.get_num_threads())


def _by_onednn(setting: Setting, widths: Widths) -> Verdict:
    if not setting.plain_layout:
        return Verdict(None, "oneDNN would copy weights that are not contiguous")
    if onednn_is_faster(setting.rows, *widths, setting.gated, setting.dtype, setting.activation):
        return Verdict(registry.ONEDNN.name, "measured to be faster than Inductor on CPUs")
    return Verdict(None, "oneDNN was not measured to be faster at this size on such a CPU")


# Rows at which a verdict on symbolic rows is asked for; it holds up to the next.
_ROWS = (1, 16, 128, 1024, 8192)


def _by_rates(setting: Setting, may_calibrate: bool, tuned: bool) -> Verdict:
    """Whether the family ``rows`` is expected to be faster than Inductor on this CPU.

    Args:
        setting: of known widths; rows that are symbolic get a guard where the verdict depends on
            them.
        may_calibrate: whether to measure the rates, if they are not known.
        tuned: whether those that ``fusedmlp tune`` measured count.
    """
    if setting.frozen:
        rates = frozen_rates.rates(setting.dtype, may_calibrate)
    else:
        rates = cpu_rates.rates(setting.dtype, may_calibrate, setting.training, tuned)
    if rates is None:
        return Verdict(None, "nothing says how fast oneDNN multiplies frozen weights here")
    threads, gated, widths = torch.get_num_threads(), setting.gated, setting.layer_widths
    assert widths is not None
    products = len(widths) - 1 + (gated and not setting.packed)

    def verdict_on(rows: int) -> Verdict:
        arguments = (rows, widths, gated, setting.texts, threads, setting.training)
        if setting.training and not _sums_are_small(setting, rows):
            return Verdict(None, "the sums of its gradients would take more memory than they save")
        calls = (rows, widths, products, setting.has_bias_up)
        if not setting.training and cpu_model.saves_no_time_of_calls(*calls):
            return Verdict(None, "it is so small that the call takes longer than what it computes")
        return _rated(cpu_model.speedup(registry.ROWS.name, rates, *arguments) or 0.0, rates.source)

    if setting.known_rows is not None:
        return verdict_on(setting.known_rows)
    verdicts = [(bound, verdict_on(bound)) for bound in _ROWS]
    for (_, verdict), (bound, following) in itertools.pairwise(verdicts):
        if verdict.family != following.family and setting.rows < bound:
            return verdict
    return verdicts[-1][1]


def _rated(speedup: float, source: str) -> Verdict:
    grounds = f"expected to be {speedup:.2f} times as fast as Inductor by rates {source}"
    family = registry.ROWS.name if speedup >= WORTHWHILE else None
    return Verdict(family, grounds, speedup)
