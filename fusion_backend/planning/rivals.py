"""An MLP as it would run fused, and as Inductor would run it: functions to be timed.

Inductor compiles an MLP into cuBLAS products and one pointwise kernel, which takes the first bias
along. Nothing need be compiled to time that: an ATen kernel that reads and writes as much stands in
for the pointwise kernel, GELU for what reads one hidden value, a product for what reads two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.kernels.registry import named
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.stopwatch import Candidate

_PADDED = "inductor, padded"
#: Names of what Inductor may run; it takes the faster.
UNFUSED = (INDUCTOR, _PADDED)
# Elements of 16 bits; cuBLAS is slow where widths are not a whole number of them.
_PIECE = 8
# Of weights, so many times the cache: each set has left it when its turn comes again.
_CACHES = 1.5
_MOST_SETS = 32
# Elements; allocated tensors start at multiples of as many, or more.
_UNIT = 64


@dataclass(frozen=True)
class Rivals:
    """Tensors for one MLP, all of them made here.

    Attributes:
        x: ``(rows, in)``.
        sets: weights, as many sets as it takes that each comes from device memory.
        packed: both first layers of a gated MLP are halves of one weight.
    """

    x: Tensor
    sets: Sequence[Weights]
    packed: bool

    @classmethod
    def of(cls, setting: Setting, cache: int) -> Rivals:
        """Random tensors, drawn without the program's random state.

        Args:
            setting: an MLP of known sizes.
            cache: bytes of the GPU's L2 cache.
        """
        assert setting.widths is not None
        inner, normal = setting.widths[0], drawing(setting)
        x = normal(setting.likely_rows, inner)
        distinct = number_of_sets(setting, cache)
        places = _places(setting, cache)
        # Weights of about unit rows; one tensor, of which all of them are parts.
        memory = normal(distinct * places.elements)
        memory.mul_(inner**-0.5)
        sets = [_cut(part, places.starts, setting) for part in memory.chunk(distinct)]
        return cls(x, sets, setting.packed)

    def candidates(self, families: Sequence[str], activation: str) -> dict[str, Candidate]:
        """What Inductor would run, under names of :data:`UNFUSED`, and the operator by families."""
        operands = [(each,) for each in self.sets]
        found = {INDUCTOR: Candidate(self.unfused, operands)}
        if self.sets[0].weight_down.shape[0] % _PIECE:
            found[_PADDED] = Candidate(partial(self.unfused, pads=True), operands)
        for family in families:
            found[family] = Candidate(_Fused(self.x, activation, family), operands)
        return found

    def kernels_of(self, name: str) -> int:
        """How many kernels a call of a candidate is, by its name."""
        if name not in UNFUSED:
            return named(name).launches
        first = self.sets[0]
        pads = (1 + (first.bias_down is not None)) * (name == _PADDED)
        return 3 + (first.weight_gate is not None and not self.packed) + pads

    def unfused(self, weights: Weights, pads: bool = False) -> Tensor:
        """The MLP as products and one pass for the activation, each by PyTorch's kernels.

        Args:
            weights: one set of them.
            pads: make the last weight's features a whole number of pieces, as Inductor does where
                it finds that to be faster.
        """
        x, gate, up = self.x, weights.weight_gate, weights.weight_up
        if gate is None:
            hidden = torch.ops.aten.gelu_(torch.mm(x, up.t()), approximate="tanh")
        elif self.packed:
            both = torch.mm(x, _joined(gate, up).t())
            hidden = torch.mul(*both.chunk(2, 1))
        else:
            hidden = torch.mm(x, gate.t()).mul_(torch.mm(x, up.t()))
        down, bias = weights.weight_down.t(), weights.bias_down
        missing = -down.shape[1] % _PIECE if pads else 0
        if missing:
            down = F.pad(down, (0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        y = torch.mm(hidden, down) if bias is None else torch.addmm(bias, hidden, down)
        return y[:, : weights.weight_down.shape[0]]


@dataclass(frozen=True)
class _Fused:
    x: Tensor
    activation: str
    family: str

    def __call__(self, weights: Weights) -> Tensor:
        y: Tensor = torch.ops.fusedmlp.mlp(self.x, *weights, [], self.activation, self.family)
        return y


def drawing(setting: Setting) -> Callable[..., Tensor]:
    """A function of a shape that draws numbers, without the program's random state."""
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=setting.dtype, device=setting.device)
        return made.normal_(generator=generator)

    return normal


def number_of_sets(setting: Setting, cache: int) -> int:
    """How many sets of weights leave a cache of so many bytes before their turn comes again."""
    return sets_beyond(cache, sum(map(math.prod, _shapes(setting))) * setting.dtype.itemsize)


def sets_beyond(cache: int, size: int) -> int:
    """The same of sets of so many bytes each."""
    return max(1, min(_MOST_SETS, math.ceil(_CACHES * cache / size)))


def bytes_of_weights(setting: Setting, cache: int) -> int:
    """The memory that all sets of weights and biases take."""
    elements = number_of_sets(setting, cache) * _places(setting, cache).elements
    return elements * setting.dtype.itemsize


def bytes_of_values(setting: Setting) -> int:
    """The most memory that comparing takes beside: the input, the result, values between."""
    assert setting.widths is not None
    inner, hidden, out = setting.widths
    values = setting.likely_rows * (inner + (3 if setting.gated else 2) * hidden + out)
    return values * setting.dtype.itemsize


class _Places(NamedTuple):
    """Where the tensors of one set of weights stand in its memory, in elements.

    Attributes:
        starts: of each of :func:`_shapes`.
        elements: all that they take.
    """

    starts: tuple[int, ...]
    elements: int


def _places(setting: Setting, cache: int) -> _Places:
    """Tensors behind one another, gate and up without a gap; but large ones share memory.

    They share it where so much is read between two reads of an element that it has left the cache:
    whether gate and up are read together, or one after the other.
    """
    gate, up, *biases, down, bias_down = map(math.prod, _shapes(setting))
    leaves = _CACHES * cache / setting.dtype.itemsize  # elements after which the cache is renewed
    up_start = _whole(gate // 2) if gate >= 2 * leaves and not setting.packed else gate
    starts, end = [0, up_start], _whole(up_start + up)
    for size in biases:
        starts.append(end)
        end += _whole(size)
    down_start = 0 if gate + up >= leaves else end
    end = max(end, _whole(down_start + down))
    return _Places((*starts, down_start, end), end + _whole(bias_down))


def _shapes(setting: Setting) -> tuple[tuple[int, ...], ...]:
    """Of gate and up, of their biases, of down and of its bias; of what is not there ``(0,)``."""
    assert setting.widths is not None
    inner, hidden, out = setting.widths
    nothing = (0,)
    first, bias = (hidden, inner), (hidden,) if setting.has_bias_up else nothing
    bias_down = (out,) if setting.has_bias_up else nothing
    if not setting.gated:
        return nothing, first, nothing, bias, (out, hidden), bias_down
    return first, first, bias, bias, (out, hidden), bias_down


def _cut(memory: Tensor, starts: Sequence[int], setting: Setting) -> Weights:
    """One set of weights, as parts of a tensor."""
    gate, up, bias_gate, bias_up, down, bias_down = (
        memory[start : start + math.prod(shape)].view(shape) if 0 not in shape else None
        for start, shape in zip(starts, _shapes(setting), strict=True)
    )
    assert up is not None
    assert down is not None
    if setting.transposed:
        gate = None if gate is None else _turned(gate)
        up, down = _turned(up), _turned(down)
    return Weights(gate, bias_gate, up, bias_up, down, bias_down)


def _turned(weight: Tensor) -> Tensor:
    """A weight of the same shape in the same memory, stored the other way round."""
    return weight.view(weight.shape[1], weight.shape[0]).t()


def _whole(elements: int) -> int:
    """So many elements that the next tensor starts where allocated ones do."""
    return -(-elements // _UNIT) * _UNIT


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    """Both weights as one: they lie one behind the other."""
    hidden, inner = gate.shape
    return gate.as_strided((2 * hidden, inner), gate.stride(), gate.storage_offset())
