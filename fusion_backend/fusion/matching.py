"""Finding MLPs: a walk back from every linear layer to the linear layers that feed it.

The walk passes through pointwise calls, which become an expression, and through what leaves the
elements in their order (reshapes, inactive dropout, copies). Parameters, active dropout and the
layers that read something else enter the activation as operands. Whatever else it meets is
an *obstacle*: it is written down, and where the value behind it can be told the walk goes on, so
that a site that is left alone can say why. This module decides nothing; see ``legality``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fusion_backend import reasons
from fusion_backend.errors import ExpressionError
from fusion_backend.fusion.joins import join_of
from fusion_backend.fusion.views.batch_norms import BatchNormView, batch_norm_view
from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.convolutions import convolution_view
from fusion_backend.fusion.views.dropouts import DropoutView, dropout_view
from fusion_backend.fusion.views.experts import expert_view
from fusion_backend.fusion.views.linear import LinearView, is_weight, linear_view
from fusion_backend.fusion.views.node import operation, same_shape, same_size, tensor_of, value_of
from fusion_backend.fusion.views.obstacles import STATISTICS, identity_source, obstacle
from fusion_backend.fusion.views.operand import Entering, fits_features, in_order, parameter
from fusion_backend.fusion.views.permutations import REORDERING, composed, is_identity, permutation
from fusion_backend.fusion.views.pointwise import (
    is_linear,
    multiplies,
    pointwise_expression,
    pointwise_name,
)
from fusion_backend.fusion.views.reshape import copy_source, reshape_source, row_reshape_source
from fusion_backend.fusion.views.slices import SliceView, halves, slice_view
from fusion_backend.fusion.views.sums import layer_sum
from fusion_backend.mlp.expression import (
    Constant,
    Expression,
    Variable,
    call,
    substitute,
    variables,
)
from fusion_backend.mlp.expression.canonical import canonicalize
from fusion_backend.mlp.expression.differentiation import differentiate
from fusion_backend.mlp.expression.simplification import as_kind
from fusion_backend.mlp.record import in_one_text
from fusion_backend.patterns.form import Form, PackedProjection, Projection
from fusion_backend.reasons import Refusal

# An activation has a handful of calls. A walk beyond these bounds is in no MLP (it follows, say,
# the residual stream through all layers) and is given up, which bounds the cost of a graph.
_MAX_CALLS = 64
_MAX_SOURCES = 8


@dataclass(frozen=True)
class Source:
    """Where a variable of the activation comes from: a linear layer, or a slice of its features."""

    linear: LinearView
    part: SliceView | None = None

    @property
    def node(self) -> Node:
        return self.linear.node if self.part is None else self.part.node

    @property
    def features(self) -> Any:
        """How many features of the layer it has."""
        return self.linear.out_features if self.part is None else self.part.features

    def same_as(self, other: Source) -> bool:
        """Whether both are the same features, although two calls may take them."""
        if self.part is None or other.part is None:
            return self == other
        bounds = [(p.start, p.stop, p.step) for p in (self.part, other.part)]
        return self.linear == other.linear and bounds[0] == bounds[1]


class Part(NamedTuple):
    """That a site is fused up to its hidden value: at which node that is, and why not beyond."""

    hidden: Node
    outside: Refusal


@dataclass(frozen=True)
class Match:
    """A site: linear layers, the calls between them, and what stands in the way.

    Attributes:
        form: the declared form, or ``None`` where the site has none of them.
        down: the last linear layer.
        sources: the projections, one a variable of ``expression``, in the form's order.
        calls: every node between the first linear layers and the last one.
        expression: the activation, canonical; ``None`` where it could not be written.
        obstacles: what the walk met that no fused kernel can do.
        operands: what else enters the expression, as its variables ``p0``, ``p1``, ...
        part: where only the first layers and the activation are fused, and ``calls`` ends there.
        variables: what the expression calls the sources.
    """

    form: Form | None
    down: LinearView
    sources: tuple[Source, ...]
    calls: frozenset[Node]
    expression: Expression | None
    obstacles: tuple[Refusal, ...]
    operands: tuple[Entering, ...] = ()
    part: Part | None = None
    variables: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LinearView, ...]:
        """The linear layers that are fused."""
        first = tuple(source.linear for source in self.sources)
        return first if self.part is not None else (*first, self.down)

    @property
    def result(self) -> Node:
        """The node that the fused operator takes the place of."""
        return self.down.node if self.part is None else self.part.hidden

    @property
    def nodes(self) -> frozenset[Node]:
        """All nodes of the site."""
        return self.calls.union(*(layer.nodes for layer in self.layers))

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The activation after each layer but the last, as far as it could be written."""
        return () if self.expression is None else (self.expression,)

    @property
    def steps(self) -> str:
        """What a chain computes beside its layers and an activation between each two."""
        return ""

    @property
    def parameters(self) -> tuple[Node, ...]:
        """Those of norms within."""
        return ()

    @property
    def read_again(self) -> tuple[Node, ...]:
        """Values within, or the input, that are kept until they are read again."""
        return ()

    @property
    def activation(self) -> str:
        """The activations as they are reported."""
        return in_one_text(self.expressions)


def _raise(error: Exception) -> Refusal:
    raise error


def find_matches(
    graph: Graph, forms: tuple[Form, ...], failed: Callable[[Exception], Refusal] = _raise
) -> Iterator[Match]:
    """Every place in a graph where an activation joins two linear layers, in program order.

    Args:
        graph: its nodes carry example values.
        forms: the forms that there are.
        failed: given what was raised at a layer, the reason for which its site is left alone.
    """
    for node in graph.nodes:
        walk = None
        try:
            down = layer_view(node)
            if down is None or is_product_of_layer(node):
                continue
            walk = _Walk(down)
            match = _match_of(walk, forms)
        except Exception as error:
            refused = failed(error)
            match = None if walk is None else _left_alone(walk, refused)
        if match is not None:
            yield match


def layer_view(node: Node) -> LinearView | None:
    """The linear layer, the 1×1 convolution or the layer of experts that a node computes."""
    return linear_view(node) or convolution_view(node) or expert_view(node)


def is_product_of_layer(node: Node) -> bool:
    """Whether the only user of a product adds the bias of the layer."""
    users = tuple(node.users)
    layer = linear_view(users[0]) if len(users) == 1 else None
    return layer is not None and layer.product is node


def match_up_to(hidden: Node, match: Match, forms: tuple[Form, ...]) -> Match | None:
    """The match of a site's layers before one of its calls, as if the last layer read that."""
    return _match_of(_Walk(replace(match.down, input=hidden)), forms)


def _left_alone(walk: _Walk, refused: Refusal) -> Match:
    """The site of a walk that failed, as far as it is known."""
    first = walk.sources[0] if walk.sources else Source(walk.down)
    return Match(None, walk.down, (first,), frozenset(), None, (refused,))


def _match_of(walk: _Walk, forms: tuple[Form, ...]) -> Match | None:
    down = walk.down
    try:
        activation = walk.value(down.input)
    except _TooFar:
        return _unmatched(down)
    if not (activation.reaches and activation.bends):
        return _unmatched(down)
    if activation.moved is not None:
        walk.obstacles.append(activation.moved.refusal)
    chosen = _projections(walk.sources)
    form = _form_of(chosen, forms)
    obstacles = _most_telling_first(walk.obstacles)
    if not obstacles and form is None:
        obstacles = (Refusal(reasons.UNKNOWN_FORM, _describe(chosen)),)
    if not obstacles and not all(_keeps_rows(source, down) for source in walk.sources):
        obstacles = (Refusal(reasons.ROW_MIXING_VIEW, "a reshape"),)
    calls = frozenset(walk.slicing.union(walk.calls) - walk.parameters.keys())
    if form is None or obstacles:
        return Match(form, down, tuple(chosen), calls, None, obstacles)
    entering = dict(walk.operands)
    for index, source in enumerate(walk.sources):
        if source not in chosen:
            entering[f"v{index}"] = Entering(source.linear.node, "elementwise", source.part)
    sources, expression = _named(walk.sources, chosen, form, activation.expression)
    expression, order = in_order(expression, entering)
    operands = tuple(entering[name] for name in order)
    names = tuple(variable.name for variable in form.hidden)
    return Match(form, down, sources, calls, expression, (), operands, variables=names)


def _unmatched(down: LinearView) -> Match | None:
    """Layers that something joins which no activation is: only to be reported."""
    join = join_of(down, layer_view)
    if join is None:
        return None
    return Match(None, down, tuple(map(Source, join.layers)), frozenset(), None, join.refusals)


def _projections(sources: list[Source]) -> list[Source]:
    """The sources that read the MLP's input: that of the widest layer, the first of equals."""
    widths = [source.linear.in_features for source in sources]
    known = [width if isinstance(width, int) else 0 for width in widths]
    widest = sources[known.index(max(known))]
    return [source for source in sources if source.linear.input is widest.linear.input]


def _keeps_rows(source: Source, down: LinearView) -> bool:
    """Whether the last layer reads each row of a projection as a row, whatever came between."""
    if source.linear.positions != down.positions:
        return False
    if not down.positions:
        return same_size(source.features, down.in_features)
    before, after = tensor_of(source.node), tensor_of(down.input)
    return before is not None and after is not None and same_shape(before, after)


def _most_telling_first(obstacles: list[Refusal]) -> tuple[Refusal, ...]:
    """A transpose before and after a convolution says less than the convolution does."""
    once = dict.fromkeys(obstacles)
    return tuple(sorted(once, key=lambda refusal: refusal.particulars in REORDERING))


class _TooFar(Exception):
    """The walk has left every MLP."""


class _Move(NamedTuple):
    """The order in which the dimensions of a linear layer stand, and the call that moved them."""

    order: tuple[int, ...]
    by: str

    @property
    def refusal(self) -> Refusal:
        return Refusal(reasons.NON_POINTWISE, self.by)


class _Value(NamedTuple):
    """What the walk knows of a node.

    ``reaches``: a linear layer feeds it. ``bends``: a nonlinear function of one does. ``moved``:
    its dimensions are in another order, which a later call may undo.
    """

    expression: Expression
    reaches: bool = False
    bends: bool = False
    moved: _Move | None = None


@dataclass
class _Walk:
    down: LinearView
    sources: list[Source] = field(default_factory=list)
    calls: dict[Node, _Value] = field(default_factory=dict)
    slicing: set[Node] = field(default_factory=set)
    obstacles: list[Refusal] = field(default_factory=list)
    operands: dict[str, Entering] = field(default_factory=dict)
    parameters: dict[Node, Entering] = field(default_factory=dict)
    begun: int = 0

    def value(self, node: Any) -> _Value:
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
            raise _TooFar
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

    def _operand(self, entering: Entering) -> _Value:
        name = f"w{len(self.operands)}"
        self.operands[name] = entering
        return _Value(Variable(name))

    def _variable(self, source: Source) -> _Value:
        self.slicing.update(_slicing_calls(source))
        for index, known in enumerate(self.sources):
            if known.same_as(source):
                return _Value(Variable(f"v{index}"), reaches=True)
        if len(self.sources) >= _MAX_SOURCES:
            raise _TooFar
        self.sources.append(source)
        return _Value(Variable(f"v{len(self.sources) - 1}"), reaches=True)

    def _constant(self, number: Any, node: Node | None = None) -> _Value:
        if isinstance(number, (bool, int, float)) and number == number:
            return _Value(Constant(number))
        if isinstance(number, torch.SymFloat) and number.node.hint is not None:
            # Dynamo turned a Python float of the model into an input (dynamic=True); it stands for
            # a constant of the activation, and this guards on its value.
            return _Value(Constant(float(number)))
        name = node.name if node is not None else str(number)
        self.obstacles.append(Refusal(reasons.SYMBOLIC_CONSTANT, name))
        return _NOTHING

    def _float(self, number: Any) -> _Value:
        """What a tensor of floats is filled with."""
        value = self.value(number)
        return value._replace(expression=as_kind(value.expression, "float"))

    def _call(self, node: Node) -> _Value:
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
        refusal = obstacle(_producer(node))
        if refusal is not None:
            return self._blocked(_producer(node), refusal)
        if operation(node) in STATISTICS:
            self._blocked(node, Refusal(reasons.NORM_BETWEEN, f"its {operation(node)}"))
            return _NOTHING
        self.obstacles.append(Refusal(reasons.OTHER_OPERAND, _called(node)))
        return _NOTHING

    def _reordered(self, node: Node, order: tuple[int, ...]) -> _Value:
        value = self.value(node.args[0])
        if not value.reaches:
            return value
        if value.moved is not None:
            order = composed(value.moved.order, order)
        return value._replace(moved=None if is_identity(order) else _Move(order, operation(node)))

    def _unmoved(self, value: _Value) -> _Value:
        """Note that what follows is no pointwise function of moved dimensions."""
        if value.moved is not None:
            self.obstacles.append(value.moved.refusal)
        return value._replace(moved=None)

    def _dropout(self, dropout: DropoutView) -> _Value:
        """What is left of a value, on average all of it: no activation by itself."""
        value, p = self.value(dropout.source), self.value(dropout.p).expression
        seed = self._operand(Entering(dropout.node, "seed")).expression
        self.calls.setdefault(dropout.node, _NOTHING)  # the call with two results is passed as well
        return value._replace(expression=call("dropout", value.expression, seed, p))

    def _batch_norm(self, norm: BatchNormView) -> _Value:
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

    def _glu(self, node: Node) -> _Value | None:
        """``F.glu``: the first half of the features times the sigmoid of the second."""
        sources = gate_sources(node)
        if sources is None:
            return None
        first, second = (self._variable(source).expression for source in sources)
        return _Value(call("mul", first, call("sigmoid", second)), reaches=True, bends=True)

    def _part_of_sum(self, node: Node) -> _Value | None:
        """Some features of a sum of layers: the same features of each of them."""
        whole = sum_of_parts(node)
        if whole is None:
            return None
        self.slicing.update(whole.calls)
        parts = {name: self._variable(source).expression for name, source in whole.sources.items()}
        return _Value(substitute(whole.expression, parts), reaches=True)

    def _blocked(self, node: Node, refusal: Refusal) -> _Value:
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

    def _pointwise(self, node: Node, name: str) -> _Value:
        operands: list[_Value] = []

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
        return _Value(expression, bool(reaching), bends, moved)

    def _moved_alike(self, operands: list[_Value]) -> _Move | None:
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


_NOTHING = _Value(Constant(0.0))
_OF_ANOTHER_DIM = "batch_norm of a dimension that is not that of the features"
# What an activation may be, although none that can be fused.
_ACTIVATIONS = (reasons.UNKNOWN_FUNCTION, reasons.CUSTOM_AUTOGRAD, reasons.PARAMETER)


def source_of(node: Node) -> Source | None:
    """The linear layer, or the part of one, that a node computes."""
    linear = layer_view(node)
    if linear is not None:
        return Source(linear)
    part = slice_view(node)
    if part is None:
        return None
    packed = _packed_layer(part)
    return None if packed is None else Source(packed, part)


def gate_sources(node: Node) -> tuple[Source, Source] | None:
    """The two halves of a packed layer that a node combines, if it is a ``glu`` of one."""
    parts = halves(node)
    packed = None if parts is None else _packed_layer(parts[0])
    if parts is None or packed is None:
        return None
    return Source(packed, parts[0]), Source(packed, parts[1])


class SumOfParts(NamedTuple):
    """The same features of several layers, added up.

    Attributes:
        expression: the sum, of ``l0``, ``l1``, ...
        sources: what these are.
        calls: the calls that add and scale the layers.
    """

    expression: Expression
    sources: dict[str, Source]
    calls: frozenset[Node]


def sum_of_parts(node: Node) -> SumOfParts | None:
    """The sum that a node takes some features of, or ``None``."""
    part = slice_view(node)
    if part is None or part.dim != -1:
        return None
    whole = layer_sum(_behind_reshapes(part.source), layer_view)
    if whole is None:
        return None
    sources = {
        f"l{index}": Source(layer, replace(part, source=layer.node))
        for index, layer in enumerate(whole.layers)
    }
    return SumOfParts(whole.expression, sources, whole.calls)


def _packed_layer(part: SliceView) -> LinearView | None:
    """The layer of whose features this is a part, or ``None``."""
    layer = layer_view(_behind_reshapes(part.source))
    if layer is None or part.dim != layer.feature_dim:
        return None
    reshaped = layer.node is not part.source
    return None if layer.positions and reshaped else layer


def _behind_reshapes(node: Node) -> Node:
    while (source := row_reshape_source(node)) is not None:
        node = source
    return node


def _slicing_calls(source: Source) -> Iterator[Node]:
    """The calls between a packed linear layer and one slice of it."""
    if source.part is None:
        return
    yield from source.part.calls
    node = source.part.source
    while node is not source.linear.node:
        yield node
        node = row_reshape_source(node)  # type: ignore[assignment]


def _producer(node: Node) -> Node:
    """The call whose tuple of results a ``getitem`` opens, or the node itself."""
    source = node.args[0] if node.args else None
    opens = operation(node) == "getitem" and isinstance(source, Node) and tensor_of(source) is None
    return source if opens and isinstance(source, Node) else node


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


def _form_of(sources: list[Source], forms: tuple[Form, ...]) -> Form | None:
    return next((form for form in forms if any(_assignments(sources, form))), None)


def _assignments(sources: list[Source], form: Form) -> Iterator[tuple[Source, ...]]:
    """The ways in which sources are the variables of a form, the one in program order first."""
    if len(sources) != len(form.hidden):
        return
    for order in permutations(sorted(sources, key=lambda source: source.node)):
        kinds = [Projection if source.part is None else PackedProjection for source in order]
        if all(map(isinstance, form.hidden, kinds)):
            yield order


def _describe(sources: list[Source]) -> str:
    whole = sum(source.part is None for source in sources)
    parts = len(sources) - whole
    return f"{whole} linear layers and {parts} slices of linear layers"


def _named(
    sources: list[Source], chosen: list[Source], form: Form, expression: Expression
) -> tuple[tuple[Source, ...], Expression]:
    """The projections as variables of the form, of which some are to enter linearly."""
    index = {id(source): f"v{index}" for index, source in enumerate(sources)}
    linear = [variable.name for variable in form.hidden if variable.linear]
    named = []
    for order in _assignments(chosen, form):
        pairs = zip(order, form.hidden, strict=True)
        names = {index[id(source)]: Variable(variable.name) for source, variable in pairs}
        candidate = canonicalize(substitute(expression, names))
        named.append((order, candidate))
        if all(name not in variables(differentiate(candidate, name)) for name in linear):
            return named[-1]
    return named[0]
