"""The fast path of nn.TransformerEncoderLayer: taken apart, and put back where that is no use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from capture import Recorder, record
from fusion_backend import Options, fuse
from fusion_backend.fusion.encoder_layers import is_encoder_layer

X = torch.randn(3, 5, 8)


def layer(activation="gelu", norm_first=False):
    return nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, activation=activation, norm_first=norm_first
    ).eval()


def fast_path_calls(graph_module):
    return sum(map(is_encoder_layer, graph_module.graph.nodes))


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_mlp_of_the_fast_path_is_fused(activation, norm_first, padding):
    mask = torch.arange(5) >= torch.tensor([[5], [4], [3]]) if padding else None
    model = layer(activation, norm_first)
    with torch.no_grad():
        recorder, result = record(model, X, src_key_padding_mask=mask)
        expected = model(X, src_key_padding_mask=mask)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("plain", f"{activation}(x)", True)
    assert site.shape == (15, 8, 16, 8)
    assert list(map(fast_path_calls, recorder.before)) == [1]
    assert list(map(fast_path_calls, recorder.after)) == [0]
    torch.testing.assert_close(result, expected)


def test_every_layer_of_an_encoder_is_named():
    model = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        recorder, result = record(model, X)
        torch.testing.assert_close(result, model(X))
    assert [(site.module, site.rewritten) for site in recorder.sites] == [
        ("layers.0", True),
        ("layers.1", True),
    ]


def test_a_layer_whose_mlp_is_not_fused_stays_one_operator():
    torch._dynamo.reset()
    recorder = Recorder(Options(policy="never"))
    model = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        result = torch.compile(model, backend=recorder)(X)
        assert torch.equal(result, model(X))
    assert [site.reason for site in recorder.sites] == ["policy", "policy"]
    for before, after in zip(recorder.before, recorder.after, strict=True):
        assert len(before.graph.nodes) == len(after.graph.nodes)
        assert fast_path_calls(after) == 2


def test_a_layer_between_fused_mlps_is_put_back_without_a_trace():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = layer(), layer().double()

        def forward(self, x):
            return self.first(self.layer(self.first(x).double()).float())

    model = Wide().eval()
    with torch.no_grad():
        recorder, result = record(model, X)
        torch.testing.assert_close(result, model(X))
    reasons = [None if site.rewritten else site.reason for site in recorder.sites]
    assert reasons == [None, "dtype", None]
    assert list(map(fast_path_calls, recorder.after)) == [1]


def test_an_empty_batch_stays_in_the_operator():
    with torch.no_grad():
        recorder, result = record(layer(), X[:0])
    (site,) = recorder.sites
    assert (site.form, site.activation) == ("encoder_layer", "gelu(x)")
    assert (site.fused, site.reason) == (False, "opaque-operator")
    assert result.shape == (0, 5, 8)


def test_inductor_compiles_the_parts():
    model = layer()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))


def test_the_layer_is_fused_in_training():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    (site,) = record(model, X)[0].sites
    assert (site.form, site.activation, site.rewritten) == ("plain", "relu(x)", True)


def test_an_exported_layer_is_taken_apart():
    model = layer()
    with torch.no_grad():
        program = torch.export.export(model, (X,)).module()
        result = fuse(program, (X,), Options(policy="always"))
        torch.testing.assert_close(result.graph_module(X), model(X))
    assert [site.rewritten for site in result.sites] == [True]
