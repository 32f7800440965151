"""What random programs do beside computing: writes of all spellings, logs, and nested bodies.

``{h}`` and ``{b}`` are values of H features, ``{v}`` is one of D, ``{m}`` a mask or whole number.
``kept`` and ``total`` are buffers of H and D features that require no gradient.
"""

from __future__ import annotations

HOOK = "hook({h})"
# To a value of H features, or to an input or parameter.
WRITES = (
    "{h}.add_(1.0)",
    "{h}[..., 0] = 1.0",
    "{h}[:1].zero_()",
    "{h}.view(-1).mul_(2)",
    "{h}.copy_({h} + 1)",
    "{v}.mul_(0.9)",
    "{v}[..., :1].add_(1)",
    "down.mul_(1.01)",
    "bias.add_(0.1)",
    "scale.mul_(0.5)",
    "up.t().mul_(0.5)",
    "{v}.detach().add_(0.5)",
    "{v}.data.mul_(1.5)",
    "{v}.T.add_(0.5)",
    "up.index_fill_(0, torch.tensor([0]), 0.5)",
    "{v}.masked_fill_({v} > 0.5, 0.25)",
    "{v}.index_put_((torch.tensor([0]),), torch.tensor(0.5, dtype={v}.dtype))",
    "torch.Tensor.add_({v}, 1.0)",
    "torch.ops.aten.mul_.Tensor({v}, {v})",
    "torch.ops.aten.add_({h}, 1)",
    "torch.nn.init.constant_(bias, 0.5)",
    "torch.relu_({v})",
    "F.threshold_({v}, 0.1, 0.2)",
    "F.hardtanh({v}, inplace=True)",
    HOOK,
    HOOK,
)
# Assignments that write, and those that make a new value of the same name.
_ASSIGNED = (
    *("{} += 0.5", "{} -= 0.25", "{} *= 1.5", "{} /= 2", "{} //= 0.3", "{} %= 0.3", "{} **= 2"),
    *("{} += {}", "{} *= {}.sigmoid()", "{} -= {}.mean()", "{} /= 1 + {}.abs()"),
)
AUGMENTED = (
    *(text.replace("{}", name) for text in _ASSIGNED for name in ("{h}", "{v}")),
    *("up *= 0.5", "down += 0.1", "bias -= 0.1", "scale **= 2", "x %= 0.4", "x //= 0.4"),
    *("{h} @= square", "{v} = {v} + 1", "{h} += bias", "{h} *= scale"),
)
OF_MASKS = (
    *("{m} &= {h} > 0.5", "{m} |= {h} > 1", "{m} ^= {h} > 0", "{m} <<= 1", "{m} >>= 1"),
    *("{m} &= 3", "{m} |= 4", "{m} ^= 1", "{m} += 1", "{m} *= 2", "{m} -= 1", "{m} //= 2"),
    *("{m} %= 2", "{m} **= 2", "{m}.logical_not_()", "{m}.__iand__({h} > 0)", "{m}[:1] = True"),
    *("{m}.__ior__({h} > 1)", "{m}.__ixor__({h} > 1)", "{m}.__ilshift__(1)", "{m}.zero_()"),
)
DUNDERS = (
    *("{v}.__iadd__(1.0)", "{v}.__isub__({v})", "{h}.__imul__(0.5)", "{v}.__itruediv__(2)"),
    *("{v}.__ifloordiv__(0.3)", "{v}.__imod__(0.3)", "{h}.__ipow__(2)", "{v}.__setitem__(0, 1.0)"),
    *("torch.Tensor.__iadd__({v}, 0.5)", "{h}.__setitem__((..., 0), 1.0)", "x.__iadd__({v})"),
)
FOREACH = (
    "torch._foreach_add_([{v}, {h}], 1.0)",
    "torch._foreach_mul_(({v},), 0.5)",
    "torch._foreach_mul_([{v}, {v}.detach().clone()], [{v}, {v}])",
    "torch._foreach_tanh_([{h}])",
    "torch._foreach_zero_([bias])",
    "torch._foreach_copy_([kept], [{h}])",
    "torch._foreach_lerp_([{v}], [{v} + 1], 0.3)",
    "torch._foreach_addcmul_([{h}], [{h}], [{h}], 0.5)",
    "torch._foreach_clamp_max_([up, down], 0.5)",
    "torch._foreach_neg_([up])",
)
OUT = (
    "torch.mul({v}, 0.5, out={v})",
    "torch.add({h}, 1, out=kept)",
    "torch.sigmoid({h}, out=kept)",
    "torch.tanh({h}, out={h})",
    "torch.clamp({v}, -0.5, 0.5, out=x)",
    "torch.ops.aten.add.out({v}, {v}, out={v})",
    "torch.ops.aten.neg({v}, out={v})",
    "torch.max({v}, -1, out=(total[..., 0], torch.empty({v}.shape[:-1], dtype=torch.int64)))",
    "torch.add(bias, 1, out=bias)",
    "torch.where({h} > 0, {h}, 0.5 * {h}, out=kept)",
)
BUFFERED = (
    "kept.copy_({h})",
    "kept[...] = {h}",
    "kept[:1] = {h}[:1]",
    "kept += {h}",
    "kept.mul_(0).add_({h})",
    "kept.set_({h}.detach().clone())",
    "kept.lerp_({h}.detach(), 0.5)",
    "kept.view(-1).copy_({h}.reshape(-1))",
    "total.copy_({v})",
    "total[..., :1].copy_({v}[..., :1])",
    "scale.copy_({h}.detach().reshape(-1, {H})[0])",
)
OPERATORS = (
    *("ops.grow({v})", "ops.grow.default({v})", "ops.grow({h})", "ops.grow({h}.view(-1))"),
    *("ops.keep({h}, kept)", "ops.keep.default({h}, kept)", "ops.keep({v}, total)"),
    *("ops.keep(x=scale, kept=bias)", "ops.shrink_all([{v}, {h}])", "ops.shrink_all.default([up])"),
    *(
        "ops.note({h})",
        "ops.note.default({h})",
        "ops.note({v})",
        "ops.note(x={h})",
        "ops.note(kept)",
    ),
    *("ops.grow(up.t())", "ops.grow({v}.detach())"),
)
STATEMENTS = (AUGMENTED, DUNDERS, FOREACH, OUT, BUFFERED, BUFFERED, OPERATORS, OPERATORS)

# Calls that write and whose result goes on: values of H features ...
WRITING_VALUES = (
    "torch.sigmoid({h}, out=kept)",
    "torch.mul({h}, {h}.sigmoid(), out=kept)",
    "torch.clamp({h}, min=0, out={h})",
    "torch._C._nn.gelu({h}, out=kept)",
    "torch.add({h}, bias, out=kept)",
    "torch.clamp_min({h}, 0, out=torch.empty_like({h}))",
    "torch.mm({v}, up.t(), out=kept)",
    "torch.matmul({v}, up.t(), out=kept)",
    "torch.addmm(bias, {v}, up.t(), out=kept)",
    "torch.matmul({v}, up.t(), out=torch.empty_like(kept))",
    "torch.ops.aten.mm.out({v}, up.t(), out=kept)",
    "torch._C._nn.linear({v}, up, bias, out=kept)",
    "kept.copy_({h})",
    "kept.add_({h})",
    "kept.addmm_({v}, up.t())",
    "{h}.__iadd__(bias)",
    "{h}.__imul__({h}.sigmoid())",
    "{h}.__rsub__(1)",
    "{h}.__mul__({h}.__neg__())",
    "{h}.__pow__(2)",
    "{h} + ops.grow_and_sum({v})",
    "{h} + ops.grow_and_sum({h})",
    "ops.tripled({h})",
    "ops.tripled.default(F.gelu({h}))",
    "torch._foreach_mul([{h}], 2.0)[0]",
    "torch._foreach_sigmoid([{h}, {v}])[0]",
    "torch._foreach_add([{h}], [{h}.sigmoid()], alpha=2)[0]",
    "torch._foreach_maximum([{h}], 0.0)[0]",
    "torch._foreach_pow([{h}, {v}], 2)[0]",
    "Steep.apply({h})",
    "Doubled.apply({h})",
    "Steep.apply(F.gelu({h}))",
    "checkpoint(F.gelu, {h}, use_reentrant=False)",
    "checkpoint(F.silu, {h}, use_reentrant=True)",
    "checkpoint(lambda t: t.mul_(2).sigmoid(), {h}, use_reentrant=False)",
    "checkpoint(lambda t: (kept.copy_(t), t.sigmoid())[1], {h}, use_reentrant=False)",
    "checkpoint(lambda t: (ops.note(t), t.tanh())[1], {h}, use_reentrant=False)",
    "checkpoint(lambda t: (up.mul_(0.5), t.tanh())[1], {h}, use_reentrant=False)",
    "{h} + checkpoint(lambda t: t.mul_(2).sum(), {v}, use_reentrant=False)",
    "{h} + checkpoint(lambda t: ops.grow(t) or t.mean(), {v}, use_reentrant=False)",
    "cond({h}.sum() > 0, lambda t: F.gelu(t), lambda t: t * 2, ({h},))",
    "cond({v}.sum() > 0, lambda t: t.add(1), lambda t: t.clone(), ({h},))",
    "cond({v}.sum() > 0, lambda t: (kept.copy_(t), t.tanh())[1], lambda t: t * 2, ({h},))",
    "cond({v}.sum() < 9, lambda t, v: v.add_(1) @ up.t() + t, lambda t, v: t + 1, ({h}, {v}))",
    "while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, F.silu(t)), "
    "(torch.zeros((), dtype=torch.int64), {h}))[1]",
    "while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, (kept.add_(1), F.silu(t))[1]), "
    "(torch.zeros((), dtype=torch.int64), {h}))[1]",
)
# ... and of D.
WRITING_RESULTS = (
    "torch.mm({h}, down.t(), out=total)",
    "torch.matmul({h}, down.t(), out=total)",
    "torch.matmul({h}, down.t(), out={v})",
    "torch.addmm({v}, {h}, down.t(), out=total)",
    "torch.addmm(bias[:{D}], {h}, down.t(), out=total)",
    "torch._C._nn.linear({h}, down, out=total)",
    "torch.add({v}, F.linear({h}, down), out=total)",
    "torch.add(F.linear({h}, down), {v}, alpha=2, out={v})",
    "torch.einsum('...i,oi->...o', {h}, down).add_({v}).mul_(2)",
    "total.copy_(F.linear({h}, down))",
    "total.add_(F.linear({h}, down))",
    "total.addmm_({h}, down.t())",
    "{v}.__iadd__(F.linear({h}, down))",
    "F.linear({h}, down).__iadd__({v})",
    "torch._foreach_add([F.linear({h}, down)], [{v}])[0]",
    "F.linear(ops.tripled({h}), down)",
    "Steep.apply(F.linear({h}, down))",
    "Layers.apply({v}, up, down)",
    "Layers.apply({v}, up, down) + F.linear({h}, down)",
    "cond({h}.sum() > 0, lambda t: F.linear(F.gelu(t), down), lambda t: t[..., :{D}] * 2, ({h},))",
    "cond({v}.sum() > 0, lambda v: F.linear(F.gelu(F.linear(v, up)), down), "
    "lambda v: v.clone(), ({v},))",
    "while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, F.linear(F.relu(F.linear(t, up)), down)), "
    "(torch.zeros((), dtype=torch.int64), {v}))[1]",
    "checkpoint(lambda v: F.linear(F.gelu(F.linear(v.add_(1), up)), down), {v}, "
    "use_reentrant=False)",
    "checkpoint(lambda t: F.linear(F.gelu(t), down).add_(1), {h}, use_reentrant=False)",
)
