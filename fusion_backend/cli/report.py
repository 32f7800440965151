"""`fusedmlp report`: what became of a model's MLPs and what it gained, as one HTML file."""

from __future__ import annotations

import argparse
from time import perf_counter

import torch

import fusion_backend
from fusion_backend.bench.roofline import ceilings_of
from fusion_backend.cli.loading import Loaded, check_folder, choose_options, load_for
from fusion_backend.cli.progress import step
from fusion_backend.instruments.comparison import Comparison
from fusion_backend.instruments.explanation import Explanation
from fusion_backend.instruments.html.page import report_html
from fusion_backend.instruments.html.roofline import Roof


def run(arguments: argparse.Namespace) -> int:
    """Explain the model, profile it where it can be run, and write the page."""
    check_folder(arguments.output, "--output")
    options = choose_options(arguments)
    loaded = load_for(arguments)
    with step(f"compiling {arguments.factory}"), torch.set_grad_enabled(arguments.backward):
        explanation = fusion_backend.explain(
            loaded.model, *loaded.args, options=options, target=arguments.target, **loaded.kwargs
        )
    comparison, roof = None, None
    can_run = arguments.target is None and arguments.device != "meta"
    if can_run and not arguments.no_profile:
        comparison = profiled(arguments, loaded, options)
        roof = roof_here(explanation)
    with step("drawing the page, with the kernels that run"):
        start = perf_counter()
        page = report_html(explanation, comparison, arguments.factory, roof)
        written = arguments.output.write_text(page, encoding="utf-8")
    seconds = perf_counter() - start
    print(f"{arguments.output}: {written / 1024:.0f} KiB, written in {seconds:.1f} s")
    return 0


def profiled(arguments: argparse.Namespace, loaded: Loaded, options: dict[str, str]) -> Comparison:
    """The model under each backend."""
    with step(f"profiling {arguments.factory}"), torch.set_grad_enabled(arguments.backward):
        return fusion_backend.profile(
            loaded.model, *loaded.args, options=options, backward=arguments.backward,
            **loaded.kwargs,
        )  # fmt: skip


def roof_here(explanation: Explanation) -> Roof | None:
    """What this machine reaches, measured now; ``None`` without any site."""
    if not explanation.sites:
        return None
    site = explanation.sites[0]
    device = torch.device(site.device)
    with step("measuring what this machine reaches"):
        measured = ceilings_of(device, [site.dtype])
    source = "a large copy and a large product, measured here and now"
    return Roof(measured.bytes_per_second, measured.flops_per_second[site.dtype], source)
