"""The launches: functions that run kernels, on real tensors or under tracing.

    epilogue          first product(s) and activation
    linear            the second product, and the sum that follows it
    hidden_gradient   gradient of the pre-activations
    back_to_back      a whole narrow MLP
    stream            a whole MLP of few rows, in two launches, which overlap where they can

Under tracing, ``torch.library.wrap_triton`` turns a launch into a node that Inductor inlines. The
number of rows may be symbolic then. It is compared with few constants, to choose a configuration; a
grid of no programs, which no rows make, is launched as nothing by Triton and by Inductor.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.library import wrap_triton

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.compat.tensors import is_traced
from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.codegen.specialize import specialize
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.hidden_gradient import launch_sm90 as hopper_hidden_gradient
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.configs import Config, narrow_gradient_config
from fusion_backend.kernels.host.problems import (
    back_to_back_problem,
    epilogue_problem,
    hidden_gradient_problem,
    stream_problems,
)
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.kernels.invocations import (
    Invocation,
    back_to_back_invocation,
    cdiv,
    epilogue_invocation,
    hidden_gradient_invocation,
    narrow_gradient_invocation,
    stream_hidden_invocation,
    stream_out_invocation,
)
from fusion_backend.kernels.preferences import chosen
from fusion_backend.kernels.stream import launch_sm90 as stream_launch
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import kind_of, reduced
from fusion_backend.mlp.weights import is_transposed


def epilogue(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    activation: Expression,
    save_preact: bool,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``f(x W_gateᵀ + b_gate, x W_upᵀ + b_up)``, or ``f(x W_upᵀ + b_up)`` without a gate.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weight_gate: ``(hidden, in)`` or ``None``; any strides.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``; any strides.
        bias_up: ``(hidden,)`` or ``None``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        save_preact: also return the pre-activations, for training.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        config: how to launch; ``None`` chooses by shape.

    Returns:
        The activation and the two pre-activations, each ``(rows, hidden)``, contiguous and with the
        dtype of x. A pre-activation is ``None`` where it is not saved or does not exist.

    Raises:
        ValueError: ``config`` cannot run on this GPU with these operands.
    """

    def results() -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape = (x.shape[0], weight_up.shape[0])
        preact_gate = x.new_empty(shape) if save_preact and weight_gate is not None else None
        preact_up = x.new_empty(shape) if save_preact else None
        return x.new_empty(shape), preact_gate, preact_up

    if _is_empty(x):
        return results()
    target = target_of(x.device)
    problem = epilogue_problem(x, weight_gate, weight_up, target, operands)
    plain = config is None and not operands
    layers = (x, weight_up, weight_gate, bias_up, bias_gate)
    plain = plain and (not save_preact or _differentiates(activation, x))
    runs = hopper_epilogue.runs(problem, x.shape[0], target)
    if plain and runs and _suits_hopper(*layers):
        if not save_preact:
            return _on_hopper(*layers, None, str(activation)), None, None
        postact, *preacts = torch.ops.fusedmlp.epilogue_saving(*layers, str(activation))
        return postact, preacts[0] if weight_gate is not None else None, preacts[-1]
    written = results()
    config = chosen("epilogue", problem, target, config)
    tensors = (x, weight_gate, bias_gate, weight_up, bias_up)
    invocation = epilogue_invocation(
        *tensors, *written, problem.precision, config, target, operands
    )
    run(invocation, activation, target, operands)
    return written


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``x Wᵀ + b + residual``, in one kernel on Hopper, and rounded once there.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weight: ``(out, in)``; any strides.
        bias: ``(out,)`` or ``None``.
        residual: ``(rows, out)``; any strides.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.
    """
    out_features, in_features = map(int, weight.shape)
    residual = residual.contiguous()
    layer = (x, weight, None, bias, None, residual)
    if (
        x.dtype.itemsize == 2
        and not _is_empty(x)
        and hopper_epilogue.can(in_features, out_features, target_of(x.device))
        and _suits_hopper(*layer)
    ):
        return _on_hopper(*layer, hopper_epilogue.IDENTITY)
    return F.linear(x, weight, bias) + residual


def _differentiates(activation: Expression, x: Tensor) -> bool:
    """Whether kernels for Hopper take an activation in training."""
    return hopper_hidden_gradient.differentiates(str(activation), x.dtype)


def _suits_hopper(*tensors: Any) -> bool:
    """Whether ``hopper_epilogue`` takes the tensors, and what is generated can call it."""
    return hopper_epilogue.suits(*tensors) and not compiles_to_cpp()


def _on_hopper(x: Tensor, *layers_and_activation: Any) -> Tensor:
    """By ``hopper_epilogue``, or traced as the operator that stands for it."""
    call: Any = torch.ops.fusedmlp.epilogue if is_traced(x) else hopper_epilogue.epilogue
    result: Tensor = call(x, *layers_and_activation)
    return result


def hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the pre-activations, and the activation recomputed.

    Args:
        grad_output: ``(rows, out)``; bfloat16, float16 or float32, like all others; any strides.
        weight_down: ``(out, hidden)``; any strides.
        preact_gate: ``(rows, hidden)`` as :func:`epilogue` saved it, or ``None`` without a gate.
        preact_up: ``(rows, hidden)`` as :func:`epilogue` saved it.
        activation: as in the forward pass.
        operands: of the activation, as in the forward pass.
        config: how to launch; ``None`` chooses by shape.

    Returns:
        ``grad_gate`` (``None`` without a gate), ``grad_up`` and ``postact``, each
        ``(rows, hidden)``, contiguous and with the dtype of grad_output.

    Raises:
        ValueError: ``config`` cannot run on this GPU with these operands.
    """
    preacts = (preact_gate, preact_up)
    return hidden_and_operand_gradients(
        grad_output, weight_down, *preacts, activation, operands, (), config
    )[:3]


def hidden_and_operand_gradients(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
    """:func:`hidden_gradient`, and the gradients of those operands that are ``wanted``.

    These have shape and dtype of the operands.
    """
    shape = (grad_output.shape[0], weight_down.shape[1])
    grad_gate = None if preact_gate is None else grad_output.new_empty(shape)
    grad_up, postact = grad_output.new_empty(shape), grad_output.new_empty(shape)
    stored: list[Tensor | None] = [None] * len(operands)
    if not _is_empty(grad_output):
        target = target_of(grad_output.device)
        problem = hidden_gradient_problem(grad_output, weight_down, preact_gate, target)
        tensors = (grad_output, weight_down, preact_gate, preact_up)
        results = (grad_gate, grad_up, postact)
        config = chosen("hidden_gradient", problem, target, config)
        for index in wanted:
            stored[index] = _gradient_of(operands[index], shape, config)
        invocation = hidden_gradient_invocation(
            *tensors, *results, problem.precision, config, target, operands, stored
        )
        run(invocation, activation, target, operands, wanted)
    found = [
        torch.zeros_like(operands[index])
        if gradient is None
        else reduced(gradient, operands[index])
        for index, gradient in ((index, stored[index]) for index in wanted)
    ]
    return grad_gate, grad_up, postact, found


def joined_hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    has_sums: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """As :func:`hidden_gradient`, by the kernel for Hopper where that runs; ``None`` elsewhere.

    Returns:
        ``[grad_gate | grad_up]`` ``(rows, 2 · hidden)``, or ``grad_up`` without a gate;
        ``postact``; and, if ``has_sums``, what the sum of the first over all rows is to be summed
        of, ``(any, width)`` in float32.
    """
    if _is_empty(grad_output):
        return None
    target = target_of(grad_output.device)
    problem = hidden_gradient_problem(grad_output, weight_down, preact_gate, target)
    tensors = (grad_output, weight_down, preact_gate, preact_up)
    if not hopper_hidden_gradient.runs(problem, grad_output.shape[0], target):
        return None
    if not _differentiates(activation, grad_output):
        return None
    if not hopper_hidden_gradient.suits(*tensors) or compiles_to_cpp():
        return None
    found = torch.ops.fusedmlp.hidden_gradient(*tensors, str(activation), has_sums)
    grad_preact, postact, sums = found
    return grad_preact, postact, sums


def input_gradient(grad_preact: Tensor, weight_gate: Tensor, weight_up: Tensor) -> Tensor | None:
    """``[grad_gate | grad_up] @ [weight_gate; weight_up]`` in one kernel, or ``None``.

    Args:
        grad_preact: ``(rows, 2 · hidden)``, as :func:`joined_hidden_gradient` returns it.
        weight_gate: ``(hidden, in)``; any strides.
        weight_up: ``(hidden, in)``; any strides.
    """
    hidden, inner = map(int, weight_up.shape)
    target, tensors = target_of(grad_preact.device), (grad_preact, weight_gate, weight_up)
    if not hopper_epilogue.can_join(hidden, inner, target) or not called.suits(*tensors):
        return None
    if not hopper_epilogue.joins(grad_preact.shape[0], inner, target):
        return None
    result: Tensor = torch.ops.fusedmlp.input_gradient(*tensors)[0]
    return result


def narrow_gradient(
    x: Tensor,
    grad_output: Tensor,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    activation: Expression,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """The backward pass of an MLP that :func:`support.can_recompute`.

    Args:
        x: ``(rows, in)``; any strides, as all.
        grad_output: ``(rows, out)``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``.
        activation: as in the forward pass.
        needs_x: whether the gradient of x is computed.

    Returns:
        ``grad_x`` ``(rows, in)`` or ``None``, and a matrix in float32 whose rows add up to the
        gradients of weight_up, weight_down, bias_up and bias_down, one after the other.
    """
    hidden, inner, out = *map(int, weight_up.shape), int(weight_down.shape[0])
    grad_x = x.new_empty((x.shape[0], inner)) if needs_x else None
    width = hidden * (inner + out + 1) + out
    if _is_empty(x):
        return grad_x, x.new_zeros((1, width), dtype=torch.float32)
    target = target_of(x.device)
    config = narrow_gradient_config(inner, hidden, out)
    sums = x.new_empty((target.multiprocessors, width), dtype=torch.float32)
    tensors = (x, grad_output, weight_up, bias_up, weight_down, grad_x, sums)
    run(narrow_gradient_invocation(*tensors, config), activation, target)
    return grad_x, sums


def _gradient_of(operand: Tensor, shape: tuple[Any, int], config: Config) -> Tensor:
    """What the kernel stores of an operand's gradient: all of it, or its sums by blocks of rows."""
    rows, hidden = shape
    if operand.dim() == 2:
        return operand.new_empty(shape)
    blocks = cdiv(rows, config.block_m)
    return operand.new_empty((blocks, hidden), dtype=torch.float32)


def back_to_back(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """A whole MLP in one launch, for widths of which ``support.can_back_to_back`` holds.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weight_gate: ``(hidden, in)`` or ``None``; any strides.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``; any strides.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``; any strides.
        bias_down: ``(out,)`` or ``None``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        config: how to launch; ``None`` chooses by shape.
        residual: ``(rows, out)`` or ``None``; added before the result is rounded.
        norm: of the rows of x, which comes before the first layers; ``None`` for none.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.

    Raises:
        ValueError: the layers are too wide, or ``config`` cannot run on this GPU.
    """
    shape = (x.shape[0], weight_down.shape[0])
    if _is_empty(x):
        return x.new_empty(shape)
    target = target_of(x.device)
    problem = back_to_back_problem(x, weight_gate, weight_up, weight_down, target, operands)
    of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
    parameters = (weight_up, weight_down, bias_up, bias_down, residual, *of_norm)
    plain = config is None and not operands and hopper.runs(problem, x.shape[0], target)
    if plain and called.suits(x, *parameters) and not compiles_to_cpp():
        call = torch.ops.fusedmlp.back_to_back if is_traced(x) else hopper.back_to_back
        before = "" if norm is None else norm.text
        result: Tensor = call(x, *parameters, str(activation), before)
        return result
    y = x.new_empty(shape)
    tensors = (x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down)
    config = chosen("back_to_back", problem, target, config)
    invocation = back_to_back_invocation(
        *tensors, y, problem.precision, config, target, operands, residual, norm
    )
    run(invocation, activation, target, operands)
    return y


def stream(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    configs: tuple[Config, Config] | None = None,
) -> Tensor:
    """A whole MLP, in two launches made for few rows; right for any number of them.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weight_gate: ``(hidden, in)`` or ``None``; any strides.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``; any strides.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``; any strides.
        bias_down: ``(out,)`` or ``None``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        configs: how to launch the kernels of hidden and of y; ``None`` chooses by shape.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.

    Raises:
        ValueError: one of ``configs`` cannot run on this GPU with these operands.
    """
    shape = (x.shape[0], weight_down.shape[0])
    if _is_empty(x):
        return x.new_empty(shape)
    target = target_of(x.device)
    parameters = (weight_up, weight_down, bias_up, bias_down, weight_gate, bias_gate)
    widths = (int(weight_up.shape[1]), *map(int, reversed(weight_down.shape)))
    transposed = is_transposed(weight_up) or is_transposed(weight_down)
    how = (widths, weight_gate is not None, x.dtype, transposed)
    plain = configs is None and not operands
    overlaps = plain and stream_launch.runs(x.shape[0], *how, target)
    if overlaps and stream_launch.suits(x, *parameters) and not compiles_to_cpp():
        call = torch.ops.fusedmlp.stream if is_traced(x) else stream_launch.stream
        result: Tensor = call(x, *parameters, str(activation))
        return result
    y, hidden = x.new_empty(shape), x.new_empty((x.shape[0], weight_up.shape[0]))
    first, second = stream_problems(x, weight_gate, weight_up, weight_down, target)
    given = configs or (None, None)
    tensors = (x, weight_gate, bias_gate, weight_up, bias_up, hidden)
    config = chosen("stream_hidden", first, target, given[0])
    invocation = stream_hidden_invocation(*tensors, first.precision, config, target, operands)
    run(invocation, activation, target, operands)
    config = chosen("stream_out", second, target, given[1])
    layer = (hidden, weight_down, bias_down, y)
    invocation = stream_out_invocation(*layer, second.precision, config, target)
    run(invocation, activation, target, operands)
    return y


def run(
    invocation: Invocation,
    activation: Expression,
    target: Target,
    operands: Sequence[Tensor] = (),
    wanted: Sequence[int] = (),
) -> None:
    """Launch a kernel with an activation, or trace its launch."""
    operand: Tensor = next(iter(invocation.arguments.values()))
    fast = target.has_fast_activations and operand.dtype == torch.bfloat16
    kinds = tuple(map(kind_of, operands))
    kernel = specialize(invocation.template, activation, fast, kinds, tuple(wanted))
    ordered = [invocation.arguments[name] for name in kernel.arg_names]
    if not triton_is_interpreted():
        kernel = wrap_triton(kernel)
    launch = functools.partial(
        kernel[invocation.grid],
        *ordered,
        num_warps=invocation.config.num_warps,
        num_stages=invocation.config.num_stages,
    )
    if invocation.config.tma:
        contextvars.copy_context().run(_with_scratch, launch, operand.device)
    else:
        launch()


def _is_empty(x: Tensor) -> bool:
    """Whether it is known already that there are no rows. No rows at run time: an empty grid."""
    return isinstance(x.shape[0], int) and x.shape[0] == 0


def _with_scratch(launch: Callable[[], object], device: torch.device) -> None:
    """Launch a kernel that makes tensor descriptors, for which Triton asks for memory on the GPU.

    Triton keeps the function that it asks in a context variable, which is the user's to set;
    Inductor sets it for its own launches.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
    launch()
