"""What bounds the kernels: hardware counters, read by Nsight Compute.

    python benchmarks/counters.py benchmarks/results/h100/counters.json

Needs an NVIDIA GPU whose counters may be read, and `ncu` and `nvidia-smi` on the path. Each MLP of
the published grid that runs on a kernel of ours is called once under `ncu`, which replays the
launch for as many passes as the counters take, with cold caches; clocks are left alone. Its times
are therefore not those of `fusedmlp bench`; what counts here are the shares. The clock and the
power are those of the MLP called over and over, without `ncu`. `--calls` is what runs under `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import torch

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.bench.cells import FORMS
from fusion_backend.bench.results import machine
from fusion_backend.instruments import timing
from fusion_backend.mlp.weights import Weights


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
#: In the name of the kernel of `torch.cuda._sleep`, by which cases are told apart.
WAITS = "spin_kernel"
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
    found = by_case(rows(profiled()))
    results = {
        "machine": machine(torch.device("cuda")),
        "load": {case.name: under_load(case) for case in CASES},
        "kernels": [
            {"mlp": case.name, "plan": case.plan, **row}
            for case, launches in zip(CASES, found, strict=True)
            for row in launches
        ],
    }
    arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0


def make_calls() -> None:
    """Call every case twice, the second time in view of the profiler, after a kernel that waits."""
    for case in CASES:
        operands = tensors(case)
        for watched in (False, True):
            if watched:
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
            call(*operands, case)
            torch.cuda.synchronize()
            if watched:
                torch.cuda.profiler.stop()


def call(x: torch.Tensor, weights: Weights, case: Case) -> torch.Tensor:
    """One MLP."""
    result: torch.Tensor = torch.ops.fusedmlp.mlp(x, *weights, [], FORMS[case.form], case.plan)
    return result


def under_load(case: Case) -> dict[str, float]:
    """The clock in MHz and the power in watts after half a second of nothing but one MLP."""
    timer = timing.replays(partial(call, case=case), timing.rotated([tensors(case)]))
    with ThreadPoolExecutor(1) as beside:
        state = beside.submit(device_state)
        while not state.done():
            timer()
    return state.result()


def device_state() -> dict[str, float]:
    """What the driver says of the current GPU, in a while."""
    sleep(0.5)
    wanted = "clocks.sm,clocks.max.sm,power.draw.instant,power.limit"
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--id=GPU-{gpu}", f"--query-gpu={wanted}"]
    command.append("--format=csv,noheader,nounits")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    values = map(float, done.stdout.split(","))
    return dict(zip(("MHz", "most MHz", "W", "most W"), values, strict=True))


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
        "--kernel-name", f"regex:fusedmlp|{WAITS}", "--metrics", ",".join(metrics),
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


def by_case(launches: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The launches of each case, which begins with a kernel that waits."""
    cases: list[list[dict[str, Any]]] = []
    for launch in launches:
        if WAITS in launch["kernel"]:
            cases.append([])
        else:
            cases[-1].append(launch)
    return cases


if __name__ == "__main__":
    sys.exit(main())
