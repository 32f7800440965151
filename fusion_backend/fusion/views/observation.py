"""What a call writes to, found out by running it once more.

The call runs on stand-ins: fake tensors with the sizes, strides, dtypes and devices of its example
values, on storages and symbols of their own. So nothing of the graph is touched, whatever the call
does: no guard, no symbol, no version, no size. A dispatch mode sees every operator that the call
comes down to, and what its schema says is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fusion_backend.compat import tensors
from fusion_backend.compat.operators import OpOverload
from fusion_backend.compat.sharding import is_sharded
from fusion_backend.compat.tracing import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    tree_leaves,
    tree_map,
)
from fusion_backend.fusion.views.effects import measures
from fusion_backend.fusion.views.node import value_of
from fusion_backend.fusion.views.sharding import conversion
from fusion_backend.fusion.views.storages import ANYWHERE, storages

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Effect:
    """What a call does to memory that it did not make.

    Attributes:
        writes: storages that it writes to.
        remakes: those of tensors that have other sizes or another storage afterwards. Example
            values show such tensors as they are in the end, not as calls before saw them.
    """

    writes: frozenset[int] = frozenset()
    remakes: frozenset[int] = frozenset()


class _Found(NamedTuple):
    """What a call does, whatever its tensors: to which of them, in order; to which others."""

    writes: frozenset[int]
    remakes: frozenset[int]
    others: frozenset[int]


class Observer:
    """Runs calls of graphs on stand-ins; calls that are alike, as those of equal layers, once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Found | None] = {}

    @cached_property
    def _mode(self) -> FakeTensorMode:
        mode: FakeTensorMode = tensors.fake_mode_of_its_own()
        return mode

    def effect(self, node: Node) -> Effect | None:
        """What a call of a function or method does; ``None`` where it could not be run."""
        if measures(node) or conversion(node):
            return Effect()
        try:
            tensors, kind = _kind_of_call(node)
        except (LookupError, TypeError):
            return None
        if kind not in self._known or reaches_further(node):
            self._known[kind] = self._run(node)
        found = self._known[kind]
        if found is None:
            return None
        writes, remakes = (
            frozenset[int]().union(*(storages(tensors[i]) for i in indices))
            for indices in (found.writes, found.remakes)
        )
        return Effect(writes | found.others, remakes)

    def _run(self, node: Node) -> _Found | None:
        """The result's dtype tells whether the call is one under autocast."""
        for context in _settings(node):
            stand_ins, recorder = StandIns(self._mode), _Recorder()
            try:
                with tensors.nothing_else_traced():
                    args, kwargs = stand_ins.of((node.args, node.kwargs))
                    with self._mode, recorder, context:
                        function_of(node)(*args, **kwargs)
                    return stand_ins.found(recorder)
            except Exception:  # whatever it is, the call is then taken to write to all it can
                continue
        return None


def reaches_further(node: Node) -> bool:
    """Whether a call can reach tensors that it is not given: those of a function's own module."""
    target = node.target
    return isinstance(target, FunctionType) and target.__module__.split(".")[0] != "torch"


def _kind_of_call(node: Node) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The distinct tensors that a call is given, in order, and all else that its effect is of."""
    met: dict[int, Tensor] = {}

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return tensors.number_of(value)
        met[id(value)] = value
        sizes = [*value.shape, *value.stride(), value.storage_offset()]
        place = list(met).index(id(value))
        return place, value.dtype, value.device, list(map(tensors.number_of, sizes))

    given = map_arg((node.args, node.kwargs), lambda source: tree_map(described, _known(source)))
    result = value_of(node)
    dtype = result.dtype if isinstance(result, Tensor) else None
    return list(met.values()), (node.op, node.target, dtype, repr(given))


def function_of(node: Node) -> Any:
    """What a call of a function or method calls."""
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, str(node.target))(*args, **kwargs)
    return node.target


def _settings(node: Node) -> Iterator[AbstractContextManager[Any]]:
    """Without autocast, then with it in the half precision that operands or results have."""
    yield nullcontext()
    values = tree_leaves([value_of(each) for each in (node, *node.all_input_nodes)])
    found = {(v.device.type, v.dtype) for v in values if isinstance(v, Tensor) and v.dtype in _HALF}
    for device, dtype in sorted(found, key=str):
        yield torch.autocast(device, dtype)


@dataclass
class StandIns:
    """Tensors that stand for those of example values during one run.

    Each has a storage of its own, so that one which gets the storage of another is noticed.
    """

    mode: FakeTensorMode
    made: dict[int, Tensor] = field(default_factory=dict)
    before: list[tuple[Any, ...]] = field(default_factory=list)

    def of(self, arguments: Any) -> Any:
        """Arguments of a node with a value in place of every node."""
        return map_arg(arguments, lambda node: tree_map(self._value, _known(node)))

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        return tensors.number_of(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.made:
            made = self._of_part(tensor) if is_sharded(tensor) else self._dense(tensor)
            self.made[id(tensor)] = made
            self.before.append(_layout(made))
        return self.made[id(tensor)]

    def _of_part(self, sharded: Any) -> Tensor:
        """A sharded tensor, of a stand-in for a rank's part of it."""
        shape, stride = (
            tuple(map(tensors.number_of, sizes)) for sizes in (sharded.shape, sharded.stride())
        )
        made: Tensor = type(sharded).from_local(
            self._dense(sharded.to_local()),
            *(sharded.device_mesh, sharded.placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        return made

    def _dense(self, tensor: Tensor) -> FakeTensor:
        kind: type = type(tensor)
        if is_traceable_wrapper_subclass_type(kind) or tensor.layout != torch.strided:
            raise TypeError("a stand-in must be a dense tensor")
        nbytes = tensors.number_of(tensor.untyped_storage().nbytes())
        storage = torch.UntypedStorage(nbytes, device="meta")
        shape = [tensors.number_of(size) for size in tensor.shape]
        stride = [tensors.number_of(step) for step in tensor.stride()]
        offset = tensors.number_of(tensor.storage_offset())
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return FakeTensor(self.mode, empty.set_(storage, offset, shape, stride), tensor.device)

    def found(self, recorder: _Recorder) -> _Found:
        """What was done to the tensors that these stand for, or to others that the call reached."""
        place = {layout[0]: index for index, layout in enumerate(self.before)}
        now = map(_layout, self.made.values())
        changed = {i for i, layout in enumerate(now) if layout != self.before[i]}
        remade = {place[storage] for storage in recorder.remade if storage in place}
        return _Found(
            frozenset(place[storage] for storage in recorder.written if storage in place),
            frozenset(remade | changed),
            frozenset(recorder.written - place.keys()),
        )


def _layout(tensor: Any) -> tuple[Any, ...]:
    if is_sharded(tensor):
        tensor = tensor.to_local()
    storage = int(tensor.untyped_storage()._cdata)
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


def _known(node: Node) -> Any:
    value = value_of(node)
    if value is None:
        raise LookupError(f"{node.name} carries no example value")
    return value


class _Recorder(TorchDispatchMode):
    """Notes the storages that operators write to, but for those that the call itself makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.remade: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise TypeError(f"what {func} does with its operands is not known")
        written = _written(func, args, kwargs) - self._made
        self.written |= written
        if torch.Tag.inplace_view in func.tags:
            self.remade |= written
        result = func(*args, **kwargs)
        self._made |= storages(result) - storages((args, kwargs)) - {ANYWHERE}
        return result


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """The storages that an operator writes to, as its schema says."""
    parameters = func._schema.arguments
    given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
    kept = not func._schema.is_mutable and _keeps_statistics(func, given)
    written = [
        given.get(p.name)
        for p in parameters
        if (p.alias_info is not None and p.alias_info.is_write)
        or (kept and p.name.startswith("running_"))
    ]
    return storages(written)


def _keeps_statistics(func: OpOverload, given: dict[str, Any]) -> bool:
    """Whether running statistics are written to although the schema does not say so.

    The schemas of batch norms are from before schemas told. Under the Python dispatcher most are
    replaced by operators that tell, as ahead-of-time autograd needs it, too. Of the others (MIOpen,
    synchronised batch norm) all that get such statistics are taken to write to them, but for core
    operators: those are functional.
    """
    return torch.Tag.core not in func.tags and bool(given.get("training", True))
