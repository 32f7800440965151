"""A site in the planner's terms, and rows that are not known, which tests of planning share."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.mlp.expression import parse
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.setting import Setting

SETTING = Setting(
    activations=(parse("gelu_tanh(x)"),),
    gated=False,
    rows=100,
    in_features=768,
    hidden_features=3072,
    further_features=(768,),
    dtype=torch.bfloat16,
    device=torch.device("cuda", 0),
    has_bias_up=True,
    plain_layout=True,
    training=False,
    target=gpu_named("h100"),
)


def symbolic(rows):
    environment = ShapeEnv()
    source = torch._dynamo.source.ConstantSource("rows")
    symbol = environment.create_symbol(rows, source)
    return environment, environment.create_symintnode(symbol, hint=rows, source=source)
