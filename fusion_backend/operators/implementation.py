"""What every operator does: one way from arguments to results, and one way back."""

from __future__ import annotations

from functools import partial

import torch

from fusion_backend.operators import autocast, autograd, dispatch, fakes
from fusion_backend.operators.operator import Operator
from fusion_backend.operators.registration import Rules, register


def implement(library: torch.library.Library, operator: Operator) -> None:
    """Register the rules of an operator and of its parts, which a library declares."""
    kept = (operator.position_of_operands, *operator.kept_by_autocast)
    casting = partial(autocast.casting, kept=kept)
    differentiable = partial(autograd.differentiable, operator)
    refusing = partial(autograd.not_differentiable, operator.whole.name())
    forward, fake = (partial(of.forward, operator) for of in (dispatch, fakes))
    register(library, operator.whole, Rules(forward, fake, differentiable, casting))
    library.impl(operator.name, partial(dispatch.composed, operator), "FuncTorchBatched")
    if operator.saving is not None:
        forward, fake = (partial(of.forward_saving, operator) for of in (dispatch, fakes))
        register(library, operator.saving, Rules(forward, fake, refusing, casting))
    backward, fake = (partial(of.backward, operator) for of in (dispatch, fakes))
    rules = Rules(backward, fake, refusing, autocast.passing)
    register(library, operator.differentiating, rules)
