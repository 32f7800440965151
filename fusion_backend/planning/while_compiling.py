"""Measuring an MLP while a graph is compiled, where what is known does not decide.

What is compared are the families that may be fastest and the kernels that Inductor would run. The
result goes to the user's table, so a later process measures nothing. It speaks of this very MLP and
of no other: a model's layers share it, its neighbours in size do not.

Nothing of it can be noticed but the time, the memory that it takes for a moment, and the kernels in
a profile: no random number is drawn, no stream is made and no graph is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence

import torch

from fusion_backend.compat.dispatcher import as_in_inference
from fusion_backend.compat.inductor import max_autotunes
from fusion_backend.compat.tf32 import multiplies_in_tf32
from fusion_backend.planning.chain_rivals import ChainRivals, bytes_of_chain
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.rivals import UNFUSED, Rivals, bytes_of_values, bytes_of_weights
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.stopwatch import GpuStopwatch, compared
from fusion_backend.planning.user_table import UserTable

#: How long measuring may take, beside what compiling takes.
SECONDS = 0.12
# Microseconds by which kernels follow one another later on a stream than in a CUDA graph, on an
# H200. Without them, what has fewer kernels would gain more here than where graphs are replayed.
_GAP = 0.6
_SHORTEST = 0.5
# Of the memory that is free, so much is taken at most.
_OF_FREE_MEMORY = 0.25
# Weights take so many times the cache at most, on an H200 800 MB: to make more would take longer
# than to measure them.
_MOST_CACHES = 16


def decides(setting: Setting, wanted: bool) -> bool:
    """Whether measurements of this very site count, and may be made.

    They do not where results must not depend on what was measured: under deterministic algorithms,
    and in distributed jobs, whose processes are to choose alike. Under ``max-autotune`` Inductor's
    own code is another.

    Args:
        setting: the site.
        wanted: what the option says.
    """
    return (
        wanted
        and setting.target is None
        and setting.device.type == "cuda"
        and setting.widths is not None
        and setting.known_rows is not None
        and not (setting.training or setting.activated or setting.convolution)
        and not (setting.operands or setting.strided)
        and (setting.dtype.itemsize == 2 or setting.dtype == torch.float32)
        and not max_autotunes()
        and not torch.are_deterministic_algorithms_enabled()
        and not _is_distributed()
    )


def times(
    setting: Setting, families: Sequence[str], seconds: float = SECONDS
) -> Mapping[str, float] | None:
    """Microseconds of Inductor and of families, by name; ``None`` where none could be measured.

    Args:
        setting: a site of which :func:`decides` holds.
        families: those that may be fastest, of which at least one was measured if there are times.
        seconds: how long measuring may take.
    """
    known = kept(setting)
    if known is not None or not families:
        return known
    if torch.cuda.is_current_stream_capturing() or not _fits(setting):
        return None
    return measured_once(name_of(setting), setting, tuple(families), seconds)


def kept(setting: Setting) -> Mapping[str, float] | None:
    """What an earlier process, or an earlier site, measured of the same."""
    return UserTable.of(setting.gpu).sites().get(name_of(setting))


def name_of(setting: Setting) -> str:
    """All of a site that its times depend on, in words."""
    widths = setting.layer_widths if setting.is_chain else setting.widths
    assert widths is not None
    sizes = f"{setting.likely_rows}×{'→'.join(map(str, widths))}"
    words = [setting.activation, sizes, str(setting.dtype).removeprefix("torch.")]
    words += ["biases"] * setting.has_bias_up + ["transposed"] * setting.transposed
    words += ["tf32"] * (setting.dtype == torch.float32 and multiplies_in_tf32())
    return ", ".join([*words, *["packed"] * setting.packed, *[setting.steps] * bool(setting.steps)])


def _is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def bytes_of(setting: Setting, cache: int) -> tuple[int, int]:
    """The memory that weights take to be measured, and that values take beside."""
    if setting.is_chain:
        return bytes_of_chain(setting, cache)
    return bytes_of_weights(setting, cache), bytes_of_values(setting)


def _fits(setting: Setting) -> bool:
    cache = cache_of(setting.device)
    weights, values = bytes_of(setting, cache)
    free, _ = torch.cuda.mem_get_info(setting.device)
    at_once = weights + values
    return weights <= _MOST_CACHES * cache and at_once <= _OF_FREE_MEMORY * free


def cache_of(device: torch.device) -> int:
    """Bytes of a GPU's L2 cache."""
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


@functools.cache  # what failed for one layer of a model is not tried for each of the others
def measured_once(
    name: str, setting: Setting, families: tuple[str, ...], seconds: float
) -> Mapping[str, float] | None:
    """What :func:`timed` finds, added to the user's table; ``None`` and a warning if it fails.

    ``name`` is that of :func:`name_of` now: it has what may be set otherwise later.
    """
    table = UserTable.of(setting.gpu)
    try:
        with as_in_inference(), torch.cuda.device(setting.device):
            found = timed(setting, families, seconds)
    except Exception as error:  # out of memory, most likely: the model then decides alone
        warnings.warn(
            f"fusedmlp could not measure {name}: {type(error).__name__}: {error}. "
            "It is planned without; FUSEDMLP_MEASURE=0 switches measuring off.",
            stacklevel=2,
        )
        return None
    with contextlib.suppress(OSError):  # nothing can be written: the next process measures again
        table.add({"site": name, "us": {k: round(us, 3) for k, us in found.items()}})
    return found


def timed(setting: Setting, families: tuple[str, ...], seconds: float) -> dict[str, float]:
    """Microseconds of Inductor's products and of families, without the gaps between kernels."""
    kind = ChainRivals if setting.is_chain else Rivals
    rivals = kind.of(setting, cache_of(setting.device))
    candidates = rivals.candidates(families, setting.activation)
    failed = []
    for name, candidate in candidates.items():
        try:
            candidate.function(*candidate.operands[0])  # compiles
        except Exception:
            if name in UNFUSED:
                raise
            failed.append(name)
    for name in failed:
        del candidates[name]
    each = compared(candidates, GpuStopwatch(), seconds)
    found = {name: without_gaps(us, rivals.kernels_of(name)) for name, us in each.items()}
    unfused = min(found.pop(name) for name in UNFUSED if name in found)
    return {INDUCTOR: unfused, **found}


def without_gaps(microseconds: float, kernels: int) -> float:
    """How long so many kernels take in a CUDA graph, from how long they took on a stream."""
    return max(_SHORTEST, microseconds - _GAP * kernels)
