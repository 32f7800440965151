"""Activation checkpointing: what torch keeps private of it, torch 2.11 to 2.14."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import _CachedTorchDispatchMode as Replaying
from torch.utils.checkpoint import _CachingTorchDispatchMode as Caching

#: The modes in which a selective policy is asked: in the forward pass, and where it is run again.
SELECTIVE_MODES = (Caching, Replaying)

_SAVING = tuple(policy for policy in CheckpointPolicy if not policy.name.endswith("_RECOMPUTE"))


def saves(policy: Any) -> bool:
    """Whether what a policy answered says that a result is kept."""
    return policy is True or policy in _SAVING


@contextmanager
def asking(mode: Any, answer: Callable[..., Any]) -> Iterator[None]:
    """Let a mode ask another policy.

    Args:
        mode: since 2.14 the second of these modes has no policy, and asks none.
        answer: is given the mode's own policy and what that is asked.
    """
    if not hasattr(mode, "policy_fn"):
        yield
        return
    own = mode.policy_fn
    mode.policy_fn = partial(answer, own)
    try:
        yield
    finally:
        mode.policy_fn = own


def recompute_in_backward(call: Node, region: int) -> None:
    """Have the partitioner compute what a call of a graph saves again in the backward pass.

    Args:
        call: of a graph that ahead-of-time autograd traces.
        region: a number of its own, larger than those of calls before it.
    """
    call.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    call.meta["ac_graph_id"] = region
