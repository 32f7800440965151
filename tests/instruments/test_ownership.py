"""Whose each launch of a profiled step is: steps of a CPU, and such as a GPU's trace has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import Comparison, Site, explain, profile
from fusion_backend.fusion.journal import CompiledGraph
from fusion_backend.instruments import ownership, profiler
from fusion_backend.instruments.ownership import Found, by_claims, by_code, by_order
from fusion_backend.instruments.profiler import launched_in
from fusion_backend.instruments.profiler_trace import KERNEL, Event, Step
from fusion_backend.instruments.timelines import BACKWARD, Launch, Owners, timeline
from html_models import ALWAYS, MLP


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(16, 32), linear(16, 32), linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def linear(inner: int, out: int) -> nn.Module:
    """A layer whose gradients are products: Inductor compiles no kernel for them."""
    return nn.Linear(inner, out, bias=False)


def model() -> nn.Module:
    """Layers that are no MLP's stand before, between and after two MLPs."""
    torch.manual_seed(0)
    return nn.Sequential(linear(16, 16), Residual(), linear(16, 16), Residual(), linear(16, 16))


def profiled(training: bool) -> Comparison:
    with torch.set_grad_enabled(training):
        return profile(model(), torch.randn(64, 16), steps=3, backward=training, options=ALWAYS)


@pytest.fixture(scope="module")
def trained() -> Comparison:
    return profiled(True)


# Forward passes of both are looked at alike.
@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.slow), True],
    ids=["inference", "training"],
)
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return request.getfixturevalue("trained") if request.param else profiled(False)


def forward(comparison: Comparison, backend: str) -> list[Launch]:
    return [launch for launch in comparison.timelines[backend] if not launch.backward]


def names_of(launches: list[Launch], site: int | None) -> list[str]:
    return [launch.name for launch in launches if launch.site == site]


def test_all_that_eager_launches_of_an_mlp_is_its_own(comparison: Comparison) -> None:
    launches = forward(comparison, "eager")
    own = ["aten::mm", "aten::silu", "aten::mm", "aten::mul", "aten::mm"]
    assert names_of(launches, 0) == names_of(launches, 1) == own
    assert Counter(names_of(launches, None))["aten::mm"] == 3


def test_all_that_inductor_launches_of_an_mlp_is_its_own(comparison: Comparison) -> None:
    launches = forward(comparison, "inductor")
    for site in (0, 1):
        names = names_of(launches, site)
        assert names[2].startswith("cpp_fused_mul_silu")
        assert [*names[:2], *names[3:]] == ["aten::mm", "aten::mm", "aten::addmm"]
    assert Counter(names_of(launches, None))["aten::mm"] == 3


def test_what_fusedmlp_launches_of_an_mlp_is_its_own(comparison: Comparison) -> None:
    launches = forward(comparison, "fusedmlp")
    assert names_of(launches, 0) == names_of(launches, 1) == ["fusedmlp::rows"]


def test_backward_passes_come_in_reverse_and_what_is_not_known_is_nobodys(
    trained: Comparison,
) -> None:
    passes = {
        name: [(launch.name, launch.site) for launch in launches if launch.backward]
        for name, launches in trained.timelines.items()
    }
    for launches in passes.values():
        sites = [site for _, site in launches if site is not None]
        assert sites == sorted(sites, reverse=True)
        assert set(sites) == {0, 1}
    eager = Counter(passes["eager"])
    assert eager["aten::mm", 0] == eager["aten::mm", 1] == 6  # two for each of three layers
    own = [each for each in passes["fusedmlp"] if each[0].startswith("fusedmlp")]
    assert own == [("fusedmlp::rows_gradients", 1), ("fusedmlp::rows_gradients", 0)]
    inductor = Counter(passes["inductor"])
    assert inductor["aten::mm", 0] == inductor["aten::mm", 1] > 0
    assert inductor["aten::mm", None] > 0  # gradients of weights name no node of the graph


def test_a_comparison_has_the_mlps_that_launches_name(comparison: Comparison) -> None:
    assert [site.module for site in comparison.mlps] == ["1.mlp", "3.mlp"]
    assert all(site.fused for site in comparison.mlps)


def test_code_that_is_loaded_again_is_read_again() -> None:
    for _ in range(2):
        with torch.no_grad():
            found = profile(
                model(), torch.randn(64, 16), steps=2, backends=BACKENDS, options=ALWAYS
            )
        assert len(names_of(forward(found, "inductor"), 1)) == 4


BACKENDS = ("inductor", "fusedmlp")


class Trace:
    """A step as a GPU's trace has it: each launch takes 1 µs, and runs 100 µs later."""

    def __init__(self) -> None:
        self.step = Step("one")
        self.now = 0.0

    def region(self, name: str) -> None:
        self.step.cpu.append(op(f"Torch-Compiled Region: {name}", 0.0, 99.0))

    def launch(self, name: str) -> None:
        number = len(self.step.gpu) + 1
        self.step.launches.append(
            Event("cuda_runtime", "cudaLaunchKernel", self.now, 0.5, THREAD, number)
        )
        self.step.gpu.append(Event(KERNEL, name, 100 + self.now, 1.0, (0, 7), number))
        self.now += 1

    def operator(self, name: str, *kernels: str, sequence: int = -1) -> None:
        start, self.now = self.now, self.now + 1
        for kernel in kernels:
            self.launch(kernel)
        self.step.cpu.append(op(name, start, self.now)._replace(sequence=sequence))
        self.now += 1

    def backward(self, node: str, sequence: int, *kernels: str) -> None:
        start = self.now
        self.operator("aten::mm", *kernels)
        self.step.cpu.append(op(BACKWARD + node, start, self.now)._replace(sequence=sequence))
        self.now += 1

    def sites(self, owners: Owners) -> list[int | None]:
        return [launch.site for launch in timeline([self.step], owners)]


THREAD = ("cpu", 1)


def op(name: str, start: float, end: float) -> Event:
    return Event("cpu_op", name, start, end - start, THREAD)


def captured(module: nn.Module) -> Found:
    with torch.no_grad():
        found = explain(module, torch.randn(8, 16), options=ALWAYS)
    return Found(found.graphs[0].before.graph, found.sites)


def test_kernels_of_eager_belong_to_the_operators_that_launched_them() -> None:
    trace = Trace()
    trace.operator("aten::addmm", "gemm", sequence=1)
    trace.operator("aten::addmm", "gemm", "splitKreduce", sequence=2)
    trace.operator("aten::gelu", "elementwise", sequence=3)
    trace.operator("aten::addmm", "gemm", sequence=4)
    trace.backward("AddmmBackward0", 4, "gemm", "gemm")
    trace.backward("AddmmBackward0", 1, "gemm")
    found = captured(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), MLP()))
    number = next(i for i, site in enumerate(found.sites) if site.fused)
    assert trace.sites(by_order([found])) == [None, *[number] * 4, *[number] * 2, None]


def test_a_call_with_other_products_than_the_graph_has_no_owners() -> None:
    trace = Trace()
    for _ in range(3):
        trace.operator("aten::addmm", "gemm")
    assert trace.sites(by_order([captured(MLP())])) == [None] * 3


CODE = """
# Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu]
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', '''...''')

def call(self, args):
    # Topologically Sorted Source Nodes: [linear_2], Original ATen: [aten.addmm]
    extern_kernels.addmm(arg0, arg1, arg2, alpha=1, beta=1, out=buf0)
    # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
    triton_tem_fused_addmm_1.run(buf1, stream=stream0)
    # Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu]
    triton_poi_fused_gelu_0.run(buf1, 256, stream=stream0)
    # Topologically Sorted Source Nodes: [gelu, linear_1], Original ATen: [aten.addmm]
    extern_kernels.addmm(arg0, buf1, arg2, alpha=1, beta=1, out=buf2)
    return (buf0, buf2)
"""


class Branches(nn.Module):
    """A layer that nothing else here needs is called last; Inductor may well begin with it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.other = MLP(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mlp(x), self.other(x)


def test_products_of_inductor_are_those_of_the_nodes_that_its_code_names() -> None:
    trace = Trace()
    trace.operator("aten::addmm", "gemm")
    trace.launch("triton_tem_fused_addmm_1")
    trace.launch("triton_poi_fused_gelu_0")
    trace.operator("aten::addmm", "gemm", "splitKreduce")
    found = captured(Branches())
    assert trace.sites(by_code([found], [CODE])) == [None, 0, 0, 0, 0]


def test_where_the_code_does_not_fit_the_products_are_taken_in_program_order() -> None:
    trace = Trace()
    trace.operator("aten::addmm", "gemm")
    trace.launch("triton_poi_fused_gelu_0")
    trace.operator("aten::addmm", "gemm")
    for code in ([], [CODE], [CODE, CODE, CODE]):
        assert trace.sites(by_code([captured(MLP())], code)) == [0, 0, 0]


def planned(monkeypatch: pytest.MonkeyPatch, plan: str, **more: Any) -> Owners:
    """The owners of two MLPs of one graph, on a plan for GPUs."""
    found = captured(nn.Sequential(MLP(), nn.Softmax(-1), MLP()))
    sites = tuple(
        Site(**{**vars(site), "plan": plan, "device": "cuda", **more})
        for site in found.sites
        if site.fused
    )
    for module in (ownership, profiler):
        monkeypatch.setattr(module, "numbered", lambda: (CompiledGraph("0/0", sites),))
    return by_claims([Found(found.graph, sites)])


def test_a_product_that_follows_first_layers_is_their_mlps(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = planned(monkeypatch, "epilogue")
    trace = Trace()
    trace.region("0/0")
    trace.launch("fusedmlp_epilogue_hopper")
    trace.operator("aten::mm", "gemm", "splitKreduce")
    trace.launch("triton_per_fused_softmax_0")
    trace.operator("aten::mm", "gemm")  # not of an MLP
    trace.launch("fusedmlp_epilogue_hopper")
    trace.operator("aten::mm", "gemm")
    trace.operator("aten::mm", "gemm")
    assert trace.sites(owners) == [0, 0, 0, None, None, 1, 1, None]


def test_a_plan_of_two_kernels_of_ours_owns_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = planned(monkeypatch, "stream")
    trace = Trace()
    trace.region("0/0")
    for _ in range(2):
        trace.launch("fusedmlp_stream_hidden")
        trace.launch("fusedmlp_stream_out")
        trace.operator("aten::mm", "gemm")
    assert trace.sites(owners) == [0, 0, None, 1, 1, None]


def test_gradients_belong_to_the_last_mlp_first(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = planned(monkeypatch, "back_to_back", training=True)
    trace = Trace()
    trace.region("0/0")
    trace.launch("fusedmlp_back_to_back_kernel")
    trace.launch("fusedmlp_back_to_back_kernel")
    for _ in range(2):
        trace.launch("fusedmlp_narrow_gradient")
    assert trace.sites(owners) == [0, 1, 1, 0]
    trace.launch("fusedmlp_narrow_gradient")  # three for two: nobody knows
    assert trace.sites(owners) == [0, 1, None, None, None]


def test_the_launch_of_a_call_that_mlps_share_is_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = planned(monkeypatch, "chain", call=1)
    trace = Trace()
    trace.region("0/0")
    trace.launch("fusedmlp_chain_towers")
    trace.operator("aten::mm", "gemm")
    assert trace.sites(owners) == [0, None]
    (launched,), _, _ = launched_in(trace.step)
    assert (launched.claimed, launched.launched) == (1, 1)


def test_what_a_launcher_calls_by_the_name_of_a_kernel_is_no_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = planned(monkeypatch, "back_to_back", training=True)
    trace = Trace()
    trace.region("0/0")
    for name in ("fusedmlp_back_to_back", "fusedmlp_narrow_gradient"):
        for _ in range(2):
            trace.operator(name, name)
    assert trace.sites(owners) == [0, 1, 1, 0]
    sites, gradients, _ = launched_in(trace.step)
    assert [site.launched for site in sites] == [1, 1]
    assert gradients == {"fusedmlp_narrow_gradient": 2}


def test_kernels_of_an_operator_that_is_claimed_are_its_mlps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = planned(monkeypatch, "library")
    trace = Trace()
    trace.region("0/0")
    for _ in range(2):
        trace.operator("aten::_addmm_activation", "gemm_gelu")
        trace.operator("aten::addmm", "gemm")
    assert trace.sites(owners) == [0, 0, 1, 1]
