"""The same model under one backend or another, compiled apart from the caller's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from fusion_backend.compat import dynamo, inductor
from fusion_backend.compat.dynamo import CompileSettings
from fusion_backend.instruments.isolation import modules_of, private_frame
from fusion_backend.options import PREFIX

if TYPE_CHECKING:
    from fusion_backend.fusion.fuse import FuseResult

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
    settings: CompileSettings,
    name_loops: bool,
    observe: Callable[[GraphModule, FuseResult], None],
) -> Call:
    """The model under ``backend``, to be compiled in its first call.

    Args:
        model: a module or function that is not compiled itself.
        backend: name of a ``torch.compile`` backend.
        settings: as for ``torch.compile``. Only fusedmlp is given the options with its prefix;
            mode and options are ignored where the backend is neither Inductor nor fusedmlp.
        name_loops: let Inductor's C++ loops announce themselves to the profiler.
        observe: is called with each graph and with what fusedmlp does with it.
    """
    frame = private_frame(model)
    if backend not in ("inductor", "fusedmlp"):
        return torch.compile(frame, backend=backend, dynamic=settings.dynamic)
    chosen = {
        key: value
        for key, value in settings.options.items()
        if backend == "fusedmlp" or not key.startswith(PREFIX)
    }
    if name_loops:
        chosen["cpp.enable_kernel_profile"] = True
    mode, chosen = mode_or_options(settings.mode, chosen)
    return torch.compile(
        frame,
        backend=resolve(backend, observe),
        mode=mode,
        options=chosen or None,
        dynamic=settings.dynamic,
    )


def as_compiled(model: Call, given: CompileSettings) -> CompileSettings:
    """How a model is to be compiled: as it was, where it is compiled, but for what is given here.

    Args:
        model: a module or function, or what ``torch.compile`` returned.
        given: what the caller asks for; ``{}`` and ``None`` where nothing.
    """
    before = dynamo.compile_settings(model)
    if before is None:
        return given
    dynamic = before.dynamic if given.dynamic is None else given.dynamic
    if not given.options and given.mode is None:
        return before._replace(dynamic=dynamic)
    if not before.options and before.mode is None:
        return given._replace(dynamic=dynamic)
    # torch.compile takes a mode or options, not both.
    both = [{**mode_options(each.mode), **each.options} for each in (before, given)]
    return CompileSettings({**both[0], **both[1]}, None, dynamic)


def mode_options(mode: str | None) -> dict[str, Any]:
    """The options that a mode of ``torch.compile`` stands for."""
    return inductor.options_of_mode(mode) if mode else {}


def mode_or_options(
    mode: str | None, options: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """What ``torch.compile`` takes, which is one of both: a mode beside options is some of them."""
    if mode is None or not options:
        return mode, dict(options)
    return None, {**mode_options(mode), **options}


def resolve(backend: str, observe: Callable[[GraphModule, FuseResult], None]) -> str | Call:
    """The backend to give to ``torch.compile``; our own also where its entry point is missing."""
    if backend != "fusedmlp":
        return backend
    from fusion_backend.backend import backend_with_observer

    return backend_with_observer(observe)


def failure(error: BaseException) -> str:
    """Why compiling or running a model failed, without the wrapping that Dynamo adds."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}"
