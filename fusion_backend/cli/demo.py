"""`fusedmlp demo`: real, unmodified models, fused and measured on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import platform
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch

import fusion_backend
from fusion_backend import reasons
from fusion_backend.cli import one_line
from fusion_backend.cli.loading import choose_device
from fusion_backend.cli.models import ModelCase, cpu_cases, gpu_cases
from fusion_backend.cli.progress import step
from fusion_backend.errors import CommandError
from fusion_backend.fusion.sites import Site, by_call
from fusion_backend.instruments.comparison import Comparison
from fusion_backend.instruments.explanation import Explanation
from fusion_backend.instruments.report import WIDTH, ratio_text, table
from fusion_backend.kernels import registry
from fusion_backend.kernels.back_to_back.compiled import compile_for_h100
from fusion_backend.options import nearest
from fusion_backend.patterns import FORMS
from fusion_backend.patterns.form import Projection

STEPS = 10
#: Longer graphs (in nodes) are shown as the difference that the rewrite makes.
LONGEST_GRAPH = 50


@dataclass(frozen=True)
class Outcome:
    """What one model showed."""

    case: ModelCase
    explanation: Explanation
    comparison: Comparison


def run(arguments: argparse.Namespace) -> int:
    """Go through the models; 1 if one of them failed."""
    device = choose_device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = chosen_cases(device, arguments.model)
    say = print if not arguments.json else lambda *_: None
    say(f"fusedmlp {fusion_backend.__version__}, PyTorch {torch.__version__}, {machine(device)}")
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    failures = 0
    for case in cases:
        say(f"\n\n{heading(case, device, dtype)}")
        try:
            outcome = examine(case, device, dtype)
        except Exception as error:
            if arguments.traceback:
                raise
            print(f"fusedmlp: error: {case.name}: {one_line(error)}", file=sys.stderr)
            failures += 1
            continue
        say(report(outcome, with_graph=not any(o.explanation.fused for o in outcomes)))
        outcomes.append(outcome)
    if device.type == "cpu" and outcomes and not arguments.json:
        say(f"\n\n{on_an_h100([outcome.case for outcome in outcomes])}")
    say(f"\n\n{summary(outcomes)}\n\n{gain(outcomes)}")
    say(f"\n{time.perf_counter() - start:.0f} s in all")
    if arguments.json:
        print(json.dumps([as_data(outcome) for outcome in outcomes], indent=2, ensure_ascii=False))
    return int(failures > 0)


def chosen_cases(device: torch.device, names: Sequence[str] | None) -> list[ModelCase]:
    """The models that were asked for by name (default: all) and whose library is installed.

    Raises:
        CommandError: no model has such a name.
    """
    known = gpu_cases() if device.type == "cuda" else cpu_cases()
    cases = [
        case
        for case in known
        if not names or any(name.lower() in case.name.lower() for name in names)
    ]
    if not cases:
        all_ = [case.name for case in known]
        got = ", ".join(f"{name!r}{nearest(name, all_)}" for name in names or ())
        raise CommandError(f"--model must be part of one of {', '.join(all_)}, got {got}")
    if importlib.util.find_spec("transformers") is None:
        left = [case.name for case in cases if case.needs_transformers]
        if left:
            print(
                f"Without transformers, {', '.join(left)} are left out: pip install transformers",
                file=sys.stderr,
            )
        cases = [case for case in cases if not case.needs_transformers]
        if not cases:
            raise CommandError("all models that --model names need transformers")
    return cases


def examine(case: ModelCase, device: torch.device, dtype: torch.dtype) -> Outcome:
    """Explain and profile one model."""
    model, inputs = built(case, device, dtype)
    with torch.set_grad_enabled(case.training):
        with step(f"  {case.name}: looking for MLPs"):
            explanation = fusion_backend.explain(model, options=case.options, **inputs)
        with step(f"  {case.name}: profiling eager, Inductor and fusedmlp"):
            comparison = fusion_backend.profile(
                model, steps=STEPS, options=case.options, backward=case.training, **inputs
            )
    return Outcome(case, explanation, comparison)


def built(
    case: ModelCase, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and its inputs, the same weights each time."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.device(device):
        model, inputs = case.build()
    model = model.to(device, dtype).train(case.training)
    return model, {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def heading(case: ModelCase, device: torch.device, dtype: torch.dtype) -> str:
    """The line above a model."""
    title = f"{case.name}, {case.batch}, {str(dtype).removeprefix('torch.')} on {device.type}"
    return f"{title}\n{'=' * len(title)}"


def report(outcome: Outcome, with_graph: bool) -> str:
    """Sites, the graph before and after if asked for, and the comparison of one model."""
    text = io.StringIO()
    print(f"\n{outcome.explanation}\n", file=text)
    more = fused_by_always(outcome.explanation)
    if more:
        print(f"Policy 'always' would fuse {more} more here, faster or not.\n", file=text)
    if outcome.case.note:
        print(textwrap.fill(outcome.case.note, WIDTH), file=text, end="\n\n")
    if with_graph and outcome.explanation.fused:
        if len(outcome.explanation.graphs[0].before.graph.nodes) <= LONGEST_GRAPH:
            outcome.explanation.print_graphs(text)
        else:
            print(f"{outcome.explanation.graph_diff()}\n", file=text)
    print(outcome.comparison, file=text)
    return text.getvalue()


def fused_by_always(explanation: Explanation) -> int:
    """How many MLPs are left alone only because Inductor's code is expected to be as fast."""
    return sum(site.reason == reasons.NOT_FASTER.code for site in explanation.sites)


def summary(outcomes: Sequence[Outcome]) -> str:
    """All models in one table."""
    counted = outcomes[0].comparison.counted if outcomes else "kernels"
    headers = ["model", "MLPs fused / legal / found", counted, "wall ms", "vs Inductor", "error"]
    rows = [summary_row(outcome) for outcome in outcomes]
    return f"eager / Inductor / fusedmlp:\n\n{table(headers, rows)}"


def summary_row(outcome: Outcome) -> list[str]:
    """One model's cells."""
    rows = outcome.comparison.rows
    return [
        outcome.case.name,
        counts(outcome.explanation),
        " / ".join(str(row.kernels) for row in rows),
        " / ".join(f"{row.wall_us / 1e3:.3g}" for row in rows),
        ratio_text(outcome.comparison["fusedmlp"], outcome.comparison.baseline),
        " / ".join("–" if row.error is None else f"{row.error:.1e}" for row in rows),
    ]


def counts(explanation: Explanation) -> str:
    """How many MLPs are fused, may be, and are there."""
    legal = sum(site.legal for site in explanation.sites)
    return f"{len(explanation.fused)} / {legal} / {len(explanation.sites)}"


def gain(outcomes: Sequence[Outcome]) -> str:
    """What was gained, in a sentence."""
    fused = [outcome for outcome in outcomes if outcome.explanation.fused]
    found = sum(len(outcome.explanation.sites) for outcome in outcomes)
    if not fused:
        return f"None of {found} MLPs is fused on this machine: nothing is gained, nothing is lost."
    mlps = sum(len(outcome.explanation.fused) for outcome in fused)
    comparisons = [outcome.comparison for outcome in fused]
    before = sum(comparison["inductor"].kernels for comparison in comparisons)
    after = sum(comparison["fusedmlp"].kernels for comparison in comparisons)
    ratio = geometric_mean(comparison.speedup(comparison["fusedmlp"]) for comparison in comparisons)
    return textwrap.fill(
        f"{mlps} of {found} MLPs are fused, in {len(fused)} of {len(outcomes)} models: together "
        f"these run {after} {comparisons[0].counted} a call instead of {before}, and are "
        f"{ratio:.2f} times as fast as with Inductor (geometric mean).",
        WIDTH,
    )


def on_an_h100(cases: Sequence[ModelCase]) -> str:
    """What an H100 would run of the same models in bfloat16, and one of its kernels."""
    rows = []
    for case in cases:
        with step(f"  {case.name}: planning for an H100"):
            explanation = planned(case)
        plans = sorted({str(site.plan) for site in explanation.fused})
        expected = [site.expected_speedup for site in explanation.fused if site.expected_speedup]
        rows.append(
            [
                case.name,
                counts(explanation),
                ", ".join(plans) or "–",
                f"{sum(map(unfused, explanation.fused))} → {fused(explanation.sites)}",
                f"{geometric_mean(expected):.2f}×" if expected else "–",
            ]
        )
    headers = ["model", "MLPs fused / legal / found", "plans", "kernels", "expected"]
    with step("  compiling a kernel for sm_90"):
        kernel = compile_for_h100("gelu_tanh(x)", 64, 256)
    what = (
        "On an H100, in bfloat16, the same models would run as follows; nothing is run here. The "
        "kernels are those of the fused MLPs, forward."
    )
    shown = table(headers, rows)
    return f"{textwrap.fill(what, WIDTH)}\n\n{shown}\n\nOne of the kernels: {kernel}"


def unfused(site: Site) -> int:
    """How many kernels Inductor runs for the forward pass of an MLP: products, and activations."""
    if site.chain:
        return 2 * len(site.chain) + 1
    layers = [form.hidden for form in FORMS if form.name == site.form]
    first = sum(isinstance(variable, Projection) for hidden in layers for variable in hidden)
    return max(first, 1) + 2


def fused(sites: Sequence[Site]) -> int:
    """How many kernels the families of fused MLPs run; those that share a call run one."""
    first = (sites[call[0]] for call in by_call(sites))
    return sum(registry.named(str(site.plan)).launches for site in first if site.fused)


def planned(case: ModelCase) -> Explanation:
    """What is planned for one model in bfloat16 on an H100."""
    model, inputs = built(case, torch.device("cpu"), torch.bfloat16)
    with torch.set_grad_enabled(case.training):
        return fusion_backend.explain(model, target="h100", options=case.options, **inputs)


def as_data(outcome: Outcome) -> dict[str, Any]:
    """One model as JSON-compatible data."""
    return {
        "model": outcome.case.name,
        "batch": outcome.case.batch,
        "training": outcome.case.training,
        "explanation": json.loads(outcome.explanation.to_json()),
        "comparison": json.loads(outcome.comparison.to_json()),
    }


def machine(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.get_num_threads()} threads"
