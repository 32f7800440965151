"""What a cell means: its activation, its biases, its tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.bench.cells import FORMS, PRECISIONS, Cell, as_written, check, operands
from fusion_backend.bench.grids import GRIDS, grid_of, grids_for
from fusion_backend.errors import CommandError
from fusion_backend.mlp.expression import evaluate, parse

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", [*FORMS, "silu(x) * 2.0", "tanh(g) * u"])
def test_an_mlp_as_written_computes_its_expression(form: str) -> None:
    cell = Cell(form, 3, 8, 16, "float32", out=4)
    x, (w,) = operands(cell, 1, CPU)
    up = F.linear(x, w.weight_up, w.bias_up)
    values = {"x": up}
    if cell.gated:
        assert w.weight_gate is not None
        values = {"g": F.linear(x, w.weight_gate, w.bias_gate), "u": up}
    postact = evaluate(parse(cell.activation), values)
    expected = F.linear(postact, w.weight_down, w.bias_down)
    torch.testing.assert_close(as_written(cell)(x, *w), expected)


def test_plain_mlps_have_biases_and_gated_ones_none_by_default() -> None:
    assert Cell("gelu", 1, 8, 8).has_bias
    assert not Cell("swiglu", 1, 8, 8).has_bias
    assert Cell("swiglu", 1, 8, 8, bias=True).has_bias


def test_the_sets_of_weights_differ() -> None:
    _, sets = operands(Cell("gelu", 1, 8, 8, "float32"), 2, CPU)
    assert not torch.equal(sets[0].weight_up, sets[1].weight_up)


def test_the_published_cells_can_be_built_and_have_different_names() -> None:
    for device_type in ("cpu", "cuda"):
        cells = [cell for grid in grids_for(device_type) for cell in GRIDS[grid]]
        for cell in cells:
            check(cell)
        assert len({cell.name for cell in cells}) == len(cells)
    assert len(GRIDS["forward"]) == 17


def test_every_precision_has_three_shapes_at_least() -> None:
    cells = [cell for grid in grids_for("cuda") for cell in GRIDS[grid]]
    for precision in PRECISIONS:
        of_precision = {cell for cell in cells if cell.precision == precision}
        assert len({(cell.rows, cell.width, cell.hidden) for cell in of_precision}) >= 3
    assert sum(not cell.gated and not cell.has_bias for cell in cells) >= 3


def test_a_cell_belongs_to_the_grid_of_its_device() -> None:
    both = Cell("gelu_tanh", 16, 768, 3072, "float32", bias=True)
    assert grid_of(both, "cuda") == "single"
    assert grid_of(both, "cpu") == "cpu"
    assert grid_of(Cell("gelu", 3, 5, 7), "cuda") is None


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (Cell("gelu", 0, 8, 8), "rows must be at least 1, got 0"),
        (Cell("gelu", 1, 8, 8, out=-1), "out_width must be at least 1, got -1"),
        (Cell("blub", 1, 8, 8), "got 'blub'"),
        (Cell("silu(", 1, 8, 8), "form must be one of"),
        (Cell("silu(x) * u", 1, 8, 8), "got 'silu\\(x\\) \\* u'"),
    ],
)
def test_a_cell_that_cannot_be_built_is_refused(cell: Cell, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        check(cell)
