"""Selective activation checkpointing: what a policy says of products holds for fused ones too.

A policy is asked of every operator whether its results are kept. It names ``aten.mm`` or
``aten.addmm``, and has never heard of operators that compute several products at once. So it is
asked of those as well, in their place, once for each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.checkpointing import SELECTIVE_MODES, asking, saves
from fusion_backend.compat.operators import argument_names


def register(library: torch.library.Library, qualified: str) -> None:
    """Have an operator, by its qualified name, saved where a policy saves products."""
    for mode in SELECTIVE_MODES:
        torch.library.register_torch_dispatch(qualified, mode, _rule, lib=library)


def _rule(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
    with asking(mode, _answer):
        return mode.__torch_dispatch__(operator, types, args, kwargs)


def _answer(policy: Callable[..., Any], context: Any, operator: Any, *args: Any, **kw: Any) -> Any:
    own = policy(context, operator, *args, **kw)
    if saves(own):
        return own
    answers = [policy(context, product, *given) for product, given in _products(operator, args)]
    return next(filter(saves, answers), own)


def _products(operator: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """The products of a call: the operator of ATen that each would be, and matrices alike."""
    given = dict(zip(argument_names(operator), args, strict=False))
    x = given["x"]
    layers = [
        (weight, given.get(name.replace("weight", "bias")))
        for name, weight in given.items()
        if name.startswith("weight") and isinstance(weight, Tensor)
    ]
    chained = given.get("weights")
    if chained is not None:
        layers = list(zip(chained, given["biases"], strict=True))
    for weight, bias in layers:
        rows = x.new_empty((x.numel() // max(x.shape[-1], 1), weight.shape[1]), device="meta")
        columns = weight.detach().to("meta").t()
        if bias is None:
            yield torch.ops.aten.mm.default, (rows, columns)
        else:
            yield torch.ops.aten.addmm.default, (bias, rows, columns)
