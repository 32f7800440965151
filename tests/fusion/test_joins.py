"""Layers joined by what no activation is get a row; attention, norms and residuals get none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import sites_of

X = torch.randn(2, 6, 16)


@torch.library.custom_op("joins::act", mutates_args=())
def act(x: Tensor) -> Tensor:
    return torch.tanh(x)


@torch.library.custom_op("joins::gate", mutates_args=())
def gate(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


@torch.library.custom_op("joins::packed", mutates_args=())
def packed(x: Tensor) -> Tensor:
    g, u = x.chunk(2, -1)
    return F.silu(g) * u


@torch.library.custom_op("joins::pair", mutates_args=())
def pair(x: Tensor) -> list[Tensor]:
    return [torch.tanh(x), torch.sigmoid(x)]


@torch.library.custom_op("joins::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


for operator in (act, gate, attention):
    operator.register_fake(lambda x, *others: torch.empty_like(x))
packed.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
pair.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])


class Layers(nn.Module):
    """Three layers of 16 → 32, one of 32 → 16 and one of 16 → 16, and what a body does by them."""

    def __init__(self, body):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 32) for _ in range(3))
        self.down, self.same = nn.Linear(32, 16), nn.Linear(16, 16)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def heads(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def by_hand(q, k, v):
    return ((q @ k.transpose(-1, -2)) / 3.0).softmax(-1) @ v


JOINED = {
    "softmax": ("non-pointwise", lambda m, x: m.down(m.a(x).softmax(-1))),
    "log_softmax": ("non-pointwise", lambda m, x: m.down(F.log_softmax(m.a(x), -1))),
    "softmax of heads": (
        "non-pointwise",
        lambda m, x: m.down(m.a(x).unflatten(-1, (4, -1)).softmax(-1).flatten(-2)),
    ),
    "scaled softmax": ("non-pointwise", lambda m, x: m.down((m.a(x) / 2.0).softmax(-1) * 3.0)),
    "softmax and a residual": (
        "non-pointwise",
        lambda m, x: m.same(x + F.softmax(m.same(x), -1)),
    ),
    "maximum over rows": ("non-pointwise", lambda m, x: m.down(m.a(x).amax(1))),
    "deviation over rows": ("non-pointwise", lambda m, x: m.down(m.a(x).std(1))),
    "median over rows": ("non-pointwise", lambda m, x: m.down(m.a(x).median(1).values)),
    "product of features": ("non-pointwise", lambda m, x: m.down(m.a(x).logcumsumexp(-1))),
    "largest of two features": (
        "non-pointwise",
        lambda m, x: m.same(m.a(x).unflatten(-1, (16, 2)).amax(-1)),
    ),
    "softmax written to its operand": (
        "non-pointwise",
        lambda m, x: m.down(torch.softmax(m.a(x).mul_(2.0), -1)),
    ),
    "softmax and dropout": (
        "non-pointwise",
        lambda m, x: m.down(F.dropout(m.a(x).softmax(-1), 0.5, True)),
    ),
    "custom operator": ("unknown-function", lambda m, x: m.down(act(m.a(x)))),
    "activation and custom operator": (
        "unknown-function",
        lambda m, x: m.down(act(F.gelu(m.a(x)))),
    ),
    "custom operator and activation": (
        "unknown-function",
        lambda m, x: m.down(F.gelu(act(m.a(x)))),
    ),
    "custom gate": ("unknown-function", lambda m, x: m.down(gate(m.a(x), m.b(x)))),
    "custom packed gate": ("unknown-function", lambda m, x: m.same(packed(m.a(x)))),
    "cond": (
        "unknown-function",
        lambda m, x: m.down(torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.a(x),))),
    ),
    "fake quantization": (
        "unknown-function",
        lambda m, x: m.down(torch.fake_quantize_per_tensor_affine(m.a(x), 0.1, 0, -128, 127)),
    ),
    "one of several results": ("unknown-function", lambda m, x: m.down(pair(m.a(x))[1])),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_join_that_cannot_be_fused_has_a_row_with_its_reason(name):
    reason, body = JOINED[name]
    with torch.no_grad():
        sites = sites_of(Layers(body), X)
    assert [(site.reason, site.legal, site.rewritten) for site in sites] == [(reason, False, False)]
    assert tuple(sites[0].shape)[1] == 16


NOT_JOINED = {
    "attention": lambda m, x: m.down(
        merged(F.scaled_dot_product_attention(*(heads(layer(x)) for layer in (m.a, m.b, m.c))))
    ),
    "attention by hand": lambda m, x: m.down(
        merged(by_hand(*(heads(layer(x)) for layer in (m.a, m.b, m.c))))
    ),
    "attention of one head": lambda m, x: m.down(by_hand(m.a(x), m.b(x), m.c(x))),
    "custom attention": lambda m, x: m.down(
        merged(attention(*(heads(layer(x)) for layer in (m.a, m.b, m.c))))
    ),
    "custom attention of one head": lambda m, x: m.down(attention(m.a(x), m.b(x), m.c(x))),
    "nothing": lambda m, x: m.down(m.a(x)),
    "a norm": lambda m, x: m.down(F.layer_norm(m.a(x), (32,))),
    "a norm without a name": lambda m, x: m.down(
        m.a(x) / torch.linalg.vector_norm(m.a(x), dim=-1, keepdim=True)
    ),
    "a residual": lambda m, x: m.same(x + m.same(x)),
    "a mean over rows": lambda m, x: m.down(m.a(x).mean(1)),
    "chosen rows": lambda m, x: m.down(m.a(x)[:, [0, 2]]),
    "rows moved by a random number": lambda m, x: m.down(m.a(x)[:, torch.randperm(6)]),
    "a dropout": lambda m, x: m.down(F.dropout(m.a(x), 0.5, True)),
    "attention of features": lambda m, x: m.down(
        m.a(x).softmax(-1) @ (m.b(x).softmax(-2).transpose(-1, -2) @ m.c(x))
    ),
    "a softmax of no layer": lambda m, x: m.same(x.softmax(-1)),
    "a custom operator of no layer": lambda m, x: m.same(act(x)),
    "a softmax that ends": lambda m, x: m.a(x).softmax(-1),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_is_no_join_has_no_row(name):
    with torch.no_grad():
        assert sites_of(Layers(NOT_JOINED[name]), X) == []


def test_the_way_back_is_bounded():
    def body(m, x):
        h = act(m.a(x))
        for _ in range(100):
            h = h + 1.0
        return m.down(h)

    assert sites_of(Layers(body), X) == []
