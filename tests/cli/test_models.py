"""Unmodified models of transformers: exactly these sites, and the numbers of eager."""

from __future__ import annotations

import itertools

import pytest
import torch

from capture import record
from repetition import slow_but

transformers = pytest.importorskip("transformers")

VOCABULARY = 64

pytestmark = pytest.mark.usefixtures("rows_by_reference")


def _tokens():
    return {"input_ids": torch.randint(0, VOCABULARY, (2, 7))}


def _pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


_GPT2 = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_LLAMA = dict(**_BERT, num_key_value_heads=1, vocab_size=VOCABULARY, pad_token_id=0)
_T5 = {
    "d_model": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "d_kv": 8,
    "vocab_size": VOCABULARY,
}

# model, its configuration, the inputs, form and activation of each of its two layers' MLPs
MODELS = {
    "GPT2Model": ("GPT2Config", _GPT2, _tokens, "plain", "gelu_tanh(x)"),
    "BertModel": ("BertConfig", {**_BERT, "vocab_size": VOCABULARY}, _tokens, "plain", "gelu(x)"),
    "ViTModel": (
        "ViTConfig",
        {**_BERT, "image_size": 16, "patch_size": 8},
        _pixels,
        "plain",
        "gelu(x)",
    ),
    "LlamaModel": ("LlamaConfig", _LLAMA, _tokens, "gated", "silu(g) * u"),
    "Phi3Model": ("Phi3Config", _LLAMA, _tokens, "packed", "silu(g) * u"),
    "GemmaModel": ("GemmaConfig", {**_LLAMA, "head_dim": 8}, _tokens, "gated", "gelu_tanh(g) * u"),
    "ApertusModel": (
        "ApertusConfig",
        _LLAMA,
        _tokens,
        "plain",
        "where(x > 0.0, x * p0 * x + x * p1, x * p1 + (expm1(minimum(x, p2)) - x) * p3)",
    ),
    "T5EncoderModel": ("T5Config", _T5, _tokens, "plain", "relu(x)"),
    "OPTModel": (
        "OPTConfig",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "vocab_size": 64,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
        },
        _tokens,
        "plain",
        "relu(x)",
    ),
    "CLIPVisionModel": (
        "CLIPVisionConfig",
        {**_BERT, "image_size": 16, "patch_size": 8},
        _pixels,
        "plain",
        "x * sigmoid(1.702 * x)",
    ),
}


# Each form, and an activation with parameters; tests/test_corpus.py finds the sites of others.
QUICK = [
    ("LlamaModel", True),
    ("Phi3Model", None),
    ("ApertusModel", None),
]


@pytest.mark.parametrize(
    ("name", "dynamic"), slow_but(QUICK, itertools.product(MODELS, [None, True]))
)
def test_every_mlp_of_the_model_is_fused(name, dynamic):
    configuration, arguments, inputs, form, activation = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, configuration)(**arguments)).eval()
    given = inputs()
    with torch.no_grad():
        recorder, result = record(model, dynamic=dynamic, **given)
        expected = model(**given)
    assert [(s.form, s.activation, s.rewritten) for s in recorder.sites if s.rewritten] == [
        (form, activation, True)
    ] * 2
    assert not [site for site in recorder.sites if not site.rewritten]
    torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-4)
