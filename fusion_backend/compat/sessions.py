"""What a session of torch.profiler recorded, without the file that it exports; saved tensors.

A session can be exported once only: whoever else wants the file would find it gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch._C._autograd import DeviceType

_RUNTIME = ("cuda", "cu", "hip")


def recorded_events(
    session: Any,
) -> Iterator[tuple[str, str, float, float, tuple[Any, Any], int]]:
    """Category, name, start and duration in µs, device and thread or stream, and correlation.

    Args:
        session: a ``torch.profiler.profile`` that has stopped.
    """
    inner = getattr(session, "profiler", None)
    results = getattr(inner, "kineto_results", None)
    for event in () if results is None else results.events():
        thread = (str(event.device_type()), event.device_index()), event.device_resource_id()
        yield (
            _category(event),
            event.name(),
            event.start_ns() / 1e3,
            event.duration_ns() / 1e3,
            thread,
            event.correlation_id(),
        )


def _category(event: Any) -> str:
    """As the exported file calls it; told by the name where the event itself does not say."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name: str = event.name()
    if event.device_type() != DeviceType.CPU:
        return {"Memcp": "gpu_memcpy", "Memse": "gpu_memset"}.get(name[:5], "kernel")
    runtime = name.startswith(_RUNTIME) and "::" not in name
    return "cuda_runtime" if runtime else "cpu_op"


def allocations(session: Any) -> Iterator[tuple[float, int, str]]:
    """What was allocated and freed under ``profile_memory=True``: µs, bytes, device, unsorted."""
    results = getattr(getattr(session, "profiler", None), "kineto_results", None)
    for event in () if results is None else results.events():
        if event.name() == "[memory]":
            yield event.start_ns() / 1e3, event.nbytes(), str(event.device_type())


def saved_tensors(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that the backward pass behind these nodes of autograd has been left."""
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                yield from _tensors(getattr(node, name, None))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
