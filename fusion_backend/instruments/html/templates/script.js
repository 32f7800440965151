"use strict";
(() => {
  const page = document.querySelector(".fusedmlp.page");
  // Blocks that repeat are drawn once: of the others' sites, the block itself is what is lit.
  const ofSite = (number) => page.querySelectorAll(`[data-site="${number}"], .block[data-sites~="${number}"]`);
  let pinned = null;
  let lit = null;

  const light = (number) => {
    if (number === lit) return;
    if (lit !== null) ofSite(lit).forEach((each) => each.classList.remove("lit"));
    if (number !== null) ofSite(number).forEach((each) => each.classList.add("lit"));
    lit = number;
  };
  const siteOf = (target) => {
    const marked = target.closest ? target.closest("[data-site]") : null;
    return marked ? marked.dataset.site : null;
  };
  page.addEventListener("pointerover", (event) => light(siteOf(event.target) ?? pinned));
  page.addEventListener("pointerleave", () => light(pinned));
  page.addEventListener("focusin", (event) => light(siteOf(event.target) ?? event.target.querySelector("[data-site]")?.dataset.site ?? pinned));

  // A link to a site, or to anything within a part that is closed, opens it.
  const reveal = () => {
    const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
    if (!target) return;
    for (let each = target.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
    target.scrollIntoView({ block: "nearest" });
    pinned = target.dataset.site ?? null;
    light(pinned);
  };
  addEventListener("hashchange", reveal);
  reveal();

  for (const controls of page.querySelectorAll("[data-zooms]")) {
    const part = controls.closest("section");
    const zoomed = controls.dataset.zooms === "graph" ? part : part.querySelector(".timeline");
    let zoom = 1;
    controls.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if ("open" in button.dataset) {
        const blocks = [...part.querySelectorAll("details.block")];
        const open = !blocks.every((each) => each.open);
        blocks.forEach((each) => { each.open = open; });
        button.textContent = open ? "Close all" : "Open all";
        return;
      }
      zoom = Math.min(32, Math.max(controls.dataset.zooms === "graph" ? 0.2 : 1, zoom * Number(button.dataset.step)));
      zoomed.style.setProperty("--zoom", zoom);
    });
  }

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...page.querySelectorAll("details:not([open])")].filter((each) => !each.querySelector("pre"));
    closed.forEach((each) => { each.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((each) => { each.open = false; }));
})();
