"""What random programs are made of: layers as templates, with names and sizes to fill in.

``{v}`` is a value of D features, ``{h}``, ``{a}`` and ``{b}`` are values of H features, ``{p}`` one
of 2 H, and ``{w}`` is a weight of shape (H, D). Eager PyTorch refuses some combinations; those
statements are left out. Activations stand in ``program_activations.py``, what writes, logs or nests
in ``program_effects.py``.
"""

from __future__ import annotations

ARGUMENTS = {
    "gate": ("H", "D"),
    "up": ("H", "D"),
    "other": ("H", "D"),
    "packed": ("2 * H", "D"),
    "down": ("D", "H"),
    "square": ("H", "H"),
    "low_a": ("2", "D"),
    "low_b": ("H", "2"),
    "bias": ("H",),
    "scale": ("H",),
    "alpha": ("1",),
    "beta": (),
}
# Python numbers, which are symbolic where sizes are.
NUMBERS = ("s", "r", "n")
WEIGHTS = ("up", "up", "other")

PRODUCTS = (
    "F.linear({v}, {w})",
    "F.linear({v}, {w}, bias)",
    "F.linear({v}, {w}, bias)",
    "{v} @ {w}.t()",
    "{v} @ {w}.T + bias",
    "torch.matmul({v}, {w}.mT)",
    "F.linear({v}, {w}).add_(bias)",
    "bias + torch.matmul({v}, {w}.transpose(0, 1))",
    "torch.einsum('...i,oi->...o', {v}, {w})",
    "torch.einsum('...i,io->...o', {v}, {w}.t()) + bias",
    "torch.addmm(bias, {v}.reshape(-1, {D}), {w}.t()).view(*{v}.shape[:-1], {H})",
    "torch.bmm({v}.reshape(1, -1, {D}), {w}.t()[None]).view(*{v}.shape[:-1], {H})",
    "F.linear({v}, {w} * 0.5)",
    "F.linear({v}, {w}.t().contiguous().t(), bias)",
    "F.linear({v}, down.t(), bias)",
    "F.linear({v}, {w}, beta.expand({H}))",
    # A gate that is only compared: it has no gradient.
    "(F.linear({v}, gate) > 0) * F.linear({v}, {w})",
    # Sizes of 1, and a second input, which may have other leading dimensions.
    "torch.einsum('...i,oi->...o', {v}[..., :1], {w})",
    "torch.einsum('...i,io->...o', {v}, {w}.t()[:1])",
    "torch.einsum('...i,i->...', {v}, {w}[0])[..., None].expand(*{v}.shape[:-1], {H})",
    "({v}.unsqueeze(-2) @ {w}.t()).squeeze(-2)",
    "torch.matmul({w}, {v}.unsqueeze(-1)).squeeze(-1)",
    "torch.addmm(beta, {v}.reshape(-1, {D}), {w}.t())",
    "torch.addmm(alpha, {v}.reshape(-1, {D}), {w}.t(), beta=s, alpha=r)",
    "torch.baddbmm(bias, {v}.reshape(1, -1, {D}), {w}.t()[None])[0]",
    "F.linear({v}[..., :1, :], {w}, bias)",
    "F.linear({v}[:1], {w}, bias)",
    "F.silu(F.linear({v}, {w})) * F.linear(z, other)",
    "F.linear(z, {w}) + F.linear({v}, other)",
    "F.linear(z + {v}, {w})",
    # Sums of linear layers.
    "F.linear({v}, {w}) + F.linear({v}, other)",
    "F.linear({v}, {w}, bias) + 2.0 * F.linear(F.linear({v}, low_a), low_b)",
    "torch.add({v} @ {w}.t(), F.linear(F.dropout({v}, 0.0), low_a) @ low_b.t(), alpha=0.5)",
    "F.linear(F.linear({v}, low_a), low_b)",
)
SQUARES = (
    "F.linear({h}, square)",
    "F.linear({h}, square, bias)",
    "{h} @ square",
    "{h} @ square.t() + bias",
    "torch.addmm(bias, {h}.reshape(-1, {H}), square).view({h}.shape)",
)
SPLITS = (
    "{p}.chunk(2, -1)",
    "{p}.chunk(2, dim=-1)[::-1]",
    "{p}.split({H}, -1)",
    "torch.split({p}, [{H}, {H}], dim=-1)",
    "torch.tensor_split({p}, 2, dim=-1)",
    "{p}[..., :{H}], {p}[..., {H}:]",
    "{p}[..., ::2], {p}[..., 1::2]",
    "{p}.narrow(-1, 0, {H}), {p}.narrow(-1, {H}, {H})",
    "{p}.unflatten(-1, (2, {H})).unbind(-2)",
    "{p}.view(*{p}.shape[:-1], {H}, 2).unbind(-1)",
    "{p}.view(*{p}.shape[:-1], 2, {H})[..., 0, :], {p}.view(*{p}.shape[:-1], 2, {H})[..., 1, :]",
    "{p}.reshape(-1, {H}, 2)[..., 1], {p}.reshape(-1, {H}, 2)[..., 0]",
    "{p}[..., {H} // 2 : {H} // 2 + {H}], {p}[..., :{H}]",
    "{p}[..., -{H}:], {p}[..., 1 : {H} + 1]",
)
JOINS = (
    "{a} * {b}",
    "{a} + {b}",
    "F.silu({a}) * {b}",
    "{b} * F.gelu({a})",
    "{a} - 2 * {b}",
    "F.silu({a}).mul_({b})",
    "torch.sigmoid({a}) * {b} + {a}",
    "F.silu({a}.clamp(max=1.0)) * ({b}.clamp(-1, 1) + 1)",
    "F.gelu({a} * scale) * {b}",
)
DOWN = (
    "F.linear({h}, down)",
    "F.linear({h}, down)",
    "F.linear({h}, down)",
    "{h} @ down.t()",
    "{h} @ down.t() + bias[:{D}]",
    "{h} @ down.t() + alpha",
    "torch.einsum('...i,io->...o', {h}, down.t()[:1])",
    "torch.einsum('...i,oi->...o', {h}[..., :1], down)",
    "({h}.unsqueeze(-2) @ down.t()).squeeze(-2)",
    "torch.matmul(down, {h}[..., None])[..., 0]",
    "F.linear({h}, down, bias[:{D}])",
    "F.linear({h}, up.t())",
    "torch.einsum('...i,oi->...o', {h}, down)",
    "torch.addmm(bias[:{D}], {h}.flatten(0, -2), up).unflatten(0, {h}.shape[:-1])",
    "F.linear({h}, down).add_({v})",
    "F.linear({h}, down) + F.linear(F.linear({h}, low_b.t()), low_a.t())",
)
# What comes before a first layer.
NORMS = (
    "F.layer_norm({v}, ({D},))",
    "F.layer_norm({v}, ({D},), down[:, 0], down[:, -1])",
    "F.layer_norm({v}, ({D},), down[:, 0], eps=0.1)",
    "torch.layer_norm({v}, [{D}], bias=down[:, 0])",
    "F.rms_norm({v}, ({D},), down[:, 0], 1e-3)",
    "torch.rms_norm({v}, ({D},))",
    "F.layer_norm({v}, {v}.shape)",
    "F.layer_norm({v}.clone(), ({D},))",
    "F.layer_norm({v}.float(), ({D},)).to({v}.dtype)",
    "F.normalize({v}, dim=-1)",
)
# What follows a last layer ``{y}``, (..., D).
SUMS = (
    "{v} + {y}",
    "{v} + {y}",
    "{y} + {v}",
    "torch.add({v}, {y}, alpha=1)",
    "{v}.add({y})",
    "{v} + F.dropout({y}, 0.1, training=False)",
    "{y}.add_({v})",
    "{v}.add_({y})",
    "torch.add({y}, {v}, alpha=0.5)",
    "{v} + {y}.contiguous()",
    "{v} + {y} + {y}",
    "{y} + {y}",
    "{v}[..., :1] + {y}",
    "{v}.expand(2, *{v}.shape)[0] + {y}",
    "{v}.double() + {y}",
    "{v}.clone() + {y}",
    "F.layer_norm({v} + {y}, ({D},))",
    "z + {y}",
    "{y} + z",
    "torch.add({y}, {v}, alpha=s)",
)
# Whole MLPs: (..., D) to (..., D).
BLOCKS = (
    "checkpoint(lambda v: F.linear(F.gelu(F.linear(v, up)), down), {v}, use_reentrant=False)",
    "checkpoint(lambda v: F.linear(F.silu(v @ up.t()) * (v @ other.t()), down), {v}, "
    "use_reentrant=True)",
    "checkpoint(lambda v: checkpoint(lambda u: F.relu(F.linear(u, up)), v, use_reentrant=False)"
    " @ down.t(), {v}, use_reentrant=False)",
    "F.linear(F.gelu(F.linear({v}, packed)), packed.t())",
    "F.linear(F.relu(F.linear(F.gelu(F.linear({v}, up)), square, bias)), down)",
    "F.linear(F.relu(F.linear(F.relu(F.linear(F.relu(F.linear({v}, up)), square)), square)), down)",
    "F.linear(F.silu(F.linear(F.silu(F.linear({v}, up)), down)) @ other.t(), down)",
    "torch.bmm(F.gelu(torch.bmm({v}.reshape(1, -1, {D}), up.t()[None])), down.t()[None])"
    ".view({v}.shape)",
    "torch.func.vmap(lambda row: F.linear(F.gelu(F.linear(row, up, bias)), down))({v})",
    "torch.stack([F.linear(F.gelu(F.linear(row, up)), down) for row in {v}.unbind(0)])",
    "torch.cat([F.linear(F.gelu(F.linear({v}, up)), down), {v}], -1)[..., :{D}]",
)
# Gradients that the program computes itself.
GRADIENTS = (
    "torch.autograd.grad(F.linear(F.gelu(F.linear({v}, up)), down).sum(), {v}, "
    "retain_graph=True)[0]",
    "torch.autograd.grad(F.linear(F.silu(F.linear({v}, up)), down).sum(), {v}, "
    "create_graph=True)[0]",
    "torch.func.grad(lambda v: F.linear(F.gelu(F.linear(v, up)), down).sum())({v})",
    "torch.func.jvp(lambda v: F.linear(F.relu(F.linear(v, up)), down), ({v},), ({v}.detach(),))[1]",
    "torch.func.vjp(lambda v: F.linear(F.gelu(F.linear(v, up)), down), {v})[1]({v}.detach())[0]",
)
# Images of D channels, as {i}; {k} is "[:, :, None, None]".
IMAGES = (
    "{v}.reshape(1, -1, 1, {D}).permute(0, 3, 1, 2)",
    "{v}.reshape(-1, 1, 1, {D}).permute(0, 3, 1, 2).contiguous()",
    "{v}.reshape(1, 1, -1, {D}).permute(0, 3, 1, 2).contiguous()",
    "{v}.reshape(1, -1, 1, {D}).movedim(-1, 1).contiguous(memory_format=torch.channels_last)",
)
CONVOLUTIONS = (
    "F.conv2d(F.gelu(F.conv2d({i}, up{k}, bias)), down{k})",
    "F.conv2d(F.relu(F.conv2d({i}, up{k}, bias), inplace=True), down{k}, bias[:{D}])",
    "F.conv2d(F.silu(F.conv2d({i}, up{k})) * F.conv2d({i}, other{k}), down{k})",
    "F.conv2d(F.glu(F.conv2d({i}, packed{k}), dim=1), down{k})",
    "F.conv2d(torch.mul(*F.conv2d({i}, packed{k}).chunk(2, 1)), down{k})",
    "F.conv2d(F.gelu(F.conv2d({i}, up{k}, padding=1)), down{k})[..., 1:-1, 1:-1]",
    "F.conv2d(F.gelu(F.conv2d({i}, up{k}) * scale{c}), down{k})",
    "F.conv2d(F.relu(F.batch_norm(F.conv2d({i}, up{k}), bias.detach(), scale.detach().exp(), "
    "scale, bias)), down{k})",
    "F.conv2d(F.gelu(F.linear({i}.permute(0, 2, 3, 1), up).permute(0, 3, 1, 2)), down{k})",
    "F.conv2d({i}, (down @ up){k})",
)
PIXELS = (
    "{i}.permute(0, 2, 3, 1).reshape({v}.shape)",
    "{i}.flatten(2).transpose(1, 2).reshape({v}.shape)",
)
RESHAPES = (
    "{h}[..., :{D}].repeat(*[1] * ({h}.dim() - 1), 2)",
    "{h}.reshape(-1, {H})",
    "{h}.reshape(*x.shape[:-1], {H})",
    "{h}.unflatten(-1, (4, {H} // 4)).flatten(-2)",
    "{h}.reshape(*{h}.shape[:-1], 4, {H} // 4)",
    "{h}.flatten()",
    "{h}.unsqueeze(0)",
    "{h}.squeeze(0)",
    "{h}.transpose(0, -1).contiguous().transpose(0, -1)",
    "{h}.transpose(0, 1)",
    "{h}.reshape(8, -1).reshape(-1, {H})",
    "{h}.contiguous()",
    "{h}.expand(2, *{h}.shape)",
    "{h}.flip(0)",
)
REGIONS = (
    "with torch.autocast('cpu', dtype=torch.bfloat16):",
    "with torch.autocast('cpu', dtype=torch.bfloat16):",
    "with torch.autocast('cpu', enabled=False):",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.inference_mode():",
)
