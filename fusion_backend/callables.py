"""The same model under one backend or another, compiled apart from the caller's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fusion_backend.isolation import modules_of, private_frame
from fusion_backend.options import PREFIX

Call = Callable[..., Any]


def eager_call(model: Call) -> Call:
    """The model without compilation, also where it holds compiled parts."""
    if not any(is_compiled(part) for module in modules_of(model) for part in module.modules()):
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return model(*args, **kwargs)

    return call


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` returned it or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def compiled_call(
    model: Call,
    backend: str,
    options: Mapping[str, Any] | None,
    mode: str | None,
    dynamic: bool | None,
    name_loops: bool,
) -> Call:
    """The model under ``backend``, to be compiled in its first call.

    Args:
        model: a module or function that is not compiled itself.
        backend: name of a ``torch.compile`` backend.
        options: as for ``torch.compile``; only fusedmlp is given those with its prefix.
        mode: as for ``torch.compile``; ignored, as ``options``, where the backend is neither
            Inductor nor fusedmlp.
        dynamic: as for ``torch.compile``.
        name_loops: let Inductor's C++ loops announce themselves to the profiler.
    """
    frame = private_frame(model)
    if backend not in ("inductor", "fusedmlp"):
        return torch.compile(frame, backend=backend, dynamic=dynamic)
    chosen = {
        key: value
        for key, value in (options or {}).items()
        if backend == "fusedmlp" or not key.startswith(PREFIX)
    }
    if name_loops:
        # torch.compile takes a mode or options, not both.
        chosen = {**mode_options(mode), **chosen, "cpp.enable_kernel_profile": True}
        mode = None
    return torch.compile(
        frame, backend=resolve(backend), mode=mode, options=chosen or None, dynamic=dynamic
    )


def mode_options(mode: str | None) -> dict[str, Any]:
    """The options that a mode of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode) if mode else {}


def resolve(backend: str) -> str | Call:
    """The backend to give to ``torch.compile``; our own also where its entry point is missing."""
    if backend != "fusedmlp":
        return backend
    from fusion_backend.backend import fusedmlp

    return fusedmlp


def failure(error: BaseException) -> str:
    """Why compiling or running a model failed, without the wrapping that Dynamo adds."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}"
