"""What generated code launches has been compiled, in threads, before it is called."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

pytest.importorskip("triton")

import fusion_backend
import fusion_backend.operators  # registers torch.ops.fusedmlp
from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.stream import launch_sm90 as stream_launch
from fusion_backend.operators import gpu_calls
from kernel_cases import GATED, PLAIN, assert_exact, eager_mlp, gluon_on_gpu, random_case

pytestmark = gluon_on_gpu

ALL = (
    hopper.compiled,
    hopper_epilogue.compiled,
    stream_launch.compiled_hidden,
    stream_launch.compiled_out,
)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("plan", "rows", "widths", "activation", "kernels"),
    [
        ("back_to_back", 4096, (256, 1024, 256), PLAIN, 1),
        ("epilogue", 512, (1024, 2048, 1024), GATED, 1),
        ("epilogue", 8192, (768, 3072, 768), PLAIN, 1),
        ("stream", 16, (768, 3072, 768), PLAIN, 2),
        ("stream", 128, (768, 3072, 768), GATED, 2),
    ],
)
def test_inductor_has_them_compiled_beside_it(
    monkeypatch, plan, rows, widths, activation, kernels, dynamic
):
    gpu_calls.install_lowering()
    compiled = []
    for function in ALL:

        def recorded(*arguments, compiling=function.compiling):
            compiled.append(threading.current_thread())
            return compiling(*arguments)

        monkeypatch.setattr(function, "compiling", recorded)
        monkeypatch.setattr(function, "started", {})
    PyCodeCache.cache_clear()  # another test's code, if it is the same, would not be run again
    case = random_case(rows, widths, activation, dtype=torch.bfloat16, device="cuda")

    @torch.compile(options={"fx_graph_cache": False}, dynamic=dynamic)
    def mlp(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], str(activation), plan)

    for made in (hopper.launcher, hopper_epilogue.launcher, hopper_epilogue.launch_of_tile):
        made.cache_clear()
    stream_launch.caller.cache_clear()
    with torch.no_grad():
        y = mlp(case.x)
    assert_exact(y, eager_mlp(case), eager_mlp(case.to(torch.float64)))
    assert len(compiled) == kernels
    assert threading.current_thread() not in compiled


def test_inductors_processes_begin_with_a_kernel_when_it_is_written(monkeypatch):
    AsyncCompile.wait_pool_ready()
    asked, compiling = [], AsyncCompile.triton

    def recorded(self, name, source, *device, **named):
        future = compiling(self, name, source, *device, **named)
        asked.append((name, source, future))
        return future

    monkeypatch.setattr(AsyncCompile, "triton", recorded)
    case = random_case(300, (256, 512, 256), PLAIN, dtype=torch.bfloat16, device="cuda")

    def mlp(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], str(case.activation), "epilogue")

    backend, options = fusion_backend.fusedmlp, {"fx_graph_cache": False}
    with torch.no_grad():
        y = torch.compile(mlp, backend=backend, options=options)(case.x)
    assert_exact(y, eager_mlp(case), eager_mlp(case.to(torch.float64)))
    early, late = (of for of in asked if of[0].startswith("fusedmlp_"))
    assert early == late
