"""What a family of kernels is: it says which MLPs it can run, and runs them.

``registry`` lists the families. Everything else asks them, by the name that a graph, a report or a
table has. A family never says whether it pays; ``planning`` does.

What a family does not do itself is done here by ATen operators: an MLP's norm and residual,
pre-activations that training keeps, their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import MOST_IN_KERNELS, Kind
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import FirstLayer, Tower, Weights

Operands = Sequence[Tensor]
Shapes = list[tuple[tuple[Any, Any], torch.dtype]]
Results = Callable[[Sequence[Any], torch.dtype, Sequence[Any], Callable[..., Any]], Shapes]


class Call(NamedTuple):
    """An operator of ``torch.ops.fusedmlp`` that stands for launches that Inductor cannot inline.

    Attributes:
        name: of the operator, and of the function that runs it.
        arguments: as in a schema: tensors, then texts and numbers.
        module: that function is in it, and the two that follow.
        caller: makes of texts and of ``called.Known`` a function that takes the tensors.
        prepare: starts compiling what that launches.
        transposed: whether a weight that is the transpose of a contiguous one is read as it is:
            ``never``, where the MLP is ``plain``, or ``always``.
        results: shapes and dtypes of several results, from sizes of the operands, their dtype, the
            texts and truth values that follow them, and a function that divides, as ``//`` does;
            ``None`` for one result ``(rows, out)``.
        spends: positions of operands whose memory results take, where nothing else reads them.
            What makes the function is told last whether that is so of all that are given.
    """

    name: str
    arguments: str
    module: str
    caller: str = "caller"
    prepare: str = "prepare"
    transposed: Literal["never", "plain", "always"] = "never"
    results: Results | None = None
    spends: tuple[int, ...] = ()


class Family:
    """One way to run MLPs. Tensors are matrices: rows and features.

    Attributes:
        name: by which graphs, reports and tables of measurements speak of it.
        mlps: what it does with an MLP, the beginning of a sentence; empty where it runs none.
        trained: what it does with an MLP in training, where that is something else.
        first_layers: what it does with first layers and activation alone, in the same way.
        chains: what it does with three and more layers, in the same way.
        most_layers: of a chain.
        towers: what it does with several chains of one input at once, in the same way.
        launches: how many kernels the forward pass of an MLP, or of a chain, is.
        launches_triton: it launches Triton's kernels.
        computes_norm: :meth:`run` takes the norm before an MLP.
        adds_residual: :meth:`run` takes what is added to an MLP's result.
        computes_steps: :meth:`run_chain` takes chains with norms and values that are read again.
        is_composed: it is made of ATen operators, which a compiler joins with norm and residual.
        few_rows: it is made for few rows, and right for any.
        stays_one_call: compiled code calls the operator instead of what it is made of.
        calls: operators that stand for its launches in compiled code.
        mark: a pattern of the names by which a profiler shows the launches of its forward pass, or
            the operators that make them; empty where no name tells them from others'.
        marked_launches: how many of these there are each time an MLP runs, at least and at most.
        gradient_mark: the same pattern for launches of its backward pass.
    """

    name: str
    mlps: str = ""
    trained: str = ""
    first_layers: str = ""
    chains: str = ""
    most_layers: float = math.inf
    towers: str = ""
    launches: int = 2
    launches_triton: bool = False
    computes_norm: bool = False
    adds_residual: bool = False
    computes_steps: bool = False
    is_composed: bool = False
    few_rows: bool = False
    stays_one_call: bool = False
    calls: tuple[Call, ...] = ()
    mark: str = ""
    marked_launches: tuple[int, int] = (1, 1)
    gradient_mark: str = ""

    def is_for(self, device_type: str) -> bool:
        """Whether it is made for a type of device, such as ``"cpu"``."""
        raise NotImplementedError

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that it cannot run on.

        Raises:
            PlanError: as said; the message names another family.
        """

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Why it cannot run an MLP on a device that it is for; ``None`` where it can.

        Args:
            mlp: the MLP, or a chain if the family runs some; :meth:`untaken` says of its operands.
            target: the GPU to plan for; ``None`` for the one that the MLP is on.
        """
        raise NotImplementedError

    def why_not_together(self, mlps: Sequence[MLP], target: Target | None) -> str | None:
        """Why it cannot run several MLPs of one input at once; ``None`` where it can.

        Args:
            mlps: plain MLPs and chains, without operands.
            target: as for :meth:`why_not`.
        """
        raise NotImplementedError

    def compile_ahead(self, mlp: MLP) -> str | None:
        """Compile what it would run of an MLP, where that may fail; the reason if it did."""
        return None

    def untaken(self, kinds: Sequence[Kind], training: bool) -> int | None:
        """The first operand of an activation, by their kinds, that it does not read.

        Args:
            kinds: what the operands are, by :func:`fusion_backend.mlp.operands.kind_of`.
            training: whether gradients are wanted: a family trains on the reference, which reads
                all, unless it trains by itself.
        """
        return 0 if kinds and not training else None

    def takes_residual(self, mlp: MLP, target: Target | None) -> bool:
        """Whether an MLP that it runs may take a residual: by its kernel, or by a compiler."""
        return self.adds_residual or self.is_composed

    def takes_norm(self) -> bool:
        """Whether an MLP that it runs may take a norm: by its kernel, or by a compiler."""
        return self.computes_norm or self.is_composed

    def runs_made_for_hopper(
        self,
        rows: Any,
        widths: Sequence[int],
        gated: bool,
        dtype: torch.dtype,
        transposed: bool,
        target: Target | None,
    ) -> bool:
        """Whether an MLP runs on kernels made for Hopper, and not on those for any GPU.

        That is for tensors that start at aligned addresses, in inference, and without operands of
        the activation.

        Args:
            rows: how many there are.
            widths: of x, between the layers, and of y.
            gated: whether there are two first layers.
            dtype: of all tensors.
            transposed: whether weights are the transposes of contiguous ones.
            target: the GPU; by default the current one, or an H100 if there is none.
        """
        return False

    def run(
        self,
        x: Tensor,
        weights: Weights,
        activation: Expression,
        operands: Operands,
        residual: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """The MLP of ``x`` ``(rows, in)`` as a new ``(rows, out)``.

        Args:
            x: of any strides.
            weights: of any strides; a plain MLP has no ``weight_gate``.
            activation: of ``g`` and ``u`` with a gate, else of ``x``.
            operands: of the activation, as they broadcast with ``(rows, hidden)``.
            residual: ``(rows, out)``; ``None`` where :attr:`adds_residual` is not set, too.
            norm: of x; ``None`` where :attr:`computes_norm` is not set, too.
        """
        raise NotImplementedError

    def run_first_layers(
        self, x: Tensor, first: FirstLayer, activation: Expression, operands: Operands, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The activation ``(rows, hidden)`` and its pre-activations, gate first.

        Of these there is none without a gate, and there may be none unless ``save`` asks for them.
        """
        raise NotImplementedError

    def run_chain(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activations: Sequence[Expression],
        steps: Steps | None = None,
        norms: Sequence[Norm] = (),
    ) -> Tensor:
        """A chain of linear layers of ``x`` ``(rows, in)``.

        Args:
            x: ``(rows, in)``.
            weights: one a layer.
            biases: one a layer, or ``None``.
            activations: those of the steps, in their order.
            steps: what it computes; ``None`` for its layers, and an activation between each two.
                Others are given where :meth:`why_not` says that it runs them.
            norms: those of the steps, in their order.
        """
        raise NotImplementedError

    def run_towers(self, x: Tensor, towers: Sequence[Tower]) -> list[Tensor]:
        """Several chains of ``x`` ``(rows, in)``, each of two and more layers: one result each."""
        raise NotImplementedError

    def saves(
        self, widths: Sequence[Any], gated: bool, dtype: torch.dtype, operands: Sequence[Any]
    ) -> Literal["preact", "x"]:
        """What training keeps: the pre-activations, or nothing but x, of which they are recomputed.

        Args:
            widths: of x, between the layers, and of y.
            gated: whether there are two first layers.
            dtype: of all tensors.
            operands: of the activation.
        """
        return "preact"

    def run_saving(
        self, x: Tensor, weights: Weights, activation: Expression, operands: Operands
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """:meth:`run`, and the pre-activations; that of the gate is ``None`` without one.

        It is also ``None`` where the last result has both side by side, ``(rows, 2 · hidden)``.
        """
        return reference.forward_saving(x, weights, activation, operands)

    def gradients(
        self,
        grad_output: Tensor,
        x: Tensor,
        weights: Weights,
        preacts: tuple[Tensor | None, Tensor | None],
        operands: Operands,
        activation: Expression,
        needs: Sequence[bool],
    ) -> list[Tensor] | None:
        """The whole backward pass by one kernel; ``None`` where none runs it.

        Args:
            grad_output: ``(rows, out)``.
            x: ``(rows, in)``.
            weights: those of the forward pass; of biases, those of the first layers where
                :meth:`saves` says ``x``, and none else.
            preacts: what :meth:`run_saving` saved, those of a pair apart; ``None`` twice where
                :meth:`saves` says ``x``.
            operands: as in the forward pass.
            activation: as in the forward pass.
            needs: which gradients are asked for: of x, of each weight and its bias, gate first, and
                of each operand.

        Returns:
            The gradients that are asked for, in that order.
        """
        return None

    def hidden_gradient(
        self,
        grad_output: Tensor,
        weight_down: Tensor,
        preacts: tuple[Tensor | None, Tensor],
        activation: Expression,
        operands: Operands,
        wanted: Sequence[int],
    ) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
        """Gradients of gate (``None`` without one) and up, the activation, and of operands.

        Args:
            grad_output: ``(rows, out)``.
            weight_down: ``(out, hidden)``.
            preacts: what :meth:`run_saving` saved, of the gate and of up apart.
            activation: as in the forward pass.
            operands: as in the forward pass.
            wanted: of which operands the gradients are asked for.
        """
        saved = (*preacts, activation, operands)
        return reference.hidden_and_operand_gradients(grad_output, weight_down, *saved, wanted)

    def summed_hidden_gradient(
        self,
        grad_output: Tensor,
        weight_down: Tensor,
        preacts: tuple[Tensor | None, Tensor],
        activation: Expression,
        has_sums: bool,
        has_output_sums: bool,
    ) -> tuple[Sequence[Tensor], Tensor, Tensor, bool] | None:
        """As :meth:`hidden_gradient` without operands, by one kernel; ``None`` where none runs it.

        Args:
            grad_output: ``(rows, out)``.
            weight_down: ``(out, hidden)``.
            preacts: what :meth:`run_saving` saved, as it did.
            activation: as in the forward pass.
            has_sums: whether sums of the gradients are wanted.
            has_output_sums: whether those of grad_output are; they may be left to the caller.

        Returns:
            Gradients of the pre-activations, one or two matrices as these are; ``postact``; what
            sums over all rows are to be summed of, ``(any, width of all)`` in float32, of the
            gradients and of grad_output side by side; and whether the latter are among them.
        """
        return None

    def joined_input_gradient(
        self, grad_preacts: Sequence[Tensor], weight_gate: Tensor, weight_up: Tensor
    ) -> Tensor | None:
        """``[grad_gate | grad_up] @ [weight_gate; weight_up]`` by one kernel; ``None`` without.

        The gradients are two matrices or one, as :meth:`summed_hidden_gradient` returns them.
        """
        return None

    def hidden_gradient_of_x(
        self,
        x: Tensor,
        grad_output: Tensor,
        weights: Weights,
        activation: Expression,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None:
        """The part of the backward pass that is no product of a weight's gradient.

        It is asked for first where :meth:`saves` says ``x``.

        Args:
            x: ``(rows, in)``.
            grad_output: ``(rows, out)``.
            weights: of a plain MLP, with the bias of up.
            activation: as in the forward pass.
            needs: which gradients are asked for, of x and of each weight and its bias, gate first.

        Returns:
            ``None`` where :meth:`gradient_of_x` runs the whole; else what is needed of ``grad_x``
            ``(rows, in)``, of the gradient of the pre-activations ``(rows, hidden)``, of the
            activation ``(rows, hidden)``, and of ``(any, hidden + out)`` in float32, whose rows
            add up to the gradients of bias_up and bias_down, one after the other.
        """
        return None

    def gradient_of_x(
        self,
        x: Tensor,
        grad_output: Tensor,
        weights: Weights,
        activation: Expression,
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """The backward pass where :meth:`saves` says ``x``.

        Returns:
            ``grad_x`` ``(rows, in)``, or ``None`` where it is not needed, and a matrix in float32
            whose rows add up to the gradients of weight_up, weight_down, bias_up and bias_down, one
            after the other.
        """
        raise NotImplementedError


class TritonFamily(Family):
    """A family of Triton's kernels, which run on GPUs, and on CPUs in Triton's interpreter."""

    launches_triton = True

    def is_for(self, device_type: str) -> bool:
        """Whether there are GPUs, or the interpreter, for it."""
        return device_type != "cpu" or triton_is_interpreted()

    def check_device(self, device: torch.device) -> None:
        """Refuse CPUs, but in the interpreter."""
        if device.type != "cuda" and not triton_is_interpreted():
            raise PlanError(
                f"plan {self.name!r} needs a CUDA device or TRITON_INTERPRET=1, got {device.type}; "
                f"use plan {reference.NAME!r}"
            )

    def untaken(self, kinds: Sequence[Kind], training: bool) -> int | None:
        """The first operand that a kernel has no room for."""
        return MOST_IN_KERNELS if len(kinds) > MOST_IN_KERNELS else None


def why_not_on_cpu(mlp: MLP) -> str | None:
    """Why families for CPUs do not run an MLP, whatever its layers are; ``None`` where they may."""
    if mlp.activated:
        return "on the CPU whole MLPs are fused only, and this is one without its last layer"
    return None
