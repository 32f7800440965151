"""Whether Inductor takes padding of a product's operand for free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.compat import patches

aten = torch.ops.aten
KERNEL = torch.ops.fusedmlp.mlp.default


@pytest.mark.parametrize(
    ("target", "is_free"),
    [(aten.relu.default, True), (aten._addmm_activation.default, False), (KERNEL, False)],
    ids=["Inductor's own", "a library's", "a kernel's"],
)
def test_what_inductors_code_has_not_written_is_not_padded_for_free(target, is_free):
    from torch._inductor.fx_passes import pad_mm

    graph = Graph()
    made = graph.call_function(target, (graph.placeholder("x"),))
    viewed = graph.call_function(aten.view.default, (made, [6, 4]))
    viewed.meta["val"] = torch.empty(6, 4)
    match = SimpleNamespace(kwargs={"mat1": viewed})
    with patches.paying_for_padding():
        assert pad_mm.should_exclude_padding_time(match, "mat1") == is_free
    assert pad_mm.should_exclude_padding_time(match, "mat1")
