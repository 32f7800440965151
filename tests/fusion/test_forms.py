"""Forms: what has one and what nearly has; others are declared, some switched off."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, fused_calls, record
from fusion_backend import Options, explain, fuse
from fusion_backend.errors import FormError, OptionError
from fusion_backend.fusion.settings import legal_settings
from fusion_backend.inductor_pass import FusionPass
from fusion_backend.patterns import ACTIVATED, CHAIN, FORMS
from fusion_backend.patterns.form import Form, PackedProjection, Projection
from fusion_backend.reasons import REASONS

ALL = (*FORMS, ACTIVATED, CHAIN)
by_name = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)


@by_name
@torch.no_grad()
def test_the_example_of_a_form_becomes_what_the_form_says(form):
    model, inputs = form.example()
    recorder, result = record(model, *inputs)
    assert [(site.form, site.rewritten) for site in recorder.sites] == [(form.name, True)]
    target = getattr(torch.ops.fusedmlp, form.becomes).default
    assert [fused_calls(graph, target) for graph in recorder.after] == [1]
    torch.testing.assert_close(result, model(*inputs))


@by_name
@torch.no_grad()
def test_the_near_miss_of_a_form_is_left_alone_for_its_reason(form):
    assert form.near_miss is not None
    model, inputs = form.near_miss.program()
    recorder, result = record(model, *inputs)
    assert (form.name, True) not in [(site.form, site.rewritten) for site in recorder.sites]
    (left,) = [site for site in recorder.sites if not site.rewritten]
    assert left.reason == form.near_miss.reason
    torch.testing.assert_close(result, model(*inputs))


@by_name
def test_a_form_that_is_switched_off_is_not_fused(form):
    model, inputs = form.example()
    options = {"fusedmlp.policy": "always", "fusedmlp.disable_forms": form.name}
    with torch.no_grad():
        sites = explain(model, *inputs, options=options).sites
    assert form.name not in [site.form for site in sites if site.rewritten]
    if form in FORMS:
        (site,) = sites
        assert (site.form, site.reason, site.legal) == (form.name, "form-off", False)
        assert repr(form.name) in site.detail


def test_without_chains_pairs_are_fused():
    model, inputs = CHAIN.example()
    result = fuse(torch.fx.symbolic_trace(model), inputs, {"fusedmlp.disable_forms": ["chain"]})
    assert [site.form for site in result.sites] == ["plain", "plain"]


def test_without_activated_a_site_has_the_reason_that_it_had():
    model, inputs = ACTIVATED.example()
    options = Options(policy="always", disable_forms=("activated",))
    (site,) = fuse(torch.fx.symbolic_trace(model), inputs, options).sites
    assert (site.form, site.reason) == ("plain", "norm-between")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks, then layers of two modules that make one MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.neck, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.neck(x)))


PLACES = ["blocks.0.mlp", "blocks.1.mlp", ""]


@pytest.mark.parametrize(
    ("exclude", "left_alone"),
    [
        ("", []),
        ("blocks.0.mlp", PLACES[:1]),
        ("blocks.0", PLACES[:1]),
        ("blocks.?.mlp", PLACES[:2]),
        (" blocks.1.* , head", PLACES[1:]),
        (("neck",), PLACES[2:]),
        ("mlp", []),  # paths begin at the model
        ("*", PLACES),
    ],
)
def test_sites_of_excluded_modules_are_left_alone(exclude, left_alone):
    options = {"fusedmlp.policy": "always", "fusedmlp.exclude": exclude}
    sites = fuse(torch.fx.symbolic_trace(Model()), (torch.randn(4, 8),), options).sites
    assert [site.module for site in sites] == PLACES
    assert [site.module for site in sites if site.reason == "excluded"] == left_alone
    assert [site.module for site in sites if not site.rewritten] == left_alone


def explained(model, x, options):
    return explain(model, x, options=options).sites


def exported(model, x, options):
    return fuse(torch.export.export(model, (x,)), options=options).sites


@pytest.mark.parametrize("find", [explained, exported])
def test_paths_are_the_same_however_a_model_is_captured(find):
    options = {"fusedmlp.policy": "always", "fusedmlp.exclude": "blocks.1, head"}
    sites = find(Model(), torch.randn(4, 8), options)
    assert [(site.module, site.reason == "excluded") for site in sites] == [
        ("blocks.0.mlp", False),
        ("blocks.1.mlp", True),
        ("", True),
    ]


def test_explain_warns_of_a_pattern_that_names_no_module():
    with pytest.warns(UserWarning, match=r"exclude has 'blocks\.7', which names no module of the"):
        explain(Model(), torch.randn(4, 8), options={"fusedmlp.exclude": "blocks.7,head"})


def test_an_excluded_link_is_no_part_of_a_chain(fusedmlp):
    model, inputs = CHAIN.example()
    pins = {"*: 0 → 2": "plain", "*: 2 → 4": {"form": "plain", "reason": "excluded"}}
    fusedmlp.assert_sites(model, *inputs, pins=pins, options={"fusedmlp.exclude": "4"})


@pytest.mark.slow
def test_the_compiled_model_keeps_excluded_modules_as_they_are():
    model, x = Model(), torch.randn(4, 8)
    options = {"fusedmlp.policy": "always", "fusedmlp.exclude": "blocks"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusedmlp", options=options)
        torch.testing.assert_close(compiled(x), model(x))


def test_what_is_measured_for_a_table_is_not_of_excluded_modules(monkeypatch):
    traced = torch.export.export(Model(), (torch.randn(4, 8),)).module()
    assert len(list(legal_settings(traced))) == 3
    monkeypatch.setenv("FUSEDMLP_EXCLUDE", "blocks.*,head")
    assert not list(legal_settings(traced))


@pytest.mark.parametrize("name", ["exclude", "disable_forms"])
def test_lists_in_the_environment_are_taken_apart(name):
    found = Options.from_environment({f"FUSEDMLP_{name.upper()}": "gated, chain,"})
    assert getattr(found, name) == ("gated", "chain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable_forms": "gatd"}, r"got 'gatd' \(did you mean 'gated'\?\); there are plain, "),
        ({"disable_forms": 3}, "disable_forms must be a text with commas or texts, got 3"),
        ({"exclude": [1]}, r"exclude must be a text with commas or texts, got \[1\]"),
        ({"forms": FORMS[0]}, "forms must be a tuple of Form, got Form"),
        ({"forms": ("gated",)}, "forms must be a tuple of Form, got"),
        ({"forms": (FORMS[0],)}, "forms must have new names, got 'plain' again"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Options(**options)


MIXED = (Projection("g"), PackedProjection("u"))


def declared(name="mixed", hidden=MIXED):
    return Form(name=name, summary="", hidden=hidden, example=FORMS[0].example)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"name": "Mixed"}, "name must be small letters, digits and _, such as 'gated', got 'Mix"),
        ({"hidden": (Projection("y"),)}, "variables of the form 'mixed' must be called x, or g an"),
        ({"hidden": (Projection("x"), Projection("x"))}, "must be called x, or g and u, got x, x"),
    ],
)
def test_a_form_that_there_cannot_be_is_refused(declaration, message):
    with pytest.raises(FormError, match=message):
        declared(**declaration)


def test_a_form_may_list_its_variables():
    assert declared(hidden=list(MIXED)) == declared()


def test_a_form_of_the_user_may_take_the_place_of_one_that_is_switched_off(fusedmlp):
    own = declared("own", (Projection("g"), Projection("u", linear=True)))
    (model, inputs) = next(form.example() for form in FORMS if form.name == "gated")
    options = {"fusedmlp.forms": (own,), "fusedmlp.disable_forms": ("gated",)}
    pin = {"form": "own", "activation": "silu(g) * u", "fused": True}
    fusedmlp.assert_sites(model, *inputs, pins={"*": pin}, options=options)


def test_the_pass_has_another_identity_for_other_forms_and_modules():
    made = [declared("one"), declared("one"), declared("two")]
    options = [
        Options(),
        Options(exclude=("head",)),
        Options(disable_forms=("gated",)),
        *(Options(forms=(form,)) for form in made),
    ]
    identities = [FusionPass(each).uuid() for each in options]
    assert identities[3] == identities[4]  # declared alike, if by other objects
    assert len(set(identities)) == len(options) - 1


def test_the_identity_of_a_form_has_no_address():
    assert not re.search("0x[0-9a-f]+", repr(declared()))


def test_near_misses_have_reasons_that_there_are():
    codes = {reason.code for reason in REASONS}
    assert all(form.near_miss.reason in codes for form in ALL)


def test_a_user_form_that_is_not_given_is_unknown():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.wide, self.down = nn.Linear(8, 16), nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.sigmoid(self.gate(x)) * self.wide(x)[..., :16])

    traced, x = torch.fx.symbolic_trace(Mixed()), torch.randn(4, 8)
    assert [site.reason for site in fuse(traced, (x,), ALWAYS).sites] == ["unknown-form"]
    options = Options(policy="always", forms=(declared(),))
    result = fuse(traced, (x,), options)
    assert [site.form for site in result.sites if site.rewritten] == ["mixed"]
    torch.testing.assert_close(result.graph_module(x), traced(x))
