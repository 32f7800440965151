"""The corpus of real models: the published table is made from its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from repetition import slow_but, telling

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "corpus.json"
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("rows_by_reference")


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


@pytest.fixture(scope="module")
def corpus():
    spec = importlib.util.spec_from_file_location("corpus", ROOT / "benchmarks" / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["corpus"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_is_made_from_the_results(corpus, results):
    assert (ROOT / "docs" / "coverage.md").read_text() == corpus.page(results)


def test_every_class_has_a_result(corpus, results):
    assert [case.name for case in corpus.CASES] == list(results["models"])
    assert not [name for name, found in results["models"].items() if "failure" in found]


def test_no_result_in_evaluation_differs_from_eager(corpus, results):
    errors = {name: found["evaluation"]["error"] for name, found in results["models"].items()}
    assert {name: e for name, e in errors.items() if e is None or e > corpus.TOLERANCE} == {}


PUBLISHED = json.loads(RESULTS.read_text())["models"]


def shown(name):
    """Why sites of a class are left alone, or that they are not."""
    return [reason for _, _, reason in PUBLISHED[name]["evaluation"]["sites"]]


HERE = [name for name in PUBLISHED if not name.startswith("timm:") or find_spec("timm")]


EXAMINED = "MixtralModel"  # by a test of its own, which looks at these sites, too
QUICK = [name for name in telling(HERE, shown) if name != EXAMINED]


@pytest.mark.parametrize("name", slow_but(QUICK, HERE))
def test_the_sites_of_a_class_are_the_published_ones(corpus, name):
    (case,) = (case for case in corpus.CASES if case.name == name)
    sites = corpus.sites_in_evaluation(case)
    assert sites == PUBLISHED[name]["evaluation"]["sites"]


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["Phi3Model"],
        ["GPT2Model", "LlamaModel", "Phi3Model", "GlmModel", "ModernBertModel", "MixtralModel"],
    ),
)
def test_one_token_makes_no_difference(monkeypatch, corpus, name):
    """The hidden activation then has the shape of a parameter."""
    monkeypatch.setattr(corpus, "TOKENS", (1, 1))
    (case,) = (case for case in corpus.CASES if case.name == name)
    assert corpus.sites_in_evaluation(case) == PUBLISHED[name]["evaluation"]["sites"]


def test_a_class_is_examined_as_published(corpus):
    (case,) = (case for case in corpus.CASES if case.name == EXAMINED)
    found, published = corpus.examine(case), PUBLISHED[EXAMINED]
    for mode in ("evaluation", "training"):
        assert found[mode]["sites"] == published[mode]["sites"]
        assert found[mode]["missed"] == []
        assert found[mode]["error"] <= corpus.TOLERANCE


def test_no_layer_that_pointwise_work_joins_to_another_is_missed(results):
    runs = [found[mode] for found in results["models"].values() for mode in found]
    assert any(run.get("joined") for run in runs)
    assert [run["missed"] for run in runs if run.get("missed")] == []


@pytest.mark.parametrize(
    ("between", "joined"),
    [
        (nn.GELU(), {"2.weight"}),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Unflatten(1, (2, 8)), nn.Flatten()), {"2.weight"}),
        (nn.LayerNorm(16), set()),
        (nn.Identity(), set()),
        (nn.Softmax(-1), set()),
    ],
)
def test_the_independent_count_knows_what_joins_two_layers(between, joined):
    from pointwise_joins import joined_layers

    model = nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8))
    assert joined_layers(model, lambda: model(torch.randn(4, 8))) == joined


def test_the_independent_count_knows_gates():
    from pointwise_joins import joined_layers

    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("gate", "up", "down")})
    x = torch.randn(4, 8)

    def call():
        return model["down"](model["gate"](x) * model["up"](x))

    assert joined_layers(model, call) == {"down.weight"}
