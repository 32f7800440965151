"""Which kernels run a legal site, and whether they are worth it. Never asks whether it is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from fusion_backend import reasons
from fusion_backend.compat import inductor, triton_features
from fusion_backend.kernels import onednn
from fusion_backend.kernels.library import library_supports
from fusion_backend.operators.dispatch import plan_takes
from fusion_backend.options import Options
from fusion_backend.planning import profit
from fusion_backend.planning.gpus import kernel_target
from fusion_backend.planning.setting import Setting
from fusion_backend.reasons import Refusal

INTERPRETED_DTYPES = (torch.float32, torch.float16)


@dataclass(frozen=True)
class Plan:
    """A family of kernels, and in one sentence why it was chosen.

    ``refusal`` says of the plan ``reference`` why no family of kernels runs the site.
    """

    family: str
    detail: str
    expected_speedup: float | None = None
    refusal: Refusal | None = None


def without_kernels(why: str) -> Plan:
    """The plan of a site that no kernels run, under policy ``always``: the rewrite by itself."""
    into = "policy 'always' rewrites it into ATen operators, which Inductor compiles"
    refusal = Refusal(reasons.NO_KERNEL, f"{why}; {into}")
    return Plan("reference", refusal.detail, refusal=refusal)


def plan(setting: Setting, options: Options, outside: str = "") -> Plan | Refusal:
    """The plan of a legal site, or why none is taken.

    Args:
        setting: the circumstances of the site, or of the part of it that may be fused.
        options: the policy decides whether profit counts.
        outside: why the rest of a site that is fused in part stays as it is.
    """
    if options.policy == "never":
        return Refusal(reasons.POLICY)
    if setting.device.type == "meta":
        return Refusal(reasons.DEVICE, "meta, where nothing runs")
    families = tuple(available(setting))
    choice = _choice(setting, families, options, outside)
    if isinstance(choice, Plan) and choice.family == "rows":
        why = why_not_rows(setting, (setting.activation,))
        if why is not None:  # known only now: a kernel is compiled where it is wanted
            rest = tuple(family for family in families if family != "rows")
            return _choice(setting, rest, options, outside, why)
    return choice


def _choice(
    setting: Setting,
    families: tuple[str, ...],
    options: Options,
    outside: str,
    without_rows: str | None = None,
) -> Plan | Refusal:
    """The plan by one of some families, or why there is none."""
    if options.policy == "always":
        if not families:
            return without_kernels(_why_no_kernel(setting, without_rows) + _rest(outside))
        what = _what(families[0], setting, outside)
        return Plan(families[0], f"{what}; policy 'always' does not ask whether it is faster")
    if not families:
        return Refusal(reasons.NO_KERNEL, _why_no_kernel(setting, without_rows))
    verdict = profit.best(families, setting, options.tune, options.calibrate)
    if verdict.family is None:
        training = "; gradients are recorded here, inference is planned by itself"
        return Refusal(reasons.NOT_FASTER, verdict.grounds + training * setting.training)
    what = _what(verdict.family, setting, outside)
    if setting.activated:  # nobody knows what else is made of the hidden value, nor how fast
        return Plan(verdict.family, f"{what}; for an MLP of these layers: {verdict.grounds}")
    return Plan(verdict.family, f"{what}; {verdict.grounds}", verdict.expected_speedup)


_WHAT = {
    "back_to_back": "one Triton kernel, the hidden activation stays on the chip",
    "stream": "two Triton kernels that read each weight once, at the speed of memory",
    "epilogue": "first product and activation in one Triton kernel, then the second product",
    "library": "cuBLASLt applies the activation in its own epilogue, then the second product",
    "rows": "one C++ kernel, the hidden activation stays in the cache of a core",
    "onednn": "oneDNN applies the activation within its products",
}


def _what(family: str, setting: Setting, outside: str) -> str:
    if family == "rows" and setting.training:
        return "two C++ kernels, forward and backward: hidden values stay in the cache of a core"
    if not setting.activated:
        return _WHAT[family]
    return f"first product and activation in one Triton kernel{_rest(outside)}"


def _rest(outside: str) -> str:
    """What becomes of the rest of a site that is fused in part."""
    return f"; the rest stays as it is, since {outside}" if outside else ""


def takes_norm(setting: Setting, saves_a_pass: bool, options: Options) -> bool:
    """Whether a site that can compute the norm before it is to do so.

    Args:
        setting: the circumstances of a site whose family can compute a norm.
        saves_a_pass: whether without the norm there is one pass over the rows less.
        options: the policy decides whether profit counts.
    """
    if options.policy == "always":
        return True
    if setting.device.type == "cpu":
        return saves_a_pass
    from fusion_backend.kernels.support import gains_by_norm

    assert setting.widths is not None  # or no kernel would have been planned
    sizes = (setting.rows, *setting.widths, setting.gated, setting.dtype)
    return saves_a_pass and gains_by_norm(*sizes, kernel_target(setting.target))


def takes_residual(setting: Setting, choice: Plan, options: Options) -> bool:
    """Whether a site that can add what follows to its result is to do so.

    Args:
        setting: the circumstances of a site whose family can add to the result.
        choice: its plan.
        options: the policy decides whether profit counts.
    """
    if choice.family != "epilogue":
        return True
    from fusion_backend.kernels.support import can_add_residual, gains_by_residual

    assert setting.widths is not None  # or no kernel would have been planned
    _, hidden_features, out_features = setting.widths
    gpu = kernel_target(setting.target)
    if setting.training or not can_add_residual(hidden_features, out_features, setting.dtype, gpu):
        return False
    return options.policy == "always" or gains_by_residual(setting.rows, out_features, gpu)


def available(setting: Setting) -> Iterator[str]:
    """Families that can run a site, most fused first."""
    for family in _families(setting):
        if plan_takes(family, setting.operands, setting.training):
            yield family


def _families(setting: Setting) -> Iterator[str]:
    """Families that can run a site if they can read its operands."""
    by_library = not setting.training and not setting.activated
    if setting.device.type == "cpu":
        if triton_features.triton_is_interpreted() and setting.dtype in INTERPRETED_DTYPES:
            yield from _triton_families(setting)
        elif not setting.activated:
            if cannot_run_rows(setting, (setting.activation,)) is None:
                yield "rows"
            if by_library and onednn.onednn_supports(setting.activation, setting.dtype):
                yield "onednn"
    elif setting.target is not None or find_spec("triton") is not None:
        yield from _triton_families(setting)
        if by_library and _library_runs(setting):
            yield "library"


def why_not_rows(setting: Setting, activations: tuple[str, ...]) -> str | None:
    """Why the C++ kernel of a site cannot be had; ``None`` where it can: it is then compiled."""
    cannot = cannot_run_rows(setting, activations)
    if cannot is not None:
        return cannot
    from fusion_backend.kernels.cpu_rows import support

    of_kernels = (setting.dtype, activations, setting.gated, setting.operands)
    return support.why_not_compiled(*of_kernels, training=setting.training)


def cannot_run_rows(setting: Setting, activations: tuple[str, ...]) -> str | None:
    """Why the family ``rows`` is not for a site, as far as is known without compiling."""
    if inductor.compiles_to_cpp():
        return "code that AOTInductor generates cannot call the CPU's kernels"
    from fusion_backend.kernels.cpu_rows import support

    cannot = support.why_not(setting.dtype, activations)
    if cannot is None and setting.training:
        return support.why_no_gradients(setting.activation, setting.gated)
    return cannot


def _library_runs(setting: Setting) -> bool:
    return setting.gpu.backend == "cuda" and library_supports(
        setting.activation,
        setting.dtype,
        device_type=setting.device.type,
        has_bias_up=setting.has_bias_up,
        rows=setting.known_rows,
        in_features=setting.in_features,
        hidden_features=setting.hidden_features,
    )


def _triton_families(setting: Setting) -> Iterator[str]:
    from fusion_backend.kernels.support import can_back_to_back, can_recompute, can_stream

    if setting.activated:
        yield "epilogue"
        return
    widths, target = setting.widths, kernel_target(setting.target)
    narrow = widths is not None and can_back_to_back(*widths, setting.gated, setting.dtype, target)
    recomputes = widths is not None and can_recompute(
        *widths, setting.gated, setting.dtype, setting.operands
    )
    if narrow and (recomputes or not setting.training):
        yield "back_to_back"
    rows = setting.known_rows
    streams = rows is not None and can_stream(rows, setting.dtype)
    if streams and not setting.training:
        yield "stream"
    yield "epilogue"
    # Symbolic rows may be many. Only where measurements speak for all of a class is it taken.
    if rows is None and can_stream(1, setting.dtype) and not setting.training:
        yield "stream"


def _why_no_kernel(setting: Setting, without_rows: str | None = None) -> str:
    """Why no family runs a site; ``without_rows``: why its C++ kernel could not be compiled."""
    if setting.device.type != "cpu":
        if find_spec("triton") is None:
            return "Triton is not installed"
        return f"no family reads all operands of {setting.activation} ({_kinds(setting)})"
    if setting.activated:
        return "on the CPU whole MLPs are fused only, and this is one without its last layer"
    without_rows = without_rows or cannot_run_rows(setting, (setting.activation,))
    if without_rows is None:
        return "no family runs it on the CPU"
    if setting.training:
        return f"{without_rows}; oneDNN runs inference only, and gradients are recorded here"
    if setting.operands:
        return f"{without_rows}; oneDNN reads no operands ({_kinds(setting)})"
    without_onednn = onednn.why_not(setting.activation, setting.dtype)
    return "; ".join(filter(None, (without_rows, without_onednn)))


def _kinds(setting: Setting) -> str:
    return ", ".join(sorted(set(setting.operands)))
