"""Which kernels run a legal site, and whether they are worth it. Never asks whether it is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

import torch

from fusion_backend import reasons
from fusion_backend.compat import triton_features
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.options import Options
from fusion_backend.planning import chain_profit, gains, profit, tower_profit
from fusion_backend.planning.gpus import kernel_target
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.verdict import Verdict
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
    return Plan(registry.REFERENCE.name, refusal.detail, refusal=refusal)


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
    if isinstance(choice, Plan) and choice.family in families:
        why = registry.named(choice.family).compile_ahead(setting)
        if why is not None:  # known only now: a kernel is compiled where it is wanted
            rest = tuple(family for family in families if family != choice.family)
            return _choice(setting, rest, options, outside, {choice.family: why})
    return choice


def _choice(
    setting: Setting,
    families: tuple[str, ...],
    options: Options,
    outside: str,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Plan | Refusal:
    """The plan by one of some families, or why there is none.

    ``failed``: why families that could run the site have no kernel for it.
    """
    if options.policy == "always" and (families or _is_worth_rewriting(setting)):
        if not families:
            return without_kernels(why_no_kernel(setting, failed) + _rest(outside))
        what = _what(families[0], setting, outside)
        return Plan(families[0], f"{what}; policy 'always' does not ask whether it is faster")
    if not families:
        return Refusal(reasons.NO_KERNEL, why_no_kernel(setting, failed))
    verdict = _verdict(families, setting, options)
    if verdict.family is None:
        training = "; gradients are recorded here, inference is planned by itself"
        return Refusal(reasons.NOT_FASTER, verdict.grounds + training * setting.training)
    what = _what(verdict.family, setting, outside)
    if setting.activated:  # nobody knows what else is made of the hidden value, nor how fast
        return Plan(verdict.family, f"{what}; for an MLP of these layers: {verdict.grounds}")
    return Plan(verdict.family, f"{what}; {verdict.grounds}", verdict.expected_speedup)


def plan_of_first_layers(setting: Setting, choice: Plan) -> Plan | None:
    """The plan of a site's first layers and activation, by that of the whole; ``None`` without.

    It is for a site whose last layer is the first one of another site that is fused. What a family
    saves with a library's last product, it saves without that product. There is no plan for
    families of other kernels, nor in training, where gradients of parts were not measured.

    Args:
        setting: of the part.
        choice: the plan of the whole site.
    """
    family = registry.named(choice.family)
    if setting.training or choice.refusal is not None or family.name not in available(setting):
        return None
    _, _, grounds = choice.detail.partition("; ")
    what = f"{family.first_layers}; its last layer is the first one of the next MLP"
    return Plan(family.name, f"{what}; for an MLP of these layers: {grounds}")


def plan_together(
    settings: Sequence[Setting], choices: Sequence[Plan | Refusal], options: Options
) -> Plan | None:
    """One plan for several MLPs of one input, or ``None`` where each is to have its own.

    Args:
        settings: of plain MLPs and chains without operands.
        choices: what was decided for each by itself; of a chain that is not formed, why.
        options: the policy decides whether profit counts.
    """
    family = _family_of_all(settings, choices)
    if family is None:
        return None
    if family.is_composed:
        return next(each for each in choices if isinstance(each, Plan))
    what = f"{family.towers}, {len(settings)} at once"
    if options.policy == "always":
        return Plan(family.name, f"{what}; policy 'always' does not ask whether it is faster")
    if settings[0].device.type == "cpu":
        return None
    verdict = tower_profit.best(settings, [isinstance(choice, Plan) for choice in choices])
    if verdict.family != family.name:
        return None
    return Plan(family.name, f"{what}; {verdict.grounds}", verdict.expected_speedup)


def _family_of_all(settings: Sequence[Setting], choices: Sequence[Plan | Refusal]) -> Family | None:
    """A family that runs several MLPs at once: where no kernels run any of them, ATen operators."""
    first, target = settings[0], kernel_target(settings[0].target)
    if all(isinstance(each, Plan) and each.refusal is not None for each in choices):
        return registry.REFERENCE
    if first.device.type == "cpu" and not _is_interpreted(first):
        return None
    if find_spec("triton") is None or not _runs_triton(first):
        return None
    for family in registry.of_towers():
        can_run = not family.is_composed and family.is_for(first.device.type)
        if can_run and family.why_not_together(settings, target) is None:
            return family
    return None


def _verdict(families: tuple[str, ...], setting: Setting, options: Options) -> Verdict:
    """Whether one of some families pays: of chains on GPUs there is a model of its own."""
    if setting.is_chain and setting.device.type != "cpu":
        return chain_profit.best(setting, options.measure)
    return profit.best(families, setting, options.tune, options.calibrate, may_time=options.measure)


def _is_worth_rewriting(setting: Setting) -> bool:
    """Whether a site that no kernels run here is rewritten; a chain only if a GPU's would run it.

    The links of another chain are sites themselves.
    """
    target, chains = kernel_target(setting.target), registry.of_chains()
    able = (f.launches_triton and f.why_not(setting, target) is None for f in chains)
    return not setting.is_chain or any(able)


def _what(name: str, setting: Setting, outside: str) -> str:
    family = registry.named(name)
    if setting.is_chain:
        return family.chains
    if setting.activated:
        return f"{family.first_layers}{_rest(outside)}"
    return (family.trained if setting.training else "") or family.mlps


def _rest(outside: str) -> str:
    """What becomes of the rest of a site that is fused in part."""
    return f"; the rest stays as it is, since {outside}" if outside else ""


def may_take_norm(choice: Plan) -> bool:
    """Whether a site on this plan can compute the norm before it."""
    return registry.named(choice.family).takes_norm()


def takes_norm(setting: Setting, saves_a_pass: bool, options: Options) -> bool:
    """Whether a site that can compute the norm before it is to do so.

    Args:
        setting: the circumstances of a site that :func:`may_take_norm`.
        saves_a_pass: whether without the norm there is one pass over the rows less.
        options: the policy decides whether profit counts.
    """
    if options.policy == "always":
        return True
    if setting.device.type == "cpu":
        return saves_a_pass
    return saves_a_pass and gains.gains_by_norm(setting, kernel_target(setting.target))


def may_take_steps(device_type: str) -> bool:
    """Whether a chain with more than activations between its layers may run on a type of device."""
    families = (family for family in registry.of_chains() if family.computes_steps)
    return any(family.is_for(device_type) for family in families)


def most_layers(device_type: str) -> float:
    """How many layers a chain may have on a type of device, for kernels to run it."""
    families = [family for family in registry.of_chains() if not family.is_composed]
    found = (family.most_layers for family in families if family.is_for(device_type))
    return max(found, default=0)


def may_take_residual(choice: Plan) -> bool:
    """Whether sites on this plan can add to their result, perhaps not all of them."""
    family = registry.named(choice.family)
    return family.adds_residual or family.is_composed


def takes_residual(setting: Setting, choice: Plan, options: Options) -> bool:
    """Whether a site that can add what follows to its result is to do so.

    Args:
        setting: the circumstances of a site.
        choice: its plan, on which it :func:`may_take_residual`.
        options: the policy decides whether profit counts.
    """
    gpu = kernel_target(setting.target)
    if not registry.named(choice.family).takes_residual(setting, gpu):
        return False
    if options.policy == "always" or choice.family != registry.EPILOGUE.name:
        return True
    return gains.gains_by_residual(setting.rows, setting.out_features, gpu)


def available(setting: Setting) -> Iterator[str]:
    """Families that can run a site, most fused first."""
    target = kernel_target(setting.target)
    no_triton = not _runs_triton(setting)
    for family in _offered(setting):
        if family.launches_triton and no_triton:
            continue
        can_run = family.why_not(setting, target) is None
        if can_run and family.untaken(setting.operands, setting.training) is None:
            yield family.name


def _offered(setting: Setting) -> list[Family]:
    """Families for the site's device and for as many rows, most fused first."""
    running = registry.of_chains() if setting.is_chain else registry.of_mlps()
    offered = [family for family in running if family.is_for(setting.device.type)]
    offered = [family for family in offered if not family.is_composed]
    if setting.device.type == "cpu":
        interpreted = _is_interpreted(setting)
        offered = [family for family in offered if family.launches_triton == interpreted]
    elif setting.target is None and find_spec("triton") is None:
        return []
    rows = setting.known_rows
    if rows is not None and rows > gains.MOST_OF_FEW_ROWS:
        return [family for family in offered if not family.few_rows]
    if rows is None:
        # They may be many: what is made for few is taken only where measurements speak for all.
        offered.sort(key=lambda family: (not family.launches_triton, family.few_rows))
    return offered


def _runs_triton(setting: Setting) -> bool:
    """Whether Triton compiles for the site's GPU, or runs on its CPU."""
    from fusion_backend.kernels.host.targets import here

    return (kernel_target(setting.target) or here()).runs_triton


def _is_interpreted(setting: Setting) -> bool:
    """Whether a site on a CPU runs Triton's kernels in the interpreter."""
    return triton_features.triton_is_interpreted() and setting.dtype in INTERPRETED_DTYPES


def why_no_kernel(setting: Setting, failed: Mapping[str, str]) -> str:
    """Why no family runs a site; ``failed``: why kernels of some could not be compiled."""
    by_triton = setting.device.type != "cpu" or _is_interpreted(setting)
    if by_triton:
        if find_spec("triton") is None:
            return "Triton is not installed"
        if not _runs_triton(setting):
            return "Triton compiles for GPUs of capability 8.0 and newer"
    if by_triton and not setting.is_chain:
        return f"no family reads all operands of {setting.activation} ({setting.kinds})"
    offered, target = _offered(setting), kernel_target(setting.target)
    reasons = (failed.get(each.name) or each.why_not(setting, target) for each in offered)
    return "; ".join(dict.fromkeys(filter(None, reasons))) or "no family runs it here"
