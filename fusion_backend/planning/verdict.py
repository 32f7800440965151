"""What planning decides of a site: which family pays, and on what grounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE


@dataclass(frozen=True)
class Verdict:
    """The family that pays, if one does, and on what grounds: the end of a sentence.

    Attributes:
        expected_speedup: of that family over Inductor, or of the best that does not pay; ``None``
            where nothing says.
    """

    family: str | None
    grounds: str
    expected_speedup: float | None = None


def by_times(times: Mapping[str, float]) -> Verdict:
    """What times of this very MLP say, in microseconds by family, Inductor's among them."""
    family = min(times.keys() - {INDUCTOR}, key=lambda name: times[name], default=None)
    if family is None:
        return Verdict(None, "measured here, and no family that is left was")
    speedup = times[INDUCTOR] / times[family]
    each = ", ".join(f"{name} {us:.1f} µs" for name, us in times.items() if name != INDUCTOR)
    grounds = f"measured here for this MLP: {each}, Inductor's products {times[INDUCTOR]:.1f} µs"
    return Verdict(family if speedup >= WORTHWHILE else None, grounds, speedup)
