"""The tables of measurements that ship with the package, one for each model of GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from fusion_backend.planning.gpus import Gpu


def contents(subject: str, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Tables of a subject that speak for a GPU, the one measured on its own model first.

    The others were measured on GPUs of the same architecture: of what its own model's table lacks,
    they are the best evidence.

    Args:
        subject: ``mlps`` or ``chains``.
        gpu: the GPU to plan for.
    """
    folder = resources.files("fusion_backend") / "tables"
    files = sorted(
        (file for file in folder.iterdir() if file.name.startswith(f"{subject}_")),
        key=lambda file: (file.name != f"{subject}_{gpu.model}.json", file.name),
    )
    for file in files:
        content = json.loads(file.read_text())
        if content["machine"]["architecture"] == gpu.architecture:
            yield content
