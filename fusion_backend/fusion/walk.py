"""A walk back from a linear layer to the linear layers that feed it.

The walk passes through pointwise calls, which become an expression, and through what leaves the
elements in their order (reshapes, inactive dropout, copies). Parameters, active dropout and the
layers that read something else enter the activation as operands. Whatever else it meets is
an *obstacle*: it is written down, and where the value behind it can be told the walk goes on, so
that a site that is left alone can say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.errors import ExpressionError
from fusion_backend.fusion.sources import (
    Source,
    gate_sources,
    slicing_calls,
    source_of,
    sum_of_parts,
)
from fusion_backend.fusion.views.batch_norms import BatchNormView, batch_norm_view
from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.dropouts import DropoutView, dropout_view
from fusion_backend.fusion.views.linear import LinearView, is_weight
from fusion_backend.fusion.views.node import (
    operation,
    producer,
    same_shape,
    same_size,
    tensor_of,
    value_of,
)
from fusion_backend.fusion.views.obstacles import STATISTICS, identity_source, obstacle
from fusion_backend.fusion.views.operand import Entering, fits_features, parameter
from fusion_backend.fusion.views.permutations import composed, is_identity, permutation
from fusion_backend.fusion.views.pointwise import (
    is_linear,
    multiplies,
    pointwise_expression,
    pointwise_name,
)
from fusion_backend.fusion.views.reshape import copy_source, reshape_source
from fusion_backend.mlp.expression import (
    Constant,
    Expression,
    Variable,
    call,
    substitute,
)
from fusion_backend.mlp.expression.simplification import as_kind
from fusion_backend.reasons import Refusal

# An activation has a handful of calls. A walk beyond these bounds is in no MLP (it follows, say,
# the residual stream through all layers) and is given up, which bounds the cost of a graph.
_MAX_CALLS = 64
_MAX_SOURCES = 8


class TooFar(Exception):
    """The walk has left every MLP."""


class _Move(NamedTuple):
    """The order in which the dimensions of a linear layer stand, and the call that moved them."""

    order: tuple[int, ...]
    by: str

    @property
    def refusal(self) -> Refusal:
        return Refusal(reasons.NON_POINTWISE, self.by)


class Value(NamedTuple):
    """What the walk knows of a node.

    ``reaches``: a linear layer feeds it. ``bends``: a nonlinear function of one does. ``moved``:
    its dimensions are in another order, which a later call may undo.
    """

    expression: Expression
    reaches: bool = False
    bends: bool = False
    moved: _Move | None = None


@dataclass
class Walk:
    """What a walk back from a linear layer has met; :meth:`value` goes it.

    Attributes:
        down: the layer.
        sources: the layers that feed it, or parts of them: the variables ``v0``, ``v1``, ...
        calls: those that were walked, with what is known of each.
        slicing: the calls between a packed layer and the parts of it.
        obstacles: what no fused kernel can do.
        operands: what else enters the activation, as the variables ``w0``, ``w1``, ...
        parameters: those operands that are parameters, by their nodes.
        begun: how many calls were walked, those included whose operands still are.
    """

    down: LinearView
    sources: list[Source] = field(default_factory=list)
    calls: dict[Node, Value] = field(default_factory=dict)
    slicing: set[Node] = field(default_factory=set)
    obstacles: list[Refusal] = field(default_factory=list)
    operands: dict[str, Entering] = field(default_factory=dict)
    parameters: dict[Node, Entering] = field(default_factory=dict)
    begun: int = 0

    def value(self, node: Any) -> Value:
        """What is known of a node, or of a number.

        Raises:
            TooFar: an activation is never as long as this.
        """
        if not isinstance(node, Node):
            return self._constant(node)
        if node in self.calls:
            return self.calls[node]
        source = source_of(node)
        if source is not None:
            return self._variable(source)
        if tensor_of(node) is None:
            return self._constant(value_of(node), node)
        if self.begun >= _MAX_CALLS:
            raise TooFar
        self.begun += 1  # before its operands are walked: it bounds the depth as well
        number = constant_of(node)
        entering = parameter(node, self.down.feature_dim) if number is None else None
        if entering is not None:
            self.parameters[node] = entering
            value = self._operand(entering)
        else:
            value = self._call(node) if number is None else self._float(number)
        self.calls[node] = value
        return value

    def _operand(self, entering: Entering) -> Value:
        name = f"w{len(self.operands)}"
        self.operands[name] = entering
        return Value(Variable(name))

    def _variable(self, source: Source) -> Value:
        self.slicing.update(slicing_calls(source))
        for index, known in enumerate(self.sources):
            if known.same_as(source):
                return Value(Variable(f"v{index}"), reaches=True)
        if len(self.sources) >= _MAX_SOURCES:
            raise TooFar
        self.sources.append(source)
        return Value(Variable(f"v{len(self.sources) - 1}"), reaches=True)

    def _constant(self, number: Any, node: Node | None = None) -> Value:
        if isinstance(number, (bool, int, float)) and number == number:
            return Value(Constant(number))
        if isinstance(number, torch.SymFloat) and number.node.hint is not None:
            # Dynamo turned a Python float of the model into an input (dynamic=True); it stands for
            # a constant of the activation, and this guards on its value.
            return Value(Constant(float(number)))
        name = node.name if node is not None else str(number)
        self.obstacles.append(Refusal(reasons.SYMBOLIC_CONSTANT, name))
        return _NOTHING

    def _float(self, number: Any) -> Value:
        """What a tensor of floats is filled with."""
        value = self.value(number)
        return value._replace(expression=as_kind(value.expression, "float"))

    def _call(self, node: Node) -> Value:
        passed = identity_source(node) or copy_source(node)
        if passed is not None:
            return self.value(passed)
        reshaped = reshape_source(node)
        if reshaped is not None:
            return self._unmoved(self.value(reshaped))
        order = permutation(node)
        if order is not None:
            return self._reordered(node, order)
        dropout = dropout_view(node)
        if dropout is not None:
            return self._dropout(dropout)
        norm = batch_norm_view(node)
        if norm is not None:
            return self._batch_norm(norm)
        gate = self._glu(node) or self._part_of_sum(node)
        if gate is not None:
            return gate
        name = pointwise_name(node)
        if name is not None:
            return self._pointwise(node, name)
        if _is_parameter(node):  # of integers, or it would be an operand
            self.obstacles.append(Refusal(reasons.PARAMETER, _called(node)))
            return _NOTHING
        refusal = obstacle(producer(node))
        if refusal is not None:
            return self._blocked(producer(node), refusal)
        if operation(node) in STATISTICS:
            self._blocked(node, Refusal(reasons.NORM_BETWEEN, f"its {operation(node)}"))
            return _NOTHING
        self.obstacles.append(Refusal(reasons.OTHER_OPERAND, _called(node)))
        return _NOTHING

    def _reordered(self, node: Node, order: tuple[int, ...]) -> Value:
        value = self.value(node.args[0])
        if not value.reaches:
            return value
        if value.moved is not None:
            order = composed(value.moved.order, order)
        return value._replace(moved=None if is_identity(order) else _Move(order, operation(node)))

    def _unmoved(self, value: Value) -> Value:
        """Note that what follows is no pointwise function of moved dimensions."""
        if value.moved is not None:
            self.obstacles.append(value.moved.refusal)
        return value._replace(moved=None)

    def _dropout(self, dropout: DropoutView) -> Value:
        """What is left of a value, on average all of it: no activation by itself."""
        value, p = self.value(dropout.source), self.value(dropout.p).expression
        seed = self._operand(Entering(dropout.node, "seed")).expression
        self.calls.setdefault(dropout.node, _NOTHING)  # the call with two results is passed as well
        return value._replace(expression=call("dropout", value.expression, seed, p))

    def _batch_norm(self, norm: BatchNormView) -> Value:
        """A scale and a shift of each feature: no activation by itself."""
        met = len(self.obstacles)
        value, last = self.value(norm.source), tensor_of(self.down.input)
        if not value.reaches:
            return self._blocked(norm.node, Refusal(reasons.NORM_BETWEEN, operation(norm.node)))
        normed = norm.expression(value.expression, lambda given: self.value(given).expression)
        order = None if value.moved is None else value.moved.order
        if last is None or not norm.is_of_features(last, self.down.feature_dim, order):
            self.obstacles.insert(met, Refusal(reasons.NORM_BETWEEN, _OF_ANOTHER_DIM))
            return value
        self.calls.setdefault(norm.node, _NOTHING)  # the call with more results is passed as well
        return value._replace(expression=normed)

    def _glu(self, node: Node) -> Value | None:
        """``F.glu``: the first half of the features times the sigmoid of the second."""
        sources = gate_sources(node)
        if sources is None:
            return None
        first, second = (self._variable(source).expression for source in sources)
        return Value(call("mul", first, call("sigmoid", second)), reaches=True, bends=True)

    def _part_of_sum(self, node: Node) -> Value | None:
        """Some features of a sum of layers: the same features of each of them."""
        whole = sum_of_parts(node)
        if whole is None:
            return None
        self.slicing.update(whole.calls)
        parts = {name: self._variable(source).expression for name, source in whole.sources.items()}
        return Value(substitute(whole.expression, parts), reaches=True)

    def _blocked(self, node: Node, refusal: Refusal) -> Value:
        """Note what forbids fusion, then look for linear layers behind it, for the report."""
        position = len(self.obstacles)
        self.obstacles.append(refusal)
        behind = [self.value(item) for item in node.all_input_nodes if tensor_of(item) is not None]
        reaching = next((value for value in behind if value.reaches), None)
        if reaching is None:
            self.obstacles[position] = Refusal(reasons.OTHER_OPERAND, _called(node))
            return _NOTHING
        bends = any(value.bends for value in behind) or refusal.reason in _ACTIVATIONS
        return reaching._replace(bends=bends, moved=None)

    def _pointwise(self, node: Node, name: str) -> Value:
        operands: list[Value] = []

        def operand(argument: Any) -> Expression:
            operands.append(self.value(argument))
            return operands[-1].expression

        obstacles = len(self.obstacles)
        try:
            expression = pointwise_expression(node, operand)
        except ExpressionError:  # such as a slope that is a tensor
            expression = None
        if expression is None and _is_parameter(node):  # of integers
            self.obstacles.append(Refusal(reasons.PARAMETER, _called(node)))
            return _NOTHING
        if expression is None:
            return self._blocked(node, Refusal(reasons.UNKNOWN_FUNCTION, _called(node)))
        reaching = [value for value in operands if value.reaches]
        if len(self.obstacles) == obstacles:
            in_place = all(value.moved is None for value in reaching)
            self.obstacles.extend(self._misfits(node, name, in_place))
        moved = self._moved_alike(reaching)
        bends = any(value.bends for value in operands) or (
            bool(reaching) and ((multiplies(name) and len(reaching) > 1) or not is_linear(name))
        )
        return Value(expression, bool(reaching), bends, moved)

    def _moved_alike(self, operands: list[Value]) -> _Move | None:
        """How all operands of a pointwise call are moved; an obstacle where they differ."""
        moves = {value.moved.order: value.moved for value in operands if value.moved is not None}
        if len(moves) == 1 and all(value.moved is not None for value in operands):
            return next(iter(moves.values()))
        self.obstacles.extend(move.refusal for move in moves.values())
        return None

    def _fits(self, operand: Node, result: Node, name: str, in_place: bool) -> bool:
        """Whether a parameter has one number for all elements of a result, or one a feature."""
        if self.parameters[operand].kind == "scalar":
            return True
        slopes, value, last = (tensor_of(n) for n in (operand, result, self.down.input))
        assert slopes is not None
        assert value is not None
        assert last is not None
        if not in_place or (self.down.positions and not same_shape(value, last)):
            return False
        hidden, feature_dim = self.down.in_features, self.down.feature_dim
        if name == "prelu":  # its slopes are those of the second dimension
            return value.dim() == 1 - feature_dim and same_size(slopes.shape[0], hidden)
        return fits_features(operand, result, hidden, feature_dim)

    def _has_shape_of(self, operand: Node, node: Node) -> bool:
        """Whether each element of a result is computed of its own element of an operand.

        A number serves all elements, but not the result of a layer that has no dimension left.
        """
        value, result = tensor_of(operand), tensor_of(node)
        if value is None or (value.dim() == 0 and not self.value(operand).reaches):
            return True
        return result is not None and same_shape(value, result)

    def _misfits(self, node: Node, name: str, in_place: bool) -> Iterator[Refusal]:
        """Operands of a pointwise call that are not one for each of its elements."""
        for operand in node.all_input_nodes:
            entering = self.parameters.get(operand)
            if entering is not None and not self._fits(operand, node, name, in_place):
                yield Refusal(reasons.PARAMETER, _called(operand))
            elif entering is None and not self._has_shape_of(operand, node):
                yield Refusal(reasons.SHAPES_DIFFER, _called(node))
                return


_NOTHING = Value(Constant(0.0))
_OF_ANOTHER_DIM = "batch_norm of a dimension that is not that of the features"
# What an activation may be, although none that can be fused.
_ACTIVATIONS = (reasons.UNKNOWN_FUNCTION, reasons.CUSTOM_AUTOGRAD, reasons.PARAMETER)


def _is_parameter(node: Node) -> bool:
    """Whether a value is a number, or a number a feature, that the graph is given."""
    tensor = tensor_of(node)
    if tensor is None or not all(same_size(size, 1) for size in tensor.shape[:-1]):
        return False
    return is_weight(node)


def _called(node: Node) -> str:
    if node.op == "placeholder":
        return f"the value {node.name!r}"
    return f"the result of {operation(node)}"
