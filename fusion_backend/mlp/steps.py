"""What a chain computes, step by step: its layers, activations and norms, and values read again.

    linear                the next layer
    linear(0, x)          the same, of the input and what the step before computed, side by side
    linear(x, 0)          the same, the input behind
    activation            the next activation, of what the step before it computed
    activation(0, 3)      the same, also of earlier values: p0 is value 0, p1 is value 3
    layer_norm(1e-05)     the norm of what the step before it computed, over its features
    rms_norm(1e-06)       the same

A chain's steps are written one after the other, with semicolons between.

Value 0 is the input, and value i is what step i - 1 computes. So a residual block,
``x + W_2 f(W_1 norm(x))``, is ``layer_norm(1e-05); linear; activation; linear; activation(0)``, the
last activation being ``x + p0``. NeRF's skip, ``W_3 cat([x, h])``, is a ``linear(0, x)``.

Values are held in float32 from one layer to the next, and are rounded to the dtype of the layers
where a layer reads them, or where more than one step does.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusion_backend.mlp.norms import KINDS

LINEAR = "linear"
ACTIVATION = "activation"
_BETWEEN = "; "
_ACTIVATION = re.compile(r"activation(?:\((\d+(?:, \d+)*)\))?")
# Where the input's features stand in what a layer reads, as its text says it.
_BESIDE = {"": LINEAR, "before": f"{LINEAR}(0, x)", "after": f"{LINEAR}(x, 0)"}
_NORM = re.compile(rf"({'|'.join(KINDS)})\(([-+.\w]+)\)")


class Step(NamedTuple):
    """One step.

    Attributes:
        kind: ``linear``, ``activation``, ``layer_norm`` or ``rms_norm``.
        reads: earlier values that an activation is of, as its variables ``p0``, ``p1`` and so on.
        eps: of a norm.
        beside: of a layer that also reads the chain's input, where that stands: ``before`` or
            ``after`` what the step before the layer computed.
    """

    kind: str
    reads: tuple[int, ...] = ()
    eps: float = 0.0
    beside: str = ""

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm of either kind."""
        return self.kind in KINDS

    @property
    def text(self) -> str:
        """The step as an operator takes it."""
        if self.is_norm:
            return f"{self.kind}({self.eps!r})"
        if self.kind == LINEAR:
            return _BESIDE[self.beside]
        return f"{self.kind}({', '.join(map(str, self.reads))})" if self.reads else self.kind

    @classmethod
    def of(cls, text: str) -> Step:
        """What a text says.

        Raises:
            ValueError: it says something else.
        """
        for beside, said in _BESIDE.items():
            if text == said:
                return cls(LINEAR, beside=beside)
        if (found := _ACTIVATION.fullmatch(text)) is not None:
            reads = found[1].split(", ") if found[1] else ()
            return cls(ACTIVATION, tuple(map(int, reads)))
        if (found := _NORM.fullmatch(text)) is not None:
            return cls(found[1], eps=float(found[2]))
        raise ValueError(
            "a step of a chain must be linear, linear(0, x), linear(x, 0), activation, "
            f"activation(value, …), layer_norm(eps) or rms_norm(eps), got {text!r}"
        )


@dataclass(frozen=True)
class Steps:
    """All steps of a chain, in their order."""

    all: tuple[Step, ...]

    @classmethod
    def of(cls, text: str, layers: int) -> Steps:
        """The steps that a text says; without any, an activation between each two layers.

        Raises:
            ValueError: a part of it is no step, there are more or fewer layers than so many, a
                step reads a value that is not there yet, or the first layer reads the input beside
                another value.
        """
        if not text:
            return _plain(layers)
        steps = cls(tuple(map(Step.of, text.split(_BETWEEN))))
        found = sum(step.kind == LINEAR for step in steps.all)
        if found != layers:
            raise ValueError(f"steps must have as many layers as weights, {layers}, got {found}")
        for index, step in enumerate(steps.all):
            if any(read > index for read in step.reads):
                raise ValueError(f"step {index} must read earlier values, got {step.text}")
        if steps.beside[0]:
            raise ValueError("the first layer must read one value, got the input beside another")
        return steps

    @property
    def text(self) -> str:
        """As an operator takes them: nothing where an activation is between each two layers."""
        return "" if self.is_plain else _BETWEEN.join(step.text for step in self.all)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(step.kind == LINEAR for step in self.all)

    @property
    def activations(self) -> int:
        """How many activations there are."""
        return sum(step.kind == ACTIVATION for step in self.all)

    @property
    def norms(self) -> tuple[Step, ...]:
        """Those that are norms."""
        return tuple(step for step in self.all if step.is_norm)

    @functools.cached_property
    def beside(self) -> tuple[str, ...]:
        """Of each layer, where the input's features stand, if it reads them beside others."""
        return tuple(step.beside for step in self.all if step.kind == LINEAR)

    @functools.cached_property
    def joined(self) -> frozenset[int]:
        """The layers that read the input beside the value before them."""
        return frozenset(layer for layer, where in enumerate(self.beside) if where)

    def depths(self, widths: Sequence[Any]) -> tuple[Any, ...]:
        """The features that each layer sums over.

        ``widths``: of the chain's input, and after each layer.
        """
        pairs = zip(widths[:-1], self.beside, strict=True)
        return tuple(width + widths[0] if beside else width for width, beside in pairs)

    @property
    def is_plain(self) -> bool:
        """Whether there is an activation between each two layers, and nothing else."""
        return self == _plain(self.layers)

    @functools.cached_property
    def only_activates(self) -> bool:
        """Whether that holds but for layers that also read the input, and an activation at the end.

        Neither needs another value than a layer computes, whole or in blocks.
        """
        steps = [step._replace(beside="") for step in self.all]
        if steps[-1] == Step(ACTIVATION):
            steps.pop()
        return Steps(tuple(steps)).is_plain

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the steps before each layer, and after the last, in ``all``.

        A group belongs to the chain's value of the same number: the input, each hidden value, the
        output.
        """
        found: list[list[int]] = [[]]
        for index, step in enumerate(self.all):
            if step.kind == LINEAR:
                found.append([])
            else:
                found[-1].append(index)
        return tuple(map(tuple, found))

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """Of each group, the value that it begins with: the input, or what a layer computes."""
        layers = (i + 1 for i, step in enumerate(self.all) if step.kind == LINEAR)
        return (0, *layers)

    def ordinal(self, index: int) -> int:
        """Which of the chain's layers, activations or norms a step is."""
        kind = self.all[index].kind
        alike = [step.kind == kind or (step.is_norm and kind in KINDS) for step in self.all[:index]]
        return sum(alike)

    @functools.cached_property
    def read_again(self) -> frozenset[int]:
        """Values that another step than the next one reads."""
        return frozenset(itertools.chain.from_iterable(step.reads for step in self.all))

    @functools.cached_property
    def group_of(self) -> tuple[int, ...]:
        """Of each value, to which group it belongs."""
        return tuple(itertools.accumulate((step.kind == LINEAR for step in self.all), initial=0))

    @functools.cached_property
    def held(self) -> frozenset[int]:
        """Groups whose values are needed whole: all but those of which f alone is taken.

        Of hidden values it must be taken, of the input it is not, of the output it may be.
        """
        usual = {0: (0,), self.layers: (0, 1)}
        found = {self.group_of[value] for value in self.read_again}
        for group, steps in enumerate(self.groups):
            plain = [i for i in steps if self.all[i] == Step(ACTIVATION)]
            if len(steps) != len(plain) or len(plain) not in usual.get(group, (1,)):
                found.add(group)
        return frozenset(found)

    def live(self) -> Iterator[frozenset[int]]:
        """Of each step, the values that are kept for later steps while it runs."""
        for index in range(len(self.all)):
            later = itertools.chain.from_iterable(step.reads for step in self.all[index:])
            yield frozenset(value for value in later if value <= index)


def _plain(layers: int) -> Steps:
    return Steps((Step(LINEAR), *(Step(ACTIVATION), Step(LINEAR)) * (layers - 1)))
