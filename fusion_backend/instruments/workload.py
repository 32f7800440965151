"""One call of a model, prepared so that it can be repeated: fresh inputs, backward, waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.tracing import tree_leaves
from fusion_backend.errors import ProfileError
from fusion_backend.instruments.compiled_calls import Call
from fusion_backend.instruments.isolation import Inputs, State, modules_of


@dataclass(frozen=True)
class Workload:
    """What is repeated.

    Attributes:
        inputs: the caller's arguments; every run works on a copy.
        devices: where the tensors of model and inputs are.
        state: of the model, to start every run with the same buffers and without gradients.
        seeds: the gradients of the outputs, for a run with backward; ``None`` for one without.
        step: what a run is, if not a call and its backward: it is given what to call, and the
            inputs.
    """

    inputs: Inputs
    devices: tuple[torch.device, ...]
    state: State
    seeds: Sequence[Tensor] | None = None
    step: Callable[..., Any] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a tensor of the model or of its inputs is on a GPU."""
        return any(device.type == "cuda" for device in self.devices)

    def with_backward(self, output: Any) -> Workload:
        """The same with backward from the sum of the outputs, the first of which is given.

        The gradient of a sum is all ones; it is made beforehand so that no kernel of the sum and
        of its gradient is counted as the model's.

        Raises:
            ProfileError: gradients are disabled, or no output requires one.
        """
        if not torch.is_grad_enabled():
            raise ProfileError(
                "backward=True needs gradients: call profile() outside of torch.no_grad() and "
                "torch.inference_mode()"
            )
        seeds = [torch.ones_like(tensor) for tensor in differentiable(output)]
        if not seeds:
            raise ProfileError(
                "backward=True needs an output that requires gradients, got none: a parameter or "
                "an input must have requires_grad=True"
            )
        return replace(self, seeds=seeds)

    def prepare(self) -> Inputs:
        """Inputs of the next run, with everything before it done on the device."""
        self.state.restore_buffers()
        self.state.restore_parameters()
        self.state.clear_gradients()
        inputs = self.inputs.copy()
        # Tells CUDA graphs that the outputs of the run before are no longer in use.
        torch.compiler.cudagraph_mark_step_begin()
        self.synchronize()
        return inputs

    def run(self, call: Call, inputs: Inputs) -> Any:
        """Call, run backward if asked for, and return the output; or do the step."""
        if self.step is not None:
            return self.step(call, *inputs.args, **inputs.kwargs)
        output = call(*inputs.args, **inputs.kwargs)
        if self.seeds is not None:
            torch.autograd.backward(differentiable(output), self.seeds)
        return output

    def time(self, call: Call) -> float:
        """Wall time of one run in microseconds, waiting for the device included."""
        inputs = self.prepare()
        start = perf_counter_ns()
        self.run(call, inputs)
        self.synchronize()
        return (perf_counter_ns() - start) / 1e3

    def synchronize(self) -> None:
        """Wait for every GPU in use."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if not self.on_gpu and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a function may make its own tensors


def devices_of(model: Call, inputs: Inputs) -> tuple[torch.device, ...]:
    """Where the tensors of model and inputs are, in a stable order."""
    tensors = inputs.tensors()
    for module in modules_of(model):
        tensors += [*module.parameters(), *module.buffers()]
    return tuple(sorted({tensor.device for tensor in tensors}, key=str))


def differentiable(output: Any) -> list[Tensor]:
    """The tensors in an output that have a gradient."""
    return [tensor for tensor in floating(output) if tensor.requires_grad]


def floating(output: Any) -> list[Tensor]:
    """The floating-point tensors in an output, in a stable order."""
    leaves = tree_leaves(output)
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
