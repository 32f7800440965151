"""Fuse models of Hugging Face's transformers, unchanged.

    pip install transformers
    python examples/huggingface_models.py

The weights are random, so nothing is downloaded; with `AutoModel.from_pretrained(...)` the rest of
the code is the same.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import fusion_backend

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(0, 1000, (4, 32), device=device)
    for model in (BertModel(BertConfig(**SMALL)), LlamaModel(LlamaConfig(**SMALL))):
        model = model.to(device).eval()
        print(f"\n{type(model).__name__} on {device}")
        with torch.no_grad():
            print(fusion_backend.explain(model, tokens))
            compiled = torch.compile(model, backend="fusedmlp")
            difference = compiled(tokens)[0] - model(tokens)[0]
        print(f"greatest difference from eager: {difference.abs().max():.1e}")


if __name__ == "__main__":
    main()
