"""How fast one kernel for a chain is: beside the unfused chain, and beside its pairs fused.

    python benchmarks/chains.py --write     # measures on this GPU and writes the package's table

Times are medians of CUDA-graph replays in turns, over operands that come from device memory. The
unfused chain is eager's: as many cuBLAS products and pointwise kernels as Inductor's, whose time
was 1 to 3 % above it at 1024 rows, where both were measured. The pairs are those that the backend
fuses where there is no chain; for few rows the faster of ``back_to_back`` and ``stream``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fusion_backend.compat import triton_features
from fusion_backend.instruments import timing
from fusion_backend.kernels import launch
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.config import middle
from fusion_backend.mlp.expression import evaluate, parse
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.gpus import gpu_of

TABLES = Path(__file__).resolve().parent.parent / "fusion_backend" / "tables"
MOST_SETS = 16

WIDTHS: tuple[tuple[int, ...], ...] = (
    (32,) * 4,
    (32,) * 5,
    (64,) * 4,
    (64, 64, 64, 64, 16),
    (64,) * 9,
    (64, 128, 128, 1),
    (128,) * 4,
    (128,) * 5,
    (13, 512, 256, 64),
    (64, 256, 256, 64),
    (256, 128, 64, 32, 1),
    (256,) * 5,
)
ROWS = (262144, 16384, 1024, 64, 1)
ACTIVATIONS = {"gelu_tanh": "gelu_tanh(x)", "gelu": "gelu(x)"}


class Case(NamedTuple):
    """One chain, in bfloat16 and with biases."""

    form: str
    widths: tuple[int, ...]
    rows: int

    def operands(self) -> tuple[Tensor, ...]:
        """x, and weight and bias of each layer."""

        def tensor(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, device="cuda")).bfloat16()

        layers = [
            (tensor(out, inner, scale=inner**-0.5), tensor(out))
            for inner, out in itertools.pairwise(self.widths)
        ]
        return (tensor(self.rows, self.widths[0]), *itertools.chain.from_iterable(layers))

    @property
    def bytes(self) -> int:
        """Of x, y and the weights."""
        weights = sum(inner * out for inner, out in itertools.pairwise(self.widths))
        return 2 * (self.rows * (self.widths[0] + self.widths[-1]) + weights)


def cases() -> Iterator[Case]:
    """All that is measured."""
    for form, rows, widths in itertools.product(ACTIVATIONS, ROWS, WIDTHS):
        yield Case(form, widths, rows)


def peers(case: Case) -> Mapping[str, Callable[..., Tensor]]:
    """What is timed, by name."""
    found = {"unfused": unfused(case), "chain": chained(case)}
    found["pairs"] = paired(case, launch.back_to_back)
    if case.rows <= 128:
        found["pairs, stream"] = paired(case, launch.stream)
    return found


def unfused(case: Case) -> Callable[..., Tensor]:
    """Products by cuBLAS, and a pointwise kernel between two."""

    def run(x: Tensor, *layers: Tensor) -> Tensor:
        for i in range(0, len(layers), 2):
            x = F.linear(_activated(case, x) if i else x, *layers[i : i + 2])
        return x

    return run


def chained(case: Case) -> Callable[..., Tensor]:
    """The plan ``chain``."""
    activations = [parse(ACTIVATIONS[case.form])] * (len(case.widths) - 2)
    return lambda x, *layers: chain_launch.chain(x, layers[::2], layers[1::2], activations)


def paired(case: Case, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pairs of layers fused, those with the widest hidden values in total."""
    activation, hidden = parse(ACTIVATIONS[case.form]), middle(case.widths)

    def run(x: Tensor, *layers: Tensor) -> Tensor:
        i = 0
        while i < len(layers):
            x = _activated(case, x) if i else x
            if i // 2 + 1 in hidden:
                x = kernel(x, Weights(None, None, *layers[i : i + 4]), activation)
                i += 4
            else:
                x = F.linear(x, *layers[i : i + 2])
                i += 2
        return x

    return run


def _activated(case: Case, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh" if case.form == "gelu_tanh" else "none")


def measured(case: Case, rounds: int = 4) -> dict[str, Any]:
    """One line of the table; refuses what is further from float64 than eager is."""
    sets = [
        case.operands() for _ in range(min(timing.distinct_sets(case.bytes, _gpu()), MOST_SETS))
    ]
    with torch.no_grad(), triton_features.launching_directly():
        errors = {name: _error(case, run, sets[0]) for name, run in peers(case).items()}
        few = case.rows * case.widths[-1] < MOST_SETS  # whose errors are a matter of luck
        assert few or errors["chain"] <= 1.5 * errors["unfused"] + 2**-9, errors
        calls = timing.rotated(sets)
        timers = {name: timing.replays(run, calls) for name, run in peers(case).items()}
        times = timing.interleaved(timers, rounds)
    medians = {name: round(time.median, 2) for name, time in times.items()}
    medians["pairs"] = min(medians["pairs"], medians.pop("pairs, stream", medians["pairs"]))
    return {"form": case.form, "widths": case.widths, "rows": case.rows, "us": medians}


def _error(case: Case, run: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> float:
    """Of the first rows, relative to a run in float64."""
    x, *layers = (tensor.double() for tensor in operands)
    exact, activation = x[:4096], parse(ACTIVATIONS[case.form])
    for i in range(0, len(layers), 2):
        exact = F.linear(evaluate(activation, {"x": exact}) if i else exact, *layers[i : i + 2])
    return float((run(*operands)[:4096].double() - exact).norm() / exact.norm())


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the package, a line a chain."""
    gpu = gpu_of(_gpu())
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "architecture": gpu.architecture,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"machine": {json.dumps(machine)},\n "rows": [\n{lines}\n]}}\n'


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the package's table")
    options = parser.parse_args()
    rows = []
    for case in cases():
        rows.append(measured(case))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.write:
        (TABLES / f"chains_{gpu_of(_gpu()).model}.json").write_text(table(rows))


if __name__ == "__main__":
    main()
