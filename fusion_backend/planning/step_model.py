"""How long a training step of an MLP takes, by family and in Inductor's code: a model of launches.

A step is forward and backward, with the gradients of everything. Each way to run it is a list of
launches, and a launch takes what ``cost_model`` says of a product, of reading and writing, or both:

    Inductor      products: of the first layers and of the last; of the hidden gradient, of each
                  weight's gradient, of the input's; a pass over the hidden values in each
                  direction; sums over rows for the gradients of biases
    epilogue      first product(s) with the activation and the hidden gradient's product with the
                  derivative in kernels of our own, which do both passes along; on Hopper the sums
                  over rows, too, and a pair's products as one; all other products as Inductor's
    back_to_back  a kernel forward, which writes nothing hidden, and one backward: where the
                  weights' gradients fit in registers, of everything, and a sum; else of x and of
                  the hidden values, of which products give the weights' gradients

Most products are the same in all of them. So a ratio of times is better known than either time, and
``deviation`` is that of the ratio's logarithm: the uncertainty. All was fitted to an H200, by
``benchmarks/fit_step_model.py``, so the model speaks for GPUs of its architecture only, and in 16
bits only: in float32 each step that was measured took longer fused. Of narrow MLPs whose weights'
gradients are products no random ones are measured yet: the factors of their two kernels are set to
what five steps took there.

Of activations whose derivatives need exact functions, such as mish, ``epilogue`` is not predicted
at all: its kernels take longer for them than for the products, and none was measured to gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusion_backend.kernels import registry
from fusion_backend.kernels.back_to_back.family import gradients_fit
from fusion_backend.planning import cost_model, discounts
from fusion_backend.planning.cost_model import Factors
from fusion_backend.planning.gpus import Gpu, kernel_target
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE
from fusion_backend.planning.setting import Setting

_ARCHITECTURE = "sm_90"
_UNIT = 8  # 16-bit elements: libraries have slower kernels for rows of other lengths
_ROWS_OF_SUMS = 32  # of a tile, whose sum the hidden gradient's kernel for Hopper stores
# Of our kernels: tiles, for Hopper and by rows up to a number, and what they sum over at a time.
_HOPPERS_TILES: Sequence[tuple[int, int]] = ((128, 128), (128, 192), (192, 128))
_TILES = ((16, (16, 32)), (64, (64, 32)), (1024, (64, 128)), (math.inf, (128, 256)))
_BLOCK_K = 64
# Of narrow ones: rows of a tile, and how many a multiprocessor has at a time.
_ROWS_OF_A_TILE, _ROWS_OF_A_TURN = 64, 128
# By how much each exact function takes narrow kernels longer than an approximated one.
_EXACT = 4.0

#: Families that are predicted.
KNOWN = (registry.BACK_TO_BACK.name, registry.EPILOGUE.name)

#: What launches are: each kind has factors of its own.
LIBRARY, UNALIGNED, PASS, SUM = "product", "unaligned product", "pass", "sum"
FORWARD, FORWARD_HOPPER = "forward", "forward on Hopper"
GRADIENT, GRADIENT_HOPPER = "gradient", "gradient on Hopper"
NARROW, NARROW_FORWARD, NARROW_HIDDEN = "narrow", "narrow forward", "narrow hidden gradient"

#: Fitted by ``benchmarks/fit_step_model.py``. Some reach more than the memory's bandwidth: values
#: are still in the L2 cache.
FITTED: Mapping[str, Factors] = {
    LIBRARY: Factors(2.14, 0.312, 0.735, 0.693),
    UNALIGNED: Factors(3.11, 0.104, 0.554, 0.249),
    PASS: Factors(3.19, 0.5, 1.16, 0.7),
    SUM: Factors(2.7, 0.5, 0.691, 0.7),
    FORWARD: Factors(5.79, 0.104, 1.0, 0.911),
    FORWARD_HOPPER: Factors(7.55, 1.83, 2.47, 0.7),
    GRADIENT: Factors(3.19, 0.104, 0.528, 0.506),
    GRADIENT_HOPPER: Factors(10.1, 1.39, 0.642, 0.873),
    NARROW: Factors(7.06, 1.89, 0.844, 0.454, 0.291),
    NARROW_FORWARD: Factors(1.94, 1.7, 0.361, 1.19, 0.45),
    NARROW_HIDDEN: Factors(3.0, 1.0, 0.8, 0.6, 0.3),
}
# Of the logarithm of Inductor's time over a family's, rounded up from what it is off by: of kernels
# for Hopper alone, then with few tiles or odd rows, of those for any GPU, too, and of narrow ones.
_ON_HOPPER, _LESS_KNOWN, _ON_ANY, _NARROW = 0.04, 0.08, 0.09, 0.15
# Of narrow ones whose weights' gradients are products: those are the library's.
_NARROW_HIDDEN = 0.08
#: Tiles of 128×128 hidden values, of which a GPU computes a hundred or so at a time.
_FEW_TILES = 500


class Product(NamedTuple):
    """A product of matrices by one kernel; ``further`` elements are read or written beside it."""

    kind: str
    rows: int
    depth: int
    columns: int
    further: float = 0.0

    def microseconds(self, reached: Factors, gpu: Gpu) -> float:
        """A library has tiles of all sizes, and splits long sums; our kernels do neither."""
        how = (reached, gpu, self.further)
        if self.kind in (LIBRARY, UNALIGNED):
            return cost_model.of_product(self.rows, self.depth, self.columns, *how)
        tiles = _HOPPERS_TILES if self.kind in (FORWARD_HOPPER, GRADIENT_HOPPER) else ()
        depth = math.ceil(self.depth / _BLOCK_K) * _BLOCK_K
        tiles = tiles or (next(tile for rows, tile in _TILES if self.rows <= rows),)
        return cost_model.of_product(self.rows, depth, self.columns, *how, tiles, may_split=False)


class Pass(NamedTuple):
    """A kernel that does nothing but read and write so many elements."""

    kind: str
    elements: float

    def microseconds(self, reached: Factors, gpu: Gpu) -> float:
        """Its start, and what the memory takes."""
        return reached.start + cost_model.of_moving(self.elements, reached, gpu)


class Narrow(NamedTuple):
    """All kernels of a narrow MLP: each program of the backward pass takes blocks of rows."""

    rows: int
    widths: tuple[int, int, int]
    exact: int = 0
    special: int = 1
    kind: str = NARROW

    def microseconds(self, reached: Factors, gpu: Gpu) -> float:
        """The latency is that of one block of rows."""
        from fusion_backend.kernels.host.configs import narrow_gradient_config, padded

        inner, hidden, out = map(padded, self.widths)
        height, programs = narrow_gradient_config(*self.widths).block_m, gpu.multiprocessors
        blocks = math.ceil(self.rows / (height * programs))
        padded_rows = blocks * height * programs
        # Forward two products; backward the first again, the hidden gradient, three gradients.
        products = cost_model.of_multiplying(
            padded_rows * hidden * (4 * inner + 3 * out), reached, gpu
        )
        busy = products + _of_activation(padded_rows * hidden, self, reached, gpu)
        sums = 4 * programs * hidden * (inner + out)  # in float32, written and read
        moved = self.rows * (3 * self.widths[0] + 2 * self.widths[2]) + sums
        memory = cost_model.of_moving(moved, reached, gpu)
        return reached.start + reached.latency * blocks + cost_model.overlapped(memory, busy)


class NarrowForward(NamedTuple):
    """The forward kernel of a narrow MLP."""

    rows: int
    widths: tuple[int, int, int]
    kind: str = NARROW_FORWARD

    def microseconds(self, reached: Factors, gpu: Gpu) -> float:
        """As in inference."""
        return cost_model.of_back_to_back(cost_model.Work(self.rows, self.widths), gpu, reached)


class NarrowHidden(NamedTuple):
    """The kernel of a narrow MLP that writes the gradients of x and of the pre-activations."""

    rows: int
    widths: tuple[int, int, int]
    exact: int = 0
    special: int = 1
    kind: str = NARROW_HIDDEN

    def microseconds(self, reached: Factors, gpu: Gpu) -> float:
        """The latency is that of passing over 65,536 elements of weights."""
        from fusion_backend.kernels.host.configs import padded

        inner, hidden, out = padded(self.widths[0]), self.widths[1], padded(self.widths[2])
        turn = _ROWS_OF_A_TURN * gpu.multiprocessors
        rows = math.ceil(self.rows / turn) * turn
        weights = hidden * (2 * inner + out)
        products = cost_model.of_multiplying(rows * weights, reached, gpu)
        busy = products + _of_activation(rows * hidden, self, reached, gpu)
        moved = self.rows * (2 * self.widths[0] + self.widths[2] + 2 * hidden)
        memory = cost_model.of_moving(moved, reached, gpu)
        latency = reached.latency * weights / 65536
        return reached.start + latency + cost_model.overlapped(memory, busy)


def _of_activation(values: int, launch: Narrow | NarrowHidden, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of the special functions, or of the exact ones, of so many hidden values."""
    functions = max(launch.special, _EXACT * launch.exact)
    return functions * cost_model.of_functions(values, reached, gpu)


Launch = Product | Pass | Narrow | NarrowForward | NarrowHidden


@dataclass(frozen=True)
class Step:
    """A training step of one MLP in 16 bits, as the model sees it.

    Attributes:
        rows: at least one.
        widths: input, hidden and output width.
        gated: there are two first layers.
        packed: their weights are halves of one.
        biases: the layers have biases.
        exact: how many functions the activation's derivatives need that are computed exactly.
        special: how many special functions an approximated activation takes.
        forward_on_hopper: ``epilogue`` runs the first layers on its kernel for Hopper.
        gradient_on_hopper: it runs the hidden gradient on its kernel for Hopper.
    """

    rows: int
    widths: tuple[int, int, int]
    gated: bool = False
    packed: bool = False
    biases: bool = True
    exact: int = 0
    special: int = 1
    forward_on_hopper: bool = False
    gradient_on_hopper: bool = False

    @classmethod
    def of(cls, setting: Setting, rows: int) -> Step:
        """The step of a site that the model :func:`speaks_for`, with so many rows."""
        assert setting.widths is not None
        exact = discounts.exact_functions(setting, differentiated=True)
        return cls(
            rows=max(rows, 1),
            widths=setting.widths,
            gated=setting.gated,
            packed=setting.packed,
            biases=setting.has_bias_up,
            exact=exact,
            special=discounts.special_functions(setting),
            forward_on_hopper=not exact and _forward_on_hopper(setting, rows),
            gradient_on_hopper=not exact and _gradient_on_hopper(setting, rows),
        )

    def inductors(self) -> list[Launch]:
        """What Inductor launches."""
        inner, hidden, out = self.widths
        first = 2 if self.gated else 1
        pairs, columns = (1, 2 * hidden) if self.packed else (first, hidden)
        values = self.rows * hidden
        launches: list[Launch] = [
            *pairs * [self._library(self.rows, inner, columns, (inner, hidden))],
            *self._shared(),
            self._library(self.rows, out, hidden, (hidden, out)),
            *pairs * [self._library(inner, self.rows, columns, (inner, hidden))],
            *pairs * [self._library(self.rows, columns, inner, (inner, hidden))],
            Pass(PASS, (first + 1) * values),
            Pass(PASS, (2 * first + 2) * values),
        ]
        if self.biases:
            launches += [*pairs * [Pass(SUM, first * values / pairs)], Pass(SUM, self.rows * out)]
        return launches

    def by_epilogue(self) -> list[Launch]:
        """What the family ``epilogue`` launches."""
        inner, hidden, out = self.widths
        first = 2 if self.gated else 1
        joined = self.gradient_on_hopper
        pairs, columns = (1, first * hidden) if joined else (first, hidden)
        of_weights = (pairs, columns)
        if self.gated and (self.packed or self._parts_pairs()):
            of_weights = (first, hidden)
        values = self.rows * hidden
        forward = FORWARD_HOPPER if self.forward_on_hopper else FORWARD
        gradient = GRADIENT_HOPPER if joined else GRADIENT
        launches: list[Launch] = [
            # Writes the activation beside the pre-activations.
            Product(forward, self.rows, inner, first * hidden, values),
            *self._shared(),
            # Reads the pre-activations, writes their gradients and the activation.
            Product(gradient, self.rows, out, hidden, 2 * first * values),
            *of_weights[0] * [self._library(inner, self.rows, of_weights[1], (inner, hidden))],
            *pairs * [self._library(self.rows, columns, inner, (inner, hidden))],
        ]
        if self.biases:
            launches.append(Pass(SUM, self.rows * out))
            of_tiles = 2 * first * values / _ROWS_OF_SUMS  # in float32
            sums = [Pass(PASS, of_tiles)] if joined else first * [Pass(SUM, values)]
            launches += sums
        return launches

    def _parts_pairs(self) -> bool:
        from fusion_backend.kernels.epilogue.gradient_launch_sm90 import parts_pairs

        inner, hidden, _ = self.widths
        return self.gradient_on_hopper and parts_pairs(self.rows, inner, hidden)

    def by_back_to_back(self) -> list[Launch]:
        """What the family ``back_to_back`` launches."""
        if gradients_fit(*self.widths):
            return [Narrow(self.rows, self.widths, self.exact, self.special)]
        inner, hidden, out = self.widths
        launches: list[Launch] = [
            NarrowForward(self.rows, self.widths),
            NarrowHidden(self.rows, self.widths, self.exact, self.special),
            self._library(inner, self.rows, hidden, (inner, hidden)),
            self._library(out, self.rows, hidden, (hidden, out)),
        ]
        if self.biases:
            # Each program writes sums in float32, which another kernel reads.
            of_tiles = 2 * math.ceil(self.rows / _ROWS_OF_A_TILE) * (hidden + out)
            launches.append(Pass(PASS, of_tiles))
        return launches

    def _shared(self) -> list[Launch]:
        """The last layer's product and the gradient of its weight, which both have."""
        _, hidden, out = self.widths
        return [
            self._library(self.rows, hidden, out, (hidden, out)),
            self._library(out, self.rows, hidden, (hidden, out)),
        ]

    def _library(self, rows: int, depth: int, columns: int, widths: tuple[int, ...]) -> Product:
        aligned = all(width % _UNIT == 0 for width in widths)
        return Product(LIBRARY if aligned else UNALIGNED, rows, depth, columns)


def speaks_for(setting: Setting) -> bool:
    """Whether the model was fitted to training steps such as a site's, on such a GPU."""
    return (
        setting.training
        and setting.widths is not None
        and setting.dtype.itemsize == 2
        and setting.gpu.architecture == _ARCHITECTURE
        and not (setting.operands or setting.strided or setting.is_chain or setting.activated)
        and not (setting.transposed and setting.gated)
    )


def known(families: Sequence[str], setting: Setting) -> list[str]:
    """Those of the families whose times the model predicts for a site."""
    left_out = registry.EPILOGUE.name if discounts.needs_exact_functions(setting) else None
    return [name for name in families if name in KNOWN and name != left_out]


def predicted(
    families: Sequence[str], step: Step, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> dict[str, float]:
    """Microseconds of Inductor's code, and of those families that the model knows.

    Args:
        families: their names.
        step: the training step.
        gpu: where it would run, by its data sheet.
        fitted: what launches of each kind reach.
    """
    return {
        name: math.fsum(each.microseconds(fitted[each.kind], gpu) for each in whole)
        for name, whole in launches(families, step).items()
    }


def launches(families: Sequence[str], step: Step) -> dict[str, list[Launch]]:
    """What Inductor launches, and what those families do that the model knows."""
    found = {INDUCTOR: step.inductors()}
    if registry.BACK_TO_BACK.name in families:
        found[registry.BACK_TO_BACK.name] = step.by_back_to_back()
    if registry.EPILOGUE.name in families and not step.exact:
        found[registry.EPILOGUE.name] = step.by_epilogue()
    return found


def careful(
    families: Sequence[str], step: Step, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> dict[str, float]:
    """:func:`predicted`, with families as much longer as makes their least gain worthwhile.

    A family is then worthwhile where what it is predicted to gain exceeds its :func:`deviation`.
    """
    times = predicted(families, step, gpu, fitted)
    for name in times.keys() - {INDUCTOR}:
        times[name] *= max(1.0, math.exp(deviation(name, step)) / WORTHWHILE)
    return times


def deviation(family: str, step: Step) -> float:
    """Standard deviation of the logarithm of Inductor's time over the family's."""
    if family == registry.BACK_TO_BACK.name:
        return _NARROW if gradients_fit(*step.widths) else _NARROW_HIDDEN
    if not (step.forward_on_hopper and step.gradient_on_hopper):
        return _ON_ANY
    tiles = step.rows * step.widths[1] * (1 + step.gated) / 128**2
    if tiles < _FEW_TILES or step.rows % _UNIT:  # of products that sum over such rows less is known
        return _LESS_KNOWN
    return _ON_HOPPER


def _forward_on_hopper(setting: Setting, rows: int) -> bool:
    assert setting.widths is not None
    how = (setting.widths, setting.gated, setting.dtype, setting.transposed)
    return registry.EPILOGUE.runs_made_for_hopper(rows, *how, kernel_target(setting.gpu))


def _gradient_on_hopper(setting: Setting, rows: int) -> bool:
    from fusion_backend.kernels.epilogue import gradient_launch_sm90
    from fusion_backend.kernels.host.problems import inference_problem

    target = kernel_target(setting.gpu)
    assert target is not None
    assert setting.widths is not None
    problem = inference_problem(rows, setting.widths, setting.gated, setting.dtype, target)
    return problem is not None and gradient_launch_sm90.runs(problem, rows, target)
