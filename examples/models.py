"""Factories for the command line: each returns a model and the arguments of one call.

fusedmlp explain examples/models.py:gpt2
fusedmlp profile examples/models.py:mlp --backward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Call = tuple[nn.Module, tuple[Any, ...]]


def mlp() -> Call:
    """A plain MLP with 4096 rows."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 64))
    return model, (torch.randn(4096, 64),)


def gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=1000)
    tokens = torch.randint(0, 1000, (4, 64))
    return GPT2Model(config).eval(), (), {"input_ids": tokens, "use_cache": False}


def gpt2_small() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """GPT-2 of 12 layers, 124 million parameters, with random weights."""
    from transformers import GPT2Config, GPT2Model

    tokens = torch.randint(0, 50257, (1, 64))
    return GPT2Model(GPT2Config()).eval(), (), {"input_ids": tokens, "use_cache": False}


def main() -> None:
    """List the factories with the sizes of their models."""
    for factory in (mlp, gpt2):
        parameters = sum(parameter.numel() for parameter in factory()[0].parameters())
        print(f"examples/models.py:{factory.__name__}  {parameters / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
