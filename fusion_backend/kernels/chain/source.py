"""Prints the kernel of a chain: straight-line code over the functions of ``chain``.

What is known at compile time stands in it as numbers, so the kernel has no parameters but tensors,
the number of rows and the stride from one to the next.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fusion_backend.kernels.back_to_back.kernel import load_rows
from fusion_backend.kernels.chain.config import LARGEST_WEIGHT, block_beside
from fusion_backend.kernels.chain.kernel import layer, rows_block, unpadded, weight_tile
from fusion_backend.kernels.codegen import flops
from fusion_backend.kernels.codegen.activation import emit_function
from fusion_backend.kernels.codegen.printed import execute
from fusion_backend.kernels.device.normalization import normed
from fusion_backend.kernels.device.tiles import (
    add_bias,
    halves,
    multiply_add,
    rounded,
    store_tile,
)
from fusion_backend.kernels.host.configs import Config, padded
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.steps import ACTIVATION, Steps


@dataclass(frozen=True)
class ChainCode:
    """All that a kernel is printed from.

    Attributes:
        widths: of the input, of each hidden value and of the output.
        activations: those of the steps, in their order: functions of ``x``, and of the values that
            a step reads again.
        biases: whether each layer has one.
        strides: (row, column) of each weight, in elements.
        x_row_unit: what ``x_row_units`` counts, in elements.
        x_column_stride: in elements.
        wide: whether offsets within a tile need 64 bits.
        precision: how fp32 operands are multiplied.
        blocked: positions in ``widths`` of the values that are taken in blocks of their features.
        config: how the kernel is launched.
        accuracy: as for :func:`activation.emit`.
        steps: what the chain computes.
        norms: whether each norm has a weight, and a bias.
    """

    widths: tuple[int, ...]
    activations: tuple[Expression, ...]
    biases: tuple[bool, ...]
    strides: tuple[tuple[int, int], ...]
    x_row_unit: int
    x_column_stride: int
    wide: bool
    precision: str
    blocked: frozenset[int]
    config: Config
    accuracy: torch.dtype
    steps: Steps
    norms: tuple[tuple[bool, bool], ...] = ()

    @property
    def layers(self) -> int:
        return len(self.strides)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in their order."""
        operands = []
        for i, has_bias in enumerate(self.biases):
            operands += [f"weight_{i}", f"bias_{i}"] if has_bias else [f"weight_{i}"]
        for i, (has_weight, has_bias) in enumerate(self.norms):
            operands += [f"norm_weight_{i}"] * has_weight + [f"norm_bias_{i}"] * has_bias
        return ("x", *operands, "y", "rows", "x_row_units")

    @property
    def functions(self) -> dict[str, tuple[Expression, int]]:
        """The different activations, each named after the first that it is, and what they read.

        Of each it is known of how many earlier values it is.
        """
        reads = [len(step.reads) for step in self.steps.all if step.kind == ACTIVATION]
        found = zip(self.activations, reads, strict=True)
        return {self.function(i): each for i, each in enumerate(found)}

    def function(self, i: int) -> str:
        """The name of the function that activation i is."""
        return f"activation_{self.activations.index(self.activations[i])}"


@functools.cache
def chain_kernel(code: ChainCode) -> Any:
    """The kernel, a ``triton.JITFunction`` or what the interpreter has in its place."""
    return jitted(ChainPrinter(code).kernel(), ["fusedmlp_chain"], code.functions, code.accuracy)


def jitted(
    lines: Iterable[str],
    names: Sequence[str],
    functions: Mapping[str, tuple[Expression, int]],
    accuracy: torch.dtype,
) -> Any:
    """The last function that some lines define, as Triton takes it.

    Args:
        lines: what a printer printed.
        names: of the functions that are defined there, each after those that it calls.
        functions: the activations that are called there, by name, as :attr:`ChainCode.functions`.
        accuracy: as for :func:`activation.emit`.
    """
    source = "\n".join(lines) + "\n"
    filename = f"<fusedmlp chain {zlib.crc32(source.encode()):08x}>"
    scope: dict[str, Any] = {
        "__name__": __name__,
        "tl": tl,
        "load_rows": load_rows,
        "rows_block": rows_block,
        "weight_tile": weight_tile,
        "layer": layer,
        "rounded": rounded,
        "add_bias": add_bias,
        "multiply_add": multiply_add,
        "store_tile": store_tile,
        "halves": halves,
        "normed": normed,
        "unpadded": unpadded,
    }
    for name, (expression, earlier) in functions.items():
        scope[name] = emit_function(name, expression, accuracy, earlier)
    execute(source, filename, scope)
    for name in names:
        scope[name] = triton.jit(scope[name])
    kernel = scope[names[-1]]
    flops.register(kernel)
    return kernel


class ChainPrinter:
    """Prints one kernel. A value at position i of the chain's widths is the input of layer i.

    Attributes:
        program: which of the programs that share the rows this is, and
        programs: how many there are, as expressions.
    """

    program, programs = "tl.program_id(0)", "tl.num_programs(0)"

    def __init__(self, code: ChainCode) -> None:
        self.code = code
        self.blocks = [padded(width) for width in code.widths]
        self.blocked = code.blocked

    def kernel(self) -> Iterator[str]:
        yield f"def fusedmlp_chain({', '.join(self.code.parameters)}):"
        yield from self.body()

    def body(self) -> Iterator[str]:
        """What it does on all of its tiles."""
        code, config = self.code, self.code.config
        if config.resident:
            for i in range(code.layers):
                yield f"    tile_{i} = {self.weight_tile(i)}"
                if code.steps.beside[i]:
                    yield f"    tile_{i}_beside = {self.tile_beside(i)}"
            yield f"    row_start = tl.minimum({self.program} * {config.block_m}, rows - 1)"
            yield f"    following = {self.rows('row_start')}"
        if any(code.steps.beside) and not config.programs:
            # A program has one tile. A loop would have the compiler compute the addresses of all
            # weights before it, and registers have no room for those of weights of many strides.
            yield f"    tile = {self.program}"
            yield from (f"    {line}" for line in self.tile())
            return
        tiles = f"{self.program}, tl.cdiv(rows, {config.block_m}), {self.programs}"
        yield f"    for tile in range({tiles}):"
        yield from (f"        {line}" for line in self.tile())

    def tile(self) -> Iterator[str]:
        """The work on a tile of rows."""
        code, config = self.code, self.code.config
        yield f"row_start = tile * {config.block_m}"
        if config.resident:
            step = f"{self.programs} * {config.block_m}"
            yield "value = following"
            yield f"ahead = tl.minimum({step}, rows - row_start - 1)"
            yield f"following = {self.rows('row_start + ahead')}"
        elif 0 not in self.blocked:
            yield f"value = {self.rows('row_start')}"
        yield from self.between(0)
        for i in range(code.layers):
            if i == 0 and 0 in self.blocked:
                yield from self.first_layer()
            elif i + 1 == code.layers and code.layers in self.blocked:
                yield from self.last_layer()
            elif i + 1 in self.blocked:
                yield from self.two_layers(i)
            elif i not in self.blocked:
                yield from self.whole_layer(i)
            if i + 1 not in self.blocked:
                yield from self.between(i + 1)
        if code.layers not in self.blocked:
            width, whole = code.widths[-1], self.whole(code.layers)
            yield f"store_tile(y, value, row_start, rows, 0, {width}, {whole}, {code.wide})"

    def whole_layer(self, i: int) -> Iterator[str]:
        """Layer i of a value that is held whole; in two sums where its weight is too large."""
        code = self.code
        if not code.config.resident and self.blocks[i] * self.blocks[i + 1] > LARGEST_WEIGHT:
            yield from self.layer_in_halves(i)
            return
        tile = f"tile_{i}" if code.config.resident else self.weight_tile(i)
        yield f"value = {self.layer('value', tile, i)}"
        yield from self.added_beside("value", i)

    def added_beside(self, total: str, i: int) -> Iterator[str]:
        """What the input adds to the sum of layer i, if that reads it beside another value.

        It is loaded again: in registers it would stand in the way of all layers before.
        """
        if not self.code.steps.beside[i]:
            return
        if self.code.config.resident:
            yield f"beside = {self.rows('row_start')}"
            yield f"{total} = multiply_add({total}, beside, tile_{i}_beside, {self.how(i)})"
        else:
            block = block_beside(self.code.config, self.blocks[0])
            yield from self.over_input(total, i, block, self.columns_beside(i))

    def layer_in_halves(self, i: int) -> Iterator[str]:
        """Layer i, which sums over the left and the right half of its features one after another.

        Each half of the weight is loaded when it is multiplied: registers have no room for both.
        """
        half, width = self.blocks[i] // 2, self.code.widths[i]
        out, stride = self.code.widths[i + 1], self.code.strides[i][1]
        blocks = (half, self.blocks[i + 1])
        left = self.weight_tile(i, None, (width, out), blocks)
        middle = f"{self.columns(i)} + {half * stride}"
        right = self.weight_tile(i, middle, (width - half, out), blocks)
        yield "left, right = halves(value)"
        yield f"value = {self.layer('left', left, i)}"
        yield f"value = multiply_add(value, right, {right}, {self.how(i)})"
        yield from self.added_beside("value", i)

    def between(self, position: int) -> Iterator[str]:
        """The steps before the layer of a position, or after the last, of a value held whole.

        The value is an fp32 sum, or x; it becomes the operand of that layer.
        """
        code, steps = self.code, self.code.steps
        begin, is_last = steps.begins[position], position == code.layers
        is_rounded = position == 0 or begin in steps.read_again
        if begin in steps.read_again:
            yield from self.kept(begin, position)
        for index in steps.groups[position]:
            if is_rounded:
                yield "value = value.to(tl.float32)"
            yield f"value = {self.step(index, position)}"
            is_rounded = index + 1 in steps.read_again
            if is_rounded:
                yield from self.kept(index + 1, position)
        if not is_rounded and not is_last:
            yield f"value = {self.rounded('value', position)}"

    def kept(self, value: int, position: int) -> Iterator[str]:
        """Rounds the value of a step, which later steps read, too."""
        if value:
            yield f"value = {self.rounded('value', position)}"
        yield f"value_{value} = value"

    def step(self, index: int, position: int) -> str:
        """The result of a norm or of an activation of an fp32 value."""
        code, step = self.code, self.code.steps.all[index]
        if not step.is_norm:
            earlier = "".join(f", value_{read}.to(tl.float32)" for read in step.reads)
            return f"{self.function(code.steps.ordinal(index))}(value{earlier})"
        norm = code.steps.ordinal(index)
        has_weight, has_bias = code.norms[norm]
        weight = f"norm_weight_{norm}" if has_weight else "None"
        bias = f"norm_bias_{norm}" if has_bias else "None"
        width, whole = code.widths[position], self.whole(position)
        values = f"unpadded(value, {width}, {whole})"
        how = f"{step.kind!r}, {step.eps!r}, {width}, {whole}"
        return f"normed({values}, {weight}, {bias}, {how})"

    def first_layer(self) -> Iterator[str]:
        """Layer 0, with the input in blocks."""
        block = min(self.code.config.block_k, self.blocks[0])
        yield f"total = tl.zeros(({self.code.config.block_m}, {self.blocks[1]}), tl.float32)"
        yield from self.over_input("total", 0, block, "weight_0")
        yield f"value = {self.biased('total', 0)}"

    def over_input(self, total: str, i: int, block: int, columns: str) -> Iterator[str]:
        """Adds the product of the input, in blocks, with columns of weight i."""
        code, width = self.code, self.code.widths[0]
        whole, left = width % block == 0, f"{width} - start"
        x_tile = (
            f"rows_block(block_of_x, row_start, rows, {self.x_strides()}, {left}, "
            f"{code.config.block_m}, {block}, {whole}, {code.wide})"
        )
        ends, blocks = (left, code.widths[i + 1]), (block, self.blocks[i + 1])
        tile = self.tile_of(i, "ups", ends, blocks, whole and self.whole(i + 1))
        yield "block_of_x = x"
        yield f"ups = {columns}"
        yield f"for start in range(0, {width}, {block}):"
        yield f"    {total} = multiply_add({total}, {x_tile}, {tile}, {self.how(i)})"
        yield f"    block_of_x += {block * code.x_column_stride}"
        yield f"    ups += {block * code.strides[i][1]}"

    def last_layer(self) -> Iterator[str]:
        """The last layer, with the output in blocks."""
        code, i = self.code, self.code.layers - 1
        width = code.widths[-1]
        block = min(code.config.block_n, self.blocks[-1])
        whole, left = width % block == 0, f"{width} - start"
        tile = self.weight_tile(i, "downs", (code.widths[i], left), (self.blocks[i], block), whole)
        yield f"downs = weight_{i}"
        yield f"for start in range(0, {width}, {block}):"
        yield f"    block_of_y = {self.layer('value', tile, i, 'start', whole)}"
        for step in code.steps.groups[-1]:  # an activation, if any
            yield f"    block_of_y = {self.function(code.steps.ordinal(step))}(block_of_y)"
        yield (
            f"    store_tile(y, block_of_y, row_start, rows, start, {width}, {whole}, {code.wide})"
        )
        yield f"    downs += {block * code.strides[i][0]}"

    def two_layers(self, i: int) -> Iterator[str]:
        """Layers i and i + 1, with the value between them in blocks."""
        code, width = self.code, self.code.widths[i + 1]
        block = min(code.config.block_n, self.blocks[i + 1])
        first, second = code.strides[i], code.strides[i + 1]
        whole = width % block == 0
        left = f"{width} - start"
        up_tile = self.weight_tile(i, "ups", (code.widths[i], left), (self.blocks[i], block), whole)
        down_tile = self.weight_tile(
            i + 1, "downs", (left, code.widths[i + 2]), (block, self.blocks[i + 2]), whole
        )
        yield f"ups = weight_{i}"
        yield f"downs = {self.columns(i + 1)}"
        yield f"total = tl.zeros(({code.config.block_m}, {self.blocks[i + 2]}), tl.float32)"
        yield f"for start in range(0, {width}, {block}):"
        yield f"    hidden = {self.layer('value', up_tile, i, 'start', whole)}"
        yield f"    hidden = {self.activated('hidden', i, 'start', whole)}"
        yield f"    total = multiply_add(total, hidden, {down_tile}, {self.how(i + 1)})"
        yield f"    ups += {block * first[0]}"
        yield f"    downs += {block * second[1]}"
        yield from self.added_beside("total", i + 1)
        yield f"value = {self.biased('total', i + 1)}"

    def biased(self, total: str, i: int) -> str:
        """The sum of layer i that was made in blocks, with the bias."""
        columns, width = f"tl.arange(0, {self.blocks[i + 1]})", self.code.widths[i + 1]
        return f"add_bias({total}, {self.bias(i)}, {columns}, {width}, {self.whole(i + 1)})"

    def rows(self, row_start: str) -> str:
        code = self.code
        sizes = f"{code.widths[0]}, {code.config.block_m}, {self.blocks[0]}, {code.wide}"
        return f"load_rows(x, {row_start}, rows, {self.x_strides()}, {sizes})"

    def x_strides(self) -> str:
        return f"x_row_units * {self.code.x_row_unit}, {self.code.x_column_stride}"

    def columns(self, i: int) -> str:
        """Where the columns of weight i begin that multiply the value before the layer."""
        is_first = self.code.steps.beside[i] != "before"
        return self._column(i, 0 if is_first else self.code.widths[0])

    def columns_beside(self, i: int) -> str:
        """Where those begin that multiply the input."""
        is_first = self.code.steps.beside[i] == "before"
        return self._column(i, 0 if is_first else self.code.widths[i])

    def _column(self, i: int, column: int) -> str:
        return f"weight_{i} + {column * self.code.strides[i][1]}" if column else f"weight_{i}"

    def weight_tile(
        self,
        i: int,
        pointer: str | None = None,
        ends: tuple[Any, Any] | None = None,
        blocks: tuple[int, int] | None = None,
        whole: bool | None = None,
    ) -> str:
        """All of a weight, transposed, or a block of it: what multiplies the value before."""
        ends = ends or (self.code.widths[i], self.code.widths[i + 1])
        blocks = blocks or (self.blocks[i], self.blocks[i + 1])
        padded_sides = {i: self.whole(i), i + 1: self.whole(i + 1)}
        if whole is not None:
            padded_sides |= dict.fromkeys(self.blocked & {i, i + 1}, whole)
        pointer = pointer or self.columns(i)
        return self.tile_of(i, pointer, ends, blocks, all(padded_sides.values()))

    def tile_beside(self, i: int) -> str:
        """All of a weight, transposed, that multiplies the input."""
        ends = (self.code.widths[0], self.code.widths[i + 1])
        blocks = (self.blocks[0], self.blocks[i + 1])
        whole = self.whole(0) and self.whole(i + 1)
        return self.tile_of(i, self.columns_beside(i), ends, blocks, whole)

    def tile_of(
        self, i: int, pointer: str, ends: tuple[Any, Any], blocks: tuple[int, int], whole: bool
    ) -> str:
        """A tile of a weight, transposed, from an address on."""
        row, column = self.code.strides[i]
        return (
            f"weight_tile({pointer}, {ends[0]}, {ends[1]}, {row}, {column}, "
            f"{blocks[0]}, {blocks[1]}, {whole}, {self.code.wide})"
        )

    def layer(
        self, value: str, tile: str, i: int, start: str = "0", whole: bool | None = None
    ) -> str:
        whole = self.whole(i + 1) if whole is None else whole
        width = self.code.widths[i + 1]
        return f"layer({value}, {tile}, {self.bias(i)}, {start}, {width}, {whole}, {self.how(i)})"

    def activated(self, value: str, i: int, start: str = "0", whole: bool | None = None) -> str:
        whole = self.whole(i + 1) if whole is None else whole
        (step,) = self.code.steps.groups[i + 1]
        function = self.function(self.code.steps.ordinal(step))
        return self.rounded(f"{function}({value})", i + 1, start, whole)

    def function(self, i: int) -> str:
        """The name of the function that activation i is."""
        return self.code.function(i)

    def rounded(
        self, value: str, position: int, start: str = "0", whole: bool | None = None
    ) -> str:
        whole = self.whole(position) if whole is None else whole
        return f"rounded({value}, {start}, {self.code.widths[position]}, {whole}, x)"

    def how(self, i: int) -> str:
        """How the operands of a layer are multiplied.

        A single column is a product with a vector, of which cuBLAS rounds nothing to TF32.
        """
        exactly = self.code.precision == "tf32" and self.code.widths[i + 1] == 1
        return repr("tf32x3" if exactly else self.code.precision)

    def bias(self, i: int) -> str:
        return f"bias_{i}" if self.code.biases[i] else "None"

    def whole(self, position: int) -> bool:
        """Whether a width needs no padding."""
        return self.code.widths[position] == self.blocks[position]
