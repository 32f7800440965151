"""The first layers of an MLP and its activation on a GPU, where a norm or a reader follows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.backend import backend_with_observer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
HALVES = [torch.bfloat16, torch.float16]


def tensors(activation, dtype, *, width=64, hidden=256):
    def tensor(*shape):
        scale = shape[-1] ** 0.5 if len(shape) == 2 else 1.0
        return (torch.randn(*shape, device="cuda") / scale).to(dtype).requires_grad_()

    gate = (tensor(hidden, width), tensor(hidden)) if activation == GATED else (None, None)
    return [tensor(3, 77, width), *gate, tensor(hidden, width), tensor(hidden)]


def eager(x, weight_gate, bias_gate, weight_up, bias_up):
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        return F.gelu(up, approximate="tanh")
    return F.silu(F.linear(x, weight_gate, bias_gate)) * up


def double(values):
    return [v if v is None else v.detach().double().requires_grad_() for v in values]


def error(found, exact):
    return (found.double() - exact).norm() / exact.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_training_is_as_exact_as_eager(activation, dtype, compiled):
    def function(*values):
        return torch.ops.fusedmlp.activated_linear(*values, [], activation, "epilogue")

    function = torch.compile(function, fullgraph=True) if compiled else function
    values = tensors(activation, dtype)
    exact_values = double(values)
    ours, theirs, truth = function(*values), eager(*values), eager(*exact_values)
    assert error(ours, truth) <= 1.05 * error(theirs, truth)
    upstream, found = torch.randn_like(ours), []
    for hidden, given in ((ours, values), (theirs, values), (truth, exact_values)):
        asked = [value for value in given if value is not None]
        found.append(torch.autograd.grad(hidden, asked, upstream.to(hidden.dtype)))
    for mine, other, right in zip(*found, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (other.shape, dtype, other.stride())
        assert error(mine, right) <= 1.1 * error(other, right)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(768, 3072),
            nn.Linear(3072, 768),
            nn.LayerNorm(3072),
        )

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


class Returning(Normalised):
    def forward(self, x):
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + hidden[..., :1]


@pytest.mark.parametrize("model", [Normalised, Returning])
def test_many_rows_are_fused_by_default_and_as_exact_as_eager(model):
    sites = []
    backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
    model = model().cuda().bfloat16()
    x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ours, theirs = torch.compile(model, backend=backend)(x), model(x)
        exact = model.double()(x.double())
    if torch.cuda.get_device_capability() == (9, 0):  # of which a table ships
        assert [(site.form, site.plan) for site in sites] == [("activated", "epilogue")]
    assert error(ours, exact) <= 1.05 * error(theirs, exact)


def test_each_activation_of_a_deep_mlp_is_fused_into_the_layer_before_it():
    sites = []
    backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
    widths = (768, 1024, 1536, 1024, 512)
    layers = [nn.Linear(*each) for each in itertools.pairwise(widths)]
    parts = [part for layer in layers for part in (layer, nn.SiLU())][:-1]
    model = nn.Sequential(*parts).cuda().bfloat16()
    x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=backend, options={"fusedmlp.policy": "always"})
    with torch.no_grad():
        ours, theirs = compiled(x), model(x)
        with torch.profiler.profile() as recorded:
            compiled(x)
            torch.cuda.synchronize()
        exact = model.double()(x.double())
    launched = [
        e.name for e in recorded.events() if e.device_type == torch.profiler.DeviceType.CUDA
    ]
    assert len([name for name in launched if "splitKreduce" not in name]) == len(layers)
    assert [site.form for site in sites] == ["activated", "activated", "plain"]
    assert error(ours, exact) <= 1.05 * error(theirs, exact)
