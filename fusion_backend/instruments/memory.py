"""The memory of one call: what it allocates at most at once, and what it keeps for backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.sessions import allocations, saved_tensors
from fusion_backend.instruments.compiled_calls import Call
from fusion_backend.instruments.isolation import Inputs, modules_of
from fusion_backend.instruments.workload import Workload, differentiable


class Memory(NamedTuple):
    """Bytes of one call: the most at once, and what it keeps for its backward pass."""

    peak: int
    saved: int | None


def peak_bytes(workload: Workload, call: Call) -> int:
    """How many bytes a run allocates at most at once, beyond what was there before; of all devices.

    Memory that a CUDA graph holds for its replays is not seen.
    """
    inputs = workload.prepare()
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, profile_memory=True) as session:
        workload.run(call, inputs)
        workload.synchronize()
    workload.state.clear_gradients()
    changes = defaultdict(list)
    for _, size, device in sorted(allocations(session), key=lambda each: each[0]):
        changes[device].append(size)
    return sum(map(highest_sum, changes.values()))


def highest_sum(changes: Iterable[int]) -> int:
    """The highest of all sums of the first so many, or 0."""
    total = highest = 0
    for change in changes:
        total += change
        highest = max(highest, total)
    return highest


def saved_bytes(workload: Workload, model: Call, call: Call) -> int | None:
    """How many bytes a run of ``call`` keeps for its backward pass; ``None`` where there is none.

    Inputs, parameters and buffers of ``model`` are there anyway and are not counted.
    """
    inputs = workload.prepare()
    found: list[int] = []

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        outputs = differentiable(output)
        if outputs:
            saved = saved_tensors(tensor.grad_fn for tensor in outputs)
            found.append(bytes_of(saved, [*there_anyway(model, inputs)]))
        return output

    workload.run(observed, inputs)
    workload.state.clear_gradients()
    return sum(found) if found else None


def there_anyway(model: Call, inputs: Inputs) -> list[Tensor]:
    """Tensors that a call does not make."""
    found = inputs.tensors()
    for module in modules_of(model):
        found += [*module.parameters(), *module.buffers()]
    return found


def bytes_of(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """The bytes of the storages of tensors, each once, less those of the others."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    known = {other.untyped_storage().data_ptr() for other in others}
    return sum(size for address, size in storages.items() if address not in known)
