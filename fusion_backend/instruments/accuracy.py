"""The numerical error of a backend: its distance from the same model in float64.

The distance is that of the relative Frobenius norm: √Σ‖yᵢ − rᵢ‖² / √Σ‖rᵢ‖² over all tensors i, with
r computed in float64, eagerly, on a copy of the model. Eager's own error is the measure of what the
dtype allows.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fusion_backend.compat import inductor
from fusion_backend.compat.tracing import tree_map
from fusion_backend.errors import ProfileError
from fusion_backend.instruments.compiled_calls import Call, eager_call, failure
from fusion_backend.instruments.isolation import Inputs, modules_of
from fusion_backend.instruments.workload import Workload, differentiable, floating

Errors = tuple[float | None, float | None]


@dataclass(frozen=True)
class Results:
    """What a run computes: its outputs and, after backward, all gradients."""

    outputs: list[Tensor]
    gradients: list[Tensor]


@dataclass(frozen=True)
class Reference:
    """Results in float64, or the reason why there are none."""

    results: Results | None
    note: str | None = None

    def errors(self, results: Results) -> Errors:
        """Relative errors of the outputs and of the gradients, ``None`` where not to be had."""
        if self.results is None:
            return None, None
        return (
            relative_error(results.outputs, self.results.outputs),
            relative_error(results.gradients, self.results.gradients),
        )


@dataclass(frozen=True)
class Accuracy:
    """What the first calls of all backends gave.

    Attributes:
        errors: of every backend.
        note: why there are none.
        first_call_s: seconds that each took.
        code: what Inductor wrote for each: paths, in the order in which the modules were loaded.
    """

    errors: Mapping[str, Errors]
    note: str | None
    first_call_s: Mapping[str, float]
    code: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check_accuracy(workload: Workload, model: Call, calls: Mapping[str, Call]) -> Accuracy:
    """Compile every call by running it, and compare its results with those in float64.

    Raises:
        ProfileError: a call fails, or its results have other shapes.
    """
    reference = reference_results(workload, model)
    errors, seconds, code = {}, {}, {}
    for backend, call in calls.items():
        known, start = len(inductor.loaded_code()), perf_counter()
        try:
            results = results_of(workload, model, call)
        except Exception as error:
            raise ProfileError(f"{backend!r} failed on the model: {failure(error)}") from error
        seconds[backend] = perf_counter() - start
        code[backend] = inductor.loaded_code()[known:]
        errors[backend] = reference.errors(results)
    return Accuracy(errors, reference.note, seconds, code)


def results_of(workload: Workload, model: Call, call: Call) -> Results:
    """Run ``call``, which computes what ``model`` does, and keep its results."""
    inputs = workload.prepare()
    output = workload.run(call, inputs)
    found = gradients(model, inputs) if workload.step is None else []
    results = Results([tensor.detach().clone() for tensor in floating(output)], found)
    workload.state.clear_gradients()
    return results


def reference_results(workload: Workload, model: Call) -> Reference:
    """Run a float64 copy of ``model``, eagerly."""
    if modules_of(model) and not isinstance(model, (nn.Module, types.MethodType)):
        return Reference(None, "errors are measured for modules, not for functions that hold one")
    before = random_states(workload)
    try:
        inputs = cast_to_float64(workload.prepare())  # restores the buffers that are copied next
        double = in_float64(model)
        output = replace(workload, seeds=None).run(eager_call(double), inputs)
        if workload.seeds is not None:
            seeds = [seed.double() for seed in workload.seeds]
            torch.autograd.backward(differentiable(output), seeds)
        outputs = [tensor.detach() for tensor in floating(output)]
        found = gradients(double, inputs) if workload.step is None else []
        results = Results(outputs, found)
    except Exception as error:  # whatever a model may raise when its dtype changes
        reason = str(error).strip().partition("\n")[0]
        return Reference(None, f"no errors: the model does not run in float64 ({reason[:200]})")
    if any(not torch.equal(*pair) for pair in zip(before, random_states(workload), strict=True)):
        return Reference(None, "no errors: the model draws random numbers, dropout for example")
    return Reference(results)


def in_float64(model: Call) -> Call:
    """A copy of a module, or a function as it is, computing in float64."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).double()
    if isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module):
        double: Call = getattr(copy.deepcopy(model.__self__).double(), model.__name__)
        return double
    return model


def cast_to_float64(inputs: Inputs) -> Inputs:
    """The inputs with every floating-point tensor in double precision."""

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return Inputs(*tree_map(cast, (inputs.args, dict(inputs.kwargs))))


def gradients(model: Call, inputs: Inputs) -> list[Tensor]:
    """The gradients that backward has left on parameters and inputs."""
    owners = inputs.tensors()
    for module in modules_of(model):
        owners += module.parameters()
    return [owner.grad for owner in owners if owner.is_leaf and owner.grad is not None]


def random_states(workload: Workload) -> list[Tensor]:
    """States of the random number generators that the model may draw from."""
    gpus = [device for device in workload.devices if device.type == "cuda"]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """Relative Frobenius norm of the difference; ``None`` where there is nothing to compare.

    Raises:
        ProfileError: the numbers or shapes of the tensors differ.
    """
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise ProfileError(
            "all backends must compute tensors of the same shapes, got "
            f"{[list(tensor.shape) for tensor in actual]} instead of "
            f"{[list(tensor.shape) for tensor in expected]}"
        )
    if not expected:
        return None
    pairs = list(zip(actual, expected, strict=True))
    distance = math.hypot(*(torch.dist(a.to(e.dtype), e).item() for a, e in pairs))
    norm = math.hypot(*(torch.linalg.vector_norm(e).item() for e in expected))
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm
