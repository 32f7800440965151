"""The backend on a GPU: real kernels through Inductor, in every way in which models are run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

from fusion_backend.backend import backend_with_observer

ALWAYS = {"fusedmlp.policy": "always"}


class Plain(nn.Module):
    def __init__(self, width, hidden, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Gated(nn.Module):
    def __init__(self, width, hidden, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def compiled(model, **kwargs):
    """The compiled model and the list that its sites go to."""
    sites = []
    backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
    kwargs.setdefault("options", ALWAYS)
    return torch.compile(model, backend=backend, **kwargs), sites


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


def assert_as_exact_as_eager(model, x, **kwargs):
    """The compiled model's error against float64 is no more than eager's own (5 % for luck)."""
    fast, sites = compiled(model, **kwargs)
    with torch.no_grad():
        result = fast(x)
        eager = model(x)
        exact = model.double()(x.double())
        model.to(x.dtype)
    assert {site.fused for site in sites} == {True}
    assert result.dtype == eager.dtype
    assert result.shape == eager.shape
    assert error(result, exact) <= 1.05 * error(eager, exact) + 1e-7
    return sites[-1]  # Dynamo begins again once it knows that a number it passed is a constant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [Plain, Gated])
@pytest.mark.parametrize(
    ("width", "hidden", "rows"), [(64, 256, 1000), (65, 259, 77), (768, 3072, 129), (512, 1000, 1)]
)
def test_inference_is_as_exact_as_eager(kind, width, hidden, rows, dtype):
    model = kind(width, hidden).to("cuda", dtype)
    assert_as_exact_as_eager(model, torch.randn(rows, width, device="cuda", dtype=dtype))


class Block(nn.Module):
    """A residual block, as in transformers."""

    def __init__(self, mlp, norm):
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("kind", [Plain, Gated])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [33, 64, 128, 256])
@pytest.mark.parametrize("how", [{}, {"dynamic": True}])
def test_the_kernel_of_a_narrow_mlp_takes_norm_and_residual(how, width, dtype, kind):
    norm = nn.RMSNorm if kind is Gated else nn.LayerNorm
    model = Block(kind(width, 4 * width), norm(width)).to("cuda", dtype)
    x = torch.randn(3, 1500, width, device="cuda", dtype=dtype)
    site = assert_as_exact_as_eager(model, x, **how)
    narrow = site.plan == "back_to_back"
    assert narrow or width > 64
    assert (bool(site.norm), site.residual) == (narrow, narrow)


@pytest.mark.parametrize("plan", ["back_to_back", "epilogue"])
def test_narrow_models_take_one_kernel_and_wide_ones_two(plan):
    width = 64 if plan == "back_to_back" else 1024
    model = Plain(width, 4 * width).to("cuda", torch.bfloat16)
    site = assert_as_exact_as_eager(model, torch.randn(256, width, device="cuda").bfloat16())
    assert site.plan == plan


@pytest.mark.parametrize("rows", [(0,), (2, 0, 3), (1,), (7, 33)])
def test_any_number_of_rows_works(rows):
    model = Plain(64, 256).to("cuda", torch.bfloat16)
    x = torch.randn(*rows, 64, device="cuda", dtype=torch.bfloat16)
    fast, _ = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [Plain, Gated])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_as_exact_as_those_of_eager(kind, dtype):
    model = kind(256, 1024, bias=True).to("cuda", dtype)
    x = torch.randn(4, 130, 256, device="cuda", dtype=dtype)
    upstream = torch.randn_like(x)
    fast, sites = compiled(model)

    def gradients(function, x, upstream):
        x = x.detach().clone().requires_grad_()
        model.zero_grad()
        function(x).backward(upstream)
        return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]

    ours, eager = gradients(fast, x, upstream), gradients(model, x, upstream)
    model.double()
    exact = gradients(model, x.double(), upstream.double())
    assert [site.fused for site in sites] == [True]
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert error(mine, truth) <= 1.1 * error(theirs, truth)


@pytest.mark.parametrize("frozen", ["up", "down"])
def test_frozen_layers_get_no_gradient(frozen):
    model = Plain(128, 512).to("cuda", torch.bfloat16)
    getattr(model, frozen).requires_grad_(False)
    fast, _ = compiled(model)
    fast(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen)


@pytest.mark.parametrize("kind", [Plain, Gated])
def test_cuda_graphs_replay_the_right_numbers(kind):
    model = kind(768, 3072).to("cuda", torch.bfloat16)
    fast, sites = compiled(model, mode="reduce-overhead", options=None)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(16, 768, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(fast(x).clone(), model(x), atol=2e-2, rtol=2e-2)
    assert len(sites) == 1


def test_symbolic_rows_choose_kernels_without_a_recompile_a_size():
    model = Gated(256, 1024).to("cuda", torch.bfloat16)
    fast, sites = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 50, 63, 5000, 4097, 700, 701):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)
    assert len(sites) <= 4


def test_autocast_computes_in_the_dtype_of_autocast():
    model = Plain(256, 1024).cuda()
    x = torch.randn(100, 256, device="cuda")
    fast, sites = compiled(model)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        result = fast(x)
        torch.testing.assert_close(result, model(x), atol=2e-2, rtol=2e-2)
    assert result.dtype == torch.bfloat16
    assert [site.fused for site in sites] == [True]


def test_checkpointed_training_is_exact():
    from torch.utils.checkpoint import checkpoint

    model = Gated(256, 1024).to("cuda", torch.bfloat16)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    fast, sites = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    fast(x).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for mine, theirs in zip(gradients, model.parameters(), strict=True):
        assert error(mine, theirs.grad.double()) < 1e-2
    assert [site.fused for site in sites] == [True]


def test_non_contiguous_inputs_and_conv1d_weights_work():
    up = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16) / 11
    down = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16) / 22

    def model(x):
        return torch.relu(x.transpose(0, 1) @ up) @ down

    x = torch.randn(128, 300, device="cuda", dtype=torch.bfloat16)
    fast, sites = compiled(model)
    torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)
    assert [site.fused for site in sites] == [True]


def test_offsets_beyond_32_bits_are_right():
    model = Plain(64, 128).to("cuda", torch.bfloat16)
    rows = (1 << 31) // 64 + 1000
    x = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16).normal_()
    fast, sites = compiled(model, dynamic=False)
    with torch.no_grad():
        result = fast(x)[-2000:]
        torch.testing.assert_close(result, model(x[-2000:]), atol=2e-2, rtol=2e-2)
    assert [site.fused for site in sites] == [True]


def test_kernels_of_equal_mlps_are_analysed_once(monkeypatch):
    from torch._higher_order_ops import triton_kernel_wrap

    analysed, generate = [], triton_kernel_wrap.generate_ttir
    monkeypatch.setattr(
        triton_kernel_wrap,
        "generate_ttir",
        lambda kernel, *launch: analysed.append(kernel) or generate(kernel, *launch),
    )
    counts = []
    for layers in (1, 4):
        torch._dynamo.reset()
        analysed.clear()
        model = nn.Sequential(*(Plain(1024, 4096) for _ in range(layers))).to("cuda", torch.half)
        fast, sites = compiled(model)
        with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
            fast(torch.randn(256, 1024, device="cuda", dtype=torch.half))
        assert [site.plan for site in sites] == layers * ["epilogue"]
        counts.append(len(analysed))
    assert counts[0] == counts[1] >= 1
