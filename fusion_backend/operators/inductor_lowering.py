"""Kernels that Inductor calls, because it cannot inline their launches.

It inlines Triton's kernels, but not Gluon's (``back_to_back``, ``epilogue``), and it passes no
attribute of a launch (``stream``, whose second kernel starts before the first has ended). In a
graph an operator of ``torch.ops.fusedmlp`` stands for such launches. By itself Inductor calls an
operator through PyTorch's dispatcher and back into Python, which takes the host longer than the GPU
computes; with the lowering here it calls a function that launches the kernels of one MLP, and that
is made once.
"""

from __future__ import annotations

import zlib
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import inductor
from fusion_backend.operators import training_calls

# By name: arguments, and the module of fusion_backend.kernels with ``<name>``, which takes them,
# with ``caller``, which makes of texts functions that take the tensors, and with ``prepare``, which
# starts compiling what those launch.
_OPERATORS = {
    "back_to_back": (
        "Tensor x, Tensor weight_up, Tensor weight_down, Tensor? bias_up, Tensor? bias_down, "
        "Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, str activation, str norm",
        "back_to_back.launch_sm90",
    ),
    "epilogue": (
        "Tensor x, Tensor weight_up, Tensor? weight_gate, Tensor? bias_up, Tensor? bias_gate, "
        "Tensor? residual, str activation",
        "epilogue.launch_sm90",
    ),
    "stream": (
        "Tensor x, Tensor weight_up, Tensor weight_down, Tensor? bias_up, Tensor? bias_down, "
        "Tensor? weight_gate, Tensor? bias_gate, str activation",
        "stream.launch_sm90",
    ),
}


def register(library: torch.library.Library) -> None:
    """Define the operators: an MLP of ``(rows, in)`` each."""
    for name, (arguments, module) in _OPERATORS.items():
        library.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _Launch(name, module), "CUDA")
        torch.library.register_fake(f"{library.ns}::{name}", _fake, lib=library)
    training_calls.register(library)


class _Launch:
    """The function of an operator's name, whose module is imported when it is called first."""

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module

    def __call__(self, *arguments: Any) -> Tensor:
        module = import_module(f"fusion_backend.kernels.{self._module}")
        result: Tensor = getattr(module, self._name)(*arguments)
        return result


def _fake(x: Tensor, weight_up: Tensor, second: Tensor | None, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], (weight_up if second is None else second).shape[0]))


def install_lowering() -> None:
    """Teach Inductor to call the functions; once a process, and only where Inductor is used.

    If it met an operator before, it has made itself a lowering by which it calls the dispatcher.
    """
    from torch._inductor import lowering

    for name, (_, module) in _OPERATORS.items():
        operator = getattr(torch.ops.fusedmlp, name).default
        if operator not in lowering.lowerings or operator in lowering.fallbacks:
            lowering.fallbacks.discard(operator)
            lower = _lowering(name, module)
            lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    training_calls.install_lowering()


def _lowering(name: str, module: str) -> Any:
    from torch._inductor import ir

    class Call(ir.ExternKernelAlloc):
        given: tuple[bool, ...]
        made: str

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(
                f"from fusion_backend.kernels.{module} import caller as {name}_caller"
            )
            wrapper.add_import_once(self.made)
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if given else "None" for given in self.given]

    def lower(*arguments: Any) -> Any:
        texts = [argument for argument in arguments if isinstance(argument, str)]
        operands = arguments[: len(arguments) - len(texts)]
        x, weight_up, second = operands[:3]
        # Whether weights that are the transposes of contiguous ones are read as they are: all of
        # ``stream``, and the one of ``epilogue`` that has no gate.
        takes_transposed = name == "stream" or (name == "epilogue" and second is None)
        given = tuple(operand is not None for operand in operands)
        realized = [
            None if operand is None else ir.ExternKernel.realize_input(operand)
            for operand in operands
        ]
        transposed = tuple(
            takes_transposed and i > 0 and operand is not None and _is_transposed(operand)
            for i, operand in enumerate(realized)
        )
        inputs = [
            operand if as_it_is else ir.ExternKernel.require_contiguous(operand)
            for operand, as_it_is in zip(realized, transposed, strict=True)
            if operand is not None
        ]
        hidden_features, in_features = map(int, weight_up.get_size())
        out_features = hidden_features if second is None else int(second.get_size()[0])
        widths = (in_features, hidden_features, out_features)
        what = (*texts, widths, x.get_dtype(), given, transposed, x.get_device().index)
        function = f"fusedmlp_{name}_{zlib.crc32(repr(what).encode()):08x}"
        layout = [x.get_size()[0], out_features], [out_features, 1]
        _prepare(module, x.get_size()[0], what)
        call = Call(
            ir.FixedLayout(x.get_device(), x.get_dtype(), *layout),
            inputs,
            python_kernel_name=function,
        )
        call.given, call.made = given, f"{function} = {name}_caller{what!r}"
        return ir.TensorBox.create(call)

    return lower


def _prepare(module: str, rows: Any, what: tuple[Any, ...]) -> None:
    """Let kernels be compiled while Inductor compiles, unless it was told not to do so itself."""
    hint = inductor.optimization_hint(rows)
    if hint and inductor.compiles_in_parallel():
        import_module(f"fusion_backend.kernels.{module}").prepare(hint, *what)


def _is_transposed(node: Any) -> bool:
    """Whether a realized node of Inductor's is the transpose of a contiguous matrix."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and min(size) > 1 and stride == [1, size[0]]
