"""How torch dispatches and differentiates: what it does not promise to keep, torch 2.11 to 2.14."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd import forward_ad


@contextmanager
def below_autograd() -> Iterator[None]:
    """Dispatch as if no tensor required gradients (``at::AutoDispatchBelowADInplaceOrView``).

    Views that are made within are not marked as such: a result may be written to in place.
    """
    marking_views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(marking_views):
        yield


def named_range(name: str) -> AbstractContextManager[None]:
    """A range that a profiler records as an operator; next to nothing where none is at work."""
    found: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(name)
    return found


def profiler_is_active() -> bool:
    """Whether a session of torch.profiler records in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def transforming() -> bool:
    """Whether forward-mode differentiation or a transform of ``torch.func`` is at work."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def below_autocast(device_type: str) -> AbstractContextManager[None]:
    """Dispatch as if autocast were off for ``device_type``, leaving its state visible."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key)
    )
    return guard


def clamp_stops_at_limits() -> bool:
    """Whether autograd's clamp has the gradient 0 at its limits, as since 2.14, and not 1."""
    return torch.__version__ >= "2.14"


@contextmanager
def plain_mode() -> Iterator[None]:
    """Run tensors of the CPU as in a fresh program, whatever traces, casts or records around it.

    ATen's kernels run, not oneDNN's: on AVX-512 its GELU of infinity is NaN.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is),  # in place of the user's
        _without_onednn(),
    ):
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def as_in_inference() -> Iterator[None]:
    """Run tensors of a GPU as compiled inference does, whatever traces, casts or records around it.

    Dynamo's state, random numbers and the caller's modes stay as they are.
    """
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        tracing(None),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    # The context manager of torch.backends.mkldnn sets TF32 as well, and warns of it.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
