"""docs/forms.md: every form and reason is there, and every example is left alone for its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import sites_of
from fusion_backend.patterns import ACTIVATED, FORMS
from fusion_backend.reasons import REASONS

PAGE = (Path(__file__).parents[1] / "docs" / "forms.md").read_text()
EXAMPLES = dict(re.findall(r"### `([\w-]+)`\n\n```python\n(.*?)```", PAGE, re.DOTALL))
# Their comments tell the activation: "def model(x):  # gelu(x)".
FUSED = [
    (found[1], example)
    for example in re.findall(r"```python\n(.*?)```", PAGE.partition("## Reasons")[0], re.DOTALL)
    if (found := re.search(r"def model\(x\):  # (.*)", example))
]
# The machine, options or dynamic shapes decide, or the version of torch.
WITHOUT_EXAMPLE = {
    *(
        "hook",
        "internal-error",
        "layout",
        "leading-shape",
        "no-kernel",
        "not-convex",
        "not-faster",
        "policy",
    ),
    "symbolic-constant",
}


def sites_of_example(example):
    scope = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "up": nn.Linear(8, 16),
        "down": nn.Linear(16, 8),
        "x": torch.randn(4, 8),
    }
    exec(example, scope)
    return sites_of(scope["model"], scope["x"])


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_is_left_alone_for_its_reason(code):
    sites = sites_of_example(EXAMPLES[code])
    assert {site.reason for site in sites if not site.rewritten} == {code}


@pytest.mark.parametrize(("activation", "example"), FUSED)
def test_the_example_is_fused_with_the_activation_beside_it(activation, example):
    (site,) = sites_of_example(example)
    assert (site.activation, site.rewritten) == (activation, True)


def test_the_page_has_an_example_that_is_fused():
    assert FUSED


def test_every_reason_has_an_example_or_cannot_have_one():
    assert set(EXAMPLES) == {reason.code for reason in REASONS} - WITHOUT_EXAMPLE


def test_every_reason_and_form_is_in_a_table():
    for reason in REASONS:
        assert f"| `{reason.code}` | {reason.sentence.format('…')} | {reason.remedy} |" in PAGE
    for form in (*FORMS, ACTIVATED):
        assert f"| `{form.name}` | `{form.summary}` |" in PAGE
