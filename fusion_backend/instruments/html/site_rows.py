"""Sites as the report lists them: those that are alike in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_backend.errors import PlanError
from fusion_backend.fusion.sites import Site, by_call
from fusion_backend.kernels import registry
from fusion_backend.reasons import REASONS


@dataclass(frozen=True)
class Member:
    """One site.

    Attributes:
        number: in the report, from 0.
        module: its path.
        source: the line of the program, shortened.
        full_source: the line with its whole path.
        detail: a sentence on what was decided.
    """

    number: int
    module: str
    source: str
    full_source: str
    detail: str


@dataclass(frozen=True)
class SiteRow:
    """Sites that differ in nothing but where they are.

    Attributes:
        site: the first of them.
        members: all of them.
        plan: what the family of kernels does, as a sentence; empty where none runs it.
        remedy: what can be done where it was not fused; else empty.
        measured: how many times as fast as Inductor's their launches were, all together; ``None``
            where that was not measured.
    """

    site: Site
    members: tuple[Member, ...]
    plan: str
    remedy: str
    measured: float | None


def site_rows(
    sites: Sequence[Site],
    times: Mapping[int, float],
    baseline: Mapping[int, float],
) -> list[SiteRow]:
    """The sites, alike ones together, in the order of the first of each kind.

    Args:
        sites: of a model, numbered from 0.
        times: microseconds of each site's launches under fusedmlp.
        baseline: the same under Inductor.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, site in enumerate(sites):
        alike.setdefault(_kind(site), []).append(number)
    together = {number: group for group in by_call(sites) for number in group}
    remedies = {reason.code: reason.remedy for reason in REASONS}
    rows = []
    for numbers in alike.values():
        first = sites[numbers[0]]
        members = tuple(_member(number, sites[number]) for number in numbers)
        calls = {together[number] for number in numbers}  # one has the launch of all that share it
        every = [number for call in calls for number in call]
        timed = all(any(number in times for number in call) for call in calls)
        both = timed and all(number in baseline for number in every)
        ours = sum(times.get(number, 0.0) for number in every)
        before = sum(baseline.get(number, 0.0) for number in every)
        measured = before / ours if both and ours and first.fused else None
        remedy = "" if first.fused else remedies.get(first.reason or "", "")
        rows.append(SiteRow(first, members, _plan(first), remedy, measured))
    return rows


def _kind(site: Site) -> tuple[object, ...]:
    described = {**vars(site), "module": "", "source": "", "nodes": (), "detail": ""}
    described["call"] = site.call > 0
    return tuple(described.values())


def _member(number: int, site: Site) -> Member:
    source = shortened(site.source)
    return Member(number, site.module or "(model)", source, site.source, site.detail)


def shortened(source: str) -> str:
    """A line of a program without the part of its path that says little."""
    path, _, line = source.rpartition(":")
    if not path:
        return ""
    parts = Path(path).parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    elif Path(path).is_relative_to(Path.cwd()):
        parts = Path(path).relative_to(Path.cwd()).parts
    return f"{'/'.join(parts[-4:])}:{line}"


def _plan(site: Site) -> str:
    if not site.fused or site.plan is None:
        return ""
    try:
        family = registry.named(site.plan)
    except PlanError:
        return ""
    if site.call:
        return family.towers
    if site.chain:
        return family.chains
    trained = family.trained if site.training else ""
    return trained or family.mlps or family.first_layers
