"""What random programs are made of: statements as templates, with names and sizes to fill in.

``{v}`` is a value of D features, ``{h}``, ``{a}`` and ``{b}`` are values of H features, ``{p}`` one
of 2 H, and ``{w}`` is a weight of shape (H, D). Eager PyTorch refuses some combinations; those
programs are left out.
"""

from __future__ import annotations

ARGUMENTS = {
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
WEIGHTS = ("up", "up", "other")

ACTIVATIONS = (
    "F.gelu({h})",
    "F.gelu({h}, approximate='tanh')",
    "F.silu({h})",
    "F.relu({h}) ** 2",
    "torch.sigmoid({h}) * {h}",
    "{h} * torch.sigmoid(1.702 * {h})",
    "{h} ** 2",
    "torch.where({h} > 0, {h}, 0.1 * {h})",
    "torch.where({h} > torch.zeros_like({h}), {h}, torch.zeros_like({h}))",
    "torch.max({h}, torch.tensor(0.1, dtype={h}.dtype))",
    "{h}.masked_fill({h} < 0, 0.5)",
    "{h}.clamp(-1, 1)",
    "F.softshrink({h}, 0.2)",
    "F.hardshrink({h}, 0.2)",
    "{h} * 2",
    "-{h}",
    "{h} + {h}.mean()",
    "F.layer_norm({h}, ({H},))",
    "{h}.detach()",
    "{h}.clone()",
    "(1 + {h}.abs()).sqrt()",
    "F.softplus({h}) - 0.5",
    "torch.tanh({h} / 4) * 4",
    # In place.
    "F.elu({h}, inplace=True)",
    "F.relu({h}, inplace=True)",
    "F.relu_({h})",
    "F.silu({h}, inplace=True)",
    "{h}.tanh_()",
    "F.leaky_relu_({h})",
    "{h}.mul_(0.5)",
    "{h}.clamp_(min=0)",
    # Parameters and other values inside of the activation.
    "{h} + bias",
    "{h} * scale",
    "scale * F.relu({h}) ** 2 + bias",
    "alpha * F.relu({h}) ** 2 + alpha",
    "{h} * torch.sigmoid(scale * {h})",
    "{h} * torch.sigmoid(beta * {h})",
    "torch.where({h} > beta, {h}, {h} * scale)",
    "F.prelu({h}, alpha)",
    "F.gelu({h}) * scale.exp()",
    "{h}.mul_(scale)",
    "{h} * scale[None]",
    "{h} / (1 + beta.abs())",
    "({h} * scale.float()).to({h}.dtype)",
    "{h} * x[..., :1]",
    "{h} * {h}.sigmoid().detach()",
    "{h} * torch.ones_like({h})[..., :1]",
    # Batch norm in evaluation, of rows and of whatever has H for its second dimension; in training.
    "F.batch_norm({h}, bias.detach(), scale.detach().exp(), scale, bias)",
    "F.batch_norm({h}.reshape(-1, {H}), bias.detach(), scale.detach().exp()).view({h}.shape)",
    "F.batch_norm({h}.transpose(1, -1), bias.detach(), scale.detach().exp()).transpose(1, -1)",
    "F.batch_norm({h}, None, None, scale, bias, True)",
    # Dropout: p = 0 and p = 1 are not random.
    "F.dropout({h}, 0.5, training=False)",
    "F.dropout({h}, 0.0)",
    "F.dropout({h}, 1.0)",
    "F.dropout(F.gelu({h}), 1.0, inplace=True)",
    "F.dropout({h}, 0.5)",
    "F.dropout(F.relu({h}), p=0.1)",
    # Conversions.
    "{h}.double().to({h}.dtype)",
    "{h}.float().to({h}.dtype)",
    "{h}.bfloat16().to({h}.dtype)",
    "F.gelu({h}.float()).type_as({h})",
    "F.silu({h}.half()).to({h}.dtype)",
    "(F.gelu({h}.float()) * 2).to({h})",
    # Nested graphs.
    "checkpoint(F.gelu, {h}, use_reentrant=False)",
    "checkpoint(F.silu, {h}, use_reentrant=True)",
    # Transposes around the activation.
    "F.gelu({h}.transpose(0, -1)).transpose(0, -1)",
    "F.relu({h}.mT).mT",
    "{h}.movedim(-1, 0).sigmoid().movedim(0, -1)",
    "F.gelu({h}.mT, approximate='tanh').contiguous().mT",
)
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
HOOK = "hook({h})"
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
    HOOK,
    HOOK,
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
