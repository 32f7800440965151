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
from repetition import walked

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


def saving(x, weight_up, weight_gate, bias_up, bias_gate, activation):
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        return [up.relu(), up]
    gate = F.linear(x, weight_gate, bias_gate)
    return [F.silu(gate) * up, gate, up]


@pytest.mark.parametrize(("gated", "turned"), walked([False, True], [False, True]))
def test_first_layers_return_what_training_keeps(monkeypatch, prepared, gated, turned):
    text = "silu(g) * u" if gated else "relu(x)"
    caller = caller_of(saving, (HIDDEN, IN), [text])
    monkeypatch.setattr(hopper_epilogue, "epilogue_saving_caller", caller)
    up = torch.randn(IN, HIDDEN).t() if turned else torch.randn(HIDDEN, IN)
    gate, bias = torch.randn(HIDDEN, IN) if gated else None, torch.randn(HIDDEN)

    # Products around a call are calls themselves: no C++ is compiled for them.
    x, before, after = torch.randn(ROWS, IN), torch.randn(IN, IN), torch.randn(HIDDEN, 8)

    def function(x):
        results = torch.ops.fusedmlp.epilogue_saving(x @ before, up, gate, bias, None, text)
        return [result @ after for result in results]

    got, code = run(function, x)
    expected = [result @ after for result in saving(x @ before, up, gate, bias, None, text)]
    assert "= fusedmlp_epilogue_saving_" in code
    torch.testing.assert_close(got, expected)
    given = (True, True, gated, True, False)
    transposed = turned and not gated
    assert prepared == [(ROWS, text, (HIDDEN, IN), torch.float32, given, transposed, None)]


def gradients(grad_output, weight_down, preact_gate, preact_up, activation, has_sums):
    grad: Tensor = grad_output @ weight_down
    if preact_gate is None:
        found, postact = grad * (preact_up > 0), preact_up.relu()
    else:
        found = torch.cat([grad * preact_up, grad * preact_gate], 1)
        postact = preact_gate * preact_up
    sums = found.new_zeros(hidden_gradients.blocks(ROWS) if has_sums else 0, found.shape[1])
    if has_sums:
        sums[0] = found.sum(0)
    return [found, postact, sums]


@pytest.mark.parametrize(
    ("gated", "has_sums", "turned"), walked([False, True], [False, True], [False, True])
)
def test_hidden_gradients_are_one_call(monkeypatch, prepared, gated, has_sums, turned):
    text = "g * u" if gated else "relu(x)"
    caller = caller_of(gradients, (IN, HIDDEN), [text, has_sums])
    monkeypatch.setattr(hidden_gradients, "hidden_gradient_caller", caller)
    weight = torch.randn(HIDDEN, IN).t() if turned else torch.randn(IN, HIDDEN)
    grad = torch.randn(ROWS, IN)
    preacts = [torch.randn(ROWS, HIDDEN) if given else None for given in (gated, True)]

    def function(grad):
        arguments = (weight, *preacts, text, has_sums)
        found, postact, sums = torch.ops.fusedmlp.hidden_gradient(grad * 2.0, *arguments)
        return found + 1.0, postact, sums.sum(0)

    got, code = run(function, grad)
    found, postact, sums = gradients(grad * 2.0, weight, *preacts, text, has_sums)
    assert "= fusedmlp_hidden_gradient_" in code
    torch.testing.assert_close(got, (found + 1.0, postact, sums.sum(0)), rtol=1e-4, atol=1e-4)
    known = ((IN, HIDDEN), torch.float32, (True, True, gated, True), turned, None)
    assert prepared == [(ROWS, text, has_sums, *known)]


class Trained(torch.autograd.Function):
    """An MLP with ``relu`` in the middle, whose backward pass is a call."""

    @staticmethod
    def forward(ctx, x, up, down, read_twice):
        preact = x @ up.t()
        ctx.save_for_backward(preact, x, up, down)
        ctx.read_twice = read_twice
        return preact.relu() @ down.t()

    @staticmethod
    def backward(ctx, grad):
        preact, x, up, down = ctx.saved_tensors
        hidden_gradient = torch.ops.fusedmlp.hidden_gradient
        found, postact, _ = hidden_gradient(grad, down, None, preact, "relu(x)", False)
        of_down = grad.t() @ postact
        if ctx.read_twice:
            of_down = of_down + (preact - preact).sum()
        return found @ up, found.t() @ x, of_down, None


@pytest.mark.parametrize(
    ("donated", "read_twice", "spends"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_postact_takes_the_memory_of_what_nothing_else_reads(
    monkeypatch, donated, read_twice, spends
):
    told = []

    def caller(*known):
        told.append(known[-1])

        def call(*tensors):
            found, postact, sums = gradients(*tensors, "relu(x)", False)
            return [found, tensors[3].copy_(postact) if known[-1] else postact, sums]

        return call

    monkeypatch.setattr(hidden_gradients, "hidden_gradient_caller", caller)
    torch._dynamo.reset()
    sizes = ((ROWS, IN), (HIDDEN, IN), (IN, HIDDEN))
    x, up, down = tensors = [torch.randn(size, requires_grad=True) for size in sizes]
    compiled = torch.compile(Trained.apply, options={"fx_graph_cache": False})
    grad = torch.randn(ROWS, IN)
    with torch._functorch.config.patch(donated_buffer=donated):
        found = torch.autograd.grad(compiled(*tensors, read_twice), tensors, grad)
    assert told == [spends]
    expected = torch.autograd.grad((x @ up.t()).relu() @ down.t(), tensors, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_the_gradient_of_a_gated_input_is_one_call(monkeypatch, prepared):
    def joined(grad, gate, up):
        return [grad @ torch.cat([gate, up])]

    caller = caller_of(joined, (HIDDEN, IN), [])
    monkeypatch.setattr(hopper_epilogue, "input_gradient_caller", caller)
    grad, gate, up = torch.randn(ROWS, 2 * HIDDEN), torch.randn(HIDDEN, IN), torch.randn(HIDDEN, IN)

    before, after = torch.randn(2 * HIDDEN, 2 * HIDDEN), torch.randn(IN, 8)

    def function(grad):
        return torch.ops.fusedmlp.input_gradient(grad @ before, gate, up)[0] @ after

    got, code = run(function, grad)
    assert "= fusedmlp_input_gradient_" in code
    expected = joined(grad @ before, gate, up)[0] @ after
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    assert prepared == [(ROWS, (HIDDEN, IN), torch.float32, (True,) * 3, False, None)]


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
