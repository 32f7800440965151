"""Our own share of compile time: it grows with the size of a graph, and not faster."""

from __future__ import annotations

import cProfile
import inspect
import os
import pstats
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend import Options
from fusion_backend.compat import patches
from fusion_backend.fusion.example_values import with_example_values
from fusion_backend.fusion.fuse import fuse_in_place
from fusion_backend.mlp.expression import parse
from models import MLP, X


class Block(nn.Module):
    """A transformer's layer as matching sees it: linear layers along a residual stream."""

    def __init__(self, width=8):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = F.layer_norm(x, x.shape[-1:])
        attended = F.scaled_dot_product_attention(self.q(normed), self.k(normed), self.v(normed))
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


def graph_of(layers):
    model = nn.Sequential(*(Block() for _ in range(layers)))
    graph = torch.fx.symbolic_trace(model)
    return with_example_values(graph, (torch.empty(1, 4, 8),))


def work_of(layers):
    """Function calls of a rewrite that fuses every MLP."""
    graph, profile = graph_of(layers), cProfile.Profile()
    profile.enable()
    result = fuse_in_place(graph, Options(policy="always"))
    profile.disable()
    assert [site.rewritten for site in result.sites] == layers * [True]
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
def test_a_layer_more_is_as_much_work_in_a_deep_model_as_in_a_shallow_one():
    work = [work_of(layers) for layers in (24, 36, 48)]
    assert (work[2] - work[1]) / (work[1] - work[0]) < 1.1


def test_a_graph_deeper_than_pythons_stack_is_fused():
    graph, before = graph_of(60), sys.getrecursionlimit()  # 10 operators of a layer follow another
    sys.setrecursionlimit(len(inspect.stack()) + 450)
    try:
        result = fuse_in_place(graph, Options(policy="always"))
    finally:
        sys.setrecursionlimit(before)
    assert [site.rewritten for site in result.sites] == 60 * [True]


def analysing_function():
    from torch._higher_order_ops import triton_kernel_wrap

    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    (name,) = [name for name in names if hasattr(triton_kernel_wrap, name)]
    return triton_kernel_wrap, name


def kernel_of(module):
    def kernel():
        """Stands for the Python function in a kernel."""

    kernel.__module__ = module
    return SimpleNamespace(fn=SimpleNamespace(fn=kernel))  # with num_warps, the kernel is wrapped


def test_what_a_kernel_writes_to_is_found_out_once_for_equal_launches(monkeypatch):
    analysed = []
    wrap, name = analysing_function()
    monkeypatch.setattr(wrap, name, lambda *launch: analysed.append(launch) or ["y"])
    before = getattr(wrap, name)
    ours, other = kernel_of("fusion_backend.kernels.epilogue.kernel"), kernel_of("models")
    half = {"x": torch.empty(2, dtype=torch.float16), "rows": 2, "bias": None}
    single = {**half, "x": torch.empty(2)}
    fewer = {**half, "rows": 1}
    with patches.analysing_kernels_once():
        analyse = getattr(wrap, name)
        for arguments in (half, single, fewer, half, single, fewer):
            result = analyse(ours, arguments, {})
            assert result == ["y"]
            result.clear()  # belongs to the caller
        assert [launch[1] for launch in analysed] == [half, single, fewer]
        for _ in range(2):
            analyse(other, half, {})
    assert len(analysed) == 5
    assert getattr(wrap, name) is before


def test_inductors_tensors_are_told_apart_by_their_dtypes():
    of_inductor = SimpleNamespace(get_dtype=lambda: torch.float16)
    traced = torch.empty(2, dtype=torch.float16)
    assert patches.kind_of_argument(of_inductor) == patches.kind_of_argument(traced)
    assert patches.kind_of_argument(traced) != patches.kind_of_argument(torch.empty(2))


SOURCE = "\ndef fusedmlp_epilogue(): pass\n"
KERNEL = f"async_compile.triton('fusedmlp_epilogue', '''{SOURCE}''', device_str='cuda')"


@pytest.mark.parametrize(
    ("name", "ready", "started"),
    [
        ("fusedmlp_epilogue_0", True, [("fusedmlp_epilogue", SOURCE)]),
        ("fusedmlp_epilogue_0", False, []),
        ("kernel_of_a_model_0", True, []),
    ],
    ids=["ours", "no process is ready", "another"],
)
def test_our_kernels_begin_to_compile_when_they_are_written(monkeypatch, name, ready, started):
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    found, defined = [], []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: ready)
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, *kernel: found.append(kernel))
    monkeypatch.setattr(
        PythonWrapperCodegen, "define_kernel", lambda self, *kernel: defined.append(kernel)
    )
    before = PythonWrapperCodegen.define_kernel
    with patches.starting_kernels_early():
        PythonWrapperCodegen.define_kernel(None, name, KERNEL, "# where it is from")
    assert PythonWrapperCodegen.define_kernel is before
    assert defined == [(name, KERNEL, "# where it is from")]
    assert found == started


@pytest.fixture
def assembler(tmp_path, monkeypatch):
    """A torch that brings an assembler, which is not Triton's."""
    from torch._inductor.runtime import compile_tasks

    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "_inductor/runtime/tasks.py"))
    compile_tasks._set_triton_ptxas_path.cache_clear()
    path = tmp_path / "bin" / "ptxas"
    path.parent.mkdir()
    path.touch(0o755)
    yield str(path)
    compile_tasks._set_triton_ptxas_path.cache_clear()


@pytest.mark.parametrize("kernel", [False, True], ids=["graph", "kernel"])
def test_kernels_are_assembled_alike_whether_or_not_inductor_compiled_before(assembler, kernel):
    """Or a second process, which finds the graph in the cache, would compile them again."""
    if kernel:
        pytest.importorskip("triton")
        from fusion_backend.kernels.codegen.specialize import specialize
        from fusion_backend.kernels.stream.kernel_sm90 import fusedmlp_stream_hopper_hidden

        activation = parse("relu(x) + 0.125")  # of which there is no kernel yet
        specialize(fusedmlp_stream_hopper_hidden, activation, torch.float32, own_launch=True)
    else:
        with torch.no_grad():
            torch.compile(MLP(F.gelu), backend="fusedmlp")(X)
    assert os.environ["TRITON_PTXAS_PATH"] == assembler
