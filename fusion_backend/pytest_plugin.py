"""For pytest: the fixture ``fusedmlp``, with which a test suite pins the fusions of its models.

``fusedmlp.assert_fused(model, x, sites=12)`` in a test fails with a report of what is not fused.
"""

# Every pytest run of an environment with fusedmlp loads this file: it must not import torch.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusion_backend import Comparison, Explanation


class Fusions:
    """Assertions about what fusedmlp does with a model.

    They run without gradients. ``policy`` is ``"always"`` unless given: the tests then hold on any
    device, a CPU included, whether or not the fused kernels are faster there.
    """

    def assert_fused(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: int | None = None,
        policy: str = "always",
        **kwargs: Any,
    ) -> Explanation:
        """Require that every MLP of a model is fused, and that there are ``sites`` if given.

        Raises:
            AssertionError: with the report of all sites.
        """
        import torch

        from fusion_backend import explain

        __tracebackhide__ = True
        with torch.no_grad():
            found = explain(model, *args, options={"fusedmlp.policy": policy}, **kwargs)
        expected = "every MLP" if sites is None else f"{sites} MLPs"
        right_number = bool(found.sites) if sites is None else len(found.fused) == sites
        if found.left_alone or not right_number:
            raise AssertionError(f"{expected} must be fused, got:\n\n{found}")
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
        import torch

        from fusion_backend import explain

        __tracebackhide__ = True
        with torch.no_grad():
            found = explain(model, *args, options={"fusedmlp.policy": policy}, **kwargs)
        if {site.reason for site in found.sites} != {reason}:
            raise AssertionError(f"every MLP must be left alone for {reason!r}, got:\n\n{found}")
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


@pytest.fixture
def fusedmlp() -> Fusions:
    """Assertions that pin the fusions of a model; see :class:`Fusions`."""
    return Fusions()
