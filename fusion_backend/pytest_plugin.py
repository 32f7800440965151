"""For pytest: the fixture ``fusedmlp``, with which a test suite pins the fusions of its models.

``fusedmlp.assert_fused(model, x, sites=12)`` in a test fails with a report of what is not fused.
"""

# Every pytest run of an environment with fusedmlp loads this file: it must not import torch.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusion_backend import Comparison, Explanation, Site


class Fusions:
    """Assertions about what fusedmlp does with a model.

    They run without gradients. ``policy`` is ``"always"`` unless given: whether the fused kernels
    are faster then does not matter. What is fused depends on the device: on a CPU it is what oneDNN
    runs. ``target="h100"``, or another GPU, plans for that one on any machine, and
    :meth:`assert_legal` does not ask for kernels.
    """

    def assert_fused(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: int | None = None,
        policy: str = "always",
        **kwargs: Any,
    ) -> Explanation:
        """Require that kernels run every MLP of a model, and that there are ``sites`` if given.

        Args:
            model: a module or function.
            args: its positional arguments.
            sites: how many MLPs there are; any number but 0, if not given.
            policy: as the option ``fusedmlp.policy``.
            kwargs: what else :func:`fusion_backend.explain` takes (``target``, ``mode``, ...), and
                keyword arguments of the model.

        Raises:
            AssertionError: with the report of all sites.
        """
        __tracebackhide__ = True
        found = explained(model, *args, policy=policy, **kwargs)
        if found.left_alone or not has(sites, found.fused):
            raise AssertionError(f"{called(sites)} must be fused, got:\n\n{found}")
        return found

    def assert_legal(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: int | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Require that fusing every MLP of a model is right, whether or not kernels run it here.

        The arguments are those of :meth:`assert_fused`.

        Raises:
            AssertionError: with the report of all sites.
        """
        __tracebackhide__ = True
        found = explained(model, *args, policy="always", **kwargs)
        legal = [site for site in found.sites if site.legal]
        if len(legal) < len(found.sites) or not has(sites, legal):
            raise AssertionError(f"{called(sites)} must be legal, got:\n\n{found}")
        return found

    def assert_left_alone(
        self,
        model: Callable[..., Any],
        *args: Any,
        reason: str,
        policy: str = "always",
        **kwargs: Any,
    ) -> Explanation:
        """Require that no MLP of a model is fused, each for the reason of this code.

        Raises:
            AssertionError: with the report of all sites.
        """
        __tracebackhide__ = True
        found = explained(model, *args, policy=policy, **kwargs)
        if {site.reason for site in found.sites} != {reason}:
            raise AssertionError(f"no MLP must be fused, for {reason!r}, got:\n\n{found}")
        return found

    def assert_fewer_kernels(
        self,
        model: Callable[..., Any],
        *args: Any,
        than: str = "inductor",
        policy: str = "always",
        **kwargs: Any,
    ) -> Comparison:
        """Require that fusedmlp runs fewer kernels (on a CPU: operators) than another backend.

        Raises:
            AssertionError: with the table of both backends and the differences.
        """
        import torch

        from fusion_backend import profile

        __tracebackhide__ = True
        backends = (than, "fusedmlp")
        options = {"fusedmlp.policy": policy}
        with torch.no_grad():
            found = profile(model, *args, backends=backends, steps=3, options=options, **kwargs)
        found.assert_fewer_kernels(than)
        return found


def explained(model: Callable[..., Any], *args: Any, policy: str, **kwargs: Any) -> Explanation:
    """What :func:`fusion_backend.explain` says of a call without gradients."""
    import torch

    from fusion_backend import explain

    with torch.no_grad():
        return explain(model, *args, options={"fusedmlp.policy": policy}, **kwargs)


def has(sites: int | None, found: Sequence[Site]) -> bool:
    """Whether so many were found; any, where no number is given."""
    return bool(found) if sites is None else len(found) == sites


def called(sites: int | None) -> str:
    """The MLPs that are asked for."""
    return "every MLP" if sites is None else f"{sites} MLPs"


@pytest.fixture
def fusedmlp() -> Fusions:
    """Assertions that pin the fusions of a model; see :class:`Fusions`."""
    return Fusions()
