"""`fusedmlp profile`: eager, Inductor and fusedmlp side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fusion_backend
from fusion_backend.cli.loading import check_folder, choose_options, load_for
from fusion_backend.cli.progress import step


def run(arguments: argparse.Namespace) -> int:
    """Compile the model with each backend, measure, and print the comparison."""
    if arguments.trace:
        check_folder(Path(arguments.trace), "--trace")
    options = choose_options(arguments)
    loaded = load_for(arguments)
    with step(f"profiling {arguments.factory}"), torch.set_grad_enabled(arguments.backward):
        comparison = fusion_backend.profile(
            loaded.model,
            *loaded.args,
            options=options,
            backward=arguments.backward,
            **loaded.kwargs,
        )
    print(comparison.to_json() if arguments.json else comparison)
    if arguments.changes and not arguments.json:
        print(f"\n{comparison.changes_text()}")
    if arguments.trace:
        comparison.save_trace(arguments.trace)
    return 0
