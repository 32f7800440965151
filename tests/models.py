"""Models and an input that tests of several rooms share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

X = torch.randn(3, 5, 8)


class MLP(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, f, hidden=16, width=8, bias=True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.f = f

    def forward(self, x):
        return self.down(self.f(self.up(x)))


class Gated(nn.Module):
    def __init__(self, f, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=bias), nn.Linear(8, 16, bias=bias)
        self.down = nn.Linear(16, 8, bias=bias)
        self.f = f

    def forward(self, x):
        return self.down(self.f(self.gate(x), self.up(x)))


class Packed(nn.Module):
    def __init__(self, split, f=lambda g, u: F.silu(g) * u, bias=False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 32, bias=bias), nn.Linear(16, 8, bias=bias)
        self.split, self.f = split, f

    def forward(self, x):
        return self.down(self.f(*self.split(self.gate_up(x))))


class Conv1D(nn.Module):
    """The linear layer of GPT-2: the weight is (in, out), and addmm wants rows."""

    def __init__(self, out_features, in_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / 4)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Around(MLP):
    """An MLP whose forward is a function of (self, x), for graphs that no module writes."""

    def __init__(self, body):
        super().__init__(F.gelu)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


class ConvMLP(nn.Module):
    """Two 1×1 convolutions with a function between them."""

    def __init__(self, f, positions=2, bias=True, hidden=16, **settings):
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[positions - 1]
        self.up = convolution(8, hidden, 1, bias=bias, **settings)
        self.down = convolution(16, 8, 1, bias=bias, **settings)
        self.f = f

    def forward(self, x):
        return self.down(self.f(self.up(x)))


class Layers(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.end, self.norm = nn.Linear(8, 8), nn.LayerNorm(16)
        self.first, self.last = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.to(memory_format=torch.channels_last)
        self.program = program

    def forward(self, x):
        return self.program(self, x)
