"""The norm of an MLP's input, as the operators take it: a text and the norm's parameters.

    layer_norm(eps)   (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    rms_norm(eps)     x / sqrt(mean(x²) + eps) * weight

Over the last dimension; weight and bias may be missing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("layer_norm", "rms_norm")
_TEXT = re.compile(rf"({'|'.join(KINDS)})\(([-+.\w]+)\)")


class Norm(NamedTuple):
    """A norm and its parameters, each ``(in,)`` or ``None``."""

    kind: str
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(cls, text: str, weight: Tensor | None = None, bias: Tensor | None = None) -> Norm | None:
        """What a text such as ``layer_norm(1e-05)`` says; nothing is no norm.

        Raises:
            ValueError: it says something else, or there are parameters that the norm has not.
        """
        found = _TEXT.fullmatch(text)
        if found is not None and (found[1] == "layer_norm" or bias is None):
            return cls(found[1], float(found[2]), weight, bias)
        if not text and weight is None and bias is None:
            return None
        has = ", ".join(
            name for name, value in (("weight", weight), ("bias", bias)) if value is not None
        )
        raise ValueError(
            "norm must be layer_norm(eps), rms_norm(eps) without a bias, or empty without either "
            f"parameter, got {text!r} with {has or 'no parameter'}"
        )

    @property
    def text(self) -> str:
        """The norm without its parameters."""
        return f"{self.kind}({self.eps!r})"

    def wide(self) -> Norm:
        """The same with parameters in float32 at least."""
        parameters = (
            None if each is None else each.to(torch.promote_types(each.dtype, torch.float32))
            for each in (self.weight, self.bias)
        )
        return Norm(self.kind, self.eps, *parameters)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``(..., in)`` by PyTorch's operators."""
        shape = x.shape[-1:]
        if self.kind == "layer_norm":
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        return torch.rms_norm(x, shape, self.weight, self.eps)
