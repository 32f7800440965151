"""The roofline of a report: each kernel is a point, with its own work and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion_backend import Explanation, Site, SiteShape, explain
from fusion_backend.instruments.html.charts import KernelRow, roofline
from fusion_backend.instruments.html.page import report_html
from fusion_backend.instruments.html.roofline import Part, Roof, roof_of, work_of
from fusion_backend.instruments.timelines import Launch
from fusion_backend.planning.cost_model import Work, predicted
from fusion_backend.planning.gpus import gpu_named
from html_models import ALWAYS, MLP, compared
from html_page import read

ROWS, INNER, HIDDEN, OUT = 8, 16, 64, 32
ROOF = Roof(1e9, 1e12, "a test")


def site(plan: str | None, activation: str = "gelu(x)", **more: Any) -> Site:
    given = {
        "form": "plain", "activation": activation, "module": "mlp",
        "shape": SiteShape(ROWS, INNER, HIDDEN, OUT), "dtype": "bfloat16", "device": "cuda",
        "fused": plan is not None, "plan": plan, "reason": None if plan else "not-faster",
        "detail": "",
    }  # fmt: skip
    return Site(**{**given, **more})


def rows_of(sites: list[Site], *fusedmlp: Launch, **more: Any) -> list[KernelRow]:
    inductor = [Launch("gemm", 0.0, 30.0, site=i) for i in range(len(sites))]
    found = roofline(sites, {"inductor": inductor, "fusedmlp": fusedmlp}, ROOF, **more)
    assert found is not None
    return list(found.rows)


def test_two_kernels_share_the_products_and_both_move_the_hidden_value() -> None:
    work = work_of(site("epilogue"))
    assert work is not None
    first = Part("first layers", 2 * ROWS * INNER * HIDDEN, 2 * (ROWS * (16 + 64) + 16 * 64))
    last = Part("last layer", 2 * ROWS * HIDDEN * OUT, 2 * (ROWS * (64 + 32) + 64 * 32))
    assert work.parts == (first, last)
    assert work.flops == first.flops + last.flops
    assert work.fused == first.bytes + last.bytes
    assert work.unfused == work.fused + 2 * 2 * ROWS * HIDDEN  # what the activation moves


def test_one_kernel_moves_no_hidden_value() -> None:
    one, two = work_of(site("back_to_back")), work_of(site("epilogue"))
    assert one is not None
    assert two is not None
    assert len(one.parts) == 1
    assert one.flops == two.flops
    assert one.fused == two.fused - 2 * 2 * ROWS * HIDDEN
    assert one.unfused == two.unfused


def test_a_gated_mlp_has_two_first_layers() -> None:
    plain, gated = work_of(site("epilogue")), work_of(site("epilogue", "silu(g) * u"))
    assert plain is not None
    assert gated is not None
    assert gated.parts[0].flops == 2 * plain.parts[0].flops
    assert gated.parts[1] == plain.parts[1]
    assert gated.unfused - gated.fused == 2 * (plain.unfused - plain.fused)


def test_a_site_that_ends_with_its_hidden_value_has_one_kernel() -> None:
    work = work_of(site("epilogue", form="activated"))
    whole = work_of(site("epilogue"))
    assert work is not None
    assert whole is not None
    assert [(p.flops, p.bytes) for p in work.parts] == [whole.parts[0][1:]]


def test_a_chain_that_is_one_kernel_moves_input_weights_and_result() -> None:
    work = work_of(site("chain", chain=(64, 48)))
    assert work is not None
    weights = 16 * 64 + 64 * 48 + 48 * 32
    assert [*work.parts] == [Part("chain", 2 * ROWS * weights, 2 * (weights + ROWS * (16 + 32)))]


@pytest.mark.parametrize("rows", [0, "s0"])
def test_of_an_unknown_number_of_rows_nothing_is_drawn(rows: int | str) -> None:
    shape = SiteShape(rows, INNER, HIDDEN, OUT)
    assert work_of(site("epilogue", shape=shape)) is None
    assert roofline([site("epilogue", shape=shape)], {}, ROOF) is None


def test_each_kernel_has_the_time_that_was_measured_of_it() -> None:
    first = Launch("fusedmlp_epilogue", 0.0, 4.0, site=0)
    product = Launch("gemm", 4.0, 5.0, site=0)
    reduction = Launch("splitKreduce_kernel", 9.0, 1.0, site=0)
    backward = Launch("fusedmlp_hidden_gradient", 10.0, 50.0, site=0, backward=True)
    theirs, *ours = rows_of([site("epilogue")], first, product, reduction, backward)
    assert (theirs.kind, theirs.time_us) == ("inductor", 30.0)
    assert [(row.kernel, row.kind, row.time_us) for row in ours] == [
        ("fusedmlp_epilogue", "fusedmlp", 4.0),
        ("gemm", "fusedmlp", 6.0),
    ]
    assert ours[0].speed == ours[0].flops / 4e-6
    assert sum(row.flops for row in ours) == theirs.flops


def test_of_mlps_that_are_alike_the_median_is_drawn() -> None:
    launches = [Launch("fusedmlp_back_to_back", 0.0, time, site=i)
                for i, time in enumerate((9.0, 2.0, 3.0))]  # fmt: skip
    _, row = rows_of([site("back_to_back")] * 3, *launches)
    assert (row.site, row.time_us) == (0, 3.0)


def test_where_there_are_other_kernels_than_the_plan_has_they_are_one_point() -> None:
    launches = [Launch(f"kernel_{i}", 10.0 * i, 2.0, site=0) for i in range(3)]
    theirs, row = rows_of([site("epilogue")], *launches)
    assert (row.time_us, row.flops) == (6.0, theirs.flops)


def test_for_a_gpu_that_is_not_there_times_are_predicted() -> None:
    gpu = gpu_named("h200")
    roof = roof_of(gpu, "bfloat16")
    found = roofline([site("epilogue")], {}, roof, gpu)
    assert found is not None
    assert found.kinds == {"predicted", "bound"}
    times = [row.time_us for row in found.rows if row.kind == "predicted"]
    whole = predicted(["epilogue"], Work(ROWS, (INNER, HIDDEN, OUT)), gpu)["epilogue"]
    assert len(times) == 2
    assert sum(time or 0.0 for time in times) == pytest.approx(whole)


def test_what_the_cost_model_does_not_know_stands_at_the_roof() -> None:
    gpu = gpu_named("h200")
    for unknown in (site("epilogue", training=True), site("epilogue", dtype="float32")):
        found = roofline([unknown], {}, ROOF, gpu)
        assert found is not None
        assert found.kinds == {"bound"}
        assert all(row.time_us is None for row in found.rows)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    with torch.no_grad():
        model, x = MLP(64).bfloat16(), torch.randn(64, 64).bfloat16()
        return explain(model, x, target="h200", options=ALWAYS)


def test_the_page_of_a_target_has_a_point_for_each_kernel(explanation: Explanation) -> None:
    section = read(explanation.to_html(kernels=False)).with_id("roofline")
    (fused,) = explanation.fused
    work = work_of(fused)
    assert work is not None
    assert len(section.all("g", "predicted")) == len(work.parts)
    assert len([cell for cell in section.all("td") if "predicted" in cell.text]) == len(work.parts)
    *_, last = [text for text in section.all("text") if text.attributes["y"] == "282"]
    assert last.attributes["text-anchor"] == "end"  # in the middle it would leave the drawing
    (table,) = section.all("tbody")
    assert len(table.all("tr")) == 1 + len(work.parts)


def test_the_page_of_a_measured_model_has_times(explanation: Explanation) -> None:
    launches = (Launch("fusedmlp_back_to_back", 0.0, 2.0, site=0),)
    measured = replace(compared(fusedmlp=launches), mlps=explanation.sites)
    section = read(report_html(explanation, measured, kernels=False)).with_id("roofline")
    assert len(section.all("g", "fusedmlp")) == 1
    assert not section.all("g", "predicted")
    assert "fusedmlp_back_to_back" in section.text
