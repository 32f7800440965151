"""The report: what the page says, drawn and in words, and that nothing in it is anybody else's."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import html_models
from fusion_backend import Explanation
from fusion_backend.cli import main
from fusion_backend.instruments.claims import SiteLaunches
from fusion_backend.instruments.explanation import GraphPair
from fusion_backend.instruments.html.blocks import shown_graphs
from fusion_backend.instruments.html.memory import memory_of
from fusion_backend.instruments.html.page import report_html
from fusion_backend.instruments.timelines import Launch
from html_models import MLP, TIMES, Block, Model, compared, explained
from html_page import Element, read

HOSTILE = "<img src=x onerror=alert(1)>\"'&"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explained(Model())


@pytest.fixture(scope="module")
def page(explanation: Explanation) -> Element:
    return read(explanation.to_html("a model"))


def test_the_summary_is_one_sentence_with_what_was_found(page: Element) -> None:
    (summary,) = page.all(css_class="summary")
    assert summary.text == "5 of 6 MLPs fused."
    assert [h1.text for h1 in page.all("h1")] == ["a model"]


def test_every_site_is_listed_with_its_module_and_its_line(
    page: Element, explanation: Explanation
) -> None:
    for number, site in enumerate(explanation.sites):
        entry = page.with_id(f"site-{number}")
        assert [path.text for path in entry.all(css_class="path")] == [site.module]
    path, line = explanation.sites[0].source.rsplit(":", 1)
    assert path == html_models.__file__
    assert "self.down(F.gelu(self.up(x)))" in Path(path).read_text().splitlines()[int(line) - 1]
    sources = page.with_id("mlps").all(css_class="source")
    assert explanation.sites[0].source in [each.attributes.get("title") for each in sources]


def test_a_site_that_is_left_alone_has_its_reason_and_what_to_do(page: Element) -> None:
    (row,) = page.with_id("mlps").all("tr", "alone")
    assert "hidden-escapes" in row.text
    assert "What to do:" in row.text
    assert "blocks.3.mlp" in row.text


def test_repeated_blocks_are_drawn_once(explanation: Explanation) -> None:
    (pair,) = explanation.graphs
    (graph,) = shown_graphs(*pair, explanation.sites, 0)
    folded = {block.title: [each.title for each in block.like] for block in graph.blocks}
    assert folded == {
        "inputs": [],
        "blocks.0": ["blocks.1", "blocks.2"],
        "blocks.3": [],
        "blocks.4": [],
        "blocks.5": [],  # a compiler adds its residual within the norm that follows
        "head": [],
    }


def test_every_node_is_in_one_block_before_and_in_one_after(explanation: Explanation) -> None:
    (pair,) = explanation.graphs
    (graph,) = shown_graphs(*pair, explanation.sites, 0)
    whole = [each for block in graph.blocks for each in (block, *block.like)]
    before = [node.name for block in whole for node in block.before]
    after = [node.name for block in whole for node in block.after]
    assert len(before) == len(set(before)) == graph.nodes_before
    assert len(after) == len(set(after)) == graph.nodes_after
    known = {node.name for node in pair.after.graph.nodes}
    assert set(after) <= known
    assert known - set(after) == {n for n in known if n.startswith("l_self") or "_parameters_" in n}


def test_what_is_replaced_is_linked_to_what_takes_its_place(
    page: Element, explanation: Explanation
) -> None:
    nodes = [
        node
        for node in page.with_id("graphs").all("g", "changed")
        if node.attributes.get("data-site") == "0"
    ]
    labels = {node.all("text")[0].text.split()[0] for node in nodes}
    assert {"linear", "gelu", "fusedmlp.mlp"} <= labels
    for node in nodes:
        assert node.parent is not None
        assert node.parent.attributes["href"] == "#site-0"


def test_links_within_the_page_lead_somewhere(page: Element) -> None:
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    assert len(ids) == len(set(ids))
    links = {link.attributes["href"] for link in page.all("a")}
    assert links <= {f"#{name}" for name in ids}


def test_the_page_loads_nothing(explanation: Explanation) -> None:
    html = explanation.to_html()
    page = read(html)
    for element in page.all():
        for name in ("src", "href", "srcset", "data", "xlink:href", "action", "poster"):
            value = element.attributes.get(name) or ""
            assert value == "" or value.startswith("#") or value == "data:,", (element.tag, value)
    (style,) = page.all("style")
    assert "url(" not in style.texts[0]
    assert "@import" not in style.texts[0]
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\s*\(", page.all("script")[0].texts[0])
    assert "default-src 'none'" in html


def test_the_kernel_of_a_cpu_is_shown_in_cpp(page: Element) -> None:
    kernels = page.with_id("kernels")
    assert "C++" in kernels.text
    assert any("activation<0>" in code.text for code in kernels.all("code"))


def test_without_kernels_none_is_listed(explanation: Explanation) -> None:
    page = read(explanation.to_html(kernels=False))
    assert not page.with_id("kernels").all("pre")


def test_names_are_escaped_wherever_they_stand(explanation: Explanation) -> None:
    site = replace(
        explanation.sites[0], module=HOSTILE, activation=HOSTILE, detail=HOSTILE,
        source=f"{HOSTILE}:1",
        form=HOSTILE, operands=(HOSTILE,), fused=False, reason=HOSTILE, plan=None, nodes=(),
    )  # fmt: skip
    hostile = replace(
        explanation, sites=(site,), sites_by_graph=((site,),), graph_breaks=(HOSTILE,)
    )
    launch = Launch(HOSTILE, 0.0, 1.0)
    measured = replace(compared(inductor=(launch,), fusedmlp=(launch,)), notes=(HOSTILE,))
    pages = [
        hostile.to_html(HOSTILE, kernels=False),
        measured.to_html(HOSTILE),
        hostile._repr_html_(),
        measured._repr_html_(),
    ]
    for html in pages:
        page = read(html)
        assert not page.all("img")
        assert not [each for each in page.all() if any(n.startswith("on") for n in each.attributes)]
        assert "<img" not in html


def test_names_of_modules_in_graphs_are_escaped() -> None:
    model = nn.Sequential(OrderedDict({"<script>alert(1)</script>": Block(MLP())}))
    found = explained(model)
    html = found.to_html(kernels=False) + found.graphs[0]._repr_html_()
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_a_model_of_hundreds_of_nodes_stays_small() -> None:
    found = explained(Model(first=30, last=30))
    (pair,) = found.graphs
    html = found.to_html(kernels=False)
    assert len(pair.before.graph.nodes) > 500
    assert len(html) < 300_000
    page = read(html)
    assert len(page.with_id("graphs").all("details", "block")) == 6
    assert page.with_id("site-60")


def test_boxes_do_not_overlap(page: Element) -> None:
    for drawing in page.all("svg", "graph"):
        boxes = [
            tuple(float(rect.attributes[name]) for name in ("x", "y", "width", "height"))
            for rect in drawing.all("rect")
        ]
        for i, (x, y, width, height) in enumerate(boxes):
            for other_x, other_y, other_width, other_height in boxes[i + 1 :]:
                apart = x + width <= other_x or other_x + other_width <= x
                apart = apart or y + height <= other_y or other_y + other_height <= y
                assert apart


def test_launches_are_given_to_sites_and_gains_are_measured_by_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), MLP())
    found = explained(model)
    measured = replace(compared(**TIMES), mlps=found.sites)
    page = read(report_html(found, measured, kernels=False))
    drawn = page.with_id("times").all("rect")
    own = [rect.all("title")[0].text for rect in drawn if rect.attributes.get("data-site") == "1"]
    assert [text.split(",")[0] for text in own] == [
        "aten::addmm",
        "cpp_fused_gelu_0",
        "aten::addmm",
        "fusedmlp::rows",
    ]
    cells = [cell.text for cell in page.with_id("mlps").all("td", "n")]
    assert cells[-1] == "2.00×"  # 50 µs against 25 µs


def test_a_launch_says_whose_it_is_and_in_which_pass() -> None:
    found = explained(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), MLP()))
    launches = (*TIMES["fusedmlp"], Launch("fusedmlp::rows_gradients", 40.0, 9.0, 0, 1, True))
    measured = replace(compared(fusedmlp=launches), mlps=found.sites)
    for page in (report_html(found, measured, kernels=False), measured.to_html()):
        titles = [title.text for title in read(page).with_id("times").all("title")]
        assert titles == [
            "aten::addmm, 10 µs",
            "fusedmlp::rows, 25 µs, MLP 2 (3)",
            "fusedmlp::rows_gradients, 9 µs, MLP 2 (3), backward",
        ]


def test_the_page_has_what_plans_claim_and_what_calls_keep() -> None:
    claim = SiteLaunches(
        "blocks.0.mlp", "0/0", "rows", 1, 1, 1, Counter({"fusedmlp::rows": 1}), 5.0
    )
    measured = replace(compared(**TIMES), sites=(claim,), gradients={"fusedmlp::rows_gradients": 1})
    rows = tuple(replace(row, saved_bytes=2_000_000, first_call_s=1.5) for row in measured.rows)
    times = read(replace(measured, rows=rows).to_html()).with_id("times")
    headers = [cell.text for cell in times.all("th") if cell.attributes.get("scope") == "col"]
    assert {"saved MB", "first call s", "claimed", "launched"} <= set(headers)
    assert "blocks.0.mlp" in [cell.text for cell in times.all("th")]
    assert "fusedmlp::rows_gradients 1×" in times.text


def test_timelines_are_to_one_scale() -> None:
    page = read(compared(**TIMES).to_html())
    drawings = page.with_id("times").all("svg")
    assert len({drawing.attributes["viewbox"].split()[2] for drawing in drawings}) == 1
    assert [rect.attributes["width"] for rect in drawings[1].all("rect")] == ["10", "25"]


def test_a_timeline_of_other_sites_than_the_graphs_has_none() -> None:
    page = read(report_html(explained(MLP()), compared(**TIMES), kernels=False))
    first, _ = page.with_id("times").all("svg")
    assert not [rect for rect in first.all("rect") if "data-site" in rect.attributes]


def test_calls_that_took_different_times_are_noticed() -> None:
    slow = tuple(each._replace(duration=1000 * each.duration) for each in TIMES["inductor"])
    busy = compared(inductor=slow)
    row = replace(busy.rows[0], wall_us=5000.0)  # the last launch ends after 40 ms
    page = read(replace(busy, rows=(row,)).to_html())
    assert "took 40.1 ms, the timed ones 5 ms" in page.with_id("times").text
    row = replace(busy.rows[0], wall_us=45000.0)
    assert "the timed ones" not in replace(busy, rows=(row,)).to_html()


def test_the_memory_of_a_fused_graph_has_a_lower_peak() -> None:
    page = read(explained(Block(MLP())).to_html(kernels=False))
    peaks = [each.attributes["aria-label"] for each in page.with_id("memory").all("svg")]
    before, after = (float(re.search(r"peak ([\d.]+)", text)[1]) for text in peaks)
    assert after < before


def test_memory_is_that_of_values_in_use() -> None:
    found = explained(MLP(), rows=10)
    memory = memory_of(found.graphs[0].before.graph)
    x, hidden = 4 * 10 * 16, 4 * 10 * 32
    assert memory.live == (x + hidden, x + 2 * hidden, x + hidden + x)
    assert memory.weights == 4 * (2 * 16 * 32 + 32 + 16)


def test_notebooks_show_fragments(explanation: Explanation) -> None:
    pair = explanation.graphs[0]
    assert isinstance(pair, GraphPair)
    for html in (explanation._repr_html_(), pair._repr_html_(), compared(**TIMES)._repr_html_()):
        page = read(html)
        (root,) = page.children
        assert root.attributes["class"] == "fusedmlp"
        assert not page.all("script")
        assert not [each for each in page.all() if "id" in each.attributes]


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factory = tmp_path / "factory.py"
    factory.write_text(
        "import torch\nfrom torch import nn\n\n\ndef mlp():\n"
        "    layers = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)\n"
        "    return nn.Sequential(*layers), (torch.randn(8, 16),)\n"
    )
    output = tmp_path / "report.html"
    assert main(["report", f"{factory}:mlp", "-o", str(output), "--policy", "always"]) == 0
    assert str(output) in capsys.readouterr().out
    page = read(output.read_text(encoding="utf-8"))
    parts = [section.attributes["id"] for section in page.all("section")]
    assert parts == ["mlps", "times", "graphs", "kernels", "roofline", "memory"]
    assert page.with_id("roofline").all(css_class="roof")


def test_the_command_refuses_a_file_in_no_folder_before_it_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "report.html"
    assert main(["report", "no.module:factory", "-o", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
