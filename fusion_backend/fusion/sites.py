"""What is reported of a place in a graph where an MLP stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fusion_backend.reasons import LEGAL_CODES

#: Of a node's ``meta``: :attr:`Site.nodes` of the site that the call takes the place of, or of all
#: those that share it, one after the other.
REPLACES = "fusedmlp_replaces"


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
    """One place where two linear layers are joined by pointwise work, or by what stands for it.

    Attributes:
        form: name of the form, such as ``gated``: one of the package's or of another's;
            ``encoder_layer``; or ``unknown``.
        activation: the pointwise work as an expression, such as ``silu(g) * u``; empty where it
            could not be written as one.
        module: path of the module in the model, ``""`` for the model itself.
        shape: the sizes; of a chain, ``hidden_features`` is the widest.
        dtype: of the result, such as ``"bfloat16"``.
        device: device type, such as ``"cuda"``.
        fused: whether kernels run it that Inductor did not make: ours, or a vendor's library.
        plan: the family of kernels that a fused site runs on. ``"reference"`` is none: policy
            ``always`` rewrites a site where no kernels are into ATen operators, which Inductor
            compiles, and it is not fused. ``None`` where the graph is as it was.
        reason: stable code of why the site is not fused, else ``None``.
        detail: one sentence for a person, for fused sites as well.
        expected_speedup: how many times as fast as Inductor's code a fused site was measured, or
            else is expected, to run; ``None`` for one that is not fused or of which nothing says.
        operands: what the variables ``p0``, ``p1``, ... of the activation are, such as
            ``"vector act.scale"``, ``"linear layer fc1.lora_B"`` or ``"seed of a dropout"``; names
            are those within ``module``.
        chain: of a chain, every hidden width in order; else empty.
        steps: of a chain with norms, sums or concatenations between, all that it computes, such as
            ``"linear; layer_norm(1e-05); activation; linear; activation(0); linear"``, as
            :mod:`fusion_backend.mlp.steps` reads it; else empty.
        norm: the norm before it that is computed within, such as ``"layer_norm(1e-05)"``, or empty.
        residual: whether a residual is added to the result within.
        layers: the linear layers as ``module`` calls them, such as
            ``"gate_proj, up_proj → down_proj"``; of a site that is fused up to its hidden value,
            those that are fused. Empty where they are not known.
        source: file and line of the model where the first of them is called, such as
            ``"/path/of/model.py:12"``; empty where that is not known.
        training: whether it was planned for training: gradients are recorded.
        nodes: names of the nodes of the captured graph that make it up, in program order.
        call: the number of the call that it shares with other sites of the graph, which then are
            one launch; 0 where it has one of its own.
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
    layers: str = ""
    source: str = ""
    training: bool = False
    nodes: tuple[str, ...] = ()
    call: int = 0
    steps: str = ""

    @property
    def legal(self) -> bool:
        """Whether a rewrite is the same program: the site is fused, or another ground decided."""
        return self.reason is None or self.reason in LEGAL_CODES

    @property
    def rewritten(self) -> bool:
        """Whether a call of the fused operator takes its place in the graph, on any plan."""
        return self.plan is not None

    @property
    def sizes(self) -> str:
        """The sizes as they are printed, such as ``64×13→32→16→1``."""
        if not self.chain:
            return str(self.shape)
        widths = (self.shape.in_features, *self.chain, self.shape.out_features)
        return f"{self.shape.rows}×{'→'.join(map(str, widths))}"

    def as_dict(self) -> dict[str, Any]:
        """The site as plain JSON-compatible data with ``legal``, ``shape`` as a mapping."""
        return {**asdict(self), "shape": self.shape._asdict(), "legal": self.legal}


def by_call(sites: Iterable[Site]) -> list[tuple[int, ...]]:
    """The places of sites, those together that share a call, in the order of the first of each."""
    found: dict[object, list[int]] = {}
    for place, site in enumerate(sites):
        found.setdefault(site.call or ("alone", place), []).append(place)
    return [*map(tuple, found.values())]


def numbered_apart(graphs: Iterable[Iterable[Site]]) -> list[tuple[Site, ...]]:
    """The sites of several graphs, of which no two number shared calls alike."""
    found, last = [], 0
    for sites in graphs:
        own = [replace(s, call=s.call + last) if s.call else s for s in sites]
        last = max((site.call for site in own), default=last)
        found.append(tuple(own))
    return found


def labels(sites: Iterable[Site]) -> list[str]:
    """A name for each site that no other has: its module, its layers where two have that module.

    ``"blocks.0.mlp"``, ``"blocks.0: gate, up → down"``; ``"blocks.0: up → down (2)"`` for the
    second of two that call the same layers. The model itself is ``"(model)"``.
    """
    sites = tuple(sites)
    alone = Counter(site.module for site in sites)
    seen: Counter[str] = Counter()
    found = []
    for site in sites:
        name = site.module or "(model)"
        if alone[site.module] > 1 and site.layers:
            name += f": {site.layers}"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
