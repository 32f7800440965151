"""`fusedmlp doctor`: what works on this machine, what does not, and why."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

import fusion_backend
from fusion_backend.cli.progress import step
from fusion_backend.compat import inductor
from fusion_backend.errors import OptionError
from fusion_backend.fusion.sites import Site
from fusion_backend.options import ENVIRONMENT_PREFIX, Options, nearest
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.measurements import shipped
from fusion_backend.planning.user_table import CACHE_VARIABLE, UserTable, cache_directory

OLDEST_TORCH = (2, 11)
OLDEST_CAPABILITY = (8, 0)
#: Relative; float32 products of 64 and 256 terms stay far below, a wrong kernel does not.
TRIAL_TOLERANCE = 1e-4
#: How alike names are, from 0 to 1, of which one is taken to be a slip of the other.
_NEARLY = 0.85

#: PyTorch calls no entry points of the group ``torch.backends`` unless it is 1, the default.
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

#: yes: it works; absent: it is not there, and the backend works without; no: the backend cannot.
Status = Literal["yes", "absent", "no"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    status: Status
    detail: str


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0 if the backend works here, 1 if not."""
    findings = list(examine(trial=not arguments.quick))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.subject:{width}}  {finding.status:6}  {finding.detail}")
    return int(any(finding.status == "no" for finding in findings))


def examine(trial: bool) -> Iterator[Finding]:
    """Every finding, the quick ones first; the trial compiles a small MLP."""
    yield Finding("fusedmlp", "yes", fusion_backend.__version__)
    yield Finding("Python", "yes", f"{platform.python_version()} at {sys.executable}")
    yield check_torch()
    yield check_entry_point()
    yield check_autoload()
    yield check_gpu()
    yield check_triton()
    yield check_interpreter()
    yield check_onednn()
    yield check_compiler()
    caches = list(check_caches())
    yield from caches
    yield check_measurements()
    yield from check_variables()
    if trial and any(each.status == "no" for each in caches):
        yield Finding("trial", "no", "nothing can be compiled without a directory to keep it in")
    elif trial:
        yield check_trial()


def check_torch() -> Finding:
    """PyTorch and its age."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        return Finding("PyTorch", "no", f"{torch.__version__}; 2.11 or newer is needed")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    return Finding("PyTorch", "yes", f"{torch.__version__}, built with {built}")


def check_entry_point() -> Finding:
    """Whether torch.compile finds the backend by its name."""
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fusedmlp")
    if not found:
        return Finding(
            "backend name",
            "no",
            'backend="fusedmlp" is not registered: install the package (`pip install .`)',
        )
    return Finding("backend name", "yes", 'torch.compile finds backend="fusedmlp"')


def check_autoload() -> Finding:
    """Whether a fused program that was exported loads without an import of this package."""
    subject = "exported programs"
    if not importlib.metadata.entry_points(group="torch.backends", name="fusedmlp"):
        why = "the package is not installed (`pip install .`)"
    elif os.environ.get(AUTOLOAD_VARIABLE, "1") != "1":
        why = f"{AUTOLOAD_VARIABLE} is set"
    else:
        return Finding(subject, "yes", "torch.export.load finds the operators of a fused program")
    how = "`import fusion_backend.operators` before torch.export.load"
    return Finding(subject, "absent", f"operators are not found by themselves, since {why}: {how}")


def check_gpu() -> Finding:
    """The GPU, or why there is none."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        memory = torch.cuda.get_device_properties().total_memory / 2**30
        detail = f"{torch.cuda.get_device_name()}, capability {major}.{minor}, {memory:.0f} GiB"
        return Finding("GPU", "yes", detail)
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding("GPU", "absent", "this PyTorch is built without CUDA and ROCm")
    return Finding("GPU", "absent", "PyTorch finds no driver or no device; models run on the CPU")


def check_triton() -> Finding:
    """Whether Triton's kernels can run here."""
    subject = "Triton kernels"
    if importlib.util.find_spec("triton") is None:
        return Finding(
            subject, "absent", "Triton is not installed (it comes with PyTorch on Linux)"
        )
    version = importlib.metadata.version("triton")
    if not torch.cuda.is_available():
        return Finding(subject, "absent", f"Triton {version} is here, a GPU to run on is not")
    if torch.version.hip is None and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        return Finding(subject, "absent", f"Triton {version}; the GPU is older than capability 8.0")
    return Finding(subject, "yes", f"Triton {version}")


def check_interpreter() -> Finding:
    """Whether Triton's kernels can be run on CPU tensors, step by step, for study."""
    subject = "Triton interpreter"
    if importlib.util.find_spec("triton") is None:
        return Finding(subject, "absent", "Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Finding(subject, "yes", "on: kernels run on the CPU, slowly, for study")
    return Finding(subject, "yes", "off; TRITON_INTERPRET=1 turns it on")


def check_onednn() -> Finding:
    """What fuses on a CPU."""
    if torch.backends.mkldnn.is_available():
        return Finding("oneDNN", "yes", "fuses linear and activation on the CPU in inference")
    return Finding("oneDNN", "absent", "this PyTorch is built without it: nothing fuses on the CPU")


def check_compiler() -> Finding:
    """The C++ compiler and Python's headers, which Inductor needs for the CPU."""
    subject = "C++ compiler"
    names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    needed = not torch.cuda.is_available()
    if found is None:
        detail = "none found; torch.compile needs one on the CPU (Debian, Ubuntu: apt install g++)"
        return Finding(subject, "no" if needed else "absent", detail)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        detail = f"{found}, but {header} is missing (Debian, Ubuntu: apt install python3-dev)"
        return Finding(subject, "no" if needed else "absent", detail)
    return Finding(subject, "yes", found)


def check_caches() -> Iterator[Finding]:
    """The directories in which Inductor and Triton keep what they compiled."""
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    for subject, directory in (
        ("Inductor cache", inductor.cache_directory()),
        ("Triton cache", triton),
    ):
        problem = why_not_written(directory)
        yield Finding(subject, "no" if problem else "yes", problem or str(directory))
    own = cache_directory()
    problem = why_not_written(own)
    detail = f"{problem}; what is measured is measured again in every process" if problem else ""
    yield Finding("fusedmlp cache", "absent" if problem else "yes", detail or str(own))


def why_not_written(directory: str | Path) -> str | None:
    """Why nothing can be kept in a directory, which is made if it is not there; or ``None``."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{str(directory)[:200]} cannot be written: {error.strerror}"


def check_measurements() -> Finding:
    """What the planner chooses by on this GPU, or on the CPU where there is none."""
    subject = "measurements"
    if not torch.cuda.is_available():
        return Finding(subject, "yes", measurements_of_cpu())
    gpu = gpu_of(torch.device("cuda"))
    own, others = UserTable.of(gpu), shipped(gpu)
    found = [f"{len(own.measurements())} of your own in {own.path}"]
    if own.outdated():
        found.append("older ones of other versions are not believed: run `fusedmlp tune` again")
    found.append(f"{len(others)} that ship for {gpu.architecture}")
    if not (others or own.measurements()):
        found.append("the heuristic plans until `fusedmlp tune` has measured")
    return Finding(subject, "yes", "; ".join(found))


def measurements_of_cpu() -> str:
    """What is kept of this CPU, with as many threads as there are now."""
    own = UserTable.of_cpu(torch.get_num_threads())
    if not (own.mlps() or own.models()):
        outdated = "; older ones of other versions are not believed" if own.outdated() else ""
        return f"none of this CPU: it is calibrated when an MLP is first planned{outdated}"
    tuned = sum("us" in line for line in own.models())
    calibrated = len(own.models()) - tuned
    return (
        f"{calibrated} calibrations of this CPU, {tuned} rates and {len(own.mlps())} MLPs of "
        f"`fusedmlp tune` in {own.path}"
    )


def check_variables() -> Iterator[Finding]:
    """Each environment variable that is set and has a name of ours, or nearly."""
    known = (*Options.variables(), CACHE_VARIABLE)
    for name in sorted(os.environ):
        if not _seems_ours(name, known):
            continue
        value = os.environ[name]
        if name not in known:
            detail = f"there is no such variable{nearest(name, known)}; it has no effect"
            yield Finding(name, "absent", detail)
            continue
        try:
            if name != CACHE_VARIABLE:
                Options.from_environment({name: value})
            yield Finding(name, "yes", value)
        except OptionError as error:
            yield Finding(name, "no", str(error))


def _seems_ours(name: str, known: Sequence[str]) -> bool:
    """Whether a variable begins as ours do, in whatever case, or is misspelt where it begins."""
    if name.upper().startswith(ENVIRONMENT_PREFIX):
        return True
    return bool(difflib.get_close_matches(name.upper(), known, n=1, cutoff=_NEARLY))


def check_trial() -> Finding:
    """Compile a small MLP with the backend and compare its result with eager's."""
    from fusion_backend.cli import one_line

    subject = "trial"
    try:
        with step("compiling a small MLP"):
            outcome, error = trial()
    except Exception as problem:
        return Finding(subject, "no", f"a small MLP does not compile: {one_line(problem)}")
    if not error < TRIAL_TOLERANCE:
        return Finding(subject, "no", f"a small MLP, {outcome}, differs from eager by {error:.1e}")
    return Finding(subject, "yes", f"a small MLP, {outcome}, is within {error:.1e} of eager")


def trial() -> tuple[str, float]:
    """What became of a small MLP, and its greatest difference from eager's greatest value."""
    from fusion_backend.backend import backend_with_observer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mlp = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(256, 64)
    ).to(device)
    x = torch.randn(32, 64, device=device)
    sites: list[Site] = []
    backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
    with torch.no_grad():
        wanted = mlp(x)
        got = torch.compile(mlp, backend=backend)(x)
    outcome = " and ".join(
        f"fused on the plan {site.plan}" if site.fused else f"left to Inductor ({site.reason})"
        for site in sites
    )
    return outcome or "not recognised", float((got - wanted).abs().max() / wanted.abs().max())
