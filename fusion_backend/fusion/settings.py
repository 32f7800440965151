"""What planning is told of a matched site: its sizes, dtype, device, layouts, training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fusion_backend.compat import inductor
from fusion_backend.fusion.failures import Failures
from fusion_backend.fusion.forms import Forms, forms_of, left_out
from fusion_backend.fusion.legality import refusal
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.matching import find_matches
from fusion_backend.fusion.nested_graphs import nested_graphs
from fusion_backend.fusion.partial import part_of
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.mlp.weights import is_transposed
from fusion_backend.options import Options
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.setting import Setting, rows_of


def setting_of(match: Match, target: Gpu | None = None) -> Setting:
    """The setting of a legal site.

    Args:
        match: the site.
        target: the GPU to plan for instead of the device that the tensors are on.
    """
    up, down = match.sources[-1], match.down
    source, result = _tensor(up.linear.input), _tensor(match.result)
    others = [layer for layer in match.layers if not _matrix(layer).is_contiguous()]
    layers = match.layers[len(match.sources) :]
    parts = [s.linear for s in match.sources if s.part is not None]
    return Setting(
        activations=match.expressions,
        gated=len(match.sources) == 2,
        rows=rows_of(source, down.feature_dim),
        in_features=up.linear.in_features,
        hidden_features=match.hidden_features[0],
        further_features=tuple(layer.out_features for layer in layers),
        dtype=result.dtype,
        device=result.device if target is None else torch.device("cuda"),
        has_bias_up=up.linear.bias is not None,
        plain_layout=not others and not parts,
        transposed=bool(others),
        strided=any(layer in parts or not is_transposed(_matrix(layer)) for layer in others)
        or (down.positions == 0 and _has_strided_rows(source)),
        training=trains(match),
        convolution=down.positions > 0,
        operands=tuple(operand.kind for operand in match.operands),
        first_frozen=not any(_requires_grad(source.linear.weight) for source in match.sources),
        target=target,
        steps=match.steps,
        frozen=inductor.weights_are_frozen() and all(map(_is_attribute, match.layers)),
    )


def legal_settings(graph_module: GraphModule) -> Iterator[Setting]:
    """The settings of sites, or parts of them, that may be fused; the graph carries examples.

    The options are those of the environment.
    """
    failures, options = Failures(), Options.from_environment()
    forms = forms_of(options)
    for nested in nested_graphs(graph_module):
        dependence = Dependence(nested.graph)
        for match in find_matches(nested.graph, forms.tried, failures.refusal):
            if left_out(match, forms, options):
                continue
            legal = failures.attempt(_legal_part, match, dependence, forms)
            if isinstance(legal, Match):
                yield setting_of(legal)


def _legal_part(match: Match, dependence: Dependence, forms: Forms) -> Match | None:
    """A site, or the part of it, that may be fused."""
    refused = refusal(match, dependence)
    return match if refused is None else part_of(match, refused, dependence, forms)


def trains(match: Match) -> bool:
    """Whether gradients are recorded of what a site reads: it is planned for training then."""
    return records_gradients(match) and any(map(_requires_grad, _read(match)))


def records_gradients(match: Match) -> bool:
    """Whether gradients may be recorded where a site runs.

    The caller's grad mode tells, and the example of the site's result where the graph sets another.
    """
    return torch.is_grad_enabled() or _requires_grad(match.result)


def _is_attribute(layer: LinearView) -> bool:
    """Whether a weight belongs to the graph, as those do that Inductor is to freeze.

    Dynamo makes inputs of all others, and of all where only the options of one compilation ask for
    frozen weights.
    """
    return layer.weight.op == "get_attr"


def _tensor(node: Node) -> torch.Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # linear_view gives no view of an untraced node
    return tensor


def _matrix(layer: LinearView) -> torch.Tensor:
    """Its weight as ``(out_features, in_features)``; that of a convolution as it is."""
    weight = _tensor(layer.weight)
    return weight.t() if layer.transposed else weight


def _has_strided_rows(x: torch.Tensor) -> bool:
    """Whether rows of x lie apart, and not as kernels want them; ``False`` if not known.

    Rows of a contiguous x do not, whatever their width: kernels are chosen by that alone.
    """
    if x.dim() < 2 or not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return False
    from fusion_backend.kernels.host.called import has_pieces

    return not x.is_contiguous() and not has_pieces(x.flatten(0, -2))


def _read(match: Match) -> Iterator[Node]:
    for layer in match.layers:
        yield from layer.operands()
    yield from (operand.node for operand in match.operands if operand.kind != "seed")
    yield from match.parameters


def _requires_grad(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.requires_grad
