"""The region of a site: the calls between its linear layers, run as the graph has them.

Each pointwise node becomes a step that makes the node's own call on other tensors. What leaves the
elements in their order is passed, as the matcher does; an active dropout multiplies by a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fusion_backend.errors import FusionError
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.sources import Source, gate_sources, source_of, sum_of_parts
from fusion_backend.fusion.views.batch_norms import BatchNormView, batch_norm_view
from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.dropouts import dropout_view
from fusion_backend.fusion.views.node import operation, tensor_of, value_of
from fusion_backend.fusion.views.obstacles import identity_source
from fusion_backend.fusion.views.operand import Entering
from fusion_backend.fusion.views.permutations import permutation
from fusion_backend.fusion.views.pointwise import pointwise_name
from fusion_backend.fusion.views.reshape import copy_source, reshape_source
from fusion_backend.mlp.expression import Expression, Variable, substitute
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.expression.programs import Program, Step, Writer

# One rounding at most between what they read and their result, whatever they are called with.
_ROUNDS_ONCE = (
    *("sub", "rsub", "add", "mul", "div", "maximum", "minimum", "where", "masked_fill", "pow"),
    *("eq", "ge", "gt", "le", "lt", "ne", "logical_and", "logical_or"),
)
_NARROW = (torch.bfloat16, torch.float16)


class _Read(NamedTuple):
    """Stands for a tensor among the arguments of a call: which of those that the step reads."""

    position: int


def region_of(match: Match) -> Program:
    """The activation of a site as a program of the variables of its expression.

    Raises:
        FusionError: a call in it cannot be made by itself.
    """
    operands = tuple(name_of(index) for index in range(len(match.operands)))
    region = _Region(Writer((*match.variables, *operands)), match.sources, match.operands)
    hidden = match.down.input if match.part is None else match.part.hidden
    return region.writer.program([region.value(hidden)])


def region_between(ends: Mapping[Node, str], result: Node) -> Program:
    """The calls between some values and another one as a program of variables.

    Args:
        ends: the values that it begins with, and the variables that they are.
        result: what it computes.

    Raises:
        FusionError: a call in it cannot be made by itself.
    """
    region = _Region(Writer(tuple(ends.values())), known=ends)
    return region.writer.program([region.value(result)])


class _Region:
    def __init__(
        self,
        writer: Writer,
        sources: Sequence[Source] = (),
        operands: Sequence[Entering] = (),
        known: Iterable[Node] = (),
    ) -> None:
        self.writer = writer
        self._sources = sources
        self._operands = operands
        self._known = {node: index for index, node in enumerate(known)}

    def value(self, node: Any) -> int:
        """Which value of the program a node is, or a number."""
        if not isinstance(node, Node):
            return self.writer.number(_number(node))
        if node not in self._known:
            self._known[node] = self._value(node)
        return self._known[node]

    def _value(self, node: Node) -> int:
        source = source_of(node)
        if source is not None:
            return self._variable(source)
        if tensor_of(node) is None:
            return self.writer.number(_number(value_of(node)))
        number = constant_of(node)
        if number is not None:
            return self.value(number if isinstance(number, Node) else float(number))
        for index, operand in enumerate(self._operands):
            if operand.node is node and operand.kind in ("scalar", "vector"):
                return len(self._sources) + index
        passed = identity_source(node) or copy_source(node)
        if passed is not None:
            return self._cast(node, passed)
        if (reshaped := reshape_source(node)) is not None:
            return self.value(reshaped)
        if permutation(node) is not None:
            return self.value(node.args[0])
        if (dropout := dropout_view(node)) is not None:
            return self._dropped(dropout.node, dropout.source)
        if (norm := batch_norm_view(node)) is not None:
            return self._normalized(norm)
        for combined in (self._gate(node), self._part_of_sum(node)):
            if combined is not None:
                return combined
        return self._called(node)

    def _variable(self, source: Source) -> int:
        for index, known in enumerate(self._sources):
            if known.same_as(source):
                return index
        for index, operand in enumerate(self._operands):
            if operand.kind == "elementwise" and _is_of(operand, source):
                return len(self._sources) + index
        raise FusionError(f"a layer of the activation must be known, got {source.node.name}")

    def _cast(self, node: Node, source: Node) -> int:
        """A conversion, of which only the kind of number matters to what computes in float32."""
        before, after = tensor_of(source), tensor_of(node)
        assert before is not None
        assert after is not None
        if before.dtype == after.dtype:
            return self.value(source)
        to = after.dtype

        def compute(dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
            return operands[0].to(_computed_in(to, dtype))

        return self.writer.step(Step(compute, (self.value(source),), f"to {to}"))

    def _dropped(self, dropout: Node, source: Node) -> int:
        """What is left of a value; zero times infinity is NaN, as when it is drawn."""
        for index, operand in enumerate(self._operands):
            if operand.kind == "seed" and operand.node is dropout:
                reads = (self.value(source), len(self._sources) + index)
                return self.writer.step(Step(lambda _, read: read[0] * read[1], reads, "dropout"))
        return self.value(source)  # its probability is 0

    def _normalized(self, norm: BatchNormView) -> int:
        given = [norm.source, norm.mean, norm.variance, norm.weight, norm.bias]
        reads = tuple(self.value(node) for node in given if node is not None)
        has = [node is not None for node in given]
        self.writer.moderate.update(reads[1:])  # (x - mean) * scale, or x * scale - mean * scale
        eps = _number(value_of(norm.eps))
        self.writer.note(eps)

        def compute(dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
            # Every point is a feature of its own.
            left = iter(torch.broadcast_tensors(*(o.to(dtype) for o in operands)))
            x, mean, variance, weight, bias = (next(left) if one else None for one in has)
            assert x is not None
            assert mean is not None
            assert variance is not None
            # Autograd refuses statistics that need a gradient.
            flat = [mean.detach().reshape(-1), variance.detach().reshape(-1)]
            of_scale = [None if v is None else v.reshape(-1) for v in (weight, bias)]
            rows = x.reshape(1, -1)
            normed = F.batch_norm(rows, flat[0], flat[1], of_scale[0], of_scale[1], eps=eps)
            return normed.reshape(x.shape)

        return self.writer.step(Step(compute, reads, f"batch_norm {eps} {has}", rounds_often=True))

    def _gate(self, node: Node) -> int | None:
        """``F.glu`` of its two halves."""
        sources = gate_sources(node)
        if sources is None:
            return None

        def compute(dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
            return F.glu(torch.cat(list(operands), -1), -1)

        reads = tuple(map(self._variable, sources))
        return self.writer.step(Step(compute, reads, "glu", rounds_often=True))

    def _part_of_sum(self, node: Node) -> int | None:
        whole = sum_of_parts(node)
        if whole is None:
            return None
        parts = {name: self._variable(source) for name, source in whole.sources.items()}
        # Named by what they are, so that the writer tells the sums of two parts from each other.
        named: dict[str, Expression] = {name: Variable(f"v{i}") for name, i in parts.items()}
        values = {f"v{index}": index for index in parts.values()}
        return self.writer.expression(substitute(whole.expression, named), values)

    def _called(self, node: Node) -> int:
        name = pointwise_name(node)
        if name is None:
            raise FusionError(f"a call of an activation must be pointwise, got {node.name}")
        reads: list[int] = []

        def read(operand: Node) -> Any:
            if tensor_of(operand) is None:
                number = _number(value_of(operand))
                self.writer.note(number)
                return number
            reads.append(self.value(operand))
            return _Read(len(reads) - 1)

        args, kwargs = map_arg(node.args, read), map_arg(node.kwargs, read)
        for number in (*args, *kwargs.values()):
            self.writer.note(number)
        result = tensor_of(node)
        assert result is not None
        make = _Call(name, _function(node), args, kwargs, result.dtype)
        text = f"{operation(node)}{args}{kwargs} {result.dtype}"
        adds = name in ("add", "sub", "rsub")
        often = len(reads) > 1 and name not in _ROUNDS_ONCE
        return self.writer.step(Step(make.__call__, tuple(reads), text, adds, often))


def _is_of(operand: Entering, source: Source) -> bool:
    known = Source(source.linear, operand.part)
    return operand.node is source.linear.node and known.same_as(source)


def _number(value: Any) -> Any:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return float(value)
    if not isinstance(value, (bool, int, float)):
        raise FusionError(f"a number of an activation must be known, got {value}")
    return value


def _computed_in(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a value when floats are computed in ``dtype``; if that is narrow, its own."""
    return dtype if own.is_floating_point and dtype not in _NARROW else own


def _function(node: Node) -> Callable[..., Tensor]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


class _Call(NamedTuple):
    """A node's call, with other tensors for its own."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    def __call__(self, dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
        # Some calls write to what they read.
        given = [operand.clone() for operand in operands]
        to = _computed_in(self.dtype, dtype)
        if self.name == "nan_to_num":
            return self._bounded(given[0], to)
        if self.name == "prelu":
            value, slope = torch.broadcast_tensors(*given)
            flat = self._made([value.reshape(1, -1), slope.reshape(-1)])
            return flat.reshape(value.shape)
        if to.is_floating_point and not any(operand.is_floating_point() for operand in given):
            return self._promoted(given, to)
        return self._made(given).to(to)

    def _made(self, operands: Sequence[Any], number: Callable[[Any], Any] = lambda v: v) -> Tensor:
        def put(value: Any) -> Any:
            return operands[value.position] if isinstance(value, _Read) else number(value)

        kwargs = {key: put(value) for key, value in self.kwargs.items() if key != "out"}
        return self.function(*map(put, self.args), **kwargs)

    def _promoted(self, operands: list[Tensor], to: torch.dtype) -> Tensor:
        """Of truth values, integers and numbers: floats are of ``to``, not of the default dtype."""
        chooses = self.name in ("where", "masked_fill")
        first = operands[:1] if self.name == "where" else []
        rest = [
            operand if chooses and operand.dtype == torch.bool else operand.to(to)
            for operand in operands[len(first) :]
        ]

        def number(value: Any) -> Any:
            return torch.tensor(value, dtype=to) if chooses and isinstance(value, float) else value

        return self._made([*first, *rest], number).to(to)

    def _bounded(self, value: Tensor, to: torch.dtype) -> Tensor:
        """``nan_to_num`` takes the limits of the dtype that the graph computes it in."""
        limits, given = torch.finfo(self.dtype), dict(self.kwargs)
        names = ("nan", "posinf", "neginf")
        given |= dict(zip(names, self.args[1:], strict=False))
        if self.dtype in _NARROW:
            own = value.to(self.dtype)
            value = torch.where(own.isinf(), own.to(value.dtype), value)
        high = limits.max if given.get("posinf") is None else given["posinf"]
        low = limits.min if given.get("neginf") is None else given["neginf"]
        nan = 0.0 if given.get("nan") is None else given["nan"]
        return torch.nan_to_num(value, nan, high, low).to(to)
