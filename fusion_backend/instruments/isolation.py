"""Running somebody's model as a guest: caches, inputs and state are left as they were found."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusion_backend.compat.tracing import tree_leaves


class Inputs(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        """Every tensor in the arguments."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def copy(self) -> Inputs:
        """A deep copy, so that a model which writes to its inputs (a KV cache) starts anew.

        Modules are not copied, and tensors with a history become leaves that require gradients.
        """
        memo: dict[int, Any] = {}
        with torch.inference_mode(False):
            for tensor in self.tensors():
                if not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone().requires_grad_()
            for leaf in tree_leaves((self.args, dict(self.kwargs))):
                if isinstance(leaf, nn.Module):
                    memo[id(leaf)] = leaf
            return Inputs(*copy.deepcopy((self.args, dict(self.kwargs)), memo))


def original(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function that ``torch.compile`` was given, for what it returned."""
    if getattr(model, "_torchdynamo_disable", False):  # what torch.compiler.disable returned
        return model
    inner = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None)
    return original(inner) if inner is not None else model


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a call of ``model`` runs, as far as its definition shows them."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        return modules_of(model.func)
    if isinstance(model, types.MethodType):
        return [model.__self__] if isinstance(model.__self__, nn.Module) else []
    if not isinstance(model, types.FunctionType):
        return []
    names = inspect.getclosurevars(model)
    values = [*names.nonlocals.values(), *names.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def private_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``model`` and shares no Dynamo state with any other.

    Dynamo keeps compiled code, and the sizes it has seen, by code object and by the name of the
    code. A model compiled through this frame neither counts towards the recompile limit of the
    user's own ``torch.compile(model)`` nor makes its sizes dynamic. (Functions in which a graph
    breaks are frames of their own, and do share.)
    """

    def frame(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = frame.__code__.replace(co_name=f"frame_{uuid.uuid4().hex}")
    return types.FunctionType(code, frame.__globals__, frame.__name__, None, frame.__closure__)


def kept_by(step: Callable[..., Any] | None) -> list[Any]:
    """What a training step changes beside the model, as far as its definition shows: optimizers."""
    while isinstance(step, functools.partial):
        step = step.func
    if isinstance(step, types.MethodType):
        values = list(vars(step.__self__).values()) if hasattr(step.__self__, "__dict__") else []
    elif isinstance(step, types.FunctionType):
        names = inspect.getclosurevars(step)
        values = [*names.nonlocals.values(), *names.globals.values()]
    else:
        values = []
    return [
        value
        for value in values
        if hasattr(value, "load_state_dict")
        and hasattr(value, "state_dict")
        and not isinstance(value, (nn.Module, type))
    ]


@contextmanager
def preserved(
    modules: Iterable[nn.Module],
    devices: Sequence[torch.device],
    step: Callable[..., Any] | None = None,
) -> Iterator[State]:
    """Restore buffers, gradients and random number generators at the end.

    With a training step, parameters and the state of its optimizers as well. Attributes that a
    model sets on itself in Python are not restored.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    state = State(modules, parameters=step is not None)
    others = [(each, copy.deepcopy(each.state_dict())) for each in kept_by(step)]
    with torch.random.fork_rng(cuda):
        try:
            yield state
        finally:
            state.restore_buffers()
            state.restore_parameters()
            state.restore_gradients()
            for each, content in others:
                each.load_state_dict(content)


class State:
    """The buffers and gradients of modules at one moment; their parameters, if asked for."""

    def __init__(self, modules: Iterable[nn.Module], parameters: bool = False) -> None:
        unique = {module for root in modules for module in root.modules()}
        owned = {p for module in unique for p in module.parameters(recurse=False)}
        self._parameters = [(p, p.detach().clone()) for p in owned] if parameters else []
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in unique
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._gradients = [
            (parameter, parameter.grad)
            for module in unique
            for parameter in module.parameters(recurse=False)
        ]

    def restore_buffers(self) -> None:
        """Give every buffer the values it had."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                if not (buffer.is_meta or torch.equal(buffer, values)):
                    buffer.copy_(values)
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)

    def restore_parameters(self) -> None:
        """Give every parameter that was kept the values it had."""
        with torch.no_grad():
            for parameter, values in self._parameters:
                parameter.copy_(values)

    def clear_gradients(self) -> None:
        """Forget the gradients, as ``optimizer.zero_grad()`` does."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore_gradients(self) -> None:
        """Give every parameter the gradient it had."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
