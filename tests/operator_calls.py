"""Arguments of ``torch.ops.fusedmlp.mlp``, what it means, and what graphs and functions call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
IN, HIDDEN, OUT = 8, 16, 12


def arguments(activation, plan="reference", *, leading=(2, 3), dtype=torch.float32, bias=True):
    """Random arguments of ``mlp``; a gate where the activation asks for one."""

    def tensor(*shape):
        return torch.randn(*shape).to(dtype)

    def layer(out_features, in_features):
        return tensor(out_features, in_features), tensor(out_features) if bias else None

    gate = layer(HIDDEN, IN) if "g" in activation.replace("gelu", "") else (None, None)
    layers = (*gate, *layer(HIDDEN, IN), *layer(OUT, HIDDEN))
    return (tensor(*leading, IN), *layers, [], activation, plan)


def eager(x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, *_):
    """What the activations ``PLAIN`` and ``GATED`` mean."""
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        postact = F.gelu(up, approximate="tanh")
    else:
        postact = F.silu(F.linear(x, weight_gate, bias_gate)) * up
    return F.linear(postact, weight_down, bias_down)


def calls(graph_module):
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def compiled_calls(function, *values):
    """The operators that are left when ahead-of-time autograd hands the graph to a compiler."""
    found = []

    def compiler(graph_module, _):
        found.extend(calls(graph_module))
        return make_boxed_func(graph_module.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*values)
    return found


def products(function):
    """How many matrix products a function runs."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return operator(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.count
