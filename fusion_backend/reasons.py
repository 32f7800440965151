"""Why a site is left alone: stable codes, each with a sentence and with what a person can do.

Codes are part of the public surface: users pin them in their tests. They never change meaning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A kind of refusal.

    Attributes:
        code: short stable name.
        sentence: what stands in the way; ``{}`` takes the particulars of the site.
        remedy: what the user can do about it.
    """

    code: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class Refusal:
    """A reason with the particulars of one site."""

    reason: Reason
    particulars: str = ""

    @property
    def code(self) -> str:
        return self.reason.code

    @property
    def detail(self) -> str:
        """One sentence for a person."""
        return self.reason.sentence.format(self.particulars)


HIDDEN_ESCAPES = Reason(
    "hidden-escapes",
    "the hidden activation is also {}",
    "Do not return or reuse the value between the two linear layers.",
)
MUTATED = Reason(
    "mutated",
    "{} is written to in place before the MLP, or its backward pass, is done with it",
    "Use the out-of-place operation, or move the write after the MLP.",
)
OUT_ARGUMENT = Reason(
    "out-argument",
    "{} stores its result in a tensor that it is given (out=), which must get it",
    "Use the returned value, and copy it where it is needed.",
)
ACTIVE_DROPOUT = Reason(
    "active-dropout",
    "dropout that fused kernels cannot draw is active between the linear layers: {}",
    "Use nn.Dropout, without Inductor's fallback_random; call model.eval() for inference.",
)
NORM_BETWEEN = Reason(
    "norm-between",
    "a normalisation ({}) stands between the activation and the second linear layer",
    "Call model.eval(): batch norm is pointwise there. Others need whole rows of the hidden value.",
)
NON_POINTWISE = Reason(
    "non-pointwise",
    "{} stands between the linear layers and is not pointwise",
    "Nothing: the operation mixes elements of the hidden activation.",
)
OTHER_OPERAND = Reason(
    "other-operand",
    "{} enters the activation and is neither a linear layer nor a parameter",
    "Nothing, if the value is needed; a constant should be a Python number.",
)
PARAMETER = Reason(
    "parameter-in-activation",
    "{} is a parameter of the activation and neither one floating number nor one a feature",
    "Give it a floating dtype and the shape (), (1,) or (hidden,), the features last.",
)
STOPS_GRADIENT = Reason(
    "stops-gradient",
    "{} between the linear layers stops the gradient",
    "Run without gradients (torch.no_grad()) without detach().",
)
HOOK = Reason(
    "hook",
    "a hook is registered on the hidden activation",
    "Remove the hook, or register it on the MLP's output.",
)
CUSTOM_AUTOGRAD = Reason(
    "custom-autograd",
    "a custom autograd.Function defines the gradient of the activation",
    "Write the activation with differentiable torch operations.",
)
NARROWING_CAST = Reason(
    "narrowing-cast",
    "the hidden activation is cast to {} between the linear layers",
    "Keep the activation in the dtype of the linear layers, or in a wider one.",
)
SYMBOLIC_CONSTANT = Reason(
    "symbolic-constant",
    "the constant {} of the activation depends on the sizes or values of the inputs",
    "Pass a Python number.",
)
SHAPES_DIFFER = Reason(
    "shapes-differ",
    "{} combines values of different shapes",
    "Give the operands the same shape.",
)
ROW_MIXING_VIEW = Reason(
    "row-mixing-view",
    "{} changes the hidden dimension between the linear layers",
    "Reshape leading dimensions only.",
)
EXPERTS = Reason(
    "experts",
    "{} has one weight matrix an expert; fused kernels take one for all rows",
    "Nothing: see the kernels for grouped products of your model's library.",
)
UNKNOWN_FORM = Reason(
    "unknown-form",
    "{} enter the activation, which is none of the supported forms",
    "See docs/forms.md for the supported forms.",
)
UNKNOWN_FUNCTION = Reason(
    "unknown-function",
    "{} is not a pointwise function that fusedmlp can write as an expression",
    "Use one of the functions in docs/forms.md.",
)
UNVERIFIED = Reason(
    "unverified",
    "the expression of the activation does not compute what the graph does: {}",
    "Please report it, with the model.",
)
DTYPE = Reason(
    "dtype",
    "the site computes in {}; bfloat16, float16 and float32, the same throughout, are supported",
    "Convert the model to one of the supported dtypes.",
)
DEVICE = Reason(
    "device",
    "the site's tensors are on {}; one CUDA device or the CPU is supported",
    "Move the model to one supported device; for a `target`, `explain` plans on meta, too.",
)
LAYOUT = Reason(
    "layout",
    "{} is not a dense strided tensor",
    "Use dense tensors for the MLP.",
)
TENSOR_SUBCLASS = Reason(
    "tensor-subclass",
    "{} is a tensor subclass with operations of its own",
    "Nothing: the subclass decides how its products are computed.",
)
SHARDING = Reason(
    "sharding",
    "its layers are spread over ranks such that no rank computes its part alone: {}",
    "Shard the first layers by ColwiseParallel and the last one by RowwiseParallel.",
)
MODE_CHANGE = Reason(
    "mode-change",
    "autocast, grad mode or inference mode changes between the linear layers",
    "Open and close the context outside of the MLP.",
)
TRANSFORM = Reason(
    "functorch-transform",
    "the graph runs under a torch.func transform (vmap, grad or jvp)",
    "Compile the model outside of the transform.",
)
EMPTY = Reason("empty", "one of the MLP's widths is zero", "Nothing: there is no work to fuse.")
LEADING_SHAPE = Reason(
    "leading-shape",
    "the leading dimensions of input and output differ in a way that depends on symbolic sizes",
    "Reshape before or after the MLP instead of within it.",
)
CHANNELS_FIRST = Reason(
    "channels-first",
    "{} reads or returns channels-first (NCHW) data; 1×1 convolutions are fused on channels-last",
    "Convert model and input with .to(memory_format=torch.channels_last).",
)
NOT_CONVEX = Reason(
    "not-convex",
    "{} depends on the hidden activation and the site depends on it",
    "Nothing: the site cannot be run in one piece.",
)
OVERLAPS = Reason(
    "overlaps",
    "it shares a linear layer with a neighbour that is fused",
    "Nothing: of a chain of linear layers, the pairs with the widest hidden values are fused.",
)
OPAQUE_OPERATOR = Reason(
    "opaque-operator",
    "torch runs the whole encoder layer as one operator ({}) in evaluation without gradients",
    "torch.backends.mha.set_fastpath_enabled(False) lets the MLP be seen.",
)
INTERNAL_ERROR = Reason(
    "internal-error",
    "fusedmlp failed at it and left it as it was: {}",
    "Please report it, with the program.",
)
EXCLUDED = Reason(
    "excluded",
    "the option fusedmlp.exclude has {}, which names a module that calls one of its layers",
    "Take it out of fusedmlp.exclude, or of FUSEDMLP_EXCLUDE.",
)
FORM_OFF = Reason(
    "form-off",
    "the form {} is switched off by the option fusedmlp.disable_forms",
    "Take it out of fusedmlp.disable_forms, or of FUSEDMLP_DISABLE_FORMS.",
)
POLICY = Reason("policy", "the policy is 'never'", 'Set options={"fusedmlp.policy": "auto"}.')
NO_KERNEL = Reason(
    "no-kernel",
    "no fused kernel runs it here: {}",
    "Run on a CUDA device with Triton; `fusedmlp doctor` says what is missing.",
)
NOT_FASTER = Reason(
    "not-faster",
    "Inductor's own code is taken to be as fast: {}",
    'Measure on this machine with `fusedmlp tune`; options={"fusedmlp.policy": "always"} fuses it '
    "all the same.",
)

REASONS: tuple[Reason, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Reason)
)
"""Every reason, in the order in which they are defined above."""

LEGAL_CODES = frozenset(reason.code for reason in (OVERLAPS, POLICY, NO_KERNEL, NOT_FASTER))
"""Codes of the reasons for which sites are not fused although that would be right."""
