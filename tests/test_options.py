"""Options from torch.compile and from the environment."""

from __future__ import annotations

import pytest

from fusion_backend.errors import OptionError
from fusion_backend.options import Options, split_options


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for switch in ("CALIBRATE", "MEASURE"):
        monkeypatch.delenv(f"FUSEDMLP_{switch}")


def test_own_options_are_separated_from_those_of_inductor():
    own, inductor = split_options({"fusedmlp.policy": "always", "max_autotune": True})
    assert own == Options(policy="always")
    assert inductor == {"max_autotune": True}


def test_no_options_mean_the_defaults(monkeypatch):
    monkeypatch.delenv("FUSEDMLP_POLICY", raising=False)
    monkeypatch.delenv("FUSEDMLP_STRICT", raising=False)
    monkeypatch.delenv("FUSEDMLP_TUNE", raising=False)
    assert split_options(None) == (Options("auto", strict=False, tune=True, calibrate=True), {})


def test_the_environment_sets_defaults_that_options_override(monkeypatch):
    monkeypatch.setenv("FUSEDMLP_POLICY", "never")
    monkeypatch.setenv("FUSEDMLP_STRICT", "1")
    monkeypatch.setenv("FUSEDMLP_TUNE", "0")
    assert Options.from_environment() == Options(policy="never", strict=True, tune=False)
    monkeypatch.delenv("FUSEDMLP_TUNE")
    assert split_options({"fusedmlp.policy": "auto"})[0] == Options(policy="auto", strict=True)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"'fusedmlp\.polcy'.*fusedmlp\.policy, fusedmlp\.strict"):
        split_options({"fusedmlp.polcy": "always"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusedmlp.policy": "sometimes"}, "policy must be one of auto, always, never"),
        ({"fusedmlp.strict": "yes"}, "strict must be True or False"),
        ({"fusedmlp.tune": 1}, "tune must be True or False"),
    ],
)
def test_a_wrong_value_is_refused_with_the_possible_ones(options, message):
    with pytest.raises(OptionError, match=message):
        split_options(options)


def test_a_wrong_value_in_the_environment_is_refused():
    with pytest.raises(OptionError, match="FUSEDMLP_STRICT must be 1 or 0, got 'maybe'"):
        Options.from_environment({"FUSEDMLP_STRICT": "maybe"})
