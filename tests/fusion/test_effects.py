"""What a node writes, reads and aliases is observed: programs that write or read between layers.

Every program is run as it is and rewritten; results, arguments afterwards and what was logged must
be the same. Each says whether its site may be fused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from capture import ALWAYS, record
from fusion_backend import fuse
from fusion_backend.fusion.views.dependence import Dependence

UP, DOWN = torch.randn(16, 8) / 3, torch.randn(8, 16) / 3
LOG: list[float] = []


@torch.library.custom_op("effects::increase", mutates_args={"x"})
def increase(x: torch.Tensor) -> None:
    x.add_(1.0)


@torch.library.custom_op("effects::increase_all", mutates_args={"xs"})
def increase_all(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1.0)


@torch.library.custom_op("effects::save", mutates_args={"out"})
def save(h: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(h)


@torch.library.custom_op("effects::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


@look.register_fake
def _(x):
    return x.new_empty(())


@torch.library.custom_op("effects::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    LOG.append(round(x.sum().item(), 3))


@note.register_fake
def _(x):
    return None


if hasattr(note, "register_effect"):
    note.register_effect(torch._library.effects.EffectType.ORDERED)


@torch.compiler.allow_in_graph
def increased_by_function(x):
    x += 1
    return x.sum()


@torch.compiler.allow_in_graph
def sum_by_function(x):
    return x.sum()


KEPT = torch.randn(16)


@torch.fx.wrap
def write_to_kept(y):
    KEPT.add_(y.sum())


class Closed(nn.Module):
    """A module that symbolic tracing does not open."""

    __module__ = "torch.nn.closed"

    def forward(self, state, y):
        state.add_(y.sum())


class Increase(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1.0)

    @staticmethod
    def backward(ctx, grad):
        return grad


def assign(x, key, value):
    x[key] = value


def assign_data(x, value):
    x.data = value


def augmented(name):
    scope = {}
    exec(f"def write(x, b, w):\n    x {name} 0.5", scope)
    return scope["write"]


def augmented_by_sigmoid(h):
    h *= torch.sigmoid(h)
    return h


def in_region(body):
    """A write under autocast, in a graph of its own in some versions of torch."""

    def write(x, b, w):
        with torch.autocast("cpu", torch.bfloat16):
            body(x)

    return write


# What happens between the layers to the input x, with b and w beside it.
WRITES = {
    **{name: augmented(name) for name in ("+=", "-=", "*=", "/=", "//=", "%=", "**=")},
    **{
        name: lambda x, b, w, name=name: getattr(x, name)(0.5)
        for name in ("__iadd__", "__imul__", "__isub__", "__itruediv__", "add_", "fill_", "sub_")
    },
    "sin_": lambda x, b, w: torch.sin_(x),
    "zero_": lambda x, b, w: x.zero_(),
    "clamp_": lambda x, b, w: torch.clamp_(x, 0.1, 0.2),
    "copy_": lambda x, b, w: x.copy_(b),
    "addmm_": lambda x, b, w: x.addmm_(b, w),
    "masked_fill_": lambda x, b, w: x.masked_fill_(b > 0, 1.0),
    "index_add_": lambda x, b, w: x.index_add_(0, torch.arange(4), b),
    "index_put_": lambda x, b, w: x.index_put_((torch.arange(2),), b[:2]),
    "scatter_": lambda x, b, w: x.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 2.0),
    "init": lambda x, b, w: nn.init.constant_(x, 0.3),
    "setitem": lambda x, b, w: assign(x, 0, 7.0),
    "setitem of a slice": lambda x, b, w: assign(x, slice(1, 3), b[1:3]),
    "setitem of a mask": lambda x, b, w: assign(x, b > 0, 1.0),
    "one of a list": lambda x, b, w: torch._foreach_add_([b.clone(), x], 1.0),
    "a list by a list": lambda x, b, w: torch._foreach_mul_([x], [b]),
    "a list copied": lambda x, b, w: torch._foreach_copy_([x], [b]),
    "a view": lambda x, b, w: x.view(-1).mul_(2.0),
    "a transpose": lambda x, b, w: x.T.add_(1.0),
    "a row": lambda x, b, w: x.unbind()[1].zero_(),
    "a chunk": lambda x, b, w: x.chunk(2, 1)[1].zero_(),
    "a diagonal": lambda x, b, w: x.diagonal().fill_(2.0),
    "a view by strides": lambda x, b, w: x.as_strided((2, 2), (8, 1)).fill_(3.0),
    "a detached view": lambda x, b, w: x.detach().mul_(2.0),
    "data": lambda x, b, w: x.data.mul_(2.0),
    "other data": lambda x, b, w: assign_data(x, b * 2),
    "relu": lambda x, b, w: F.relu(x, inplace=True),
    "relu_": lambda x, b, w: torch.relu_(x),
    "leaky relu": lambda x, b, w: F.leaky_relu(x, 0.2, True),
    "threshold": lambda x, b, w: F.threshold(x, 0.0, 0.5, True),
    "module in place": lambda x, b, w: nn.Hardtanh(inplace=True)(x),
    "dropout": lambda x, b, w: F.dropout(x, 1.0, True, True),
    "out": lambda x, b, w: torch.add(b, 1.0, out=x),
    "out of a product": lambda x, b, w: torch.mm(b, w, out=x),
    "out of a list": lambda x, b, w: torch.cat([b[:2], b[2:]], out=x),
    "one of several out": lambda x, b, w: torch.sort(
        b, out=(x, torch.empty(4, 8, dtype=torch.int64))
    ),
    "packet": lambda x, b, w: torch.ops.effects.increase(x),
    "overload": lambda x, b, w: torch.ops.effects.increase.default(x),
    "overload by keyword": lambda x, b, w: torch.ops.effects.increase.default(x=x),
    "packet of a list": lambda x, b, w: torch.ops.effects.increase_all([b.clone(), x]),
    "packet of aten": lambda x, b, w: torch.ops.aten.add_(x, b),
    "overload of a list": lambda x, b, w: torch.ops.aten._foreach_neg_.default([x]),
    "custom operator's second": lambda x, b, w: torch.ops.effects.save(b, x),
    "function in the graph": lambda x, b, w: increased_by_function(x),
    "checkpoint": lambda x, b, w: checkpoint(lambda t: t.mul_(2).sum(), x, use_reentrant=False),
    "checkpoint of a view": lambda x, b, w: checkpoint(
        lambda t: t.view(-1), x, use_reentrant=False
    ).mul_(2.0),
    "checkpoint within": lambda x, b, w: checkpoint(
        lambda t: checkpoint(lambda s: s[:2].neg_().sum(), t, use_reentrant=False),
        x,
        use_reentrant=False,
    ),
    "checkpoint, captured": lambda x, b, w: checkpoint(
        lambda t: t.sum() + x.mul_(3).sum(), b, use_reentrant=False
    ),
    "checkpoint with a packet": lambda x, b, w: checkpoint(
        lambda t: (torch.ops.effects.increase(t), t.sum())[1], x, use_reentrant=False
    ),
    "autograd.Function": lambda x, b, w: Increase.apply(x),
    "autocast": in_region(lambda x: x.mul_(2.0)),
    "compiled region": lambda x, b, w: torch.compiler.nested_compile_region(
        lambda t: t.add_(1.0).sum()
    )(x),
}

# The same with what leaves x alone.
NO_WRITES = {
    "nothing": lambda x, b, w: None,
    "copy": lambda x, b, w: x.clone().add_(1.0),
    "another": lambda x, b, w: b.mul_(2.0),
    "a list of others": lambda x, b, w: torch._foreach_add_([b], [x]),
    "augmented other": lambda x, b, w: b.__iadd__(x),
    "out": lambda x, b, w: torch.add(x, 1.0, out=b),
    "packet": lambda x, b, w: torch.ops.effects.save(x, b),
    "operator": lambda x, b, w: torch.ops.effects.look(x),
    "function in the graph": lambda x, b, w: sum_by_function(x),
    "checkpoint": lambda x, b, w: checkpoint(lambda t: (t * 2).sum(), x, use_reentrant=False),
    "checkpoint that writes to what it made": lambda x, b, w: checkpoint(
        lambda t: (t * 2).add_(1.0).sum(), x, use_reentrant=False
    ),
    "not in place": lambda x, b, w: F.relu(x, inplace=False),
    "assertion on sizes": lambda x, b, w: torch._check(x.size(0) > 1),
    "effectful operator": lambda x, b, w: torch.ops.effects.note(x),
}


def arguments():
    torch.manual_seed(0)
    return torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8)


def between(statement):
    def program(x, b, w):
        h = x @ UP.t()
        statement(x, b, w)
        return F.relu(h) @ DOWN.t()

    return program


def compared(program, *args):
    """The sites of a program that gives eager's results, writes and log."""
    LOG.clear()
    theirs = [arg.clone() for arg in args]
    with torch.no_grad():
        expected = program(*theirs)
        logged = list(LOG)
        LOG.clear()
        ours = [arg.clone() for arg in args]
        recorder, result = record(program, *ours)
    assert list(LOG) == logged
    torch.testing.assert_close(result, expected, equal_nan=True)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    return [(site.rewritten, None if site.rewritten else site.reason) for site in recorder.sites]


@pytest.mark.parametrize("name", WRITES)
def test_a_site_is_left_alone_whose_input_is_written_to(name):
    sites = compared(between(WRITES[name]), *arguments())
    # Where Dynamo breaks the graph there is no site.
    assert sites in ([(False, "mutated")], [(False, "mode-change")], [])


@pytest.mark.parametrize("name", NO_WRITES)
def test_a_site_is_fused_whose_input_is_read_only(name):
    assert compared(between(NO_WRITES[name]), *arguments()) == [(True, None)]


def test_inputs_that_share_memory_are_told_apart_from_those_that_do_not():
    def program(x, v):
        h = x @ UP.t()
        v.mul_(2.0)
        return F.relu(h) @ DOWN.t()

    x = torch.randn(4, 8)
    assert record(program, x, x.view(-1))[0].sites[0].reason == "mutated"
    assert record(program, x, torch.randn(32))[0].sites[0].rewritten


# What reads the hidden value h beside the last layer; b is 4 × 16.
READERS = {
    "packet that copies": lambda h, b: torch.ops.effects.save(h, b),
    "copy_": lambda h, b: b.copy_(h),
    "setitem": lambda h, b: assign(b, slice(None), h),
    "out": lambda h, b: torch.add(h, 1.0, out=b),
    "a list": lambda h, b: torch._foreach_copy_([b], [h]),
    "effectful operator": lambda h, b: torch.ops.effects.note(h),
    "operator": lambda h, b: b.add_(torch.ops.effects.look(h)),
    "assertion on values": lambda h, b: torch._assert_async((h < 1e9).all()),
    "function in the graph": lambda h, b: b.add_(sum_by_function(h)),
    "checkpoint": lambda h, b: b.add_(checkpoint(torch.sum, h, use_reentrant=False)),
    "data": lambda h, b: b.copy_(h.data),
}


@pytest.mark.parametrize("name", READERS)
def test_a_site_is_left_alone_whose_hidden_value_is_read(name):
    def program(x, b):
        h = x @ UP.t()
        READERS[name](h, b)
        return F.relu(h) @ DOWN.t()

    sites = compared(program, torch.randn(4, 8), torch.randn(4, 16))
    assert sites == [(False, "hidden-escapes")]


SIZES = {
    "view": lambda h: h.view(h.size(0), -1),
    "shape": lambda h: h.reshape(*h.shape[:-1], 16),
    "check": lambda h: (torch._check(h.size(0) < 99), h)[1],
    "len": lambda h: h.view(len(h), h.numel() // len(h)),
    "broadcast": lambda h: h.view(torch.broadcast_shapes(h.shape, h.shape[-1:])),
    "promote": lambda h: h.to(torch.promote_types(h.dtype, torch.bfloat16)),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_of_the_hidden_value_may_be_read(name, dynamic):
    def program(x):
        return F.relu(SIZES[name](x @ UP.t())) @ DOWN.t()

    x = torch.randn(4, 8)
    recorder, result = record(program, x, dynamic=dynamic)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, program(x))


# Results that are stored in a tensor of the caller: b is 4 × 16, c is 4 × 8.
OUTS = {
    "first layer": lambda x, b, c: F.relu(torch.mm(x, UP.t(), out=b)) @ DOWN.t(),
    "first layer, matmul": lambda x, b, c: F.relu(torch.matmul(x, UP.t(), out=b)) @ DOWN.t(),
    "activation": lambda x, b, c: torch.sigmoid(x @ UP.t(), out=b) @ DOWN.t(),
    "clamp": lambda x, b, c: torch.clamp(x @ UP.t(), min=0.0, out=b) @ DOWN.t(),
    "product": lambda x, b, c: torch.mul(h := x @ UP.t(), h.sigmoid(), out=b) @ DOWN.t(),
    "gelu": lambda x, b, c: torch._C._nn.gelu(x @ UP.t(), out=b) @ DOWN.t(),
    "packet": lambda x, b, c: torch.ops.aten.tanh(x @ UP.t(), out=b) @ DOWN.t(),
    "last layer": lambda x, b, c: torch.mm(F.relu(x @ UP.t()), DOWN.t(), out=c),
    "last layer, addmm": lambda x, b, c: torch.addmm(
        DOWN[:, 0], F.relu(x @ UP.t()), DOWN.t(), out=c
    ),
    "made here": lambda x, b, c: (
        h := x.new_zeros(4, 16),
        F.relu(torch.mm(x, UP.t(), out=h)) @ DOWN.t(),
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_a_site_that_stores_in_a_given_tensor_is_left_alone(name):
    sites = compared(OUTS[name], torch.randn(4, 8), torch.randn(4, 16), torch.randn(4, 8))
    assert sites == [(False, "out-argument")]


def test_a_sum_that_is_stored_in_a_given_tensor_stays():
    def program(x, c):
        return torch.add(F.relu(x @ UP.t()) @ DOWN.t(), x, out=c)

    assert compared(program, torch.randn(4, 8), torch.randn(4, 8)) == [(True, None)]


@pytest.mark.parametrize("first", [True, False])
def test_a_sum_in_place_stays_where_it_is_not_to_the_result(first):
    def program(x):
        r = x * 2
        y = F.relu(x @ UP.t()) @ DOWN.t()
        total = y.add_(r) if first else r.add_(y)
        return total, r

    assert compared(program, torch.randn(4, 8)) == [(True, None)]


OWN = {
    "relu_": lambda h: h.relu_(),
    "augmented": lambda h: augmented_by_sigmoid(h),
    "in place": lambda h: F.silu(h, inplace=True),
    "out": lambda h: torch.tanh(h, out=h),
}


@pytest.mark.parametrize("name", OWN)
def test_an_activation_may_write_to_what_the_site_made(name):
    sites = compared(lambda x: OWN[name](x @ UP.t()) @ DOWN.t(), torch.randn(4, 8))
    assert sites == [(True, None)]


@pytest.mark.parametrize("name", OWN)
def test_an_activation_may_not_write_to_what_somebody_else_sees(name):
    def program(x, b):
        h = torch.mm(x, UP.t(), out=b)
        return OWN[name](h) @ DOWN.t()

    sites = compared(program, torch.randn(4, 8), torch.randn(4, 16))
    assert [fused for fused, _ in sites] == [False]


def test_tensors_of_the_graph_are_as_they_were_after_observation():
    def program(x, b):
        y = x * 1
        h = y @ UP.t()
        y.t_()
        b.add_(x[x > 0].sum())
        return F.relu(h) @ DOWN.t(), y

    def backend(graph_module, example_inputs):
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]

        def state():
            return [
                (t.shape, t.stride(), t._version, t.untyped_storage()._cdata, t.requires_grad)
                for t in tensors
            ]

        environment = torch._guards.detect_fake_mode(tensors).shape_env
        known = (state(), len(environment.guards), dict(environment.var_to_range))
        dependence = Dependence(graph_module.graph)
        writing = {n.name for n in graph_module.graph.nodes if dependence.effect(n).writes}
        assert writing >= {"t_", "add_"}
        assert known == (state(), len(environment.guards), dict(environment.var_to_range))
        return graph_module.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(program, backend=backend, dynamic=True)(torch.randn(4, 8), torch.randn(4, 8))


def test_sizes_that_change_in_place_leave_alone_who_read_the_tensor():
    def program(x):
        y = x * 1
        h = y @ UP.t()
        result = F.relu(h) @ DOWN.t()
        return result, y.t_()

    assert compared(program, torch.randn(4, 8)) == [(False, "mutated")]


def test_a_write_to_the_old_memory_of_a_tensor_is_seen():
    def program(x):
        y = x * 1
        view = y.view(-1)
        h = y @ UP.t()
        view.mul_(2.0)
        result = F.relu(h) @ DOWN.t()
        y.data = x + 1
        return result, y

    assert [fused for fused, _ in compared(program, torch.randn(4, 8))] != [True]


class Traced(nn.Module):
    def __init__(self, statement):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("state", torch.randn(16))
        self.statement, self.closed = statement, Closed()

    def forward(self, x):
        y = x * 2
        h = F.linear(x, self.up.weight, self.state)
        self.statement(self, y)
        return self.down(F.relu(h)) + y


TRACED = {
    "buffer": (lambda m, y: m.state.add_(y.sum()), False),
    "buffer by an operator": (lambda m, y: torch.ops.effects.save(y.view(-1)[:16], m.state), False),
    "buffer in a list": (lambda m, y: torch._foreach_mul_([m.state], y.sum()), False),
    "buffer of which a view is kept": (lambda m, y: m.state[:2].mul_(y.sum()), False),
    "weight": (lambda m, y: m.up.weight.mul_(y.sum()), False),
    "module of its own": (lambda m, y: m.closed(m.state, y), False),
    "another": (lambda m, y: y.add_(1.0), True),
    "nothing": (lambda m, y: None, True),
}


@pytest.mark.parametrize("name", TRACED)
def test_symbolically_traced_graphs_are_observed_alike(name):
    statement, fused = TRACED[name]
    x = torch.randn(4, 8)
    with torch.no_grad():
        model = Traced(statement)
        traced = torch.fx.symbolic_trace(model)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        result = fuse(traced, [x.clone()], ALWAYS)
        torch.testing.assert_close(dict(model.state_dict()), state)  # planning writes to nothing
        expected, after = model(x.clone()), model.state.clone()
        model.load_state_dict(state)
        torch.testing.assert_close(result.graph_module(x.clone()), expected)
        torch.testing.assert_close(model.state, after)
    assert [site.rewritten for site in result.sites] == [fused]


def test_a_function_of_its_own_may_write_to_what_it_is_not_given():
    def program(x):
        h = F.linear(x, UP, KEPT)
        write_to_kept(x)
        return F.linear(F.relu(h), DOWN)

    before = KEPT.clone()
    traced = torch.fx.symbolic_trace(program)
    result = fuse(traced, [torch.randn(4, 8)], ALWAYS)
    assert [(site.rewritten, site.reason) for site in result.sites] == [(False, "mutated")]
    torch.testing.assert_close(KEPT, before)


def test_a_write_after_the_site_is_one_before_the_backward_pass_in_traced_graphs_too():
    def program(x, up, down):
        y = F.linear(F.gelu(F.linear(x, up)), down)
        x.mul_(0.5)
        return y

    down = torch.randn(8, 16, requires_grad=True)
    traced = torch.fx.symbolic_trace(program)
    result = fuse(traced, [torch.randn(4, 8), torch.randn(16, 8), down], ALWAYS)
    assert [site.reason for site in result.sites] == ["mutated"]
