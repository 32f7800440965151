"""How fast plans should be where nothing was measured: three rules, and a cost model.

The rules say what is saved on any GPU. A kernel takes as long as the larger of its traffic over the
bandwidth and its products over the peak, and a launch takes ``_LAUNCH`` on top. (In
``back_to_back`` they are added, with one special function an element for the activation: there one
waits for the other.) Traffic counts each operand once; both peaks are those of the data sheet times
what good kernels reach of them. So the unfused MLP is

    Inductor   product(s), pointwise pass over the hidden layer, product

and a plan saves launches and passes over the hidden layer:

    library       the pointwise pass; products by the same library
    epilogue      the pointwise pass; gated: also the second reading of x. Our own first product
    back_to_back  everything hidden: one kernel reads x and weights and writes y

The roofline does not know what a kernel loses where its tiles fit badly, so a rule speaks only
where what it saves is structural, and our own products are taken to reach ``_OWN`` of what the
library's do where arithmetic is the bound:

1. ``library``, from two rows on: it runs the library's products, and is never slower for that.
2. ``back_to_back``, up to ``_NARROW`` wide with rows enough to fill the GPU more than once. Wider,
   registers run short; with fewer rows, half of the GPU idles.
3. ``epilogue``, gated; and plain up to ``_FEW_ROWS`` rows, where reading the weights is all the
   work and no tile can fit badly (but not for one row: a library has kernels for that). Where
   there are fewer tiles than multiprocessors, only those that have one read. Gated, weights must
   be stored as those of ``nn.Linear``.

Their times are lengthened by ``_MARGIN``. The ``cost_model`` knows tiles and waves. What it
predicts for a plan is lengthened by ``_DEVIATIONS`` standard deviations of its error, and by twice
as many on GPUs unlike the one that it was fitted to. It knows one layout of weights: for the other
it says nothing of ``stream``, nor of ``epilogue`` with a gate. Of ``stream`` it says nothing beyond
``_FEW_ROWS`` either. The better of rule and model counts.

Never in training, nor in float32: there the measured GPUs lost. The model was fitted to an H200,
so the H100's table is its test, which was measured before most kernels for Hopper. If an H100 is
taken for a GPU of an unknown architecture, this would fuse no MLP that was slower there than 0.98
of Inductor's speed in inference in 16 bits, and gain more than 0.8 of what the fastest plans do
(logarithms of speed-ups, summed). ``tests/planning/test_heuristic.py`` holds it to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusion_backend.kernels.registry import BACK_TO_BACK, EPILOGUE, LIBRARY, STREAM
from fusion_backend.planning import cost_model
from fusion_backend.planning.cost_model import Factors
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import INDUCTOR, Kind, Measurement, Widths

# Microseconds from one kernel to the next on a stream, start and drain included.
_LAUNCH = 1.5
# Of the data sheet's peaks, what good kernels reach.
_OF_BANDWIDTH, _OF_FLOPS = 0.9, 0.75
# Of that, what our own products reach on a GPU that they were not tuned for.
_OWN = 0.7
_MARGIN = 1.1
# Special functions a microsecond and multiprocessor: 16 a clock at 1.5 GHz.
_SPECIAL_FUNCTIONS = 24e3
_NARROW = 128
_ROWS_PER_MULTIPROCESSOR = 64
_FEW_ROWS = 64
_TILE = 128
_ITEMSIZE = 2
# Of the cost model's standard deviations, so many are taken from what it predicts: of GPUs like the
# one that it was fitted to, and of others.
_DEVIATIONS, _DEVIATIONS_ELSEWHERE = 1.0, 2.0
#: Rows for which a symbolic number of rows is judged, from one to many.
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


def predicted(
    families: Sequence[str],
    kind: Kind,
    rows: int,
    widths: Widths,
    gpu: Gpu,
    fitted: Mapping[str, Factors] = cost_model.FITTED,
) -> Measurement:
    """Microseconds of Inductor, and of those plans among ``families`` that the rules allow.

    Args:
        families: the plans that can run the MLP.
        kind: its form, training, precision, and how weights are stored.
        rows: a number of rows; at least one is assumed.
        widths: input, hidden and output width.
        gpu: where it would run.
        fitted: the cost model's factors: those that ship, or the GPU's own.
    """
    roofline = _Roofline(max(rows, 1), *widths, kind.form == "swiglu", kind.transposed, gpu)
    halves = ("float16",) if _lacks_bfloat16(gpu) else ("bfloat16", "float16")
    able = families if kind.precision in halves and not kind.training else ()
    times = _by_model(able, kind, rows, widths, gpu, fitted)
    ruled = {family: _MARGIN * time for family, time in roofline.plans() if family in able}
    # Each says how much is saved for sure: the better of them counts, over the model's Inductor.
    for family, time in ruled.items():
        saved = time / roofline.inductor() * times[INDUCTOR]
        times[family] = min(saved, times.get(family, saved))
    return Measurement(kind, rows, *widths, times, f"on an {gpu.name}", measured=False)


def _by_model(
    families: Sequence[str],
    kind: Kind,
    rows: int,
    widths: Widths,
    gpu: Gpu,
    fitted: Mapping[str, Factors],
) -> dict[str, float]:
    """Times by the cost model, those of families longer by what it does not know."""
    gated = kind.form == "swiglu"
    if kind.transposed or rows > _FEW_ROWS:
        families = [family for family in families if family != STREAM.name]
    if kind.transposed and gated:
        families = [family for family in families if family != EPILOGUE.name]
    work = cost_model.Work(max(rows, 1), widths, gated, transposed=kind.transposed)
    times = cost_model.predicted(families, work, gpu, fitted)
    for family in times.keys() - {INDUCTOR}:
        kernel = cost_model.kernel_of(family, work, gpu)
        own = fitted[kernel] is not cost_model.FITTED[kernel]  # to the kernels that this GPU runs
        alike = own or gpu.architecture == cost_model.ARCHITECTURE
        off = cost_model.deviation(family, INDUCTOR, work, gpu, fitted)
        times[family] *= math.exp((_DEVIATIONS if alike else _DEVIATIONS_ELSEWHERE) * off)
    return times


def _lacks_bfloat16(gpu: Gpu) -> bool:
    """Whether its matrix units are older than bfloat16."""
    return gpu.backend == "cuda" and gpu.capability < (8, 0)


class _Roofline:
    """Times of one MLP in microseconds."""

    def __init__(
        self,
        rows: int,
        in_: int,
        hidden: int,
        out: int,
        gated: bool,
        transposed: bool,
        gpu: Gpu,
    ) -> None:
        self.rows, self.in_, self.hidden, self.out = rows, in_, hidden, out
        self.first, self.transposed, self.gpu = 2 if gated else 1, transposed, gpu

    def inductor(self) -> float:
        pointwise = self._kernel((self.first + 1) * self._hidden)
        firsts = self.first * self._product(self.in_, self.hidden)
        return firsts + pointwise + self._down()

    def plans(self) -> list[tuple[str, float]]:
        gated = self.first == 2
        found: list[tuple[str, float]] = []
        if not gated and self.rows > 1:
            found.append((LIBRARY.name, self._product(self.in_, self.hidden) + self._down()))
        fills = self.rows >= _ROWS_PER_MULTIPROCESSOR * self.gpu.multiprocessors
        if fills and max(self.in_, self.out) <= _NARROW:
            found.append((BACK_TO_BACK.name, self._back_to_back()))
        own_first_product = not self.transposed if gated else 1 < self.rows <= _FEW_ROWS
        if own_first_product:
            found.append((EPILOGUE.name, self._epilogue() + self._down()))
        return found

    @property
    def _hidden(self) -> int:
        return self.rows * self.hidden

    def _down(self) -> float:
        return self._product(self.hidden, self.out)

    def _product(self, inner: int, columns: int) -> float:
        traffic = self.rows * inner + inner * columns + self.rows * columns
        return self._kernel(traffic, self.rows * inner * columns)

    def _epilogue(self) -> float:
        weights = self.first * self.in_ * self.hidden
        traffic = self.rows * self.in_ + weights + self._hidden
        busy = 1.0
        if self.rows > _FEW_ROWS:  # with fewer, tiles are cut as narrow as it takes
            tiles = -(-self.rows // _TILE) * -(-self.hidden // _TILE)
            busy = min(1.0, tiles / self.gpu.multiprocessors)
        return self._kernel(traffic / busy, self.rows * weights / _OWN)

    def _back_to_back(self) -> float:
        weights = (self.first * self.in_ + self.out) * self.hidden
        memory = self._memory(self.rows * (self.in_ + self.out) + weights)
        activation = self._hidden / (_SPECIAL_FUNCTIONS * self.gpu.multiprocessors)
        return _LAUNCH + memory + self._arithmetic(self.rows * weights / _OWN) + activation

    def _kernel(self, elements: float, multiplications: float = 0.0) -> float:
        return _LAUNCH + max(self._memory(elements), self._arithmetic(multiplications))

    def _memory(self, elements: float) -> float:
        return elements * _ITEMSIZE / (_OF_BANDWIDTH * self.gpu.gigabytes_per_second * 1e3)

    def _arithmetic(self, multiplications: float) -> float:
        return 2 * multiplications / (_OF_FLOPS * self.gpu.teraflops * 1e6)
