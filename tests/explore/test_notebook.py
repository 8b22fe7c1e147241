"""The explorer in a notebook: among its styles, in its narrow cells, answered by its kernel."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.explore.visits import Visit, eventually, visiting

from dualform.explore import Exhibit, Explorer
from dualform.explore.page import asset

WIDGET = """
async ([source, style]) => {
  const sheet = new CSSStyleSheet()
  sheet.replaceSync(style)
  document.adoptedStyleSheets = [sheet]
  const listeners = {}
  const values = {state: "", selection: []}
  window.model = {
    values,
    get: (name) => values[name],
    set: (name, value) => { values[name] = value },
    save_changes: () => {},
    on: (event, callback) => { (listeners[event] ??= []).push(callback) },
    off: () => {},
    send: async ({id, path, params}) => {
      const answer = await window.kernel(path, params)
      for (const callback of listeners["msg:custom"]) callback({id, ...answer})
    },
  }
  const widget = await import("data:text/javascript;base64," + source)
  const el = (document.querySelector(".cell") ?? document.body).appendChild(
    document.createElement("div"))
  widget.default.render({model: window.model, el})
}
"""

LAB = """
<style>
  body { margin: 0; height: 100vh; overflow: hidden }
  .notebook { height: 100vh; overflow: auto }
  .cell { width: 100%; overflow: auto }
  .cell dl, .cell dt, .cell dd { display: block }
  .cell dl { width: 100%; overflow: hidden; padding: 0; margin: 0 }
  .cell dt { font-weight: bold; float: left; width: 20%; padding: 0; margin: 0 }
  .cell dd { float: left; width: 80%; padding: 0; margin: 0 }
  .notebook .cell table td, .notebook .cell table th { text-align: center; white-space: normal }
  .notebook .cell ul { list-style: disc; padding-left: 2em }
</style>
<div class="notebook"><div class="cell"></div></div>
"""
"""What JupyterLab puts around an output: a cell that scrolls, and its own rules for elements."""


def kernel(explorer: Explorer, path: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"result": explorer.view(path, params)}


@contextmanager
def in_notebook(browser: Browser, explorer: Explorer, around: str = "", **size: int) -> Any:
    viewport = {"width": 1280, "height": 900} | size
    with visiting(browser, "about:blank", viewport=viewport) as visit:
        visit.page.goto("about:blank")
        visit.page.set_content(around)
        visit.page.expose_function("kernel", lambda *asked: kernel(explorer, *asked))
        script = base64.b64encode(asset("widget.js").encode()).decode()
        visit.page.evaluate(WIDGET, [script, asset("widget.css")])
        yield visit


@pytest.fixture(scope="module")
def explorer(digits: Exhibit) -> Explorer:
    return Explorer(digits)


@pytest.fixture(params=[1280, 620])
def lab(request: pytest.FixtureRequest, browser: Browser, explorer: Explorer) -> Iterator[Visit]:
    with in_notebook(browser, explorer, LAB, width=request.param) as visit:
        expect(visit.at("check")).to_be_visible()
        yield visit


def test_in_a_notebook_it_asks_the_kernel(browser: Browser, explorer: Explorer) -> None:
    with in_notebook(browser, explorer) as visit:
        answer = explorer.view("answer", {"query": "0"})
        samples = answer["sides"]["for"]["samples"]
        eventually(
            lambda: visit.evidence("for"), {str(line["id"]): line["value"] for line in samples}
        )
        first = str(samples[0]["id"])
        visit.at(f"tick-{first}").check()
        eventually(lambda: visit.page.evaluate("model.values.selection"), [first])
        assert f"tick={first}" in visit.page.evaluate("model.values.state")
        assert visit.page.url == "about:blank"


def test_a_notebook_s_own_rules_do_not_reach_it(lab: Visit) -> None:
    """A label of the check stands in one line, which it does not where each `dt` floats."""
    heights = "all => all.map(one => one.getBoundingClientRect().height)"
    labels = lab.at("check").locator("dt")
    assert labels.count() == 4
    assert max(labels.evaluate_all(heights)) < 30
    weights = "all => all.map(one => getComputedStyle(one).fontWeight)"
    assert set(labels.evaluate_all(weights)) == {"400"}
    markers = "all => all.map(one => getComputedStyle(one).listStyleType)"
    assert set(lab.page.locator(".dualform ul").evaluate_all(markers)) == {"none"}


SHORTCUTS = """
document.addEventListener("keydown", (event) => {
  const left = event.target.hasAttribute("data-lm-suppress-shortcuts")
  if (!left) document.title += event.key
}, true)
"""
"""As JupyterLab listens: before the page does, but not where an element asks it not to."""


def test_keys_are_its_own(lab: Visit) -> None:
    """Two d on one of its buttons would delete the notebook's cell; Ctrl+S still saves it."""
    lab.page.evaluate(SHORTCUTS)
    lab.page.locator(".card .open").first.focus()
    lab.page.keyboard.press("d")
    lab.page.keyboard.press("d")
    assert lab.page.title() == ""
    lab.page.keyboard.press("Control+s")
    assert lab.page.title() == "Controls"


def test_in_a_notebook_the_tray_is_seen_where_samples_are_ticked(lab: Visit) -> None:
    first = lab.page.locator("[data-testid^=tick-]").first
    first.check()
    expect(lab.at("after")).to_be_visible()
    expect(first).to_be_in_viewport()
    expect(lab.at("tray")).to_be_in_viewport(ratio=1)
    narrow = "one => one.scrollWidth <= one.clientWidth"
    assert lab.page.locator(".dualform").evaluate(narrow)
