"""What bounds the kernels: hardware counters, read by Nsight Compute.

    python benchmarks/counters.py benchmarks/results/h100/counters.json

Needs an NVIDIA GPU whose counters may be read and `ncu` on the path. Each MLP of the published grid
that runs on a kernel of ours is called once under `ncu`, which replays the launch for as many
passes as the counters take, with cold caches; clocks are left alone. Its times are therefore not
those of `fusedmlp bench`; what counts here are the shares. `--calls` is what runs under `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusion_backend.bench.cells import FORMS
from fusion_backend.bench.results import machine
from fusion_backend.dispatch import forward
from fusion_backend.weights import Weights


class Case(NamedTuple):
    """One MLP under one plan, as `bench` names its parts."""

    plan: str
    form: str
    rows: int
    width: int
    hidden: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.form} {self.rows}×{self.width}→{self.hidden}→{self.width}"


CASES = (
    Case("back_to_back", "gelu_tanh", 262144, 64, 256),
    Case("back_to_back", "gelu_tanh", 16384, 128, 512),
    Case("back_to_back", "gelu_tanh", 65536, 256, 1024),
    Case("stream", "gelu_tanh", 1, 768, 3072),
    Case("stream", "gelu_tanh", 16, 768, 3072),
    Case("stream", "gelu_tanh", 128, 768, 3072),
    Case("stream", "swiglu", 1, 4096, 14336),
    Case("epilogue", "gelu_tanh", 512, 768, 3072),
    Case("epilogue", "gelu_tanh", 4096, 768, 3072),
    Case("epilogue", "gelu_tanh", 16384, 768, 3072),
    Case("epilogue", "gelu_tanh", 4096, 4096, 16384),
    Case("epilogue", "swiglu", 512, 4096, 14336),
    Case("epilogue", "swiglu", 4096, 4096, 14336),
)

#: Name in the results, and Nsight Compute's, in its unit: microseconds, or percent of the peak.
METRICS = {
    "us": "gpu__time_duration.sum",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "device memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
#: Why the warps of a scheduler did not issue: of the latency of an instruction, cycles a cause.
STALLS = {
    name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for name in (
        "gmma", "wait", "barrier", "math_pipe_throttle", "mio_throttle", "short_scoreboard",
        "long_scoreboard", "not_selected", "membar", "sleeping", "branch_resolving",
        "dispatch_stall",
    )
}  # fmt: skip
_MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--calls", action="store_true", help="make the calls that are profiled")
    arguments = parser.parse_args()
    if arguments.calls:
        make_calls()
        return 0
    if arguments.results is None:
        parser.error("name the JSON file to write")
    report = profiled()
    results = {
        "machine": machine(torch.device("cuda")),
        "kernels": [
            {"mlp": case.name, "plan": case.plan, **row} for case, row in zip_cases(rows(report))
        ],
    }
    arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0


def make_calls() -> None:
    """Call every case twice, the second time in view of the profiler."""
    for case in CASES:
        operands = tensors(case)
        for watched in (False, True):
            if watched:
                torch.cuda.profiler.start()
            forward(*operands, (), FORMS[case.form], case.plan)
            torch.cuda.synchronize()
            if watched:
                torch.cuda.profiler.stop()


def tensors(case: Case) -> tuple[torch.Tensor, Weights]:
    """Random operands; biases where there is no gate, as in the published grid."""
    gated = case.form == "swiglu"

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    first, second = case.width**-0.5, case.hidden**-0.5
    return random(case.rows, case.width), Weights(
        random(case.hidden, case.width, scale=first) if gated else None,
        None,
        random(case.hidden, case.width, scale=first),
        None if gated else random(case.hidden),
        random(case.width, case.hidden, scale=second),
        None if gated else random(case.width),
    )


def profiled() -> str:
    """What Nsight Compute says of the calls: CSV, one line a launch, units in the second line."""
    known = ncu("--query-metrics")
    metrics = [
        metric
        for metric in (*METRICS.values(), *STALLS.values())
        if metric.partition(".")[0] in known.split()
    ]
    return ncu(
        "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off",
        "--kernel-name", "regex:fusedmlp", "--metrics", ",".join(metrics),
        sys.executable, __file__, "--calls",
    )  # fmt: skip


def ncu(*arguments: str) -> str:
    """What Nsight Compute prints."""
    done = subprocess.run(["ncu", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"ncu failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def rows(report: str) -> list[dict[str, Any]]:
    """The launches of a report in order; a metric that this GPU does not have is left out."""
    table = report[report.index('"ID"') :]
    launches = list(csv.DictReader(io.StringIO(table)))
    units, found = launches[0], []
    for launch in launches[1:]:
        row: dict[str, Any] = {"kernel": launch["Kernel Name"]}
        for name, metric in METRICS.items():
            if launch.get(metric):
                value = float(launch[metric].replace(",", ""))
                row[name] = value * _MICROSECONDS.get(units[metric], 1.0)
        stalls = {
            name: float(launch[metric].replace(",", ""))
            for name, metric in STALLS.items()
            if launch.get(metric)
        }
        row["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:3])
        found.append(row)
    return found


def zip_cases(launches: list[dict[str, Any]]) -> list[tuple[Case, dict[str, Any]]]:
    """The case of each launch: stream makes two."""
    owners = [case for case in CASES for _ in range(2 if case.plan == "stream" else 1)]
    return list(zip(owners, launches, strict=True))


if __name__ == "__main__":
    sys.exit(main())
