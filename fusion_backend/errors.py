"""Every exception that fusedmlp raises on purpose; each message says how to put it right."""

from __future__ import annotations


class FusedMLPError(Exception):
    """Base class of all errors raised by fusedmlp."""


class OptionError(FusedMLPError, ValueError):
    """An option of fusedmlp has an unknown name or a value it cannot take."""


class ArgumentError(FusedMLPError, TypeError):
    """A function of fusedmlp was given something of another kind than it takes."""


class FormError(FusedMLPError, ValueError):
    """A form of MLP is declared as there can be none."""


class ExpressionError(FusedMLPError, ValueError):
    """A text is not an activation expression, or an expression cannot be built."""


class PlanError(FusedMLPError, RuntimeError):
    """An operator was asked for a plan that cannot run on its device, dtype or shapes."""


class FusionError(FusedMLPError, RuntimeError):
    """The rewrite of a graph failed; raised under ``strict`` instead of leaving the graph alone."""


class RewriteError(FusedMLPError, RuntimeError):
    """The call that was to take the place of a site does not fit there; the site is left alone."""


class ExplainError(FusedMLPError, RuntimeError):
    """The model could not be compiled in order to explain it."""


class ProfileError(FusedMLPError, RuntimeError):
    """A profile is not trustworthy, for example because its steps differ in their kernels."""


class MeasurementError(FusedMLPError, RuntimeError):
    """Times cannot be believed, because other programs took the cores meanwhile."""


class WatchError(FusedMLPError, RuntimeError):
    """A running program does not launch the kernels that were planned for it."""


class PinError(FusedMLPError, ValueError):
    """A test pins something that does not exist: a reason, a form, a family of kernels."""


class CommandError(FusedMLPError):
    """A command line cannot be carried out; printed as one line, without a traceback."""
