"""Whether a chain is run by one kernel. Never asks whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from fusion_backend.compat import inductor, triton_features
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.kernels.cpu_rows.support import WIDEST_CHAIN
from fusion_backend.kernels.registry import CHAIN, ROWS
from fusion_backend.options import Options
from fusion_backend.planning import chain_profit
from fusion_backend.planning.gpus import kernel_target
from fusion_backend.planning.planner import INTERPRETED_DTYPES, Plan, without_kernels
from fusion_backend.planning.profit import by_rates
from fusion_backend.planning.setting import Setting

_NOT_ASKED = "policy 'always' does not ask whether it is faster"


def plan_chain(
    setting: Setting, widths: Sequence[Any], activations: Sequence[str], options: Options
) -> Plan | None:
    """The plan of a chain, or ``None`` where its links are to be planned by themselves.

    Args:
        setting: the circumstances of a chain that is legal, as far as its links are.
        widths: of the input, and after each layer: ints, or ``torch.SymInt``.
        activations: after each layer but the last, as text.
        options: the policy decides whether profit counts.
    """
    if options.policy == "never" or not all(isinstance(width, int) for width in widths):
        return None
    if setting.device.type == "meta":
        return None
    if setting.device.type == "cpu" and not triton_features.triton_is_interpreted():
        by_rows = _by_rows(setting, widths, tuple(activations), options)
        if by_rows is not None:
            return by_rows
    if not can_chain(widths, setting.dtype, kernel_target(setting.target)):
        return None
    runs = _kernel_runs(setting)
    if options.policy == "always":
        if not runs:
            return without_kernels("chains run in Triton kernels, for which there is no device")
        return Plan(CHAIN.name, f"{CHAIN.chains}; {_NOT_ASKED}")
    if not runs or setting.training or setting.device.type == "cpu":
        return None
    verdict = chain_profit.measured(widths, setting)
    if verdict.family is None:
        return None
    return Plan(CHAIN.name, f"{CHAIN.chains}; {verdict.grounds}", verdict.expected_speedup)


def _by_rows(
    setting: Setting, widths: Sequence[int], activations: tuple[str, ...], options: Options
) -> Plan | None:
    """The plan of a chain on a CPU, where the C++ kernel runs it and is expected to pay."""
    if setting.training or max(widths) > WIDEST_CHAIN:
        return None
    choice = Plan(ROWS.name, f"{ROWS.chains}; {_NOT_ASKED}")
    if options.policy != "always":
        if not setting.rows_can_be_compared or inductor.weights_are_frozen():
            return None
        verdict = by_rates(setting, widths, False, activations, options.calibrate)
        if verdict.family is None:
            return None
        choice = Plan(ROWS.name, f"{ROWS.chains}; {verdict.grounds}", verdict.expected_speedup)
    return choice if ROWS.compile_ahead(setting, activations) is None else None


def _kernel_runs(setting: Setting) -> bool:
    if setting.device.type == "cpu":
        return triton_features.triton_is_interpreted() and setting.dtype in INTERPRETED_DTYPES
    return setting.target is not None or find_spec("triton") is not None
