"""MLPs that are drawn at random."""

from __future__ import annotations

import argparse

import pytest
import torch

from fusion_backend.bench.cells import check
from fusion_backend.bench.random_cells import drawn
from fusion_backend.cli import add_cells
from fusion_backend.cli.bench import wanted
from fusion_backend.errors import CommandError


def test_a_seed_always_draws_the_same_and_another_others():
    cells = drawn(40, seed=3)
    assert len(set(cells)) == 40
    assert drawn(40, seed=3) == cells
    assert not set(cells) & set(drawn(40, seed=4))
    assert drawn(10, seed=3) == cells[:10]


def test_every_cell_can_be_built_and_all_kinds_are_drawn():
    cells = drawn(120, seed=1)
    for cell in cells:
        check(cell)
    assert {cell.gated for cell in cells} == {False, True}
    assert {cell.has_bias for cell in cells} == {False, True}
    assert {cell.precision for cell in cells} == {"bfloat16", "float16"}
    assert any(cell.out_width != cell.width for cell in cells)
    assert any(cell.width % 8 for cell in cells)
    assert min(cell.rows for cell in cells) == 1
    assert max(cell.rows for cell in cells) > 1 << 16


@pytest.mark.parametrize(
    ("device", "precisions"), [("cuda", {"bfloat16", "float16"}), ("cpu", {"float32"})]
)
def test_the_command_takes_them_in_the_precisions_of_the_device(device, precisions):
    cells = wanted(_given("--random", "30", "--seed", "7"), torch.device(device))
    assert {cell.precision for cell in cells} == precisions
    assert [cell.rows for cell in cells] == [cell.rows for cell in drawn(30, 7)]


def test_the_command_draws_one_at_least():
    with pytest.raises(CommandError, match="--random must be at least 1"):
        wanted(_given("--random", "0"), torch.device("cpu"))


def _given(*arguments):
    parser = argparse.ArgumentParser()
    add_cells(parser)
    return parser.parse_args(arguments)
