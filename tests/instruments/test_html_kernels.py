"""Kernels in the report: compiled for GPUs that are not there, printed for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import explain
from fusion_backend.instruments.html.kernels import Kernel, Launches, launches_of
from fusion_backend.instruments.html.page import report_html
from fusion_backend.planning.gpus import gpu_named
from html_models import ALWAYS
from html_page import read
from kernel_cases import compiled, with_gluon
from repetition import slow_but

ACTIVATION = "gelu_tanh"


class Several(nn.Module):
    """An MLP of many rows, and one of few; below one is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = mlp(768), mlp(768)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.many(x), self.few(y)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))


def shown_for(target: str) -> tuple[list[Launches], str | None]:
    """The kernels of `Several`, in bfloat16, on a GPU that is not there."""
    with torch.device("meta"):
        model = Several().bfloat16()
        inputs = [torch.empty(rows, 768) for rows in (4096, 16)]
    with torch.no_grad():
        found = explain(model, *(x.bfloat16() for x in inputs), options=ALWAYS, target=target)
    calls = [node for node in found.graphs[0].after.graph.nodes if "fusedmlp" in str(node.target)]
    return launches_of(list(enumerate(calls)), gpu_named(target))


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("target", "languages"),
    slow_but(
        [("h100", {"Triton", "Gluon", "operator"})],
        [
            ("h100", {"Triton", "Gluon", "operator"}),
            ("a100", {"Triton", "operator"}),
            ("mi300x", {"Triton", "operator"}),
        ],
    ),
)
def test_kernels_for_a_gpu_have_their_source_and_what_they_take(
    target: str, languages: set[str]
) -> None:
    launches, without = shown_for(target)
    assert without is None
    kernels = [kernel for each in launches for kernel in each.kernels]
    assert {kernel.language for kernel in kernels} == languages
    for kernel in kernels:
        if kernel.language == "operator":
            continue
        assert f"def {kernel.name}" in kernel.source
        assert "activation" in kernel.source or kernel.name.endswith("_out")
        assert "def " in kernel.generated["activation"]
        assert kernel.registers is not None
        assert 16 <= kernel.registers <= 255
        assert kernel.spilled == 0
        assert kernel.shared_memory is not None
        assert kernel.shared_memory <= gpu_named(target).shared_memory
        assert kernel.machine_code


def test_sites_that_are_alike_are_compiled_once() -> None:
    model = nn.Sequential(mlp(16), nn.Softmax(-1), mlp(16))
    with torch.no_grad():
        found = explain(model, torch.randn(8, 16), options=ALWAYS)
    calls = [node for node in found.graphs[0].after.graph.nodes if "fusedmlp" in str(node.target)]
    (launches,), without = launches_of(list(enumerate(calls)), None)
    assert without is None
    assert launches.sites == (0, 1)


def test_the_cpp_of_a_kernel_is_whole_and_has_its_operands() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.up(x)) * self.scale)

    with torch.no_grad():
        found = explain(Scaled(), torch.randn(8, 16), options=ALWAYS)
    (call,) = [n for n in found.graphs[0].after.graph.nodes if "fusedmlp" in str(n.target)]
    (launches,), _ = launches_of([(0, call)], None)
    (kernel,) = launches.kernels
    assert kernel.language == "C++"
    assert 'extern "C" void kernel(' in kernel.source
    assert "float* p0" in kernel.generated["activation"]
    assert kernel.generated["activation"].splitlines()[0] in kernel.source


def test_a_page_without_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> list[Kernel]:
        raise RuntimeError("first line\nno compiler is here")

    monkeypatch.setattr("fusion_backend.instruments.html.kernels.on_cpu", failing)
    with torch.no_grad():
        found = explain(mlp(16), torch.randn(8, 16), options=ALWAYS)
    kernels = read(report_html(found)).with_id("kernels")
    assert "no compiler is here" in kernels.text


def chain() -> nn.Module:
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16)
    return nn.Sequential(*layers)


WIDTHS = {"narrow": 64, "wide": 768, "chain": 32}


class Trained(nn.Module):
    """A narrow MLP, a wide one, a chain: those of them that are named."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            chain() if name == "chain" else mlp(WIDTHS[name]) for name in names
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


def trained(rows: int, target: str | None, *names: str) -> list[Launches]:
    """The kernels of `Trained`, planned for training; on meta if there is a target."""
    with torch.device("meta" if target else "cpu"):
        model: nn.Module = Trained(names)
        inputs = [torch.empty(rows, WIDTHS[name]) for name in names]
    if target:
        model, inputs = model.bfloat16(), [x.bfloat16() for x in inputs]
    found = explain(model, *inputs, options=ALWAYS, target=target)
    assert all(site.training for site in found.sites)
    calls = [node for node in found.graphs[0].after.graph.nodes if "fusedmlp" in str(node.target)]
    with torch.no_grad():  # the graph knows what it was planned for
        launches, without = launches_of(
            list(enumerate(calls)), gpu_named(target) if target else None
        )
    assert without is None
    return launches


def passes(launches: Launches, language: str) -> dict[bool, list[str]]:
    """Names of kernels of a language, of the forward and of the backward pass."""
    found = [kernel for kernel in launches.kernels if kernel.language == language]
    return {way: [k.name for k in found if k.backward == way] for way in (False, True)}


def test_a_trained_mlp_of_a_cpu_has_the_cpp_of_both_passes() -> None:
    narrow, wide, chain = trained(64, None, "narrow", "wide", "chain")
    assert passes(narrow, "C++") == {False: ["rows"], True: ["rows_gradients"]}
    assert passes(wide, "C++") == {False: ["rows_saving"], True: ["rows_gradients"]}
    for each in (narrow, wide):
        *_, gradients = each.kernels
        assert gradients.generated["activation"] in gradients.source
    assert passes(chain, "operator")[True].count("aten.mm") == 5
    assert all(each.trained for each in (narrow, wide, chain))


def test_an_mlp_that_is_not_trained_has_no_backward_pass() -> None:
    with torch.no_grad():
        found = explain(mlp(64), torch.randn(8, 64), options=ALWAYS)
    (call,) = [n for n in found.graphs[0].after.graph.nodes if "fusedmlp" in str(n.target)]
    (launches,), _ = launches_of([(0, call)], None)
    assert not launches.trained


def check_what_they_take(launches: Launches) -> None:
    for kernel in launches.kernels:
        if kernel.name.startswith("fusedmlp"):
            assert kernel.registers
            assert kernel.shared_memory
            assert kernel.spilled is not None
            assert f"def {kernel.name}" in kernel.source


@compiled
@pytest.mark.slow
def test_a_trained_mlp_of_a_gpu_has_the_kernels_of_both_passes_and_what_they_take() -> None:
    (narrow,) = trained(4096, "h100", "narrow")
    assert passes(narrow, "Triton") == {
        False: ["fusedmlp_back_to_back"],
        True: ["fusedmlp_narrow_gradient"],
    }
    check_what_they_take(narrow)


@pytest.mark.slow
@compiled
@with_gluon
def test_a_trained_wide_mlp_and_a_chain_of_a_gpu_have_their_kernels() -> None:
    wide, chain = trained(4096, "h100", "wide", "chain")
    assert passes(chain, "Triton")[False] == ["fusedmlp_chain"]
    assert passes(wide, "Gluon") == {
        False: ["fusedmlp_epilogue_hopper"],
        True: ["fusedmlp_hidden_gradient_hopper"],
    }
    assert passes(wide, "operator") == {False: ["aten.addmm"], True: ["aten.mm", "aten.mm"]}
    check_what_they_take(wide)


def test_the_page_of_a_trained_model_names_the_pass_of_each_kernel() -> None:
    found = explain(mlp(64), torch.randn(8, 64), options=ALWAYS)
    kernels = read(found.to_html()).with_id("kernels")
    cells = [[cell.text for cell in row.all("td")] for row in kernels.all("tbody")[0].all("tr")]
    assert cells == [["forward", "C++"], ["backward", "C++"]]
