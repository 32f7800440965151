"""Who takes constant weights on a CPU: Inductor with frozen weights, ONNX Runtime, OpenVINO.

Each is given a module with weights of its own, once for each set of them, and may lay them out
anew, which a call with weights that may change cannot. All compute in as many threads as PyTorch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusion_backend.bench.cells import Cell, as_written
from fusion_backend.bench.peer import Peer, Refusal, Runner
from fusion_backend.compat.inductor import inductor_options
from fusion_backend.instruments.isolation import private_frame
from fusion_backend.instruments.timing import Operands
from fusion_backend.mlp.weights import Weights

_TEMPLATES = {
    "max_autotune": True,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}


class _Constant(nn.Module):
    """The MLP of a cell with weights of its own."""

    def __init__(self, cell: Cell, weights: Weights) -> None:
        super().__init__()
        self._function = private_frame(as_written(cell))
        self._names: list[str | None] = []
        for name, value in zip(Weights._fields, weights, strict=True):
            self._names.append(None if value is None else name)
            if value is not None:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._function(
            x, *(None if name is None else getattr(self, name) for name in self._names)
        )
        return result


Run = Callable[[Tensor], Tensor]


def _with_constants(made: Callable[[nn.Module, Tensor], Run]) -> Callable[[Cell], Runner]:
    """What builds a runner of modules with constant weights."""

    def build(cell: Cell) -> Runner:
        def operands(x: Tensor, weights: Weights) -> Operands:
            return x, made(_Constant(cell, weights).eval(), x)

        return Runner(lambda x, run: run(x), operands)

    return build


def _frozen(options: dict[str, Any]) -> Callable[[nn.Module, Tensor], Run]:
    def made(module: nn.Module, x: Tensor) -> Run:
        compiled: Run = torch.compile(module, dynamic=False, options=options)
        # Among the options of one compilation, PyTorch does not look for this one.
        with inductor_options({"freezing": True}), torch.no_grad():
            compiled(x)
        return compiled

    return made


def _onnx_runtime(module: nn.Module, x: Tensor) -> Run:
    import onnxruntime

    program = torch.onnx.export(module, (x,), input_names=["x"], dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _openvino(module: nn.Module, x: Tensor) -> Run:
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = openvino.convert_model(torch.export.export(module, (x,)))
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()

    def run(x: Tensor) -> Tensor:
        results = request.infer({0: x.numpy()}, share_inputs=True, share_outputs=True)
        return torch.from_numpy(results[0])

    return run


def _on_cpus(*packages: str, single: bool = False) -> Refusal:
    """Refuses GPUs, where a package is missing, and dtypes but float32 if it is ``single``."""

    def refuses(cell: Cell, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "it was chosen for CPUs"
        if single and cell.dtype != torch.float32:
            return "it is given float32 only"
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"{' and '.join(missing)} is not installed" if missing else None

    return refuses


FREEZING = Peer(
    "freezing",
    "torch.compile with frozen weights",
    _with_constants(_frozen({})),
    _on_cpus(),
    compiles=True,
)
TEMPLATES = Peer(
    "freezing-max",
    "torch.compile with frozen weights and max_autotune: C++ templates of products",
    _with_constants(_frozen(_TEMPLATES)),
    _on_cpus(),
    compiles=True,
)
ONNX_RUNTIME = Peer(
    "onnxruntime",
    "ONNX Runtime's InferenceSession of the exported module",
    _with_constants(_onnx_runtime),
    _on_cpus("onnxscript", single=True),
    "onnxruntime",
)
OPENVINO = Peer(
    "openvino",
    "OpenVINO's CPU plugin, in float32",
    _with_constants(_openvino),
    _on_cpus(single=True),
    "openvino",
)
