"""MLPs to measure: what is timed, and the line of a table that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusion_backend.compat import tf32
from fusion_backend.mlp.expression import parse, variables
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import Kind, Measurement, form_of
from fusion_backend.planning.setting import Setting

#: The activation that a form is measured with, unless another is asked for.
FORMS = {"gelu_tanh": "gelu_tanh(x)", "gelu": "gelu(x)", "swiglu": "silu(g) * u"}
#: How products are computed: in a half precision, or float32 rounded to TF32, or float32 as it is.
PRECISIONS = ("bfloat16", "float16", "tf32", "ieee")


@dataclass(frozen=True)
class Case:
    """One MLP, ``rows`` × ``in_features`` → ``hidden_features`` → ``out_features``.

    It is what a table's line and a request to another process say: numbers and text, for any
    device. :meth:`setting` makes the MLP of it.

    Attributes:
        activation: the canonical text of the expression; of ``g`` and ``u`` where gated.
        precision: one of :data:`PRECISIONS`.
        biases: whether the layers have biases.
        training: forward and backward, with the gradients of everything.
        transposed: whether weights are stored ``(in_features, out_features)``.
    """

    activation: str
    rows: int
    in_features: int
    hidden_features: int
    out_features: int
    precision: str = "bfloat16"
    biases: bool = True
    training: bool = False
    transposed: bool = False

    @classmethod
    def of_form(
        cls,
        form: str,
        rows: int,
        width: int,
        hidden: int,
        precision: str = "bfloat16",
        training: bool = False,
    ) -> Case:
        """An MLP as tables have them: as wide out as in; with biases where it is plain."""
        widths = (width, hidden, width)
        return cls(FORMS[form], rows, *widths, precision, form != "swiglu", training)

    @classmethod
    def of_setting(cls, setting: Setting, rows: int) -> Case:
        """The MLP of a site of known widths, for so many rows.

        Where operands enter the site's activation, the activation is that of its form: the MLP
        without them, whose times speak for the site.
        """
        assert setting.widths is not None
        precision = kind_of(setting).precision
        activation = setting.activation
        if setting.operands:
            activation = FORMS[form_of(activation, setting.gated)]
        return cls(
            activation,
            rows,
            *setting.widths,
            precision,
            setting.has_bias_up,
            setting.training,
            transposed=setting.transposed,
        )

    @property
    def gated(self) -> bool:
        """Whether two projections enter the activation."""
        return "x" not in variables(parse(self.activation))

    @property
    def form(self) -> str:
        """The form whose measurements it counts among."""
        return form_of(self.activation, self.gated)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all operands."""
        return getattr(torch, self.precision) if is_half(self.precision) else torch.float32

    @property
    def bytes_of_weights(self) -> int:
        """The size of one set of weights."""
        first = (2 if self.gated else 1) * self.in_features
        return (first + self.out_features) * self.hidden_features * self.dtype.itemsize

    @property
    def measurement(self) -> Measurement:
        """What it will be a measurement of, without times."""
        kind = Kind(self.form, self.training, self.precision, self.transposed)
        widths = (self.in_features, self.hidden_features, self.out_features)
        return Measurement(kind, self.rows, *widths, {})

    def setting(self, device: torch.device, target: Gpu | None = None) -> Setting:
        """The site that it would be in a graph."""
        return Setting(
            activations=(parse(self.activation),),
            gated=self.gated,
            rows=self.rows,
            in_features=self.in_features,
            hidden_features=self.hidden_features,
            further_features=(self.out_features,),
            dtype=self.dtype,
            device=device,
            has_bias_up=self.biases,
            plain_layout=not self.transposed,
            transposed=self.transposed,
            training=self.training,
            target=target,
        )

    def as_dict(self) -> dict[str, Any]:
        """Its fields, from which ``Case(**fields)`` makes it again."""
        return asdict(self)

    def row(self) -> dict[str, Any]:
        """The beginning of its line in a table."""
        row: dict[str, Any] = {
            "form": self.form,
            "rows": self.rows,
            "width": self.in_features,
            "hidden": self.hidden_features,
            "precision": self.precision,
            "training": self.training,
        }
        if self.transposed:
            row["transposed"] = True
        if self.out_features != self.in_features:
            row["out"] = self.out_features
        if self.activation != FORMS[self.form]:
            row["activation"] = self.activation
        if self.biases == self.gated:  # plain MLPs have them, gated ones have not
            row["biases"] = self.biases
        return row

    def __str__(self) -> str:
        sizes = f"{self.rows}×{self.in_features}→{self.hidden_features}→{self.out_features}"
        return f"{self.activation} {sizes}, {self.precision}{particulars(self.row())}"


def is_described(setting: Setting) -> bool:
    """Whether :meth:`Case.of_setting` says all of a site's MLP that its time depends on."""
    one_mlp = not (setting.is_chain or setting.activated or setting.operands)
    usual_layout = setting.plain_layout or setting.transposed
    return one_mlp and usual_layout and not setting.strided and not setting.convolution


def particulars(row: Mapping[str, Any]) -> str:
    """What is unusual about the MLP of a table's line, in words that follow its sizes."""
    biases = row.get("biases")
    return "".join(
        text
        for text, holds in (
            (", transposed weights", row.get("transposed", False)),
            (", biases", biases is True),
            (", no biases", biases is False),
            (", training", row["training"]),
        )
        if holds
    )


def precision_of(dtype: torch.dtype) -> str:
    """The precision of products in a dtype that are not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def is_half(precision: str) -> bool:
    """Whether a precision is one of the half precisions."""
    return precision in ("bfloat16", "float16")


def kind_of(setting: Setting) -> Kind:
    """What must be the same for the measurement of another MLP to speak for a site."""
    form = form_of(setting.activation, setting.gated)
    return Kind(form, setting.training, _precision(setting.dtype), setting.transposed)


def _precision(dtype: torch.dtype) -> str:
    """The dtype, or for float32 how torch is set to multiply it."""
    is_rounded = dtype == torch.float32 and tf32.multiplies_in_tf32()
    return "tf32" if is_rounded else precision_of(dtype)
