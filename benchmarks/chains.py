"""How fast one kernel for a chain is: beside the unfused chain, and beside its pairs fused.

    python benchmarks/chains.py --write     # measures on this GPU and writes the package's table
    python benchmarks/chains.py --write --precision tf32

Times are medians of CUDA-graph replays in turns, over operands that come from device memory. The
unfused chain is eager's: as many cuBLAS products and pointwise kernels as Inductor's, whose time
was 1 to 3 % above it at 1024 rows, where both were measured. The pairs are those that the backend
fuses where there is no chain; for few rows the faster of ``back_to_back`` and ``stream``.
"""

from __future__ import annotations

import argparse
import functools
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
from fusion_backend.compat.tf32 import allow_tf32
from fusion_backend.instruments import timing
from fusion_backend.kernels import launch
from fusion_backend.kernels.back_to_back.family import can_back_to_back
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.config import middle
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.kernels.host.configs import Config
from fusion_backend.mlp.expression import Expression, parse
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
    (348, 64, 64, 17),
    (479, 256, 128, 1),
    (784, 128, 64, 10),
    (319, 256, 256, 256, 256),
    (64, 64, 64, 1024),
)
ROWS = (262144, 16384, 1024, 64, 1)
ACTIVATIONS = {
    "gelu_tanh": ("gelu_tanh(x)", functools.partial(F.gelu, approximate="tanh")),
    "gelu": ("gelu(x)", F.gelu),
    "tanh": ("tanh(x)", torch.tanh),
    "sin": ("sin(30.0 * x)", lambda x: torch.sin(30.0 * x)),
}
FORMS = ("gelu_tanh", "gelu")
#: dtypes, and whether products of float32 may use TF32.
PRECISIONS = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "tf32": (torch.float32, True),
    "ieee": (torch.float32, False),
}


class Case(NamedTuple):
    """One chain with biases."""

    form: str
    widths: tuple[int, ...]
    rows: int
    precision: str = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]

    @property
    def activation(self) -> Expression:
        return parse(ACTIVATIONS[self.form][0])

    def operands(self) -> tuple[Tensor, ...]:
        """x, and weight and bias of each layer."""

        def tensor(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, device="cuda")).to(self.dtype)

        layers = [
            (tensor(out, inner, scale=inner**-0.5), tensor(out))
            for inner, out in itertools.pairwise(self.widths)
        ]
        return (tensor(self.rows, self.widths[0]), *itertools.chain.from_iterable(layers))

    @property
    def bytes(self) -> int:
        """Of x, y and the weights."""
        weights = sum(inner * out for inner, out in itertools.pairwise(self.widths))
        size = self.dtype.itemsize
        return size * (self.rows * (self.widths[0] + self.widths[-1]) + weights)


def cases(precision: str = "bfloat16") -> Iterator[Case]:
    """All that is measured."""
    for form, rows, widths in itertools.product(FORMS, ROWS, WIDTHS):
        if can_chain(widths, PRECISIONS[precision][0]):
            yield Case(form, widths, rows, precision)


def peers(case: Case) -> Mapping[str, Callable[..., Tensor]]:
    """What is timed, by name; pairs only where kernels take the widths."""
    found = {"unfused": unfused(case), "chain": chained(case)}
    if _runs_in_pairs(case):
        found["pairs"] = paired(case, launch.back_to_back)
    if case.rows <= 128:
        found["pairs, stream"] = paired(case, launch.stream)
    return found


def _runs_in_pairs(case: Case) -> bool:
    """Whether ``back_to_back`` takes each pair of the layers that :func:`paired` takes together."""
    return all(
        can_back_to_back(*case.widths[i - 1 : i + 2], False, case.dtype)
        for i in middle(case.widths)
    )


def unfused(case: Case) -> Callable[..., Tensor]:
    """Products by cuBLAS, and a pointwise kernel between two."""
    activated = ACTIVATIONS[case.form][1]

    def run(x: Tensor, *layers: Tensor) -> Tensor:
        for i in range(0, len(layers), 2):
            x = F.linear(activated(x) if i else x, *layers[i : i + 2])
        return x

    return run


def chained(case: Case, config: Config | None = None) -> Callable[..., Tensor]:
    """The plan ``chain``, by default with the configuration that it chooses."""
    functions = [case.activation] * (len(case.widths) - 2)
    return lambda x, *layers: chain_launch.chain(x, layers[::2], layers[1::2], functions, config)


def paired(case: Case, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pairs of layers fused, those with the widest hidden values in total."""
    hidden, activated = middle(case.widths), ACTIVATIONS[case.form][1]

    def run(x: Tensor, *layers: Tensor) -> Tensor:
        i = 0
        while i < len(layers):
            x = activated(x) if i else x
            if i // 2 + 1 in hidden:
                x = kernel(x, Weights(None, None, *layers[i : i + 4]), case.activation)
                i += 4
            else:
                x = F.linear(x, *layers[i : i + 2])
                i += 2
        return x

    return run


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
    pairs = [medians.pop(name) for name in ("pairs", "pairs, stream") if name in medians]
    if pairs:
        medians["pairs"] = min(pairs)
    return {**case._asdict(), "us": medians}


def _error(case: Case, run: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> float:
    """Of the first rows, relative to a run in float64."""
    x, *layers = (tensor.double() for tensor in operands)
    exact = unfused(case)(x[:4096], *layers)
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


def _of_other_precisions(path: Path, precision: str) -> list[dict[str, Any]]:
    """What a table already has of other precisions than are measured now."""
    if not path.exists():
        return []
    known = json.loads(path.read_text())["rows"]
    return [row for row in known if row.get("precision", "bfloat16") != precision]


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the package's table")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    options = parser.parse_args()
    rows = []
    allow_tf32(PRECISIONS[options.precision][1])
    for case in cases(options.precision):
        rows.append(measured(case))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.write:
        path = TABLES / f"chains_{gpu_of(_gpu()).model}.json"
        path.write_text(table([*_of_other_precisions(path, options.precision), *rows]))


if __name__ == "__main__":
    main()
