"""Who takes which cell, and that those who take it on a CPU compute it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fusion_backend.bench.cells import Cell, as_written, operands
from fusion_backend.bench.peers import CUTLASS, PEERS, chosen
from fusion_backend.errors import CommandError
from repetition import slow_but, telling

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KNOWN = {peer.name: peer for peer in PEERS}


def refuses(name: str, cell: Cell, device: torch.device) -> str | None:
    return KNOWN[name].refuses(cell, device)


def test_a_peer_that_is_not_installed_is_named_with_its_package() -> None:
    if importlib.util.find_spec("quack") is not None:
        pytest.skip("QuACK is installed here")
    assert KNOWN["quack"].absence(Cell("gelu_tanh", 8, 8, 8), GPU) == (
        "quack-kernels is not installed"
    )


def test_cublaslt_takes_only_what_its_epilogue_computes_exactly() -> None:
    assert refuses("cublaslt", Cell("gelu_tanh", 8, 8, 8), GPU) is None
    assert refuses("cublaslt", Cell("gelu", 8, 8, 8), GPU) is not None
    assert refuses("cublaslt", Cell("gelu_tanh", 8, 8, 8, bias=False), GPU) is not None
    assert refuses("cublaslt", Cell("gelu_tanh", 8, 8, 8, "tf32"), GPU) is not None
    assert refuses("cublaslt", Cell("gelu_tanh", 8, 8, 8), CPU) is not None


def test_the_back_to_back_pass_takes_plain_mlps_without_biases() -> None:
    assert refuses("b2b", Cell("gelu_tanh", 8, 8, 8, bias=False), GPU) is None
    assert refuses("b2b", Cell("gelu_tanh", 8, 8, 8), GPU) is not None
    assert refuses("b2b", Cell("swiglu", 8, 8, 8), GPU) is not None


def test_cutlass_takes_part_where_its_sources_are(tmp_path: Path) -> None:
    from torch._inductor import config

    cell = Cell("gelu_tanh", 8, 8, 8)
    with config.patch({"cuda.cutlass_dir": str(tmp_path)}):
        assert "TORCHINDUCTOR_CUTLASS_DIR" in (refuses("cutlass", cell, GPU) or "")
        (tmp_path / "include" / "cutlass").mkdir(parents=True)
        assert refuses("cutlass", cell, GPU) is None
        assert refuses("cutlass", cell, CPU) is not None
    with config.patch(CUTLASS):  # all of them are options of this version
        assert config.cuda.cutlass_epilogue_fusion_enabled


def test_liger_takes_gated_mlps_without_biases() -> None:
    for name in ("liger", "liger-mlp"):
        assert refuses(name, Cell("swiglu", 8, 8, 8), GPU) is None
        assert refuses(name, Cell("swiglu", 8, 8, 8, bias=True), GPU) is not None
        assert refuses(name, Cell("gelu_tanh", 8, 8, 8), GPU) is not None
    assert refuses("liger", Cell("geglu_tanh", 8, 8, 8), GPU) is None
    assert refuses("liger-mlp", Cell("geglu_tanh", 8, 8, 8), GPU) is not None


def test_quack_takes_half_dtypes_and_widths_divisible_by_8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cell in (Cell("swiglu", 8, 8, 8), Cell("gelu_tanh", 8, 8, 8, "float16")):
        assert refuses("quack", cell, GPU) is None
    assert refuses("quack", Cell("gelu", 8, 8, 8), GPU) == "it has no module for this MLP"
    assert refuses("quack", Cell("swiglu", 8, 8, 8, "tf32"), GPU) is not None
    assert "divisible by 8" in (refuses("quack", Cell("swiglu", 8, 8, 12), GPU) or "")
    assert refuses("quack", Cell("swiglu", 8, 8, 8), CPU) is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "capability 9.0" in (refuses("quack", Cell("swiglu", 8, 8, 8), GPU) or "")


class QuacksMLP(nn.Module):
    """Stands for ``quack.mlp.MLP``: the rows of gate and up stand in turns in one weight."""

    def __init__(self, width, hidden, out, bias1, bias2, activation, dtype) -> None:
        super().__init__()
        self.gated = activation == "swiglu"
        assert self.gated or activation == "gelu_tanh_approx"
        first = 2 * hidden if self.gated else hidden
        self.fc1 = nn.Linear(width, first, bias=bias1, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.gated:
            return self.fc2(nn.functional.silu(h[:, ::2]) * h[:, 1::2])
        return self.fc2(nn.functional.gelu(h, approximate="tanh"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["gelu_tanh", "swiglu"])
def test_quacks_module_is_given_the_weights_in_its_own_order(
    form: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = ModuleType("quack.mlp")
    stand_in.MLP = QuacksMLP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.mlp", stand_in)
    cell = Cell(form, 5, 8, 16, "float32", bias, out=24)
    x, (weights,) = operands(cell, 1, CPU)
    runner = KNOWN["quack"].build(cell)
    with torch.no_grad():
        actual = runner.function(*runner.operands(x, weights))
        torch.testing.assert_close(actual, as_written(cell)(x, *weights))


QUICK = ("eager", "inductor", "fusedmlp", "fusedmlp:reference", "freezing", "onnxruntime")
FORMS = ("swiglu", "gelu_tanh")


# Inductor tries out a dozen products in C++ for "freezing-max"; test_command.py has it try once.
@pytest.mark.parametrize(
    ("name", "form"),
    slow_but(
        telling(itertools.product(QUICK, FORMS)),
        itertools.product([*QUICK, "freezing-max", "openvino"], FORMS),
    ),
)
def test_a_peer_computes_the_mlp(name: str, form: str) -> None:
    cell = Cell(form, 5, 8, 16, "float32")
    x, (weights,) = operands(cell, 1, CPU)
    (peer,) = chosen([name])
    if (absence := peer.absence(cell, CPU)) is not None:
        pytest.skip(absence)
    torch._dynamo.reset()
    with torch.no_grad():
        runner = peer.build(cell)
        actual = runner.function(*runner.operands(x, weights))
        torch.testing.assert_close(actual, as_written(cell)(x, *weights))


def test_frozen_weights_are_constants() -> None:
    cell = Cell("gelu_tanh", 5, 8, 16, "float32")
    x, (weights,) = operands(cell, 1, CPU)
    torch._dynamo.reset()
    with torch.no_grad():
        runner = KNOWN["freezing"].build(cell)
        arguments = runner.operands(x, weights)
        before = runner.function(*arguments).clone()
        weights.weight_up.zero_()
        torch.testing.assert_close(runner.function(*arguments), before)


@pytest.mark.parametrize("name", ["freezing", "freezing-max", "onnxruntime", "openvino"])
def test_peers_with_constant_weights_are_for_cpus(name: str) -> None:
    assert refuses(name, Cell("gelu", 8, 8, 8, "float32"), GPU) == "it was chosen for CPUs"


def test_runtimes_are_given_float32_only() -> None:
    for name in ("onnxruntime", "openvino"):
        assert refuses(name, Cell("gelu", 8, 8, 8, "bfloat16"), CPU) == "it is given float32 only"


def test_fusedmlp_says_what_it_did_with_the_cell() -> None:
    cell = Cell("gelu_tanh", 2, 8, 16, "float32")
    x, (weights,) = operands(cell, 1, CPU)
    runner = KNOWN["fusedmlp"].build(cell)
    torch._dynamo.reset()
    with torch.no_grad():
        runner.function(*runner.operands(x, weights))
    (site,) = runner.sites
    assert site.activation == "gelu_tanh(x)"


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(CommandError, match="got 'sdpa'"):
        chosen(["eager", "sdpa"])
