"""Whole models under several backends, and a decoder with a static cache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_backend.bench import whole_model
from fusion_backend.bench.whole_model import BACKENDS, compile_all, measure
from fusion_backend.cli.models import Decoder, llama_decoding

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these tests are of the CPU")


def test_every_backend_is_measured_and_compared_with_float64() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    x = torch.randn(8, 16)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = compile_all(model, {"input": x}, BACKENDS)
        exact = model.double()(x.double())
        model.float()
        measured = measure(compiled, [exact], rounds=1)
    assert not compiled.failures
    assert tuple(compiled.calls) == BACKENDS
    assert measured.sites == 1
    assert measured.plans == {"rows": 1}
    for row in measured.default.values():
        assert row["wall_us"] > 0
        assert row["kernels"] > 0
        assert row["error"] < 1e-6
    assert measured.cuda_graphs == {}


def test_a_backend_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "MAX_AUTOTUNE", {"no_such_option": True})
    with torch.no_grad():
        inputs = {"input": torch.randn(2, 4)}
        compiled = compile_all(nn.Linear(4, 4), inputs, ("max-autotune", "eager"))
        measured = measure(compiled, None, rounds=1)
    assert "no_such_option" in measured.default["max-autotune"]["failure"]
    assert measured.default["eager"]["wall_us"] > 0
    assert measured.default["eager"]["error"] is None


def test_a_decoder_moves_on_by_a_token_and_goes_back() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    decoder, inputs = llama_decoding(2, 8, **shape)
    assert isinstance(decoder, Decoder)
    with torch.no_grad():
        first = decoder(**inputs)
        second = decoder(**inputs)
        decoder.rewind()
        again = decoder(**inputs)
    assert first.shape == (2, 1, 32)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(second, first)
