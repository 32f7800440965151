"""Kernels that load by tensor descriptors, run over and over: their mistakes would be races."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.compat import triton_features
from fusion_backend.kernels import launch
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.preferences import preferences
from kernel_cases import Case, assert_exact, eager_epilogue, eager_mlp, random_case, turned

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU with a copy engine for tiles",
)

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
# Several waves of tiles, and tiles that are not full in any direction.
SHAPES = [(5000, 1000, 4104), (2049, 768, 3072), (1030, 4096, 1000), (300, 72, 8)]


def configurations() -> list[tuple[str, Config]]:
    """All that are taken on an H100."""
    taken = {
        (activation, config): None
        for activation, rows, inner, hidden in itertools.product(
            (PLAIN, GATED), (1024, MANY_ROWS), (768, 4096), (3072, 16384)
        )
        for config in preferences(
            "epilogue",
            Problem(rows, inner, hidden, 0, activation == GATED, torch.bfloat16, tma=True),
            H100,
        )
        if config.tma
    }
    return list(taken)


EACH = pytest.mark.parametrize(("activation", "config"), configurations(), ids=str)


def case_on_gpu(rows: int, inner: int, hidden: int, activation: str) -> Case:
    return random_case(rows, (inner, hidden, 16), activation, dtype=torch.bfloat16, device="cuda")


def run(case: Case, config: Config | None, save_preact: bool = False) -> list[Tensor]:
    with triton_features.launching_directly():
        results = launch.epilogue(*case.first, case.activation, save_preact, config=config)
    return [result for result in results if result is not None]


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("save_preact", [False, True])
def test_every_launch_of_many_gives_the_same_right_numbers(shape, activation, config, save_preact):
    cases = [case_on_gpu(*shape, activation) for _ in range(2)]
    firsts = [run(case, config, save_preact) for case in cases]
    for case, first in zip(cases, firsts, strict=True):
        wanted = slice(None) if save_preact else slice(1)
        eager, exact = (
            [result for result in eager_epilogue(each)[wanted] if result is not None]
            for each in (case, case.to(torch.float64))
        )
        for triple in zip(first, eager, exact, strict=True):
            assert_exact(*triple)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(50):
        which = repeat % 2  # other operands, and so other descriptors, than the last time
        for result, first in zip(
            run(cases[which], config, save_preact), firsts[which], strict=True
        ):
            different += (result != first).sum()
    assert different.item() == 0


@EACH
def test_weights_and_rows_may_be_laid_out_otherwise(activation, config):
    case = case_on_gpu(1500, 768, 3072, activation)
    case = turned(case, "weight_gate", "weight_up")
    case = case._replace(x=torch.cat([case.x, case.x], dim=1)[:, 768:])
    (result,) = run(case, config)
    eager, exact = (eager_epilogue(each)[0] for each in (case, case.to(torch.float64)))
    assert_exact(result, eager, exact)


@EACH
def test_replays_of_a_cuda_graph_give_the_same_numbers(activation, config):
    case = case_on_gpu(3000, 768, 3072, activation)
    (first,) = run(case, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = run(case, config)
        (again,) = run(case, config)
    for _ in range(20):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, first)
        assert torch.equal(again, first)


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_one_compiled_graph_takes_any_number_of_rows(activation):
    widths = (2048, 8192, 1024)
    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.fusedmlp.mlp, dynamic=True, fullgraph=True)
    case = random_case(9000, widths, activation, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for rows in (3000, 5001, 9000, 1500):
            part = case._replace(x=case.x[:rows])
            result = compiled(*part[:-1], [], activation, "epilogue")
            assert_exact(result, eager_mlp(part), eager_mlp(part.to(torch.float64)))


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_an_input_that_is_not_aligned_when_the_graph_is_called_gives_the_same_numbers(activation):
    widths = (2048, 8192, 1024)
    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.fusedmlp.mlp, fullgraph=True)
    case = random_case(3000, widths, activation, dtype=torch.bfloat16, device="cuda")
    shifted = torch.empty(case.x.numel() + 1, dtype=case.x.dtype, device="cuda")[1:]
    shifted = shifted.view_as(case.x).copy_(case.x)
    with torch.no_grad():
        for x in (case.x, shifted):
            part = case._replace(x=x)
            result = compiled(*part[:-1], [], activation, "epilogue")
            assert_exact(result, eager_mlp(part), eager_mlp(part.to(torch.float64)))
