"""The options of the backend, from ``torch.compile(options=...)`` and from the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from fusion_backend.errors import OptionError

if TYPE_CHECKING:
    from fusion_backend.patterns.form import Form

Policy = Literal["auto", "always", "never"]

PREFIX = "fusedmlp."
ENVIRONMENT_PREFIX = "FUSEDMLP_"
_LISTS = ("exclude", "disable_forms")
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
        measure: on a GPU, time the kernels that may be fastest, and those that Inductor would run,
            where no table speaks for the very MLP: within 0.15 s a distinct MLP, beside compiling,
            once. Never in distributed jobs, nor under deterministic algorithms.
        calibrate: on a CPU, measure how fast it is, once, within two seconds, and keep the result
            in the user's cache directory. Otherwise what was measured on one machine is believed,
            and nothing that ``fusedmlp tune`` measured on this CPU.
        recompute: in compiled training, save nothing of a fused MLP but its input, and compute it
            again in the backward pass: less memory for more time. Regions that are checkpointed
            do so already.
        exclude: paths of modules whose MLPs are left alone, such as ``"blocks.0.mlp"``, as
            :func:`fusion_backend.explain` prints them; ``*``, ``?`` and ``[…]`` as in file names. A
            text with commas is taken apart.
        disable_forms: names of forms of which nothing is fused, such as ``"gated"``. A text with
            commas is taken apart.
        forms: forms of MLPs beside those of the package, tried after them.
    """

    policy: Policy = "auto"
    strict: bool = False
    tune: bool = True
    measure: bool = True
    calibrate: bool = True
    recompute: bool = False
    exclude: tuple[str, ...] = ()
    disable_forms: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise OptionError(
                f"fusedmlp.policy must be one of {', '.join(get_args(Policy))}, got "
                f"{self.policy!r}{nearest(str(self.policy), get_args(Policy))}"
            )
        for switch in self._switches():
            value = getattr(self, switch)
            if not isinstance(value, bool):
                raise OptionError(f"fusedmlp.{switch} must be True or False, got {value!r}")
        for name in _LISTS:
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if self.forms or self.disable_forms:
            self._check_forms()

    def _check_forms(self) -> None:
        from fusion_backend.patterns import ACTIVATED, CHAIN, FORMS, TOWERS
        from fusion_backend.patterns.form import Form
        from fusion_backend.patterns.installed import installed_forms

        given: Any = self.forms
        if not isinstance(given, (tuple, list)) or not all(isinstance(f, Form) for f in given):
            raise OptionError(f"fusedmlp.forms must be a tuple of Form, got {given!r}")
        object.__setattr__(self, "forms", tuple(given))
        known = [form.name for form in (*FORMS, ACTIVATED, CHAIN, TOWERS, *installed_forms())]
        for form in self.forms:
            if form.name in known:
                raise OptionError(f"fusedmlp.forms must have new names, got {form.name!r} again")
            known.append(form.name)
        for name in self.disable_forms:
            if name not in known:
                raise OptionError(
                    f"fusedmlp.disable_forms must name forms, got {name!r}{nearest(name, known)}; "
                    f"there are {', '.join(known)}"
                )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys that ``torch.compile(options=...)`` accepts, with their prefix."""
        return tuple(PREFIX + field.name for field in fields(cls))

    @classmethod
    def _switches(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls) if isinstance(field.default, bool))

    @classmethod
    def variables(cls) -> tuple[str, ...]:
        """The environment variables that :meth:`from_environment` reads."""
        return tuple(
            ENVIRONMENT_PREFIX + field.name.upper()
            for field in fields(cls)
            if field.name != "forms"
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """Options from ``FUSEDMLP_POLICY``, the switches (1 or 0) and the lists (with commas).

        The switches are ``FUSEDMLP_STRICT``, ``FUSEDMLP_TUNE``, ``FUSEDMLP_MEASURE``,
        ``FUSEDMLP_CALIBRATE`` and ``FUSEDMLP_RECOMPUTE``, the lists ``FUSEDMLP_EXCLUDE`` and
        ``FUSEDMLP_DISABLE_FORMS``.

        Raises:
            OptionError: a variable has a value that its option cannot take.
        """
        environment = os.environ if environment is None else environment
        default = cls()
        policy = environment.get(ENVIRONMENT_PREFIX + "POLICY") or default.policy
        others: dict[str, Any] = {
            name: environment.get(ENVIRONMENT_PREFIX + name.upper(), "") for name in _LISTS
        }
        for name in cls._switches():
            others[name] = _switch(name.upper(), environment, getattr(default, name))
        return cls(policy=cast(Policy, policy.lower()), **others)

    def as_mapping(self) -> dict[str, Any]:
        """The options as ``torch.compile(options=...)`` takes them, all of them."""
        return {PREFIX + field.name: getattr(self, field.name) for field in fields(self)}


def _switch(name: str, environment: Mapping[str, str], default: bool) -> bool:
    value = environment.get(ENVIRONMENT_PREFIX + name)
    if not value:
        return default
    if value.lower() not in _SWITCHES:
        raise OptionError(f"{ENVIRONMENT_PREFIX}{name} must be 1 or 0, got {value!r}")
    return _SWITCHES[value.lower()]


def _texts(name: str, given: Any) -> tuple[str, ...]:
    """A text with commas, or texts, as texts."""
    found = given.split(",") if isinstance(given, str) else given
    if not isinstance(found, (tuple, list)) or not all(isinstance(text, str) for text in found):
        raise OptionError(f"fusedmlp.{name} must be a text with commas or texts, got {given!r}")
    return tuple(text.strip() for text in found if text.strip())


def split_options(options: Options | Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Separate fusedmlp's own options from those meant for Inductor.

    Args:
        options: the mapping given to ``torch.compile(options=...)``; keys that start with
            ``fusedmlp.`` are ours and take precedence over the environment. An :class:`Options` is
            taken as it is.

    Returns:
        Our options, and the remaining mapping for Inductor, which checks its own names.

    Raises:
        OptionError: a ``fusedmlp.`` key is unknown or has a value that it cannot take.
    """
    if isinstance(options, Options):
        return options, {}
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in checked_mapping(options).items():
        if not key.startswith(PREFIX):
            inductor[key] = value
        else:
            own[key.removeprefix(PREFIX)] = value
    return replace(Options.from_environment(), **own), inductor


def own_options(options: Options | Mapping[str, Any] | None) -> Options:
    """The options of a function that has none for Inductor.

    Raises:
        OptionError: a key is unknown, none of ours, or has a value that it cannot take.
    """
    own, others = split_options(options)
    if others:
        raise OptionError(_unknown(next(iter(others)), "no options of Inductor are taken here"))
    return own


def checked_mapping(options: Options | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Options as ``torch.compile(options=...)`` takes them.

    Raises:
        OptionError: they are neither an :class:`Options`, a mapping nor ``None``, or a key is meant
            for fusedmlp and unknown.
    """
    if options is None:
        return {}
    if isinstance(options, Options):
        return options.as_mapping()
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise OptionError(
            f"options must be a dict with keys such as 'fusedmlp.policy', an Options, or None, "
            f"got {options!r}"
        )
    for key in options:
        if key not in Options.names() and _is_ours(key):
            raise OptionError(_unknown(key, "others are those of torch._inductor.config"))
    return options


def _is_ours(key: str) -> bool:
    """Whether a key is meant for fusedmlp: by its beginning, or an option without the prefix."""
    return key.lower().startswith("fusedmlp") or PREFIX + key in Options.names()


def _unknown(key: str, others: str) -> str:
    known = Options.names()
    bare = key.lower().removeprefix("fusedmlp").strip("._-")
    near = difflib.get_close_matches(bare, [name.removeprefix(PREFIX) for name in known], n=1)
    nearest = f" (did you mean {PREFIX + near[0]!r}?)" if near else ""
    return f"unknown option {key!r}{nearest}; known options are {', '.join(known)}; {others}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for what was meant, where something is near."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""
