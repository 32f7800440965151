"""The backward pass of an MLP: gradients of whatever is asked for, and of nothing else.

    preact  = x W_1ᵀ + b_1          W_1 is the pair W_gate, W_up where the MLP is gated
    postact = f(preact)
    y       = postact W_downᵀ + b_down

Saved are the input and the pre-activations; the activation is recomputed beside its derivative.

f may have operands besides, whose gradients are computed with those of the pre-activations. Where a
tensor of a value an element is added to a pre-activation, perhaps times a constant, its gradient is
that of the pre-activation and not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat.tensors import is_traced, storage_of
from fusion_backend.kernels import reference
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import (
    Call,
    Constant,
    Expression,
    differentiate,
    parse,
    passing_gradients,
)
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.operands import projections
from fusion_backend.mlp.weights import Weights, is_transposed
from fusion_backend.operators.arguments import Backward, Given, as_rows, restore_rows


class Needs(NamedTuple):
    """Which gradients are asked for, in the order of the operator's tensors.

    ``operands`` has an entry for each operand of f.
    """

    x: bool
    weight_gate: bool
    bias_gate: bool
    weight_up: bool
    bias_up: bool
    weight_down: bool
    bias_down: bool
    operands: tuple[bool, ...] = ()

    @classmethod
    def of(cls, call: Backward) -> Needs:
        """Those of a backward pass."""
        count = 5 + 2 * len(call.given.further)
        own = (*call.needs[:count], *[False] * (7 - count))
        return cls._make((*own, tuple(call.needs[count:])))

    @property
    def preact(self) -> bool:
        """Whether the pre-activations' gradients are needed on the way."""
        return any(self[:5]) or any(self.operands)


class Gradients(NamedTuple):
    """One gradient a tensor, with its shape and dtype; ``None`` where none was asked for."""

    x: Tensor | None = None
    weight_gate: Tensor | None = None
    bias_gate: Tensor | None = None
    weight_up: Tensor | None = None
    bias_up: Tensor | None = None
    weight_down: Tensor | None = None
    bias_down: Tensor | None = None
    operands: tuple[Tensor | None, ...] = ()

    def and_first(self, first: Gradients) -> Gradients:
        """These of the last layer, and those of the first ones and of their input."""
        return first._replace(weight_down=self.weight_down, bias_down=self.bias_down)


class _Saved(NamedTuple):
    """What the backward pass reads, as rows.

    Attributes:
        given: the call, as it came.
        x: ``(rows, in)``.
        preacts: of gate, ``None`` without one, and of up; or both as the second, side by side; or
            what takes their place.
        f: the activation.
        operands: of f.
        needs: which gradients are asked for.
    """

    given: Given
    x: Tensor
    preacts: tuple[Tensor | None, Tensor]
    f: Expression
    operands: Sequence[Tensor]
    needs: Needs

    @classmethod
    def of(cls, call: Backward) -> _Saved:
        given, (gate, up) = call.given, call.kept
        rows, f = given.in_rows(), parse(given.activations[0])
        joined = up.shape[-1] == 2 * given.first.weight_up.shape[0]
        preacts = (gate if given.gated and not joined else None, up)
        return cls(given, rows.x, preacts, f, rows.operands, Needs.of(call))

    @property
    def preact_rows(self) -> tuple[Tensor | None, Tensor]:
        """The pre-activations, as they were saved."""
        gate, up = self.preacts
        return None if gate is None else as_rows(gate), as_rows(up)

    @property
    def preacts_apart(self) -> tuple[Tensor | None, Tensor]:
        """The pre-activations of gate, ``None`` without one, and of up."""
        gate, up = self.preact_rows
        if gate is None and self.given.gated:
            gate, up = _halves(up, 1)
        return gate, up


def backward(call: Backward, family: Family, recomputes: bool) -> Gradients:
    """Differentiate ``y`` ``(..., out)`` with respect to all that is asked for.

    Args:
        call: where the family ``recomputes``, biases take the pre-activations' place.
        family: that runs it.
        recomputes: whether the family computes the pre-activations again.

    Raises:
        PlanError: the family cannot run on this device.
    """
    saved, dy = _Saved.of(call), as_rows(call.grad_output)
    x, f, operands, needs = saved.x, saved.f, saved.operands, saved.needs
    weights = saved.given.weights._replace(bias_gate=None, bias_up=None, bias_down=None)
    asked = (*needs[:7], *needs.operands)
    if recomputes:
        bias_gate, bias_up = map(_kept, saved.preacts)
        weights = weights._replace(bias_gate=bias_gate, bias_up=bias_up)
        found = family.gradients(dy, x, weights, (None, None), operands, f, asked)
        return _recomputing(family, dy, weights, saved) if found is None else _at_once(found, saved)
    preacts = saved.preacts_apart
    found = family.gradients(dy, x, weights, preacts, operands, f, asked)
    if found is not None:
        return _at_once(found, saved)
    if needs.preact:
        family.check_device(x.device)
    summed = None
    all_pass = passing_gradients(f).issuperset(("g", "u") if saved.given.gated else ("x",))
    if needs.preact and not operands and all_pass:
        has_sums = needs.bias_gate or needs.bias_up
        of_saved = (saved.preact_rows, f, has_sums, needs.bias_down)
        summed = family.summed_hidden_gradient(dy, weights.weight_down, *of_saved)
    # The last layer's gradients come first: then the activation is no longer held.
    if summed is not None:
        d_preacts, activated, sums, has_output_sums = summed
        biases, bias_down = _of_biases(dy, sums, has_output_sums, saved)
        del sums
        last = Gradients(weight_down=_of_last_weight(dy, activated, saved), bias_down=bias_down)
        return last.and_first(_first_layer_of_summed(family, d_preacts, biases, saved))
    d_gate = d_up = postact = None
    of_operands: dict[int, Tensor] = {}
    if needs.preact:
        # d_preact = (dy W_down) · f'(preact)
        added = _sums(f, operands, needs)
        wanted = [i for i, need in enumerate(needs.operands) if need and i not in added]
        d_gate, d_up, postact, of_wanted = family.hidden_gradient(
            dy, weights.weight_down, preacts, f, operands, wanted
        )
        of_operands.update(zip(wanted, of_wanted, strict=True))
        for index, (of_gate, factor) in added.items():
            of_preact = d_gate if of_gate else d_up
            assert of_preact is not None
            taken = any(of_preact is other for other in of_operands.values())
            multiple = of_preact if factor == 1.0 and not taken else of_preact * factor
            of_operands[index] = multiple.to(operands[index].dtype)
    if needs.weight_down and postact is None:
        postact = reference.activate(*preacts, f, operands)
    last = _last_layer(dy, postact, saved)
    first = Gradients() if d_up is None else _first_layer(d_gate, d_up, saved)
    return last.and_first(first)._replace(operands=_restored(of_operands, saved))


def backward_of_hidden(call: Backward) -> Gradients:
    """Differentiate ``postact`` ``(..., hidden)`` with respect to all that is asked for."""
    saved, d_hidden = _Saved.of(call), as_rows(call.grad_output)
    # d_preact = d_hidden · f'(preact)
    wanted = [index for index, need in enumerate(saved.needs.operands) if need]
    d_gate, d_up, found = reference.preact_and_operand_gradients(
        d_hidden, *saved.preacts_apart, saved.f, saved.operands, wanted
    )
    of_operands = dict(zip(wanted, found, strict=True))
    gradients = _first_layer(d_gate, d_up, saved)
    return gradients._replace(operands=_restored(of_operands, saved))


def backward_of_chain(call: Backward) -> list[Tensor | None]:
    """Gradients of x, of each weight and of each bias; ``None`` where none is asked for.

        p_i = h_{i-1} W_iᵀ + b_i          h_{-1} = x
        h_i = f_i(p_i)                    in float32 at least, rounded once
        y   = p_{n-1}

    It starts from the input: layers are narrow, so computing them again is less work than keeping
    every pre-activation, and Inductor fuses what is pointwise in it.
    """
    given, needs = call.given, call.needs
    weights, biases = given.chained
    layers = len(weights)
    of_weights, of_biases = needs[1 : layers + 1], needs[layers + 1 :]
    found: list[Tensor | None] = [None] * len(needs)
    functions = [*map(parse, given.activations)]
    hidden, preacts = [as_rows(given.x)], []
    for weight, bias, f in zip(weights, biases, functions, strict=False):
        preacts.append(F.linear(hidden[-1], weight, bias))
        hidden.append(reference.activate(None, preacts[-1], f))
    # d_preact of the last layer is dy
    grad = as_rows(call.grad_output)
    for i in reversed(range(layers)):
        if of_weights[i]:
            # dW = d_preactᵀ h
            found[1 + i] = _weight(grad, hidden[i], weights[i])
        if of_biases[i]:
            # db = Σ_rows d_preact
            found[1 + layers + i] = grad.sum(0)
        if not (needs[0] or any(of_weights[:i]) or any(of_biases[:i])):
            break
        # dh = d_preact W
        grad = torch.mm(grad, weights[i])
        if i:
            # d_preact = dh · f'(preact)
            of_preact = (None, preacts[i - 1], functions[i - 1], (), ())
            _, grad, _ = reference.preact_and_operand_gradients(grad, *of_preact)
    else:
        found[0] = restore_rows(grad, given.x) if needs[0] else None
    return found


def _kept(bias: Tensor | None) -> Tensor | None:
    """A bias that was saved, empty where there is none."""
    return None if bias is None or not bias.shape[0] else bias


def _at_once(gradients: Sequence[Tensor], saved: _Saved) -> Gradients:
    """What one kernel computed, in the order of what is asked for."""
    found = iter(gradients)
    own = [next(found) if need else None for need in saved.needs[:7]]
    if own[0] is not None:
        own[0] = restore_rows(own[0], saved.given.x)
    of_operands = {i: next(found) for i, need in enumerate(saved.needs.operands) if need}
    return Gradients._make((*own, _restored(of_operands, saved)))


def _sums(f: Expression, operands: Sequence[Tensor], needs: Needs) -> dict[int, tuple[bool, float]]:
    """Those matrices among the operands that are added to a pre-activation.

    Each is given by whether that is the gate, and by its factor.
    """
    found = {}
    for index, (operand, need) in enumerate(zip(operands, needs.operands, strict=True)):
        if not need or operand.dim() < 2:
            continue
        partial = differentiate(f, name_of(index))
        for name in projections(f):
            factor = _quotient(partial, differentiate(f, name))
            if factor is not None:
                found[index] = (name == "g", factor)
                break
    return found


def _quotient(multiple: Expression, unit: Expression) -> float | None:
    """The constant ``multiple / unit``, where it is plain to see and there is one."""
    match multiple:
        case _ if multiple == unit:
            return 1.0
        case Call("mul", (Constant(factor), other) | (other, Constant(factor))) if other == unit:
            return factor
        case Call("neg", (other,)) if other == unit:
            return -1.0
    return None


def _restored(found: dict[int, Tensor], saved: _Saved) -> tuple[Tensor | None, ...]:
    return tuple(
        found[index].view(operand.shape) if index in found else None
        for index, operand in enumerate(saved.given.operands)
    )


def _last_layer(dy: Tensor, postact: Tensor | None, saved: _Saved) -> Gradients:
    """Gradients of the last layer's weight, for which ``postact`` is needed, and of its bias."""
    of_weight = _of_last_weight(dy, postact, saved)
    # db_down = Σ_rows dy
    return Gradients(weight_down=of_weight, bias_down=dy.sum(0) if saved.needs.bias_down else None)


def _of_last_weight(dy: Tensor, postact: Tensor | None, saved: _Saved) -> Tensor | None:
    """``dW_down = dyᵀ postact``, if it is asked for."""
    if not saved.needs.weight_down:
        return None
    assert postact is not None
    return _weight(dy, postact, saved.given.weights.weight_down)


def _of_biases(
    dy: Tensor, sums: Tensor, has_output_sums: bool, saved: _Saved
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the biases of the first layers, side by side, and of the last layer's.

    They are sums of ``sums``, which have those of dy last, or dy is summed here.
    """
    needs, out = saved.needs, dy.shape[1]
    has_sums = needs.bias_gate or needs.bias_up
    of_dy = dy.sum(0) if needs.bias_down and not has_output_sums else None
    if not has_sums and not has_output_sums:
        return None, of_dy
    found = sums.sum(0).to(saved.x.dtype)
    if not has_output_sums:
        return found, of_dy
    if not has_sums:
        return None, found
    first, last = _separate(*found.split([found.shape[0] - out, out]))
    return first, last


def _first_layer(d_gate: Tensor | None, d_up: Tensor, saved: _Saved) -> Gradients:
    """Gradients of the input and of one projection, or of both where the MLP is gated."""
    x, first, needs = saved.x, saved.given.first, saved.needs
    # dW_up = d_upᵀ x,  db_up = Σ_rows d_up
    gradients = Gradients(
        x=_input(d_gate, d_up, saved) if needs.x else None,
        weight_up=_weight(d_up, x, first.weight_up) if needs.weight_up else None,
        bias_up=d_up.sum(0) if needs.bias_up else None,
    )
    if d_gate is not None and first.weight_gate is not None:
        of_gate = _weight(d_gate, x, first.weight_gate) if needs.weight_gate else None
        bias_gate = d_gate.sum(0) if needs.bias_gate else None
        gradients = gradients._replace(weight_gate=of_gate, bias_gate=bias_gate)
    return gradients


def _input(d_gate: Tensor | None, d_up: Tensor, saved: _Saved) -> Tensor:
    """``d_up W_up + d_gate W_gate``, without the term of a projection that is only compared.

    Autograd has no such term. It is zero, but for a weight that is infinite.
    """
    passing, x = passing_gradients(saved.f), saved.given.x
    weight_gate, _, weight_up, _ = saved.given.first
    if d_gate is None or weight_gate is None or "g" not in passing:
        return restore_rows(torch.mm(d_up, weight_up), x)
    if "u" not in passing:
        return restore_rows(torch.mm(d_gate, weight_gate), x)
    # The second product is added to the float32 accumulator.
    return restore_rows(torch.addmm(torch.mm(d_up, weight_up), d_gate, weight_gate), x)


def _recomputing(family: Family, dy: Tensor, weights: Weights, saved: _Saved) -> Gradients:
    """:func:`backward` of a plain MLP whose pre-activations are computed again."""
    x, needs = saved.x, saved.needs
    weight_up, weight_down = weights.weight_up, weights.weight_down
    parts_of_it = family.hidden_gradient_of_x(x, dy, weights, saved.f, needs[:7])
    if parts_of_it is not None:
        return _of_recomputed(*parts_of_it, dy, saved)
    grad_x, sums = family.gradient_of_x(x, dy, weights, saved.f, needs.x)
    (hidden, inner), out = weight_up.shape, weight_down.shape[0]
    parts = sums.sum(0).to(x.dtype).split([hidden * inner, out * hidden, hidden, out])
    of_up, of_down, of_bias_up, of_bias_down = _separate(*parts)
    return Gradients(
        x=None if grad_x is None else restore_rows(grad_x, saved.given.x),
        weight_up=_laid_out(of_up.view(hidden, inner), weight_up) if needs.weight_up else None,
        bias_up=of_bias_up if needs.bias_up else None,
        weight_down=_laid_out(of_down.view(out, hidden), weight_down)
        if needs.weight_down
        else None,
        bias_down=of_bias_down if needs.bias_down else None,
    )


def _of_recomputed(
    grad_x: Tensor | None,
    d_up: Tensor | None,
    postact: Tensor | None,
    sums: Tensor | None,
    dy: Tensor,
    saved: _Saved,
) -> Gradients:
    """The gradients of weights and biases, of what a kernel computed beside that of x."""
    needs, first, down = saved.needs, saved.given.first, saved.given.weights.weight_down
    of_bias_up = of_bias_down = of_up = None
    if sums is not None:
        widths = [down.shape[1], down.shape[0]]
        of_bias_up, of_bias_down = _separate(*sums.sum(0).to(dy.dtype).split(widths))
    # That of the last layer comes first: then the activation is no longer held.
    of_down = None if postact is None else _weight(dy, postact, down)
    if needs.weight_up:
        assert d_up is not None
        of_up = _weight(d_up, saved.x, first.weight_up)
    return Gradients(
        x=None if grad_x is None else restore_rows(grad_x, saved.given.x),
        weight_up=of_up,
        bias_up=of_bias_up if needs.bias_up else None,
        weight_down=of_down,
        bias_down=of_bias_down if needs.bias_down else None,
    )


def _laid_out(gradient: Tensor, weight: Tensor) -> Tensor:
    """A contiguous gradient, laid out as ``weight`` is: autograd copies gradients that are not."""
    return gradient.t().contiguous().t() if is_transposed(weight) else gradient


def _first_layer_of_summed(
    family: Family, d_preacts: Sequence[Tensor], biases: Tensor | None, saved: _Saved
) -> Gradients:
    """As :func:`_first_layer`, of the gradients of a pair's pre-activations apart or side by side.

    Those of biases are side by side in any case, and ``None`` where none is asked for.
    """
    x, needs = saved.x, saved.needs
    weight_gate, _, weight_up, _ = saved.given.first
    if weight_gate is None:
        (d_up,) = d_preacts
        return Gradients(
            x=restore_rows(torch.mm(d_up, weight_up), saved.given.x) if needs.x else None,
            weight_up=_weight(d_up, x, weight_up) if needs.weight_up else None,
            bias_up=biases,
        )
    bias_gate = bias_up = None
    if biases is not None:
        bias_gate, bias_up = _separate(*_halves(biases, 0))
    # That of x comes first: it needs both, and then one can be given up for each weight's gradient.
    grad_x = _input_of_pair(family, d_preacts, saved) if needs.x else None
    grad_gate, grad_up = _weights_of_pair(d_preacts, saved)
    return Gradients(
        x=grad_x,
        weight_gate=grad_gate,
        bias_gate=bias_gate if needs.bias_gate else None,
        weight_up=grad_up,
        bias_up=bias_up if needs.bias_up else None,
    )


def _weights_of_pair(
    d_preacts: Sequence[Tensor], saved: _Saved
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the weights of gate and up, by one product where that can give both.

    They may be parts of one tensor: pre-activations are side by side in traced calls only, of which
    no operator returns what is made of them. Where the weights themselves are parts of one,
    Inductor has two products write to their places in its gradient, and would copy halves of one.
    """
    x, needs, (weight_gate, _, weight_up, _) = saved.x, saved.needs, saved.given.first
    assert weight_gate is not None
    joined, both = len(d_preacts) == 1, needs.weight_gate and needs.weight_up
    transposed = is_transposed(weight_gate) or is_transposed(weight_up)
    if joined and both and not transposed and storage_of(weight_gate) != storage_of(weight_up):
        return _halves(torch.mm(d_preacts[0].t(), x), 0)
    d_gate, d_up = _apart(d_preacts)
    grad_gate = _weight(d_gate, x, weight_gate) if needs.weight_gate else None
    return grad_gate, _weight(d_up, x, weight_up) if needs.weight_up else None


def _apart(d_preacts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of gate and up, which may be side by side."""
    return d_preacts if len(d_preacts) == 2 else _halves(d_preacts[0], 1)


def _halves(pair: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the halves, by the operator whose inverse Inductor knows to put them together."""
    first, second = pair.split([pair.shape[dim] // 2] * 2, dim)
    return first, second


def _separate(*parts: Tensor) -> tuple[Tensor, ...]:
    """Parts of a tensor, copied where an operator returns them, whose results share no memory."""
    return parts if is_traced(parts[0]) else tuple(part.clone() for part in parts)


def _input_of_pair(family: Family, d_preacts: Sequence[Tensor], saved: _Saved) -> Tensor:
    """``dx = [d_gate | d_up] [W_gate; W_up]``."""
    weight_gate, _, weight_up, _ = saved.given.first
    assert weight_gate is not None
    grad_x = family.joined_input_gradient(d_preacts, weight_gate, weight_up)
    if grad_x is None:
        d_gate, d_up = _apart(d_preacts)
        grad_x = torch.addmm(torch.mm(d_up, weight_up), d_gate, weight_gate)
    return restore_rows(grad_x, saved.given.x)


def _weight(d_result: Tensor, operand: Tensor, weight: Tensor) -> Tensor:
    """``d_resultᵀ operand``, laid out as ``weight`` is: autograd copies gradients that are not."""
    if is_transposed(weight):
        return torch.mm(operand.t(), d_result).t()
    return torch.mm(d_result.t(), operand)


def empty_weight_gradient(weight: Tensor) -> Tensor:
    """An uninitialised tensor with the shape, dtype and layout that ``weight``'s gradient has."""
    if is_transposed(weight):
        return weight.new_empty(weight.t().shape).t()
    return weight.new_empty(weight.shape)
