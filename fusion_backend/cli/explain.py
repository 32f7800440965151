"""`fusedmlp explain`: every MLP of a model, fused on which plan, or left alone and why."""

from __future__ import annotations

import argparse

import torch

import fusion_backend
from fusion_backend.cli.loading import choose_options, load_for
from fusion_backend.cli.progress import step


def run(arguments: argparse.Namespace) -> int:
    """Compile the model and print its sites."""
    options = choose_options(arguments)
    loaded = load_for(arguments)
    with step(f"compiling {arguments.factory}"), torch.set_grad_enabled(arguments.backward):
        explanation = fusion_backend.explain(
            loaded.model,
            *loaded.args,
            options=options,
            target=arguments.target,
            **loaded.kwargs,
        )
    if arguments.json:
        print(explanation.to_json())
        return 0
    print(explanation)
    if arguments.graph:
        print()
        explanation.print_graphs()
    return 0
