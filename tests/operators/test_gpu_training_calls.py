"""Kernels of training that generated code calls: without a GPU, a function in their place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

hopper_epilogue = pytest.importorskip("fusion_backend.kernels.epilogue.launch_sm90")
hidden_gradients = pytest.importorskip("fusion_backend.kernels.epilogue.gradient_launch_sm90")

from torch._inductor.utils import run_and_get_code

import fusion_backend
import fusion_backend.operators
from fusion_backend.compat import inductor
from fusion_backend.operators import gpu_calls
from repetition import slow_but

ROWS, IN, HIDDEN = 300, 16, 32


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """With which arguments kernels were to be compiled while Inductor compiles."""
    found = []
    monkeypatch.setattr(inductor, "compiles_in_parallel", lambda: True)
    for module, name in (
        (hopper_epilogue, "epilogue_saving"),
        (hidden_gradients, "hidden_gradient"),
        (hopper_epilogue, "input_gradient"),
    ):
        monkeypatch.setattr(module, f"prepare_{name}", lambda *of: found.append(of))
    gpu_calls.install_lowering()
    return found


def caller_of(function, shape, last):
    """In place of what makes the functions that launch kernels."""

    def caller(*known):
        known = known[: len(last) + 5]  # perhaps whether an operand's memory may be taken follows
        *rest, widths, dtype, given, turned, _ = known
        assert (rest, widths, dtype) == (last, shape, torch.float32)

        def call(*tensors):
            assert given == tuple(tensor is not None for tensor in tensors)
            weight = tensors[1].t() if turned else tensors[1]
            assert weight.is_contiguous()
            return function(*tensors, *rest)

        return call

    return caller


def run(function, *tensors):
    torch._dynamo.mark_dynamic(tensors[0], 0)
    compiled = torch.compile(function, options={"fx_graph_cache": False})
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, *tensors)
    return got, code


def saving(x, weight_up, weight_gate, bias_up, bias_gate, activation, joined):
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        return [up.relu(), up]
    gate = F.linear(x, weight_gate, bias_gate)
    return [F.silu(gate) * up, *([torch.cat([gate, up], 1)] if joined else [gate, up])]


LIE = pytest.mark.parametrize(
    ("gated", "joined", "turned"),
    [(False, False, True), (True, False, False), (True, True, False), (True, True, True)],
)


@LIE
def test_first_layers_return_what_training_keeps(monkeypatch, prepared, gated, joined, turned):
    text = "silu(g) * u" if gated else "relu(x)"
    caller = caller_of(saving, (HIDDEN, IN), [text, joined])
    monkeypatch.setattr(hopper_epilogue, "epilogue_saving_caller", caller)
    up = torch.randn(IN, HIDDEN).t() if turned else torch.randn(HIDDEN, IN)
    gate, bias = torch.randn(HIDDEN, IN) if gated else None, torch.randn(HIDDEN)

    # Products around a call are calls themselves: no C++ is compiled for them.
    x, before, after = torch.randn(ROWS, IN), torch.randn(IN, IN), torch.randn(2 * HIDDEN, 8)

    def function(x):
        results = torch.ops.fusedmlp.epilogue_saving(x @ before, up, gate, bias, None, text, joined)
        return [result @ after[: result.shape[1]] for result in results]

    got, code = run(function, x)
    results = saving(x @ before, up, gate, bias, None, text, joined)
    expected = [result @ after[: result.shape[1]] for result in results]
    assert "= fusedmlp_epilogue_saving_" in code
    torch.testing.assert_close(got, expected)
    given = (True, True, gated, True, False)
    transposed = turned and not gated
    assert prepared == [(ROWS, text, joined, (HIDDEN, IN), torch.float32, given, transposed, None)]


def gradients(grad_output, weight_down, preact_gate, preact_up, activation, *flags):
    joined, has_sums, has_output_sums = flags
    grad: Tensor = grad_output @ weight_down
    if preact_gate is None and not joined:
        found, postact = [grad * (preact_up > 0)], preact_up.relu()
    else:
        gate, up = preact_up.chunk(2, 1) if joined else (preact_gate, preact_up)
        found, postact = [grad * up, grad * gate], gate * up
        found = [torch.cat(found, 1)] if joined else found
    summed = [*(found if has_sums else []), *([grad_output] if has_output_sums else [])]
    if not summed:
        return [*found, postact, postact.new_empty(0, HIDDEN)]
    sums = postact.new_zeros(hidden_gradients.blocks(ROWS), sum(t.shape[1] for t in summed))
    sums[0] = torch.cat(summed, 1).sum(0)
    return [*found, postact, sums]


@LIE
@pytest.mark.parametrize("summed", [(False, False), (True, True), (False, True)])
def test_hidden_gradients_are_one_call(monkeypatch, prepared, gated, joined, turned, summed):
    text = "g * u" if gated else "relu(x)"
    caller = caller_of(gradients, (IN, HIDDEN), [text, joined, *summed])
    monkeypatch.setattr(hidden_gradients, "hidden_gradient_caller", caller)
    weight = torch.randn(HIDDEN, IN).t() if turned else torch.randn(IN, HIDDEN)
    grad, apart = torch.randn(ROWS, IN), gated and not joined
    gate = torch.randn(ROWS, HIDDEN) if apart else None
    preact = torch.randn(ROWS, 2 * HIDDEN if joined else HIDDEN)
    arguments = (weight, gate, preact, text, joined, *summed)
    before, after = torch.randn(IN, IN), torch.randn(2 * HIDDEN, 8)

    def function(grad):
        *found, sums = torch.ops.fusedmlp.hidden_gradient(grad @ before, *arguments)
        return [*(each @ after[: each.shape[1]] for each in found), sums]

    got, code = run(function, grad)
    *found, sums = gradients(grad @ before, *arguments)
    expected = [*(each @ after[: each.shape[1]] for each in found), sums]
    assert "= fusedmlp_hidden_gradient_" in code
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    known = ((IN, HIDDEN), torch.float32, (True, True, apart, True), turned, None)
    assert prepared == [(ROWS, text, joined, *summed, *known)]


class Trained(torch.autograd.Function):
    """``down(relu(up x))`` or ``down(gate x * up x)``, whose backward pass is a call."""

    @staticmethod
    def forward(ctx, x, gate, up, down, joined, read_twice):
        preacts = [x @ weight.t() for weight in (gate, up) if weight is not None]
        ctx.how, hidden = (joined, read_twice), preacts[0] * preacts[-1]
        kept = [torch.cat(preacts, 1)] if joined else preacts
        ctx.save_for_backward(x, gate, up, down, *kept)
        return (hidden if gate is not None else preacts[0].relu()) @ down.t()

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, down, *kept = ctx.saved_tensors
        joined, read_twice = ctx.how
        *others, last = kept
        what = (others[0] if others else None, last, "relu(x)" if gate is None else "g * u")
        found = torch.ops.fusedmlp.hidden_gradient(grad, down, *what, joined, False, False)
        *d_preacts, postact, _ = found
        of_down = grad.t() @ postact
        if read_twice:
            of_down = of_down + (last - last).sum()
        both = torch.cat(d_preacts, 1)
        weights = up if gate is None else torch.cat([gate, up])
        of_gate, of_up = None, both.t() @ x
        if gate is not None:
            of_gate, of_up = of_up.chunk(2)
        return both @ weights, of_gate, of_up, of_down, None, None


@pytest.mark.parametrize(
    ("gated", "joined", "donated", "read_twice", "spends"),
    slow_but(
        [
            (True, False, True, False, True),
            (True, False, True, True, False),  # of one of two is not enough
            (True, False, False, False, False),
        ],
        [
            (False, False, True, False, True),
            (False, False, True, True, False),
            (False, False, False, False, False),
            (True, True, True, False, True),
            (True, True, True, True, False),
            (True, False, True, False, True),
            (True, False, True, True, False),
            (True, False, False, False, False),
        ],
    ),
)
def test_gradients_take_the_memory_of_what_nothing_else_reads(
    monkeypatch, gated, joined, donated, read_twice, spends
):
    told, how = [], ("g * u" if gated else "relu(x)", joined, False, False)

    def caller(*known):
        told.append(known[-1])

        def call(*tensors):
            *found, postact, sums = gradients(*tensors, *how)
            kept = [each for each in tensors[2:] if each is not None]
            if known[-1]:
                found = [old.copy_(new) for old, new in zip(kept, found, strict=True)]
            return [*found, postact, sums]

        return call

    monkeypatch.setattr(hidden_gradients, "hidden_gradient_caller", caller)
    torch._dynamo.reset()
    sizes = ((ROWS, IN), (HIDDEN, IN), (HIDDEN, IN), (IN, HIDDEN))
    x, gate, up, down = (torch.randn(size, requires_grad=True) for size in sizes)
    gate = gate if gated else None
    leaves = [each for each in (x, gate, up, down) if each is not None]
    compiled = torch.compile(Trained.apply, options={"fx_graph_cache": False})
    grad = torch.randn(ROWS, IN)
    with torch._functorch.config.patch(donated_buffer=donated):
        found = torch.autograd.grad(compiled(x, gate, up, down, joined, read_twice), leaves, grad)
    assert told == [spends]
    hidden = (x @ gate.t()) * (x @ up.t()) if gated else (x @ up.t()).relu()
    expected = torch.autograd.grad(hidden @ down.t(), leaves, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("apart", [False, True])
def test_the_gradient_of_a_gated_input_is_one_call(monkeypatch, prepared, apart):
    def joined(grad, gate, up, grad_up):
        grad = grad if grad_up is None else torch.cat([grad, grad_up], 1)
        return [grad @ torch.cat([gate, up])]

    caller = caller_of(joined, (HIDDEN, IN), [])
    monkeypatch.setattr(hopper_epilogue, "input_gradient_caller", caller)
    gate, up = torch.randn(HIDDEN, IN), torch.randn(HIDDEN, IN)
    grad, grad_up = torch.randn(ROWS, (1 if apart else 2) * HIDDEN), None
    if apart:
        grad_up = torch.randn(ROWS, HIDDEN)

    before, after = torch.randn(grad.shape[1], grad.shape[1]), torch.randn(IN, 8)

    def function(grad):
        return torch.ops.fusedmlp.input_gradient(grad @ before, gate, up, grad_up)[0] @ after

    got, code = run(function, grad)
    assert "= fusedmlp_input_gradient_" in code
    expected = joined(grad @ before, gate, up, grad_up)[0] @ after
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    given = (True, True, True, apart)
    assert prepared == [(ROWS, (HIDDEN, IN), torch.float32, given, False, None)]


class Packed(torch.nn.Module):
    """Gate and up side by side in one layer, in either order."""

    def __init__(self, order):
        super().__init__()
        self.first, self.down = torch.nn.Linear(IN, 2 * HIDDEN), torch.nn.Linear(HIDDEN, IN)
        self.order = order

    def forward(self, x):
        parts = self.first(x).chunk(2, -1)
        gate, up = (parts[index] for index in self.order)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_packed_weight_is_split_at_once_and_its_gradient_is_right(order):
    model, x = Packed(order), torch.randn(10, IN, requires_grad=True)
    always = fusion_backend.Options(policy="always")
    graph = fusion_backend.fuse(torch.fx.symbolic_trace(model), [x], always)
    targets = [node.target for node in graph.graph_module.graph.nodes]
    assert targets.count(torch.ops.aten.split_with_sizes.default) == 2  # weight and bias
    assert torch.ops.aten.slice.Tensor not in targets
    leaves, grad = [x, *model.parameters()], torch.randn(10, IN)
    expected = torch.autograd.grad(model(x), leaves, grad)
    y = graph.graph_module(x)
    y = y[0] if isinstance(y, tuple) else y
    torch.testing.assert_close(torch.autograd.grad(y, leaves, grad), expected)
