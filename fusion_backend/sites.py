"""What is reported of a place in a graph where an MLP stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class SiteShape(NamedTuple):
    """Sizes of an MLP: ``rows`` vectors, ``in_features`` → ``hidden_features`` → ``out_features``.

    ``rows`` is the product of the leading dimensions, as text (such as ``"8*s0"``) where it is
    symbolic.
    """

    rows: int | str
    in_features: int
    hidden_features: int
    out_features: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.in_features}→{self.hidden_features}→{self.out_features}"


@dataclass(frozen=True)
class Site:
    """One place where two linear layers are joined by pointwise work.

    Attributes:
        form: name of the pattern: ``plain``, ``gated``, ``packed``, ``sliced`` or
            ``encoder_layer``.
        activation: the pointwise work as an expression, such as ``silu(g) * u``; empty where it
            could not be written as one.
        module: path of the module in the model, ``""`` for the model itself.
        shape: the sizes; of a chain, ``hidden_features`` is the widest.
        dtype: of the result, such as ``"bfloat16"``.
        device: device type, such as ``"cuda"``.
        fused: whether the site was rewritten.
        plan: the family of kernels that a fused site runs on, else ``None``.
        reason: stable code of why the site was left alone, else ``None``.
        detail: one sentence for a person, for fused sites as well.
        expected_speedup: how many times as fast as Inductor's code a fused site was measured, or
            else is expected, to run; ``None`` for one that is left alone or of which nothing says.
        operands: what the variables ``p0``, ``p1``, ... of the activation are, such as
            ``"vector act.scale"``, ``"linear layer fc1.lora_B"`` or ``"seed of a dropout"``; names
            are those within ``module``.
        chain: of a chain, every hidden width in order; else empty.
        norm: the norm before it that is computed within, such as ``"layer_norm(1e-05)"``, or empty.
        residual: whether a residual is added to the result within.
    """

    form: str
    activation: str
    module: str
    shape: SiteShape
    dtype: str
    device: str
    fused: bool
    plan: str | None
    reason: str | None
    detail: str
    expected_speedup: float | None = None
    operands: tuple[str, ...] = ()
    chain: tuple[int, ...] = ()
    norm: str = ""
    residual: bool = False

    @property
    def sizes(self) -> str:
        """The sizes as they are printed, such as ``64×13→32→16→1``."""
        if not self.chain:
            return str(self.shape)
        widths = (self.shape.in_features, *self.chain, self.shape.out_features)
        return f"{self.shape.rows}×{'→'.join(map(str, widths))}"

    def as_dict(self) -> dict[str, Any]:
        """The site as plain JSON-compatible data, ``shape`` as a mapping."""
        return {**asdict(self), "shape": self.shape._asdict()}
