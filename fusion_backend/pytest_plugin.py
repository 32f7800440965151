"""For pytest: the fixture ``fusedmlp``, with which a test suite pins the fusions of its models.

``fusedmlp.assert_fused(model, x, sites=12)`` in a test fails with a report of what is not fused.
"""

# Every pytest run of an environment with fusedmlp loads this file: it must not import torch.

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusion_backend import Comparison, Explanation, Site
    from fusion_backend.instruments.pins import Pin

UPDATE = "--fusedmlp-update"


class Fusions:
    """Assertions about what fusedmlp does with a model.

    They run as inference, unless ``backward=True`` asks for training. ``policy`` is ``"always"``
    unless given: whether the fused kernels are faster then does not matter. What is fused depends
    on the device. ``target="h100"``, or another GPU, plans for that one on any machine, and
    :meth:`assert_legal` does not ask for kernels.

    Args:
        snapshots: the file that :meth:`assert_graph` compares with, and a number, are named after
            this; ``None`` where there are none.
        update: write snapshots instead of comparing with them.
    """

    def __init__(self, snapshots: Path | None = None, update: bool = False) -> None:
        self._snapshots = snapshots
        self._update = update
        self._graphs = 0

    def assert_sites(
        self,
        model: Callable[..., Any],
        *args: Any,
        pins: Mapping[str, Pin],
        others: bool = False,
        policy: str = "always",
        backward: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Require of each MLP what is pinned of its module.

        ::

            fusedmlp.assert_sites(
                model, x, pins={"layers.*.mlp": "gated", "head": "hidden-escapes"}
            )

        Args:
            model: a module or function.
            args: its positional arguments.
            pins: by path of a module, or by label, as :func:`fusion_backend.explain` prints them;
                ``*`` stands for any text. Each is a form, a family of kernels or ``"fused"``: the
                MLP is fused; or the code of a reason: it is left alone for that. Or it is a dict
                with some of ``form``, ``activation``, ``plan``, ``reason``, ``fused`` and
                ``training``.
            others: allow MLPs that no pin names.
            policy: as the option ``fusedmlp.policy``.
            backward: plan for training: gradients are recorded.
            kwargs: what else :func:`fusion_backend.explain` takes (``target``, ``options``, ...),
                and keyword arguments of the model.

        Raises:
            AssertionError: with the table of sites, and how each differs from its pin.
            PinError: a reason, family, form or key does not exist.
        """
        from fusion_backend.instruments.pins import checked, differences, differences_text

        __tracebackhide__ = True
        own = (kwargs.get("options") or {}).get("fusedmlp.forms", ())
        wanted = checked(pins, (form.name for form in own))
        found = explained(model, *args, policy=policy, backward=backward, **kwargs)
        compared = differences(found.sites, wanted, others)
        wrong = sum(bool(each.wrong) for each in compared)
        if wrong:
            raise AssertionError(
                f"{wrong} of {len(compared)} MLPs differ from what is pinned:\n\n"
                f"{differences_text(compared)}\n\n{found}"
            )
        return found

    def assert_fused(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: int | None = None,
        policy: str = "always",
        backward: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Require that kernels run every MLP of a model, and that there are ``sites`` if given.

        Args:
            model: a module or function.
            args: its positional arguments.
            sites: how many MLPs there are; any number but 0, if not given.
            policy: as the option ``fusedmlp.policy``.
            backward: plan for training: gradients are recorded.
            kwargs: what else :func:`fusion_backend.explain` takes (``target``, ``mode``, ...), and
                keyword arguments of the model.

        Raises:
            AssertionError: with the report of all sites.
        """
        __tracebackhide__ = True
        found = explained(model, *args, policy=policy, backward=backward, **kwargs)
        if found.left_alone or not has(sites, found.fused):
            raise AssertionError(f"{called(sites)} must be fused, got:\n\n{found}")
        return found

    def assert_legal(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: int | None = None,
        backward: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Require that fusing every MLP of a model is right, whether or not kernels run it here.

        The arguments are those of :meth:`assert_fused`.

        Raises:
            AssertionError: with the report of all sites.
        """
        __tracebackhide__ = True
        found = explained(model, *args, policy="always", backward=backward, **kwargs)
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
        backward: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Require that no MLP of a model is fused, each for the reason of this code.

        Raises:
            AssertionError: with the report of all sites.
            PinError: there is no such reason.
        """
        from fusion_backend.instruments.pins import check_known, known_reasons

        __tracebackhide__ = True
        check_known(reason, known_reasons(), "reason")
        found = explained(model, *args, policy=policy, backward=backward, **kwargs)
        if {site.reason for site in found.sites} != {reason}:
            raise AssertionError(f"no MLP must be fused, for {reason!r}, got:\n\n{found}")
        return found

    def assert_fewer_kernels(
        self,
        model: Callable[..., Any],
        *args: Any,
        than: str = "inductor",
        policy: str = "always",
        backward: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Comparison:
        """Require that fusedmlp runs fewer kernels (on a CPU: operators) than another backend.

        Raises:
            AssertionError: with the table of both backends and the differences.
        """
        import torch

        from fusion_backend import profile

        __tracebackhide__ = True
        settings: dict[str, Any] = {
            "backends": (than, "fusedmlp"),
            "options": {"fusedmlp.policy": policy, **(options or {})},
        }
        with torch.set_grad_enabled(backward):
            found = profile(model, *args, steps=3, backward=backward, **settings, **kwargs)
        found.assert_fewer_kernels(than)
        return found

    def assert_graph(
        self,
        model: Callable[..., Any],
        *args: Any,
        policy: str = "always",
        backward: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Require that the rewritten graphs of a model are those of the test's snapshot.

        The snapshot is a text file in the folder ``snapshots`` beside the test's file.
        ``pytest --fusedmlp-update`` writes it.

        Raises:
            AssertionError: with the difference, or because there is no snapshot yet.
        """
        from fusion_backend.instruments.graph_text import graph_text

        __tracebackhide__ = True
        if self._snapshots is None:
            raise ValueError("assert_graph needs the fixture fusedmlp, which knows where tests are")
        found = explained(model, *args, policy=policy, backward=backward, **kwargs)
        text = "\n\n".join(f"{graph_text(after)}" for _, after in found.graphs) + "\n"
        self._graphs += 1
        number = f".{self._graphs}" if self._graphs > 1 else ""
        file = self._snapshots.with_name(f"{self._snapshots.name}{number}.txt")
        compare_with_snapshot(text, file, self._update)
        return found


def compare_with_snapshot(text: str, file: Path, update: bool) -> None:
    """Require that a file has a text; write it instead, if asked for."""
    __tracebackhide__ = True
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    if not file.exists():
        raise AssertionError(
            f"there is no snapshot {file}: run pytest {UPDATE} to write it, and read what it writes"
        )
    before = file.read_text(encoding="utf-8")
    if before != text:
        names = ("snapshot", "now")
        lines = difflib.unified_diff(before.splitlines(), text.splitlines(), *names, lineterm="")
        raise AssertionError(
            "the rewritten graph must be that of the snapshot, got:\n\n"
            + "\n".join(lines)
            + f"\n\nIf that is meant, run pytest {UPDATE} to write {file}"
        )


def explained(
    model: Callable[..., Any],
    *args: Any,
    policy: str,
    backward: bool = False,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """What :func:`fusion_backend.explain` says of a call, with gradients if asked for."""
    import torch

    from fusion_backend import explain

    options = {"fusedmlp.policy": policy, **(options or {})}
    with torch.set_grad_enabled(backward):
        return explain(model, *args, options=options, **kwargs)


def has(sites: int | None, found: Sequence[Site]) -> bool:
    """Whether so many were found; any, where no number is given."""
    return bool(found) if sites is None else len(found) == sites


def called(sites: int | None) -> str:
    """The MLPs that are asked for."""
    return "every MLP" if sites is None else f"{sites} MLPs"


class WithoutTraces(logging.Filter):
    """Drops the records of torch's structured trace: they have no text, and there are many."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep a record."""
        return record.name != "torch.__trace"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes snapshots."""
    parser.getgroup("fusedmlp").addoption(
        UPDATE, action="store_true", help="write the snapshots of rewritten graphs anew"
    )


@pytest.fixture
def fusedmlp(request: pytest.FixtureRequest) -> Iterator[Fusions]:
    """Assertions that pin the fusions of a model; see :class:`Fusions`."""
    name = re.sub(r"[^\w.\-]+", "-", f"{request.path.stem}.{request.node.name}").strip("-")
    quiet = WithoutTraces()
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(quiet)
    yield Fusions(request.path.parent / "snapshots" / name, request.config.getoption(UPDATE))
    for handler in handlers:
        handler.removeFilter(quiet)
