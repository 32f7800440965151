"""The options of the backend, from ``torch.compile(options=...)`` and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

from fusion_backend.errors import OptionError

Policy = Literal["auto", "always", "never"]

PREFIX = "fusedmlp."
ENVIRONMENT_PREFIX = "FUSEDMLP_"
_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Options:
    """What the user may choose.

    Attributes:
        policy: ``"auto"`` fuses what is legal and not slower, ``"always"`` fuses all that is legal
            on any device (for tests and study), ``"never"`` fuses nothing.
        strict: raise :class:`~fusion_backend.errors.FusionError` when a rewrite fails, instead of
            warning and leaving the site, or the graph, as it came.
        tune: under ``mode="max-autotune"``, measure MLPs that no table speaks for on this GPU, and
            keep the result in the user's table.
        calibrate: on a CPU, measure how fast it is, once, within two seconds, and keep the result
            in the user's cache directory. Otherwise what was measured on one machine is believed.
    """

    policy: Policy = "auto"
    strict: bool = False
    tune: bool = True
    calibrate: bool = True

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise OptionError(
                f"fusedmlp.policy must be one of {', '.join(get_args(Policy))}, got {self.policy!r}"
            )
        for switch in ("strict", "tune", "calibrate"):
            value = getattr(self, switch)
            if not isinstance(value, bool):
                raise OptionError(f"fusedmlp.{switch} must be True or False, got {value!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys that ``torch.compile(options=...)`` accepts, with their prefix."""
        return tuple(PREFIX + field.name for field in fields(cls))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """Options from ``FUSEDMLP_POLICY`` and the switches (1 or 0).

        These are ``FUSEDMLP_STRICT``, ``FUSEDMLP_TUNE`` and ``FUSEDMLP_CALIBRATE``.

        Raises:
            OptionError: a variable has a value that its option cannot take.
        """
        environment = os.environ if environment is None else environment
        options = cls()
        if policy := environment.get(ENVIRONMENT_PREFIX + "POLICY"):
            options = replace(options, policy=cast(Policy, policy.lower()))
        return replace(
            options,
            strict=_switch("STRICT", environment, options.strict),
            tune=_switch("TUNE", environment, options.tune),
            calibrate=_switch("CALIBRATE", environment, options.calibrate),
        )


def _switch(name: str, environment: Mapping[str, str], default: bool) -> bool:
    value = environment.get(ENVIRONMENT_PREFIX + name)
    if not value:
        return default
    if value.lower() not in _SWITCHES:
        raise OptionError(f"{ENVIRONMENT_PREFIX}{name} must be 1 or 0, got {value!r}")
    return _SWITCHES[value.lower()]


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Separate fusedmlp's own options from those meant for Inductor.

    Args:
        options: the mapping given to ``torch.compile(options=...)``; keys that start with
            ``fusedmlp.`` are ours and take precedence over the environment.

    Returns:
        Our options, and the remaining mapping for Inductor, which checks its own names.

    Raises:
        OptionError: a ``fusedmlp.`` key is unknown or has a value that it cannot take.
    """
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not key.startswith(PREFIX):
            inductor[key] = value
        elif key in Options.names():
            own[key.removeprefix(PREFIX)] = value
        else:
            raise OptionError(
                f"unknown option {key!r}; known options are {', '.join(Options.names())} "
                "and those of torch._inductor.config"
            )
    return replace(Options.from_environment(), **own), inductor
