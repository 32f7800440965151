"""The report in a browser: its script does what the page promises, in light, dark and narrow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from fusion_backend.instruments.html.page import report_html
from fusion_backend.instruments.html.roofline import Roof
from html_models import TIMES, Model, compared, explained

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

WIDE, NARROW, DARK = "--window-size=1280,900", 390, "--blink-settings=preferredColorScheme=0"

# Runs in the page after its own script, and leaves what it found where the test reads it.
QUESTIONS = """
<script>
const luminance = (color) => {
  const parts = color.match(/[\\d.]+/g).map(Number);
  const linear = parts.slice(0, 3).map((part) => {
    const c = part / 255;
    return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  });
  return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2];
};
const background = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (!/^rgba\\(.*, 0\\)$/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (element) => {
  const [one, other] = [getComputedStyle(element).color, background(element)].map(luminance);
  return (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
};
const hasText = (element) => [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
const wait = (time) => new Promise((done) => setTimeout(done, time));
const found = {};
(async () => {
  const root = document.documentElement;
  found.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  found.width = innerWidth;
  found.overflow = root.scrollWidth - root.clientWidth;
  const shown = [...document.querySelectorAll("main *, header *, nav *")];
  const texts = shown.filter((e) => e instanceof HTMLElement && e.checkVisibility() && hasText(e));
  const pale = texts.filter((e) => contrast(e) < 4.5);
  found.pale = pale.map((e) => `${e.tagName} ${e.className}: ${contrast(e).toFixed(2)}`);
  found.texts = texts.length;

  const node = document.querySelector("#graphs g.changed[data-site='0']");
  node.dispatchEvent(new Event("pointerover", { bubbles: true }));
  const lit = [...document.querySelectorAll(".lit[data-site]")];
  found.lit = [...new Set(lit.map((e) => e.closest("section").id))];
  found.litSites = [...new Set(lit.map((e) => e.dataset.site))];
  document.querySelector("h1").dispatchEvent(new Event("pointerover", { bubbles: true }));
  found.unlit = document.querySelectorAll(".lit").length;

  const link = document.querySelector("#site-0 a");
  link.focus();
  // A browser tells nothing of focus while its window has none, as it may be beside another one.
  if (!document.hasFocus()) link.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
  found.focused = document.querySelectorAll("#graphs .lit").length;

  const hidden = document.getElementById("site-2");
  found.closed = !hidden.closest("details").open;
  location.hash = "#site-2";
  await wait(300);
  found.opened = hidden.closest("details").open;
  found.pinned = hidden.classList.contains("lit");
  found.block = [...document.querySelectorAll(".block.lit > summary")].map((e) => e.textContent);

  const drawing = document.querySelector("#graphs svg.graph");
  const before = drawing.getBoundingClientRect().width;
  document.querySelector("[data-zooms=graph] [data-step='1.25']").click();
  found.zoomed = drawing.getBoundingClientRect().width / before;
  const all = document.querySelector("[data-open]");
  all.click();
  found.blocks = [...document.querySelectorAll("details.block")].map((e) => e.open);
  found.buttons = [...document.querySelectorAll("button")].map((e) => e.ariaLabel || e.textContent);
  const report = document.createElement("pre");
  report.id = "found";
  report.textContent = JSON.stringify(found);
  document.body.append(report);
  if (parent !== window) parent.postMessage(report.textContent, "*");
})();
</script>
</body>"""

# A window is 500 pixels wide at least; a frame is as narrow as it is told.
FRAME = """<!doctype html><title>frame</title><body style="margin:0"><script>
addEventListener("message", (event) => {{
  const report = document.createElement("pre");
  report.id = "found";
  report.textContent = event.data;
  document.body.append(report);
}});
</script><iframe src="{source}" style="width:{width}px;height:800px;border:0"></iframe></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all parts, and more sites than there are colours."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    roof = Roof(1e10, 1e11, "a test")
    path.write_text(report_html(explained(Model(5, 4)), compared(**TIMES), "a model", roof))
    return path


def browse(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page and wait until its script has done all."""
    assert CHROMIUM is not None
    profile = path.parent / "profile"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--enable-logging=stderr", "--virtual-time-budget=5000", f"--user-data-dir={profile}",
        *flags, path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the browser wrote to its console."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def found_in(page: Path, *flags: str, width: int | None = None) -> dict[str, Any]:
    """The answers to the questions above; nothing may be written to the console."""
    asked = page.with_name("asked.html")
    asked.write_text(page.read_text().replace("</body>", QUESTIONS))
    opened = asked
    if width is not None:
        opened = page.with_name("frame.html")
        opened.write_text(FRAME.format(source=asked.as_uri(), width=width))
    done = browse(opened, "--dump-dom", *flags)
    assert complaints(done) == []
    answer = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer is not None, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(unescape(answer[1]))
    return found


@pytest.fixture(scope="module")
def light(page: Path) -> dict[str, Any]:
    return found_in(page, WIDE)


def test_errors_on_the_console_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "failing.html"
    path.write_text("<!doctype html><script>throw new Error('seen')</script>")
    assert any("seen" in line for line in complaints(browse(path, "--dump-dom")))


def test_pointing_at_a_node_lights_its_site_everywhere(light: dict[str, Any]) -> None:
    assert light["litSites"] == ["0"]
    assert set(light["lit"]) >= {"mlps", "graphs", "kernels", "roofline"}
    assert light["unlit"] == 0


def test_the_keyboard_lights_a_site_as_well(light: dict[str, Any]) -> None:
    assert light["focused"] > 0


def test_a_link_to_a_site_opens_what_hides_it(light: dict[str, Any]) -> None:
    assert light["closed"]
    assert light["opened"]
    assert light["pinned"]
    (block,) = light["block"]  # the one that is drawn for all that are like it
    assert "blocks.0" in block


def test_buttons_have_names_and_zoom_and_open_the_graph(light: dict[str, Any]) -> None:
    assert light["zoomed"] == pytest.approx(1.25, rel=0.01)
    assert len(light["blocks"]) == 6
    assert all(light["blocks"])
    assert all(light["buttons"])


@pytest.mark.parametrize("flags", [(WIDE,), (WIDE, DARK)], ids=["light", "dark"])
def test_all_text_has_the_contrast_that_wcag_asks_for(page: Path, flags: tuple[str, ...]) -> None:
    found = found_in(page, *flags)
    assert found["dark"] == (DARK in flags)
    assert found["texts"] > 50
    assert found["pale"] == []


def test_a_narrow_page_is_not_wider_than_the_screen(page: Path) -> None:
    found = found_in(page, width=NARROW)
    assert found["width"] == NARROW
    assert found["overflow"] <= 0
    assert found["pale"] == []


def test_light_and_dark_are_what_they_are_called(page: Path) -> None:
    means = []
    for flags in ((WIDE,), (WIDE, DARK)):
        picture = page.with_suffix(".png")
        browse(page, f"--screenshot={picture}", *flags)
        means.append(matplotlib.image.imread(picture)[..., :3].mean())
    assert means[0] > 0.8
    assert means[1] < 0.3


def test_it_prints(page: Path) -> None:
    paper = page.with_suffix(".pdf")
    browse(page, f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
    assert paper.stat().st_size > 20_000
