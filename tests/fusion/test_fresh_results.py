"""A fused result is a tensor of its own, whoever compiles the graph: it may be written in place."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.registry import lookup_backend

from capture import ALWAYS
from fusion_backend import fuse
from models import Layers
from repetition import slow_but

IMAGE = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
BATCH = torch.randn(2, 3, 8)
PROGRAMS = {
    "matrix": (lambda m, x: m.down(F.gelu(m.up(x))), BATCH[0]),
    "vector": (lambda m, x: m.down(F.gelu(m.up(x))), BATCH[0, 0]),
    "gated": (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), BATCH),
    "flattened": (lambda m, x: m.down(F.gelu(m.up(x)).flatten(0, -2)), BATCH),
    "flattened, with an operand": (
        lambda m, x: m.down((F.gelu(m.up(x)) * m.gate(x * 2)).flatten(0, -2)),
        BATCH,
    ),
    "reshaped": (lambda m, x: m.down(F.gelu(m.up(x)).reshape(3, 2, 16)), BATCH),
    "residual": (lambda m, x: x + m.down(F.gelu(m.up(x))), BATCH),
    "chain": (lambda m, x: m.end(F.relu(m.down(F.relu(m.up(x))))), BATCH),
    "hidden value": (lambda m, x: [h := F.gelu(m.up(x)), m.down(m.norm(h)).sum()][0], BATCH),
    "convolutions": (lambda m, x: m.last(F.gelu(m.first(x))), IMAGE),
}


def interpreted(graph_module, _):
    return torch.fx.Interpreter(graph_module).run


COMPILERS = {
    "none": lambda graph_module, _: graph_module,
    "the interpreter": interpreted,
    **{name: lookup_backend(name) for name in ("aot_eager", "aot_eager_decomp_partition")},
}


def written(model, run, x, training):
    """The result, written to in place, and the gradients through it."""
    model.zero_grad()
    x = x.clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = run(x)
        F.relu_(y.add_(1.0))
        if training:
            y.square().sum().backward()
    return [y.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]


def check(program, compiler, training):
    function, x = PROGRAMS[program]
    model = Layers(function)
    fused = []

    def backend(graph_module, example_inputs):
        result = fuse(graph_module, example_inputs, ALWAYS)
        fused.extend(site.rewritten for site in result.sites)
        return compiler(result.graph_module, example_inputs)

    torch._dynamo.reset()
    run = torch.compile(model, backend=backend)
    for found, expected in zip(
        written(model, run, x, training), written(model, model, x, training), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any(fused)


@pytest.mark.parametrize(
    ("program", "training", "compiler"),
    slow_but(
        [
            (program, training, compiler)
            for program in PROGRAMS
            for training, compiler in ((False, "the interpreter"), (True, "aot_eager"))
        ]
        + [("gated", True, "none"), ("gated", True, "aot_eager_decomp_partition")],
        itertools.product(PROGRAMS, (False, True), COMPILERS),
    ),
)
def test_a_fused_result_may_be_written_to_in_place(program, compiler, training):
    check(program, COMPILERS[compiler], training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": False}])
@pytest.mark.parametrize("program", ["gated", "flattened", "hidden value", "convolutions"])
@pytest.mark.slow
def test_inductors_result_may_be_written_to_in_place(program, options, training):
    function, x = PROGRAMS[program]
    model = Layers(function)
    torch._dynamo.reset()
    run = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always", **options})
    for found, expected in zip(
        written(model, run, x, training), written(model, model, x, training), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_hidden_value_that_is_a_projection_is_a_copy_of_it():
    """The activation may come to one of its variables, which the backward pass reads again."""
    x, gate, up = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16, 8)
    hidden, _, preact = torch.ops.fusedmlp.activated_linear_forward(
        x, gate, None, up, None, [], "u", "reference"
    )
    assert hidden.data_ptr() != preact.data_ptr()


def test_a_constant_hidden_value_has_an_element_for_each_place():
    hidden = torch.ops.fusedmlp.activated_linear(
        torch.randn(4, 8), None, None, torch.randn(16, 8), None, [], "1.0 + 0.0 * x", "reference"
    )
    assert hidden.is_contiguous()
    torch.testing.assert_close(hidden.add_(1.0), torch.full((4, 16), 2.0))
