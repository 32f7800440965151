"""A program: launch our kernels on a machine without a GPU, and print what the driver was given.

    python tests/kernels/recorded_launches.py DIRECTORY

DIRECTORY holds ``driver_stub.c``, compiled, as ``libcuda.so.1``. Tensors are those of the CPU: only
their addresses matter. For each call of a launcher the kernels that it launched are printed, the
addresses of all tensors, and which threads compiled kernels after they were prepared.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.epilogue import gradient_launch_sm90 as hopper_gradient
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.stream import launch_sm90 as stream_launch
from fusion_backend.mlp.weights import is_transposed

STREAM = 77


class Launch(ctypes.Structure):
    """As in ``driver_stub.c``."""

    _fields_ = (
        ("kernel", ctypes.c_char * 64),
        *((name, ctypes.c_uint) for name in ("programs", "threads", "attributes", "attribute")),
        ("stream", ctypes.c_ulonglong),
        ("parameters", ctypes.c_ulonglong * 64),
    )


class Map(ctypes.Structure):
    """As in ``driver_stub.c``."""

    _fields_ = (
        ("address", ctypes.c_ulonglong),
        ("sizes", ctypes.c_ulonglong * 2),
        ("stride", ctypes.c_ulonglong),
        ("box", ctypes.c_ulonglong * 2),
        ("type", ctypes.c_ulonglong),
        ("swizzle", ctypes.c_ulonglong),
    )


MOST_MAPS = 256
OF_MAP = 0xDECA << 48


class Driver:
    """What was launched since the last time, and of what tensor maps were made."""

    def __init__(self, library: Path) -> None:
        stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._launches = (Launch * 8).in_dll(stub, "launches")
        self._launched = ctypes.c_int.in_dll(stub, "launched")
        self._maps = (Map * MOST_MAPS).in_dll(stub, "maps")
        self._made = ctypes.c_int.in_dll(stub, "made")
        self._expected = (ctypes.c_int * 8).in_dll(stub, "expected")

    def expect(self, *parameters: int) -> None:
        self._launched.value = 0
        self._expected[: len(parameters)] = parameters

    def launched(self) -> list[dict[str, Any]]:
        found = []
        for number in range(self._launched.value):
            launch = self._launches[number]
            values: dict[str, Any] = {name: getattr(launch, name) for name, *_ in Launch._fields_}
            values["kernel"] = launch.kernel.decode()
            parameters = list(launch.parameters)[: self._expected[number]]
            maps = [self._maps[each - OF_MAP] for each in parameters if _is_map(each)]
            addresses = iter([each.address for each in maps])
            values["parameters"] = [next(addresses) if _is_map(p) else p for p in parameters]
            values["maps"] = [_as_text(each) for each in maps]
            found.append(values)
        return found

    @property
    def made(self) -> int:
        """How many tensor maps were made so far."""
        return self._made.value


def _is_map(parameter: int) -> bool:
    return OF_MAP <= parameter < OF_MAP + MOST_MAPS


def _as_text(made: Map) -> dict[str, Any]:
    values = {name: getattr(made, name) for name, *_ in Map._fields_}
    return {name: v if isinstance(v, int) else list(v)[::-1] for name, v in values.items()}


def pretend_there_is_a_gpu() -> None:
    active = CudaDriver()
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda device: STREAM
    active.get_device_capability = lambda device: (9, 0)
    driver.set_active(active)
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    Tensor.get_device = lambda tensor: 0  # type: ignore[method-assign]
    for module in (hopper, hopper_epilogue, hopper_gradient, stream_launch):
        module.target_of = lambda device: H100
        module.empty_strided_cuda = lambda: (
            lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        )


def recording_who_compiles() -> list[str]:
    threads: list[str] = []
    ahead = (hopper.compiled, hopper_epilogue.compiled)
    for function in (*ahead, stream_launch.compiled_hidden, stream_launch.compiled_out):

        def compiling(*arguments: Any, before: Any = function.compiling) -> Any:
            threads.append(threading.current_thread().name)
            return before(*arguments)

        function.compiling = compiling
    return threads


def prepare(call: Any, t: dict[str, Tensor]) -> None:
    """As Inductor does when it lowers the call; not those of training."""
    if call not in PREPARED:
        return
    module, names, texts = PREPARED[call]
    given = tuple(name in t for name in names)
    last = names[2] if names[2] in t else names[1]
    widths = (*reversed(t[names[1]].shape), t[last].shape[0])
    turned = tuple(is_transposed(t.get(name)) for name in names)
    known = (widths, torch.bfloat16, given, turned, 0)
    module.prepare(t["x"].shape[0], *texts, *known)


def operands(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def epilogue(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], t["weight_gate"], None, t["bias_gate"])
    return hopper_epilogue.epilogue(t["x"], *layers, None, "silu(g) * u")


def plain(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], None, t.get("bias_up"), None)
    return hopper_epilogue.epilogue(t["x"], *layers, None, "relu(x)")


def last(t: dict[str, Tensor]) -> Tensor:
    layer = (t["weight_up"], None, t["bias_up"], None, t["residual"])
    return hopper_epilogue.epilogue(t["x"], *layer, hopper_epilogue.IDENTITY)


def transposed(t: dict[str, Tensor]) -> Tensor:
    return plain(t)


def back_to_back(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], t["weight_down"], t["bias_up"], t["bias_down"], None)
    return hopper.back_to_back(t["x"], *layers, None, None, "relu(x)", "")


def summed(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], t["weight_down"], None, None, t["residual"])
    return hopper.back_to_back(t["x"], *layers, t["norm_weight"], None, "relu(x)", RMS_NORM)


def summed_with_x(t: dict[str, Tensor]) -> Tensor:
    return summed(t)


def stream(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], t["weight_down"], None, t["bias_down"], t["weight_gate"], None)
    return stream_launch.stream(t["x"], *layers, "silu(g) * u")


def saving(t: dict[str, Tensor]) -> Tensor:
    layers = (t["weight_up"], t["weight_gate"], None, None)
    postact, t["preacts"] = hopper_epilogue.epilogue_saving(t["x"], *layers, "silu(g) * u", True)
    return postact


def hidden_gradient(t: dict[str, Tensor]) -> Tensor:
    """Of pre-activations side by side, whose memory is not taken."""
    how = ("silu(g) * u", True, True, True)
    tensors = (t["x"], t["weight_down"], None, t["preacts"])
    t["grads"], postact, t["sums"] = hopper_gradient.hidden_gradient(*tensors, *how)
    return postact


def hidden_gradient_in_place(t: dict[str, Tensor]) -> Tensor:
    """Of two pre-activations, whose memory is taken."""
    tensors = (t["x"], t["weight_down"], t["gate"], t["up"])
    known = ((768, 2048), torch.bfloat16, (True,) * 4, False, 0)
    run = hopper_gradient.hidden_gradient_caller("silu(g) * u", False, False, False, *known, True)
    gate, up, postact, _ = run(*tensors)
    assert (gate.data_ptr(), up.data_ptr()) == (t["gate"].data_ptr(), t["up"].data_ptr())
    return postact


def input_gradient(t: dict[str, Tensor]) -> Tensor:
    """Of two matrices."""
    return hopper_epilogue.input_gradient(t["gate"], t["weight_gate"], t["weight_up"], t["up"])[0]


RMS_NORM = "rms_norm(1e-06)"
MLP = ("x", "weight_up", "weight_down", "bias_up", "bias_down")
NARROW = (*MLP, "residual", "norm_weight", "norm_bias")
LAYERS = ("x", "weight_up", "weight_gate", "bias_up", "bias_gate", "residual")
PREPARED: dict[Any, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    epilogue: (hopper_epilogue, LAYERS, ("silu(g) * u",)),
    plain: (hopper_epilogue, LAYERS, ("relu(x)",)),
    transposed: (hopper_epilogue, LAYERS, ("relu(x)",)),
    last: (hopper_epilogue, LAYERS, (hopper_epilogue.IDENTITY,)),
    back_to_back: (hopper, NARROW, ("relu(x)", "")),
    summed: (hopper, NARROW, ("relu(x)", RMS_NORM)),
    summed_with_x: (hopper, NARROW, ("relu(x)", RMS_NORM)),
    stream: (stream_launch, (*MLP, "weight_gate", "bias_gate"), ("silu(g) * u",)),
}


def main() -> int:
    recorded = Driver(Path(sys.argv[1], "libcuda.so.1"))
    pretend_there_is_a_gpu()
    first = {"x": (500, 1024), "weight_gate": (2048, 1024), "weight_up": (2048, 1024)}
    hidden = {"x": (500, 768), "weight_down": (768, 2048)}
    pair = {"gate": (500, 2048), "up": (500, 2048)}
    many = {"x": (8192, 768), "weight_up": (3072, 768)}
    down = {"x": (8192, 3072), "weight_up": (768, 3072)}
    narrow = {"x": (5000, 64), "weight_up": (256, 64), "weight_down": (64, 256)}
    few = {"x": (16, 768), "weight_up": (3072, 768), "weight_down": (768, 3072)}
    calls = {
        epilogue: ((24,), operands(**first, bias_gate=(2048,))),
        plain: ((19,), operands(**many, bias_up=(3072,))),
        transposed: ((18,), operands(**many)),
        last: ((20,), operands(**down, bias_up=(768,), residual=(8192, 768))),
        back_to_back: ((18,), operands(**narrow, bias_up=(256,), bias_down=(64,))),
        summed_with_x: ((17,), operands(**narrow, norm_weight=(64,))),
        summed: ((18,), operands(**narrow, residual=(5000, 64), norm_weight=(64,))),
        saving: ((33,), operands(**first)),
        hidden_gradient: ((44,), operands(**hidden, preacts=(500, 4096))),
        hidden_gradient_in_place: ((38,), operands(**hidden, **pair)),
        input_gradient: ((28,), operands(weight_gate=(2048, 1024), weight_up=(2048, 1024), **pair)),
        stream: ((8, 7), operands(**few, weight_gate=(3072, 768), bias_down=(768,))),
    }
    _, of_transposed = calls[transposed]
    of_transposed["weight_up"] = of_transposed["weight_up"].view(768, 3072).t()
    of_x = calls[summed_with_x][1]
    of_x["residual"] = of_x["x"]
    results, threads = {}, recording_who_compiles()
    for call, (parameters, tensors) in calls.items():
        threads.clear()
        prepare(call, tensors)
        recorded.expect(*parameters)
        tensors["y"] = call(tensors)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        results[call.__name__] = {
            "launches": recorded.launched(),
            "addresses": addresses,
            "compiled_by": list(threads),
        }
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
