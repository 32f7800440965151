"""MLPs inside of one operator of torch that could not be taken apart: they are reported."""

from __future__ import annotations

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.description import dtype_name, module_path, size_name
from fusion_backend.fusion.encoder_layers import OPERATOR
from fusion_backend.fusion.sites import Site, SiteShape
from fusion_backend.fusion.views.names import source_line
from fusion_backend.fusion.views.node import argument, tensor_of
from fusion_backend.planning.setting import rows_of
from fusion_backend.reasons import Refusal


def opaque_site(node: Node, refusal: Refusal | None) -> Site:
    """The MLP within the fast path of ``nn.TransformerEncoderLayer``.

    Args:
        node: the operator.
        refusal: why it was not taken apart, if not because it is what it is.
    """
    source = tensor_of(argument(node, 0, "src"))
    up = tensor_of(argument(node, 14, "ffn_weight_1"))
    down = tensor_of(argument(node, 16, "ffn_weight_2"))
    assert source is not None
    assert up is not None
    assert down is not None
    module = module_path([node])
    refusal = refusal or Refusal(reasons.OPAQUE_OPERATOR, f"torch.{OPERATOR}")
    return Site(
        form="encoder_layer",
        activation="gelu(x)" if argument(node, 7, "use_gelu") else "relu(x)",
        module=module,
        shape=SiteShape(
            size_name(rows_of(source)), int(up.shape[1]), int(up.shape[0]), int(down.shape[0])
        ),
        dtype=dtype_name(source.dtype),
        device=source.device.type,
        fused=False,
        plan=None,
        reason=refusal.code,
        detail=refusal.detail,
        layers="linear1 → linear2",
        source=source_line(node, module),
        nodes=(node.name,),
    )
