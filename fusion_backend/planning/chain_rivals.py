"""A chain as it would run in one kernel, in pairs and unfused: functions to be timed.

As in :mod:`rivals` nothing of Inductor's need be compiled: ATen kernels that read and write as much
stand in for its pointwise kernels and norms. Pairs run without the norm before them and the sum
after them, which their kernel would compute: the chain must be faster all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.kernels.back_to_back.family import can_back_to_back
from fusion_backend.kernels.registry import BACK_TO_BACK, CHAIN, STREAM
from fusion_backend.mlp.steps import Steps
from fusion_backend.planning.chain_model import PAIRS
from fusion_backend.planning.gains import MOST_OF_FEW_ROWS
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.rivals import drawing, sets_beyond
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.stopwatch import Candidate

#: Pairs by the family for few rows.
_PAIRS_OF_FEW_ROWS = f"{PAIRS}, few rows"


class Layers(NamedTuple):
    """One set of a chain's parameters, in the order of its operator."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    norms: list[Tensor | None]


@dataclass(frozen=True)
class ChainRivals:
    """Tensors for one chain, all of them made here.

    Attributes:
        x: ``(rows, in)``.
        sets: parameters, as many sets as it takes that each comes from device memory.
        setting: the chain.
        steps: what it computes.
    """

    x: Tensor
    sets: Sequence[Layers]
    setting: Setting
    steps: Steps

    @classmethod
    def of(cls, setting: Setting, cache: int) -> ChainRivals:
        """Random tensors, drawn without the program's random state.

        Args:
            setting: a chain of known sizes.
            cache: bytes of the GPU's L2 cache.
        """
        widths, steps, normal = _widths(setting), _steps(setting), drawing(setting)

        def layers() -> Layers:
            sizes = zip(_depths(setting), widths[1:], strict=True)
            weights = [normal(out, inner).mul_(inner**-0.5) for inner, out in sizes]
            biases = [normal(out) if setting.has_bias_up else None for out in widths[1:]]
            return Layers(weights, biases, list(norms()))

        def norms() -> Iterator[Tensor | None]:
            for group, indices in enumerate(steps.groups):
                for step in (steps.all[index] for index in indices if steps.all[index].is_norm):
                    yield normal(widths[group])
                    yield normal(widths[group]) if step.kind == "layer_norm" else None

        sets = [layers() for _ in range(_number_of_sets(setting, cache))]
        return cls(normal(setting.likely_rows, widths[0]), sets, setting, steps)

    def candidates(self, families: Sequence[str], activation: str) -> dict[str, Candidate]:
        """What would run without the chain, and the chain by families.

        Pairs are among them where a family runs some.
        """
        operands = [(each,) for each in self.sets]
        runs: dict[str, Callable[[Layers], Tensor]] = {INDUCTOR: self.unfused}
        runs |= {name: partial(self.unfused, pairs=pairs) for name, pairs in self._pairs.items()}
        runs |= {family: partial(self.fused, family=family) for family in families}
        return {name: Candidate(run, operands) for name, run in runs.items()}

    def kernels_of(self, name: str) -> int:
        """How many kernels a call of a candidate is, by its name."""
        if name == CHAIN.name:
            return CHAIN.launches
        pairs = self._pairs.get(name, {})
        own = sum(2 if family == STREAM.name else 1 for family in pairs.values())
        rest = len(self.steps.groups) - 1 - 2 * len(pairs)
        return own + rest + sum(self._has_kernel(at, pairs) for at in range(len(self.steps.groups)))

    def fused(self, layers: Layers, family: str) -> Tensor:
        """The chain by a family."""
        given = (self.x, layers.weights, layers.biases, [*self.setting.texts], family)
        inner = {"steps": self.steps.text, "norms": layers.norms or None}
        y: Tensor = torch.ops.fusedmlp.chain(*given, **inner)
        return y

    def unfused(self, layers: Layers, pairs: Mapping[int, str] | None = None) -> Tensor:
        """The chain as products and one pass for all steps of a value, and as pairs of layers.

        Args:
            layers: one set of parameters.
            pairs: the families of pairs, by the position of their hidden value.
        """
        pairs, value, at = pairs or {}, self.x, 0
        last = len(layers.weights)
        while True:
            if self._has_kernel(at, pairs):
                value = self._stood_in(value, at)
            if at == last:
                return value
            if at + 1 in pairs:
                value = self._pair(value, layers, at, pairs[at + 1])
                at += 2
                continue
            weight, bias = layers.weights[at].t(), layers.biases[at]
            if bias is None or self._has_kernel(at + 1, pairs):  # which takes the bias along
                value = torch.mm(value, weight)
            else:
                value = torch.addmm(bias, value, weight)
            at += 1

    def _pair(self, value: Tensor, layers: Layers, at: int, family: str) -> Tensor:
        (step,) = self.steps.groups[at + 1]
        text = self.setting.texts[self.steps.ordinal(step)]
        up, down = ((layers.weights[i], layers.biases[i]) for i in (at, at + 1))
        y: Tensor = torch.ops.fusedmlp.mlp(value, None, None, *up, *down, [], text, family)
        return y

    def _stood_in(self, value: Tensor, at: int) -> Tensor:
        """A kernel that reads and writes as much as that of all steps of a value."""
        steps = [self.steps.all[index] for index in self.steps.groups[at]]
        if self._is_joined(at):
            return torch.cat([self.x, value], -1)
        if any(step.is_norm for step in steps):
            return F.layer_norm(value, value.shape[-1:])
        if any(step.reads for step in steps):
            return torch.add(value, value)
        return F.gelu(value, approximate="tanh")

    def _has_kernel(self, at: int, pairs: Mapping[int, str]) -> bool:
        """Whether a value has steps that no pair computes, or the input is written beside it."""
        if self._is_joined(at):
            return True
        beside = {at - 1, at, at + 1} & pairs.keys()
        return bool(self.steps.groups[at]) and not (
            beside and (at in pairs or at in self.steps.held)
        )

    def _is_joined(self, at: int) -> bool:
        """Whether the layer of a value also reads the input."""
        return at < self.steps.layers and bool(self.steps.beside[at])

    @property
    def _pairs(self) -> dict[str, dict[int, str]]:
        """The families of pairs, by their hidden values; by names of candidates."""
        from fusion_backend.kernels.chain.config import middle

        widths = _widths(self.setting)
        outside = {at for at in range(len(widths)) if self._is_joined(at)} | {0, len(widths) - 1}
        hidden, depths = middle(widths, held=self.steps.held | outside), _depths(self.setting)
        found = {
            PAIRS: {
                at: BACK_TO_BACK.name
                for at in hidden
                if can_back_to_back(
                    depths[at - 1], widths[at], widths[at + 1], False, self.setting.dtype
                )
            }
        }
        if self.setting.likely_rows <= MOST_OF_FEW_ROWS:
            found[_PAIRS_OF_FEW_ROWS] = dict.fromkeys(hidden, STREAM.name)
        return {name: pairs for name, pairs in found.items() if pairs}


def bytes_of_chain(setting: Setting, cache: int) -> tuple[int, int]:
    """The memory that all sets of parameters take, and the most that values take beside."""
    values = setting.likely_rows * (sum(_widths(setting)) + _beside(setting))
    weights = _number_of_sets(setting, cache) * _elements(setting)
    return weights * setting.dtype.itemsize, values * setting.dtype.itemsize


def _beside(setting: Setting) -> int:
    """Features that concatenations have more than the values of the chain."""
    return sum(_depths(setting)) - sum(_widths(setting)[:-1])


def _number_of_sets(setting: Setting, cache: int) -> int:
    return sets_beyond(cache, _elements(setting) * setting.dtype.itemsize)


def _elements(setting: Setting) -> int:
    layers = zip(_depths(setting), _widths(setting)[1:], strict=True)
    return sum(inner * out for inner, out in layers)


def _widths(setting: Setting) -> tuple[int, ...]:
    assert setting.layer_widths is not None
    return setting.layer_widths


def _depths(setting: Setting) -> tuple[int, ...]:
    """The features that each layer sums over."""
    return _steps(setting).depths(_widths(setting))


def _steps(setting: Setting) -> Steps:
    return Steps.of(setting.steps, len(_widths(setting)) - 1)
