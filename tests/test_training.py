"""What people who train do around a compiled model, which must be as with eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import fusion_backend
from fusion_backend import Options, fuse

WIDTH, HIDDEN, ROWS = 16, 32, 24


class Mlp(nn.Module):
    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Fusing:
    """A backend that fuses all that is legal and runs what ahead-of-time autograd traces."""

    def __init__(self) -> None:
        self.fused = 0

    def __call__(self, graph_module: Any, example_inputs: Any) -> Any:
        result = fuse(graph_module, example_inputs, Options(policy="always", strict=True))
        self.fused += sum(site.fused for site in result.sites)
        return aot_eager(result.graph_module, example_inputs)


# The C++ kernels of 16 bits have tests of their own, and take seconds to compile.
without_cpp_of_16_bits = pytest.mark.usefixtures("rows_by_reference")


@pytest.fixture
def fusing():
    backend = Fusing()
    yield backend
    assert backend.fused


def batch(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(result: torch.Tensor) -> torch.Tensor:
    return result.float().sin().sum()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def check_gradients(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_several_batches_add_up(fusing, gated):
    model = Mlp(gated)
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=fusing)
    for seed in range(3):
        loss_of(compiled(batch(seed))).backward()
        loss_of(expected(batch(seed))).backward()
    check_gradients(model, expected)


@without_cpp_of_16_bits
def test_a_hook_adds_gradients_up_elsewhere(fusing):
    model = Mlp().bfloat16()
    expected, compiled = copy.deepcopy(model).float(), torch.compile(model, backend=fusing)

    def accumulate(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(accumulate)
    for seed in range(2):
        loss_of(compiled(batch(seed).bfloat16())).backward()
        loss_of(expected(batch(seed).bfloat16().float())).backward()
    assert gradients(model) == [None] * 4
    for parameter, exact in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.main_grad.dtype == torch.float32
        error = (parameter.main_grad - exact.grad).norm() / exact.grad.norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps


def test_layers_that_two_mlps_share_get_both_gradients(fusing):
    model = nn.Sequential(Mlp(), nn.LayerNorm(WIDTH), Mlp())
    model[2].up, model[2].down.bias = model[0].up, model[0].down.bias
    expected = copy.deepcopy(model)
    loss_of(torch.compile(model, backend=fusing)(batch(0))).backward()
    loss_of(expected(batch(0))).backward()
    check_gradients(model, expected)


def test_a_graph_that_is_kept_is_differentiated_twice(fusing):
    model = Mlp(gated=True)
    expected = copy.deepcopy(model)
    for function in (torch.compile(model, backend=fusing), expected):
        loss = loss_of(function(batch(0)))
        loss.backward(retain_graph=True)
        loss.backward()
    check_gradients(model, expected)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(()).expand(ROWS, WIDTH),
        torch.linspace(-1, 1, ROWS).unsqueeze(1).expand(ROWS, WIDTH),
        torch.linspace(-1, 1, ROWS * WIDTH).view(WIDTH, ROWS).t(),
        torch.linspace(-1, 1, 2 * ROWS * WIDTH).view(2 * ROWS, WIDTH)[::2],
    ],
    ids=["one number", "one a row", "transposed", "every other row"],
)
def test_incoming_gradients_of_any_strides(fusing, gradient):
    model = Mlp()
    expected = copy.deepcopy(model)
    torch.compile(model, backend=fusing)(batch(0)).backward(gradient)
    expected(batch(0)).backward(gradient)
    check_gradients(model, expected)


def test_training_after_inference_mode(fusing):
    model = Mlp(gated=True)
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=fusing)
    with torch.inference_mode():
        compiled(batch(0))
    loss_of(compiled(batch(0))).backward()
    loss_of(expected(batch(0))).backward()
    check_gradients(model, expected)


@without_cpp_of_16_bits
def test_scaled_losses_under_autocast(fusing):
    model = Mlp(gated=True)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for function in (torch.compile(model, backend=fusing), eager):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(function(batch(0)))
        scaler.scale(loss).backward()
    exact(batch(0).double()).sin().sum().backward()
    for found, same, right in zip(*map(gradients, (model, eager, exact)), strict=True):
        error, bound = ((each / 1024 - right).norm() for each in (found, same))
        assert error <= 1.5 * bound


def test_blocks_are_compiled_one_by_one(fusing):
    model = nn.Sequential(*(Mlp(gated=True) for _ in range(3)))
    expected = copy.deepcopy(model)
    for block in model:
        block.compile(backend=fusing)
    loss_of(model(batch(0))).backward()
    loss_of(expected(batch(0))).backward()
    check_gradients(model, expected)
    assert fusing.fused == 2  # the input of the first alone needs no gradient


def test_the_optimizer_steps_within_the_compiled_function(fusing):
    model = Mlp(gated=True)
    expected = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, expected)]

    def step(model, optimizer, x):
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend=fusing)
    for seed in range(3):
        found = compiled(model, optimizers[0], batch(seed))
        torch.testing.assert_close(found, step(expected, optimizers[1], batch(seed)))
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


@pytest.mark.parametrize("gated", [False, True])
def test_deterministic_steps_are_bitwise_equal(gated):
    model, found = Mlp(gated), []
    torch.use_deterministic_algorithms(True)
    try:
        compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
        for _ in range(2):
            model.zero_grad()
            loss_of(compiled(batch(0))).backward()
            found.append([gradient.clone() for gradient in gradients(model)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert [site.plan for site in fusion_backend.history()[-1].sites] == ["rows"]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def frozen(kind: str, gated: bool) -> Mlp:
    torch.manual_seed(0)
    model = Mlp(gated)
    for name, parameter in model.named_parameters():
        trained = {"all": False, "first": "down" in name, "all but biases": "bias" in name}
        parameter.requires_grad_(trained[kind])
    return model


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["all", "first", "all but biases"])
def test_the_input_of_frozen_first_layers_may_be_written_to(fusing, kind, gated):
    """Autograd keeps it for the gradient of a first weight only."""
    found = []
    for compiled in (False, True):
        model, before = frozen(kind, gated), nn.Linear(WIDTH, WIDTH)
        before.weight.data.copy_(torch.eye(WIDTH))
        function = torch.compile(model, backend=fusing) if compiled else model
        hidden = before(batch(0))
        hidden += function(hidden)
        loss_of(hidden).backward()
        asked = [p for p in model.parameters() if p.requires_grad]
        found.append([before.weight.grad, *(p.grad for p in asked)])
    torch.testing.assert_close(found[1], found[0])


def test_biases_alone_may_be_trained_by_steps_between_two_backward_passes(fusing):
    found = []
    for compiled in (False, True):
        model = frozen("all but biases", False)
        function = torch.compile(model, backend=fusing) if compiled else model
        optimizer = torch.optim.SGD([model.up.bias, model.down.bias], lr=0.1)
        first, second = function(batch(0)), function(batch(1))
        loss_of(first).backward()
        optimizer.step()
        loss_of(second).backward()
        found.append([model.up.bias.grad, model.down.bias.grad])
    torch.testing.assert_close(found[1], found[0])


def test_inputs_of_frozen_first_layers_may_be_made_in_inference_mode(fusing):
    model = frozen("first", False)
    with torch.inference_mode():
        x = batch(0)
    loss_of(torch.compile(model, backend=fusing)(x)).backward()
    found, model.down.weight.grad = model.down.weight.grad, None
    loss_of(model(x)).backward()
    torch.testing.assert_close(found, model.down.weight.grad)
