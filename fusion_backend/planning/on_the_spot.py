"""Measuring an MLP while a graph is compiled: ``mode="max-autotune"``, and no table speaks for it.

A process of its own measures. So the caller's memory, random numbers, streams, modes of tracing and
Dynamo's state cannot be disturbed, and a kernel that crashes takes nobody with it. The result goes
to the user's table: a later process finds it there and measures nothing.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

import torch

from fusion_backend.compat import inductor
from fusion_backend.planning.cases import Case, kind_of
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import Measurement, are_aligned, nearest
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.user_table import UserTable

# A measurement nearer than this, in doublings, is as good as one of the MLP itself.
_NEAR = 0.5
_TIMEOUT_SECONDS = 600


class MeasuringFailed(Exception):
    """The other process measured nothing; the message says why."""


def wanted(setting: Setting, measurements: Sequence[Measurement]) -> bool:
    """Whether an MLP of known widths is to be measured before it is planned.

    It is under ``max-autotune``, on a GPU of this machine, if nothing near was measured; but never
    while a CUDA graph is being recorded.
    """
    if not inductor.max_autotunes() or setting.target is not None or setting.widths is None:
        return False
    near = nearest(measurements, kind_of(setting), setting.likely_rows, setting.widths)
    alike = near is not None and are_aligned(near.widths) == are_aligned(setting.widths)
    if near is not None and alike and near.distance(setting.likely_rows, setting.widths) <= _NEAR:
        return False
    return not torch.cuda.is_current_stream_capturing()


def measure(setting: Setting) -> None:
    """Measure an MLP and keep the result; warn where that fails."""
    measure_once(Case.of_setting(setting, setting.likely_rows), setting.gpu, setting.device)


@functools.cache  # what failed for one layer of a model is not tried for each of the others
def measure_once(case: Case, gpu: Gpu, device: torch.device) -> None:
    """Measure an MLP into the user's table, unless it is there; a warning if that fails."""
    table = UserTable.of(gpu)
    try:
        with table.locked("measure", _TIMEOUT_SECONDS):  # of many processes, one measures
            if not any(case.measurement.cell == known.cell for known in table.measurements()):
                table.add(_measured_elsewhere(case, device))
    except (MeasuringFailed, OSError) as error:  # a TimeoutError is an OSError
        warnings.warn(
            f"fusedmlp could not measure {case}: {error}. It is planned without; "
            "FUSEDMLP_TUNE=0 switches measuring off.",
            stacklevel=2,
        )


def _measured_elsewhere(case: Case, device: torch.device) -> dict[str, object]:
    """The line of a table, from a process that measures one case."""
    torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    request = json.dumps({"case": case.as_dict(), "device": index})
    command = [sys.executable, "-m", "fusion_backend.bench.tuning_worker"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command,
            input=request,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasuringFailed(f"it took more than {_TIMEOUT_SECONDS} s") from error
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not answer.startswith("{"):
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise MeasuringFailed(reason)
    row: dict[str, object] = json.loads(answer)
    return row
