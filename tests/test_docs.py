"""The documents: what they show runs, what they name is there, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.cli
from capture import sites_of
from fusion_backend.patterns import ACTIVATED, FORMS
from fusion_backend.reasons import REASONS
from processes import Children

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
#: Their examples are models, each of which is fused or left alone as the text beside it says.
OF_EXAMPLES = (DOCS / "forms.md", DOCS / "reasons.md")
#: README.md has a test of its own.
RUNNABLE = [
    page
    for page in PAGES
    if page not in (*OF_EXAMPLES, ROOT / "README.md") and "```python" in page.read_text()
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slow_if_long(page: Path) -> object:
    """A page as a parameter: the tutorial profiles a dozen models."""
    return pytest.param(page, marks=pytest.mark.slow) if page.stem == "tutorial" else page


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    broken = []
    for link in links:
        if re.match(r"\w+:", link):
            assert link.startswith("https://")
            continue
        file, _, anchor = link.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_that_is_named_is_there(page: Path) -> None:
    spans = re.findall(r"`([^`\s]+)`", prose(page))
    tops = tuple(f"{name}/" for name in ("fusion_backend", "patterns", "tests", "benchmarks"))
    tops += ("examples/", "docs/", ".ci/")
    named = {re.split(r"[:*]", span)[0] for span in spans if span.startswith(tops)}
    placeholders = re.compile(r"GPU|MACHINE|<|…")
    missing = {n for n in named if not placeholders.search(n) and not (ROOT / n).exists()}
    assert not missing


@pytest.mark.parametrize("page", [*map(slow_if_long, RUNNABLE)], ids=name_of)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, children: Children
) -> None:
    printed = children.printed("\n".join(blocks(page, "python")), folder=tmp_path)
    for output in blocks(page, "text"):  # which a page says is printed
        assert output in printed


def commands(page: Path) -> list[str]:
    """The lines of the shell blocks, without their comments."""
    lines = "".join(blocks(page, "sh")).splitlines()
    return [line for line in (line.split(" #")[0].strip() for line in lines) if line]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_are_known(page: Path) -> None:
    for command in commands(page):
        words = itertools.dropwhile(lambda word: "=" in word, shlex.split(command))
        program, *arguments = words
        if program == "fusedmlp":
            fusion_backend.cli.build_parser().parse_args(arguments)
        elif program.endswith("python"):
            assert (ROOT / arguments[0]).is_file(), command
        elif program == "torchrun":
            (script,) = (word for word in arguments if word.endswith(".py"))
            assert (ROOT / script).is_file(), command
        elif program == "make":
            subprocess.run(["make", *arguments, "--dry-run"], cwd=ROOT, check=True, text=True)
        elif program.startswith(".ci/"):
            assert (ROOT / program).is_file(), command
        else:
            assert program in ("pip", "pytest", ".venv/bin/pre-commit"), command


# Their comments tell form and activation: "def model(x):  # plain, gelu(x)".
FUSED = [
    (*found.groups(), example)
    for example in blocks(DOCS / "forms.md", "python")
    if (found := re.search(r"def model\(x\):  # ([\w-]+), (.*)", example))
]
REASONS_PAGE = (DOCS / "reasons.md").read_text()
LEFT_ALONE = {
    code: found[1]
    for code, section in re.findall(r"^### `(.*?)`\n(.*?)(?=^#|\Z)", REASONS_PAGE, re.M | re.S)
    if (found := re.search(r"```python\n(.*?)```", section, re.DOTALL))
}
# The machine, options or dynamic shapes decide, or the version of torch.
WITHOUT_EXAMPLE = {
    *("internal-error", "unverified", "excluded", "form-off"),
    *("hook", "layout", "leading-shape", "no-kernel", "not-convex", "not-faster", "policy"),
    *("sharding", "symbolic-constant"),
}


def sites_of_example(example: str):
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


@pytest.mark.usefixtures("rows_by_reference")
@pytest.mark.parametrize("code", LEFT_ALONE)
def test_an_example_is_left_alone_for_the_reason_above_it(code: str) -> None:
    sites = sites_of_example(LEFT_ALONE[code])
    assert {site.reason for site in sites if not site.rewritten} == {code}


@pytest.mark.usefixtures("rows_by_reference")
@pytest.mark.parametrize(("form", "activation", "example"), FUSED)
def test_an_example_is_fused_as_the_comment_beside_it_says(
    form: str, activation: str, example: str
) -> None:
    (site,) = sites_of_example(example)
    assert (site.form, site.activation, site.rewritten) == (form, activation, True)


def test_every_example_of_a_form_says_what_it_becomes() -> None:
    assert len(FUSED) == len(blocks(DOCS / "forms.md", "python"))


def test_every_reason_has_an_example_or_cannot_have_one() -> None:
    codes = {reason.code for reason in REASONS}
    headings = re.findall(r"^### `([\w-]+)`", REASONS_PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(codes)
    assert set(LEFT_ALONE) == codes - WITHOUT_EXAMPLE


def test_every_form_is_on_its_page() -> None:
    for form in (*FORMS, ACTIVATED):
        assert f"| `{form.name}` |" in (DOCS / "forms.md").read_text()


def test_a_run_of_the_tutorial_replaces_its_own_outputs_and_keeps_others() -> None:
    spec = importlib.util.spec_from_file_location("tutorial", DOCS / "tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    page = (
        "```python\nx = 2\n```\n\nText.\n\n```python\nprint(x)\n```\n\n<!-- output -->\n\nMore.\n"
    )
    once = tutorial.written(page, "CPU")
    assert once.endswith("<!-- output -->\n\nCPU:\n\n```\n2\n```\n\nMore.\n")
    assert tutorial.written(once, "CPU") == once
    both = tutorial.written(once.replace("x = 2", "x = 3"), "GPU")
    assert both.endswith("CPU:\n\n```\n2\n```\n\nGPU:\n\n```\n3\n```\n\nMore.\n")


def test_every_output_of_the_tutorial_is_there() -> None:
    places = (DOCS / "tutorial.md").read_text().split("<!-- output -->")[1:]
    assert all(re.match(r"\n\nCPU:\n\n```\n.+?```", each, re.DOTALL) for each in places)
