"""The user's own measurements, kept in a cache directory between processes.

A file belongs to one kind of GPU, or to one CPU with a number of threads, to one version of torch
and of Triton, and to one state of our kernels: what was measured with others is out of date, is
never believed, and is reported as such. Several processes may read and write at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusion_backend.fingerprint import kernels_hash
from fusion_backend.planning.cost_model import Factors
from fusion_backend.planning.gpus import Gpu, gpu_of
from fusion_backend.planning.measurements import Measurement, is_mlp, parsed

_CELL = (
    *("form", "rows", "width", "hidden", "out", "precision", "transposed"),
    *("training", "activation", "biases", "site", "model"),
)
Cell = tuple[Any, ...]
_POLL_SECONDS = 0.2
_CPU_VERSION = "3"  # of how is measured on CPUs
CACHE_VARIABLE = "FUSEDMLP_CACHE_DIR"


def cache_directory() -> Path:
    """``FUSEDMLP_CACHE_DIR``, or ``fusedmlp`` in ``XDG_CACHE_HOME``, or ``~/.cache/fusedmlp``."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.expanduser(chosen))  # as it is where there is no such user
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or os.path.expanduser("~/.cache")) / "fusedmlp"


@dataclass(frozen=True)
class UserTable:
    """A table in a file: JSON with ``machine`` (an object) and ``rows`` (a list), as others are.

    Attributes:
        path: the file; it need not exist.
        machine: what the measurements were made with.
    """

    path: Path
    machine: dict[str, str]

    @classmethod
    def of(cls, gpu: Gpu) -> UserTable:
        """The table of a GPU, for what is installed now."""
        machine = machine_of(gpu)
        name = f"{_slug(gpu)}-{_key(machine)}.json"
        return cls(cache_directory() / "tables" / name, machine)

    @classmethod
    def of_cpu(cls, threads: int) -> UserTable:
        """The table of this CPU with a number of threads, for what is installed now."""
        machine = machine_of_cpu(threads)
        name = f"{_words(machine['cpu'])}-{threads}_threads-{_key(machine)}.json"
        return cls(cache_directory() / "cpu" / name, machine)

    def measurements(self) -> tuple[Measurement, ...]:
        """What the file holds; empty where there is none, or none that can be read."""
        return self._content().measurements

    def sites(self) -> Mapping[str, Mapping[str, float]]:
        """Times of single sites, measured while compiling, in microseconds by family."""
        return self._content().sites

    def mlps(self) -> Mapping[Cell, Mapping[str, float]]:
        """Times of MLPs, in microseconds by family, by what :func:`cell` says of them."""
        return self._content().mlps

    def models(self) -> Sequence[Mapping[str, Any]]:
        """The lines from which times of other MLPs are computed, each with the key ``model``."""
        return self._content().models

    def factors(self) -> Mapping[str, Factors]:
        """The cost model's, fitted to this GPU, by family; empty where that was not done."""
        return self._content().factors

    def keep_factors(self, factors: Mapping[str, Factors]) -> None:
        """Add them to the file, in place of those before.

        Raises:
            OSError: the directory cannot be written to.
        """
        values = {name: [float(f"{v:.3g}") for v in astuple(f)] for name, f in factors.items()}
        self.add({"model": "inference", "factors": values})

    def _content(self) -> _Content:
        try:
            status = self.path.stat()
        except OSError:
            return _NOTHING
        return _read(self.path, status.st_mtime_ns, status.st_size)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of the file; none where there is no file, or one that cannot be read."""
        try:
            return [dict(row) for row in json.loads(self.path.read_text())["rows"]]
        except OSError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            _keep_aside(self.path, error)
            return []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line, in place of the one that measured the same.

        Raises:
            OSError: the directory cannot be written to.
        """
        with self.locked():
            others = [other for other in self.rows() if cell(other) != cell(row)]
            _replace(self.path, {"machine": self.machine, "rows": [*others, row]})

    @contextlib.contextmanager
    def locked(self, name: str = "write", timeout: float = 60.0) -> Iterator[None]:
        """Hold one of the file's locks against other processes.

        Raises:
            TimeoutError: another process has held it for ``timeout`` seconds.
            OSError: the directory cannot be written to.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(f".{name}.lock").open("w") as file:
            _lock(file, time.monotonic() + timeout)
            yield  # closing the file gives the lock back

    def outdated(self) -> tuple[Path, ...]:
        """Tables of the same GPU that were measured with other versions than those installed."""
        names = f"{self.path.name.rpartition('-')[0]}-*.json"
        try:
            return tuple(sorted(path for path in self.path.parent.glob(names) if path != self.path))
        except OSError:  # the directory can be no directory
            return ()


def content_hash() -> str:
    """A hash of the tables of this machine: it changes when plans may.

    A calibration of a CPU is no part of it: what was planned before the first was planned by it.
    """
    digest = hashlib.sha256()
    for index in range(torch.cuda.device_count()):
        path = UserTable.of(gpu_of(torch.device("cuda", index))).path
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    rows = UserTable.of_cpu(torch.get_num_threads()).rows()
    digest.update(json.dumps([row for row in rows if "cells" not in row]).encode())
    return digest.hexdigest()


def machine_of(gpu: Gpu) -> dict[str, str]:
    """What a measurement depends on, beside the MLP."""
    return {
        "gpu": gpu.name,
        "architecture": gpu.architecture,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "kernels": kernels_hash()[:16],
    }


def machine_of_cpu(threads: int) -> dict[str, str]:
    """What a measurement on this CPU depends on, beside the MLP."""
    name = torch.cpu.get_capabilities().get("cpu_name")
    return {
        "cpu": str(name or platform.machine()),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "torch": torch.__version__,
        "kernels": kernels_hash()[:16],
        "version": _CPU_VERSION,
    }


@functools.cache
def _triton_version() -> str:
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "none"


def cell(row: Mapping[str, Any]) -> Cell:
    """What a line of a table measured: two lines with the same are measurements of the same."""
    return tuple(row.get(name) for name in _CELL)


def _slug(gpu: Gpu) -> str:
    return f"{_words(gpu.name)}-{gpu.architecture}"


def _words(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name)


def _key(machine: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]


class _Content(NamedTuple):
    """What a file holds: see the methods of these names."""

    measurements: tuple[Measurement, ...]
    mlps: Mapping[Cell, Mapping[str, float]]
    sites: Mapping[str, Mapping[str, float]]
    models: Sequence[Mapping[str, Any]]
    factors: Mapping[str, Factors]


_NOTHING = _Content((), {}, {}, (), {})


@functools.lru_cache(maxsize=4)
def _read(path: Path, modified_ns: int, size: int) -> _Content:
    try:
        content = json.loads(path.read_text())
        rows = content["rows"]
        mlps = {cell(row): row["us"] for row in rows if is_mlp(row)}
        sites = {row["site"]: row["us"] for row in rows if "site" in row}
        models = tuple(row for row in rows if "model" in row)
        fitted = [row["factors"] for row in models if "factors" in row]
        factors = {name: Factors(*values) for each in fitted for name, values in each.items()}
        return _Content(parsed(content), mlps, sites, models, factors)
    except OSError:
        return _NOTHING
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _keep_aside(path, error)
        return _NOTHING


def _keep_aside(path: Path, error: Exception) -> None:
    """Give a file that is no table another name, so that nothing writes over it, and say so."""
    aside = path.with_suffix(f".unreadable-{os.getpid()}")
    with contextlib.suppress(OSError):  # another process may have done it
        os.replace(path, aside)
        warnings.warn(
            f"{path} is no table of measurements ({type(error).__name__}: {error}). It is kept as "
            f"{aside.name}, and a new table is begun.",
            stacklevel=2,
        )


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a reader sees the old one or the new one, and never a part of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text_of(content))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def text_of(content: dict[str, Any]) -> str:
    """A table as it is written: one measurement a line."""
    rows = ",\n  ".join(json.dumps(row) for row in content["rows"])
    return f'{{"machine": {json.dumps(content["machine"])},\n "rows": [\n  {rows}\n ]}}\n'


def _lock(file: Any, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {file.name}") from None
            time.sleep(_POLL_SECONDS)
