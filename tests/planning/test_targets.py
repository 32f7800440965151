"""Planning for a GPU that is not in the machine."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from fusion_backend import explain, fuse
from fusion_backend.cli import main
from fusion_backend.errors import OptionError
from fusion_backend.planning.gpus import flops_per_clock, gpu_named, known_gpus


def mlp(width=64, hidden=256, dtype=torch.bfloat16):
    layers = nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)
    return nn.Sequential(*layers).to(dtype)


def planned(target, rows=65536, device="meta", **sizes):
    model = mlp(**sizes).to(device)
    x = torch.empty(rows, model[0].in_features, dtype=model[0].weight.dtype, device=device)
    with torch.no_grad():
        return explain(model, x, target=target)


def test_a_site_is_planned_by_the_table_of_the_target():
    explanation = planned("h100")
    (site,) = explanation.sites
    assert (site.plan, site.device) == ("back_to_back", "cuda")
    assert site.expected_speedup > 1.5
    assert "on an NVIDIA H100" in site.detail
    assert explanation.target == "NVIDIA H100"


def test_an_architecture_is_planned_by_its_first_model_and_a_model_by_its_own_table():
    assert planned("sm_90").sites[0].detail == planned("h100").sites[0].detail
    assert "on an NVIDIA H200" in planned("H200").sites[0].detail


def test_a_target_without_a_table_is_planned_by_the_heuristic():
    (site,) = planned("a100").sites
    assert site.fused
    assert "the heuristic expects" in site.detail


@pytest.mark.parametrize("target", known_gpus())
def test_a_narrow_mlp_of_many_rows_is_fused_wherever_its_products_run_on_matrix_units(target):
    from fusion_backend.options import Options
    from fusion_backend.planning.planner import Plan, plan
    from settings import SETTING

    narrow = {"in_features": 64, "hidden_features": 256, "further_features": (64,)}
    setting = replace(SETTING, rows=1 << 16, **narrow, target=gpu_named(target))
    choice = plan(setting, Options(tune=False))
    assert isinstance(choice, Plan) == (gpu_named(target).architecture != "sm_75")


@pytest.mark.parametrize("target", known_gpus())
def test_every_family_has_a_configuration_that_fits_on_a_known_gpu(target):
    from fusion_backend.kernels.host.configs import fits
    from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
    from fusion_backend.kernels.preferences import chosen
    from fusion_backend.planning.gpus import kernel_target

    device = kernel_target(gpu_named(target))
    kernels = ("epilogue", "hidden_gradient", "stream_hidden", "stream_out")
    for kernel, rows, gated in itertools.product(kernels, (16, 64, 1024, MANY_ROWS), (0, 1)):
        for width, hidden in ((768, 3072), (4096, 14336)):
            problem = Problem(rows, width, hidden, width, bool(gated), torch.bfloat16)
            assert fits(kernel, chosen(kernel, problem, device), problem, device)
    for rows, gated, width in itertools.product((16, MANY_ROWS), (0, 1), (16, 64, 128, 256)):
        problem = Problem(rows, width, 4 * width, width, bool(gated), torch.bfloat16)
        assert fits("back_to_back", chosen("back_to_back", problem, device), problem, device)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx-3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
        ("A6000", "NVIDIA RTX A6000"),
        ("sm_89", "NVIDIA L40S"),
        ("sm_120", "NVIDIA GeForce RTX 5090"),
        ("gfx942", "AMD Instinct MI300X"),
        ("gfx90a", "AMD Instinct MI250X"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(written, name):
    assert gpu_named(written).name == name


def test_peaks_follow_from_clock_and_multiprocessors():
    """As for a GPU that is in the machine; boost clocks in GHz are those of the data sheets."""
    clocks = {"a100": 1.41, "h100": 1.83, "rtx4090": 2.52, "rtx5090": 2.41, "l4": 2.04, "t4": 1.59}
    clocks |= {"a6000": 1.8, "rtx3090": 1.7, "b200": 1.86, "mi300x": 2.1, "mi250x": 1.7}
    for name, clock in clocks.items():
        gpu = gpu_named(name)
        flops = flops_per_clock(gpu.name, gpu.capability, gpu.gfx)
        assert 1e-3 * clock * gpu.multiprocessors * flops == pytest.approx(gpu.teraflops, rel=0.02)


def test_a_gpu_that_triton_does_not_compile_for_is_left_to_the_library(fusedmlp):
    x = torch.empty(4096, 768, dtype=torch.float16, device="meta")
    model = mlp(768, 3072, torch.float16).to("meta")
    fusedmlp.assert_sites(model, x, pins={"*": "library"}, policy="auto", target="t4")
    silu = nn.Sequential(nn.Linear(768, 3072), nn.SiLU(), nn.Linear(3072, 768)).half()
    silu = silu.to("meta")
    found = fusedmlp.assert_sites(silu, x, pins={"*": {"plan": "reference"}}, target="t4")
    assert "capability 8.0" in found.sites[0].detail


def test_a_target_decides_which_kernels_fit():
    from fusion_backend.planning.planner import available
    from settings import SETTING

    wide = replace(SETTING, in_features=256, hidden_features=1024, further_features=(256,))
    assert "back_to_back" in available(replace(wide, target=gpu_named("h100")))
    assert "library" not in available(replace(wide, target=gpu_named("mi300x")))


def test_the_model_runs_where_it_is_and_the_report_has_the_gain():
    explanation = planned("h100", rows=4096, device="cpu")
    assert "planned for an NVIDIA H100" in str(explanation)
    assert f"{explanation.sites[0].expected_speedup:.2f}×" in str(explanation)
    content = json.loads(explanation.to_json())
    assert content["target"] == "NVIDIA H100"
    assert content["sites"][0]["expected_speedup"] == explanation.sites[0].expected_speedup


@pytest.mark.parametrize("layers", [2, 3])
def test_a_model_without_memory_is_planned_for_a_target_only(layers):
    with torch.device("meta"):
        linear = [nn.Linear(64, 64) for _ in range(layers)]
        model = nn.Sequential(*(each for layer in linear for each in (layer, nn.ReLU()))).bfloat16()
        model.register_buffer("steps", torch.zeros(1))
        x = torch.empty(65536, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        plan = "back_to_back" if layers == 2 else "chain"
        assert [site.plan for site in explain(model, x, target="h100").sites] == [plan]
        for policy in ("auto", "always"):
            explanation = explain(model, x, options={"fusedmlp.policy": policy})
            assert {site.reason for site in explanation.sites} == {"device"}


def test_a_site_that_is_left_alone_in_training_says_that_inference_may_be_fused(fusedmlp):
    x = torch.empty(4096, 64, dtype=torch.bfloat16)
    auto = {"pins": {"*": "not-faster"}, "policy": "auto"}
    (trained,) = fusedmlp.assert_sites(mlp(), x, **auto, target="a100", backward=True).sites
    assert "gradients are recorded here" in trained.detail
    # bfloat16 is younger than the matrix units of that GPU
    (site,) = fusedmlp.assert_sites(mlp(), x, **auto, target="t4").sites
    assert "gradients" not in site.detail


@pytest.mark.usefixtures("no_cpp_compiler")
def test_without_a_gain_the_table_has_no_column_of_gains():
    explanation = planned(None, rows=4, device="cpu")
    assert "expected" not in str(explanation).splitlines()[2]
    assert explanation.sites[0].expected_speedup is None


def test_a_graph_can_be_fused_for_a_target():
    graph = torch.fx.symbolic_trace(mlp().requires_grad_(False))
    with torch.no_grad():
        result = fuse(graph, (torch.empty(65536, 64, dtype=torch.bfloat16),), target="sm_90")
    assert [site.plan for site in result.sites] == ["back_to_back"]


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"h100, h200, a100.*sm_90.*got 'h1000'"):
        planned("h1000")


def test_the_command_explains_for_a_target(tmp_path, capsys):
    path = tmp_path / "factory.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def mlp():\n"
        "    layers = nn.Linear(64, 256), nn.GELU('tanh'), nn.Linear(256, 64)\n"
        "    return nn.Sequential(*layers), (torch.randn(4096, 64),)\n"
    )
    argv = ["explain", f"{path}:mlp", "--target", "h100", "--dtype", "bfloat16"]
    assert main(argv) == 0
    output = capsys.readouterr().out
    assert "1 of 1 MLP fused, planned for an NVIDIA H100" in output
    assert main([*argv[:2], "--target", "h1000"]) == 2
    assert "target must be one of" in capsys.readouterr().err


def test_the_command_plans_a_model_that_would_not_fit(tmp_path, capsys):
    path = tmp_path / "factory.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def mlp():\n"
        "    layers = nn.Linear(1 << 22, 1 << 24), nn.ReLU(), nn.Linear(1 << 24, 1 << 22)\n"
        "    return nn.Sequential(*layers), (torch.randn(4096, 1 << 22),)\n"
    )
    argv = ["explain", f"{path}:mlp", "--dtype", "bfloat16", "--device", "meta"]
    assert main([*argv, "--target", "h100", "--policy", "always"]) == 0
    assert "1 of 1 MLP fused, planned for an NVIDIA H100" in capsys.readouterr().out
    assert main(argv) == 0
    assert "on meta, where nothing runs" in capsys.readouterr().out


def test_a_machine_without_triton_plans_for_a_gpu():
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch, fusion_backend
layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
model = torch.nn.Sequential(*layers).bfloat16()
with torch.no_grad():
    explanation = fusion_backend.explain(model, torch.randn(65536, 64).bfloat16(), target="h100")
print(explanation.sites[0].plan)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["back_to_back"], done.stderr
