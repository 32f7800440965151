"""A site as it is reported to people."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.prenorms import Prenorm
from fusion_backend.fusion.residuals import Residual
from fusion_backend.fusion.settings import trains
from fusion_backend.fusion.sites import Site, SiteShape
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.names import module_stack, parameter_path, source_line
from fusion_backend.fusion.views.node import operation, tensor_of
from fusion_backend.fusion.views.operand import Entering
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.planner import Plan
from fusion_backend.planning.setting import rows_of
from fusion_backend.reasons import Refusal

_KINDS = {"scalar": "number", "vector": "vector"}


def describe(
    match: Match,
    decision: Plan | Refusal,
    target: Gpu | None = None,
    residual: Residual | None = None,
    prenorm: Prenorm | None = None,
) -> Site:
    """The public record of a site, and of what was decided for it (on ``target``, if given)."""
    result = tensor_of(match.result)
    first = match.sources[0]
    source = tensor_of(first.linear.input)
    assert result is not None
    assert source is not None
    chosen = decision if isinstance(decision, Plan) else None
    hidden = tuple(map(int, match.hidden_features))
    module = module_path([first.linear.node, match.down.node])
    return Site(
        form=match.form.name if match.form is not None else "unknown",
        activation=match.activation,
        module=module,
        shape=SiteShape(
            size_name(rows_of(source, first.linear.feature_dim)),
            int(first.linear.in_features),
            max(hidden),
            int(match.down.out_features),
        ),
        dtype=dtype_name(result.dtype),
        device=result.device.type if target is None else "cuda",
        fused=chosen is not None and chosen.refusal is None,
        plan=None if chosen is None else chosen.family,
        reason=_code(decision),
        detail=decision.detail + _within(residual, prenorm) + _between(match, chosen),
        expected_speedup=None if chosen is None else chosen.expected_speedup,
        operands=tuple(operand_name(operand, module) for operand in match.operands),
        chain=hidden if isinstance(match, Chain) else (),
        residual=residual is not None,
        norm="" if prenorm is None else prenorm.text,
        layers=layer_names(match, module),
        source=source_line(first.linear.node, module),
        training=trains(match),
        nodes=names_of(match, residual, prenorm),
        steps=match.steps,
    )


def layer_names(match: Match, module: str) -> str:
    """The layers of a site as its ``module`` calls them: ``gate_proj, up_proj → down_proj``."""
    first = ", ".join(dict.fromkeys(_layer_name(s.linear, module) for s in match.sources))
    others = [_layer_name(layer, module) for layer in match.layers[len(match.sources) :]]
    return " → ".join([first, *others])


def _layer_name(layer: LinearView, module: str) -> str:
    """The path of the layer's module; where its forward is not called, that of its weight."""
    prefix = f"{module}." if module else ""
    path = module_path([layer.node])
    if path in ("", module):
        path = parameter_path(layer.weight).removesuffix(".weight")
    return path.removeprefix(prefix)


def names_of(match: Match, residual: Residual | None, prenorm: Prenorm | None) -> tuple[str, ...]:
    """Names of a site's nodes in the captured graph, in program order."""
    nodes = set(match.nodes)
    if residual is not None:
        nodes |= residual.nodes
    if prenorm is not None:
        nodes.add(prenorm.node)
    return tuple(node.name for node in sorted(nodes))


def _code(decision: Plan | Refusal) -> str | None:
    """Why a site is not fused, if it is not."""
    refusal = decision.refusal if isinstance(decision, Plan) else decision
    return None if refusal is None else refusal.code


def nondescript(refusal: Refusal) -> Site:
    """The record of a site of which nothing can be told but that it was left alone, and why."""
    return Site(
        form="unknown",
        activation="",
        module="",
        shape=SiteShape("?", 0, 0, 0),
        dtype="unknown",
        device="unknown",
        fused=False,
        plan=None,
        reason=refusal.code,
        detail=refusal.detail,
    )


def _within(residual: Residual | None, prenorm: Prenorm | None) -> str:
    norm = "" if prenorm is None else f"; computes the {prenorm.text} before it within"
    return norm + ("" if residual is None else f"; adds the residual {residual.node.name!r} within")


def _between(match: Match, chosen: Plan | None) -> str:
    """What a chain computes between its layers beside activations."""
    if chosen is None or not isinstance(match, Chain) or match.inner is None:
        return ""
    norms, sums = len(match.norms), len(match.read_again)
    joins = sum(link.joined is not None for link in match.links)
    counts = [f"{count} {name}" for count, name in ((norms, "norms"), (sums, "sums")) if count]
    computed = f"; computes {' and '.join(counts)} of its values within" if counts else ""
    return computed + (f"; concatenates its input and {joins} of its values within" * bool(joins))


def operand_name(operand: Entering, module: str) -> str:
    """What enters an activation, as the ``module`` of the site calls it where that is known."""
    if operand.kind == "seed":
        return "seed of a dropout"
    if operand.kind == "elementwise":
        path = module_path([operand.node]) or operand.node.name
        return f"linear layer {path.removeprefix(f'{module}.')}"
    return f"{_KINDS[operand.kind]} {_formula(operand.node, module)}"


def _formula(node: Node, module: str) -> str:
    """How a parameter of an activation is made: ``softplus(alpha)``."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return parameter_path(node).removeprefix(f"{module}.")
    made_of = ", ".join(_formula(source, module) for source in node.all_input_nodes)
    return f"{operation(node)}({made_of})"


def size_name(size: int | torch.SymInt) -> int | str:
    """A size as it is printed: symbolic ones by their symbols."""
    return size if isinstance(size, int) else str(size)


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def module_path(nodes: Iterable[Node]) -> str:
    """The innermost module of the model that holds all of the nodes; ``""`` is the model itself."""
    paths = [module_stack(node) for node in nodes]
    if len(paths) == 1:
        return ".".join(paths[0])
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
