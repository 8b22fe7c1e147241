"""The page around the evidence: positions, own queries, two runs, states, looks, access."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, expect
from tests.explore.conftest import digit_images, record
from tests.explore.visits import Visit, eventually, serving, visiting
from torch import nn

import dualform
from dualform.errors import RecordingWarning
from dualform.explore import Exhibit, Explorer, Query, write_report
from dualform.read.progress import LateProgress

HOSTILE = "</script><img src=x onerror=alert(1)>"
PAGES = ["/query", "/query?acting=7", "/query?all=for", "/sample?sample=7"]
PAGES += ["/suspects", "/books", "/compare?b.query=1", "/query?tick=7&tick=8"]
PLACES = ["/query?run=1&layer=0&acting=7", "/query?run=2&layer=mix"]


class Slow(Explorer):
    """Works on query 39 until nobody waits for it."""

    def __init__(self, exhibit: Exhibit) -> None:
        super().__init__(exhibit)
        self.ended = Event()

    def view(self, name: str, parameters: Any) -> dict[str, Any]:
        """As ever, except for query 39."""
        if name == "answer" and parameters.get("query") == ["39"]:
            self._work()
        return super().view(name, parameters)

    def _work(self) -> None:
        try:
            with LateProgress("layer 2", 1000) as progress:
                for _ in range(1000):
                    progress.advance(1)
                    self.ended.wait(0.02)
        finally:
            self.ended.set()


@pytest.fixture(scope="module")
def slow(digits: Exhibit) -> Slow:
    return Slow(digits)


@pytest.fixture(scope="module")
def address(slow: Slow, patches: Exhibit, words: Exhibit) -> Iterator[str]:
    """A server of three runs: 0 digits, 1 patches, 2 words."""
    with serving([slow, Explorer(patches), Explorer(words)]) as found:
        yield found


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    with visiting(browser, address) as found:
        yield found


def amounts(answer: dict[str, Any], side: str) -> dict[str, float]:
    return {str(line["id"]): line["value"] for line in answer["sides"][side]["samples"]}


def test_patches_of_the_query_and_of_a_sample(visit: Visit, patches: Exhibit) -> None:
    explorer, asked = Explorer(patches), {"query": "0", "layer": "0"}
    visit.go("/query?run=1&layer=0")
    whole = explorer.view("answer", asked)
    eventually(lambda: visit.evidence("for"), amounts(whole, "for"))
    places = visit.at("query-places").get_by_role("radio")
    assert places.count() == whole["places"] == 36
    expect(places.nth(whole["place"])).to_be_checked()
    visit.choose(places.nth(8))
    output = str(whole["output"])
    there = explorer.view("answer", asked | {"place": "8"})
    eventually(lambda: visit.evidence("for"), amounts(there, "for"))
    visit.at("lift-place").click()
    eventually(lambda: visit.evidence("for"), amounts(whole, "for"))
    best = str(whole["sides"]["for"]["samples"][0]["id"])
    visit.at(f"card-{best}").get_by_role("button").click()
    visit.choose(visit.at("acts-places").get_by_role("radio").nth(14))
    only = explorer.view("answer", asked | {"at": "14", "output": output})
    eventually(lambda: visit.evidence("for"), amounts(only, "for"))
    assert "at=14" in visit.page.url


def test_the_whole_network_through_one_layer(visit: Visit, digits: Exhibit) -> None:
    visit.go("/query?ask=network")
    visit.at("through").select_option("0")
    part = Explorer(digits).view("answer", {"query": "0", "ask": "network", "layer": "0"})
    eventually(lambda: visit.evidence("for"), amounts(part, "for"))
    assert "layer=0" in visit.page.url


def test_tokens_and_typed_text(visit: Visit, words: Exhibit) -> None:
    explorer = Explorer(words)
    visit.go("/query?run=2&layer=mix")
    answer = explorer.view("answer", {"query": "0", "layer": "mix"})
    eventually(lambda: visit.evidence("for"), amounts(answer, "for"))
    assert visit.at("query-places").inner_text().split() == answer["tokens"]
    best = answer["sides"]["for"]["samples"][0]
    card = visit.at(f"card-{best['id']}").locator(".token")
    expect(card).to_have_text(best["preview"]["text"].split())
    acts = explorer.view("acts", {"query": "0", "layer": "mix", "id": str(best["id"])})
    assert "--for" in (card.nth(int(np.argmax(acts["places"]))).get_attribute("style") or "")
    visit.choose(visit.at("query-places").get_by_role("radio").nth(2))
    third = explorer.view("answer", {"query": "0", "layer": "mix", "place": "2"})
    eventually(lambda: visit.evidence("against"), amounts(third, "against"))
    visit.at("give").locator("summary").click()
    visit.at("typed").fill("cat sat on the mat")
    visit.at("ask-typed").click()
    own = explorer.view("answer", {"query": "text:cat sat on the mat", "layer": "mix"})
    eventually(lambda: visit.evidence("for"), amounts(own, "for"))
    expect(visit.at("title")).to_have_text("your text")


def test_an_uploaded_picture_is_the_query_it_shows(visit: Visit, digits: Exhibit) -> None:
    visit.go("/query")
    shown = Explorer(digits).view("answer", {"query": "3"})
    pixels = base64.b64decode(shown["query"]["preview"]["source"].split(",")[1])
    visit.at("give").locator("summary").click()
    given = {"name": "digit.png", "mimeType": "image/png", "buffer": pixels}
    visit.at("upload").set_input_files(given)  # type: ignore[arg-type]
    expect(visit.at("title")).to_have_text("your picture")
    values = [output["value"] for output in shown["outputs"]]
    found = visit.values("[data-testid=outputs] data")
    assert found == pytest.approx(values, abs=0.02)  # pictures have 256 shades
    broken = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"}
    visit.at("upload").set_input_files(broken)  # type: ignore[arg-type]
    expect(visit.at("error")).to_contain_text("notes.txt is not a picture")


def test_a_drawing_is_a_query(visit: Visit, digits: Exhibit) -> None:
    visit.go("/query")
    visit.at("give").locator("summary").click()
    box = visit.at("canvas").bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2
    visit.page.mouse.move(middle, box["y"] + 10)
    visit.page.mouse.down()
    visit.page.mouse.move(middle, box["y"] + box["height"] - 10, steps=5)
    visit.page.mouse.up()
    visit.at("ask-drawn").click()
    expect(visit.at("title")).to_have_text("your picture")
    name = visit.page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('query')")
    answer = Explorer(digits).view("answer", {"query": name})
    eventually(lambda: visit.evidence("for"), amounts(answer, "for"))
    preview = base64.b64decode(answer["query"]["preview"]["source"].split(",")[1])
    image = Image.open(io.BytesIO(preview)).convert("L")
    assert image.getpixel((4, 4)) > 100 > image.getpixel((0, 4))


def test_two_runs_side_by_side(visit: Visit, digits: Exhibit, patches: Exhibit) -> None:
    visit.go("/compare")
    right = visit.at("pane-other")
    right.get_by_test_id("choose-run").select_option("1")
    for pane, exhibit in (("asked", digits), ("other", patches)):
        total = Explorer(exhibit).view("answer", {"query": "0"})["check"]["total"]
        shown = f"[data-testid=pane-{pane}] [data-testid=check-total]"
        eventually(lambda shown=shown: visit.values(shown), [total])
    sides = Explorer(patches).view("answer", {"query": "0"})["sides"]
    longer = max(sides, key=lambda side: sides[side]["count"])
    right.get_by_test_id(f"all-{longer}").click()
    full = Explorer(patches).view("evidence", {"query": "0", "side": longer})
    expect(visit.at("all")).to_contain_text(f"{full['total']} samples")


def test_comparing_begins_with_the_other_run(visit: Visit) -> None:
    visit.go("/query")
    visit.at("page-compare").click()
    runs = [visit.at(f"pane-{pane}").get_by_test_id("choose-run") for pane in ("asked", "other")]
    expect(runs[0]).to_have_value("0")
    expect(runs[1]).to_have_value("1")


def test_without_a_model_training_samples_are_looked_at(browser: Browser, digits: Exhibit) -> None:
    explorer = Explorer(Exhibit(digits.run))
    with serving([explorer]) as address, visiting(browser, address) as visit:
        visit.go("/query")
        expect(visit.at("title")).to_have_text("training sample 0")
        answer = explorer.view("answer", {"query": "sample:0"})
        eventually(lambda: visit.evidence("for"), amounts(answer, "for"))
        expect(visit.at("ask-network")).to_be_disabled()
        expect(visit.at("why")).to_contain_text("needs the model")
        assert visit.at("only-wrong").count() == 0
        visit.at("layer-0").click()
        inside = explorer.view("answer", {"query": "sample:0", "layer": "0"})
        eventually(lambda: visit.evidence("against"), amounts(inside, "against"))


def test_long_scans_tell_how_far_they_are_and_can_be_cancelled(visit: Visit, slow: Slow) -> None:
    visit.go("/query?query=39")
    expect(visit.at("progress")).to_contain_text("Reading layer 2")
    expect(visit.at("progress")).to_contain_text("% done")
    visit.at("cancel").click()
    expect(visit.at("cancelled")).to_contain_text("You cancelled this")
    assert slow.ended.wait(10)  # the server has stopped working on it
    visit.at("cancelled").get_by_role("button").click()
    expect(visit.at("title")).to_have_text("digit 39")


def test_wrong_links_say_what_is_wrong(visit: Visit) -> None:
    visit.go("/query?query=4711")
    expect(visit.at("error")).to_contain_text("query '4711' does not exist")
    visit.go("/query?run=7")
    expect(visit.at("error")).to_contain_text("There is no run number 7 here")
    visit.go("/sample?sample=nobody")
    expect(visit.at("error")).to_contain_text("nobody")


def test_every_view_has_its_json(visit: Visit) -> None:
    for page, views in {
        "/query": ["answer", "layers"],
        "/suspects": ["suspects"],
        "/books": ["books"],
        "/sample?sample=7": ["sample"],
        "/query?tick=7": ["subtract"],
    }.items():
        visit.go(page)
        for view in views:
            link = visit.page.locator(f".twin[href^='api/0/{view}']").first
            found = visit.page.request.get(visit.home + (link.get_attribute("href") or ""))
            assert found.ok
            assert isinstance(found.json(), dict)


def test_without_a_mouse(visit: Visit, digits: Exhibit) -> None:
    visit.go("/query")
    expect(visit.at("check")).to_be_visible()
    visit.page.keyboard.press("Tab")
    expect(visit.page.locator(".skip")).to_be_focused()
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("main")).to_be_focused()
    visit.at("ask-layer").focus()
    visit.page.keyboard.press("ArrowRight")
    expect(visit.at("ask-network")).to_be_checked()
    assert "ask=network" in visit.page.url
    visit.at("query-1").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("Enter")
    expect(visit.at("title")).to_have_text("digit 2")
    expect(visit.at("live")).to_contain_text("The evidence about output")


def test_colors_follow_the_system_or_the_person(browser: Browser, address: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with visiting(browser, address, color_scheme="dark") as visit:
        visit.go("/books")
        expect(visit.at("books-bytes")).to_be_visible()
        dark = visit.page.evaluate(paper)
        visit.at("theme").click()
        expect(visit.at("theme")).to_have_text("Colors: dark")
        assert visit.page.evaluate(paper) == dark
        visit.at("theme").click()
        expect(visit.at("theme")).to_have_text("Colors: light")
        assert visit.page.evaluate(paper) != dark
        assert "theme=light" in visit.page.url


@pytest.mark.parametrize(
    ("scheme", "pages"), [("light", [*PAGES, *PLACES]), ("dark", [PAGES[-1], PLACES[-1]])]
)
def test_everyone_can_use_it(browser: Browser, address: str, scheme: Any, pages: list[str]) -> None:
    found = {}
    with visiting(browser, address, color_scheme=scheme, reduced_motion="reduce") as visit:
        for page in pages:
            visit.settle(page)
            found[page] = visit.axe()
    assert {page: serious for page, serious in found.items() if serious} == {}


FITTING = [*PAGES[-4:], *PLACES]


@pytest.mark.parametrize(
    ("width", "pages"), [(360, FITTING), (1280, FITTING[::2]), (2560, FITTING[1::2])]
)
def test_it_fits(browser: Browser, address: str, width: int, pages: list[str]) -> None:
    with visiting(browser, address, viewport={"width": width, "height": 800}) as visit:
        for page in pages:
            visit.settle(page)
            assert not visit.too_wide(), page


def test_a_report_begins_at_the_frame_of_what_is_asked(
    browser: Browser, digits: Exhibit, tmp_path: Path
) -> None:
    """Its queries have the numbers they had among all, which are no places in the report."""
    chosen = [str(number) for number in (39, *range(9))]
    page = write_report(digits, tmp_path / "report.html", chosen)
    small = {"width": 360, "height": 800}
    with visiting(browser, page.as_uri(), offline=True, viewport=small) as visit:
        visit.go("/query")
        expect(visit.at("query-39")).to_be_in_viewport()
        visit.settle("/query?query=8")
        expect(visit.at("query-8")).to_be_in_viewport()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """Many layers, long labels, little learned."""
    torch.manual_seed(0)
    x, y = digit_images()
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(14)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    labels = [f"a digit, which is a {int(digit)}" for digit in y[:60]]
    path = tmp_path_factory.mktemp("deep") / "run"
    run = record(model, x[:60].flatten(1), y[:60], path, labels=labels, previews=x[:60])
    return Exhibit(run, model, x[60:62].flatten(1), [Query("first"), Query("second")])


def test_long_lists_and_labels_have_their_place(
    browser: Browser, deep: Exhibit, tmp_path: Path
) -> None:
    page = write_report(deep, tmp_path / "report.html")
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.go("/query")
        visit.at("layers").scroll_into_view_if_needed()
        expect(visit.at("layer-14")).to_be_in_viewport()
        ends = "const end = (one) => one.getBoundingClientRect().right"
        inside = "end(card.querySelector('.amount')) <= end(card) + 0.5"
        read = f"all => {{ {ends}; return all.map((card) => {inside}) }}"
        assert set(visit.page.locator(".card").evaluate_all(read)) == {True}
        bounds = "const at = (one, name) => one.querySelector(name).getBoundingClientRect()"
        above = "at(card, '.label').bottom <= at(card, '.tick').top + 4"
        read = f"all => {{ {bounds}; return all.map((card) => {above}) }}"
        assert set(visit.page.locator(".card").evaluate_all(read)) == {True}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """A run whose labels and titles a stranger wrote."""
    torch.manual_seed(0)
    x, model = torch.randn(30, 6), nn.Linear(6, 3)
    labels = [HOSTILE if at % 2 else "kind" for at in range(30)]
    path = tmp_path_factory.mktemp("hostile") / "run"
    run = record(model, x, torch.arange(30) % 3, path, labels=labels, previews=[HOSTILE] * 30)
    return Exhibit(run, model, x[:2], [Query(HOSTILE, HOSTILE), Query("kind")])


@pytest.mark.parametrize("carrier", ["server", "report"])
def test_what_strangers_wrote_is_text(
    browser: Browser, hostile: Exhibit, carrier: str, tmp_path: Path
) -> None:
    home = write_report(hostile, tmp_path / "report.html").as_uri()
    with serving([Explorer(hostile)]) as served:
        place = served if carrier == "server" else home
        with visiting(browser, place, offline=carrier == "report") as visit:
            visit.go("/query")
            expect(visit.at("title")).to_have_text(HOSTILE)
            expect(visit.at(f"label-{HOSTILE}")).to_have_text(HOSTILE)
            assert visit.page.locator("img").count() == 0
            assert not visit.too_wide()
            visit.go("/suspects")
            expect(visit.at("suspect-list")).to_contain_text(HOSTILE)
            assert visit.page.locator("img").count() == 0


def test_a_run_without_steps_says_so(browser: Browser, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RecordingWarning, match="saw no step"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        empty = Explorer(Exhibit(dualform.open(tmp_path / "run")))
    with serving([empty]) as address, visiting(browser, address) as visit:
        visit.go("/query")
        expect(visit.page.locator("main")).to_contain_text("No step of this run is committed yet.")
        assert visit.at("only-wrong").count() == 0
        visit.go("/suspects")
        expect(visit.at("error")).to_contain_text("no step of this run is committed yet")
        assert visit.at("csv").count() == 0
        visit.complaints.clear()  # the browser's own, of the status of the answer


def test_samples_without_previews_are_named(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(12, 4), nn.Linear(4, 3)
    run = record(model, x, torch.arange(12) % 3, tmp_path / "run", labels=torch.arange(12) % 3)
    page = write_report(Exhibit(run, model, x[:1]), tmp_path / "report.html")
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.go("/query")
        best = run.spotlight(model, x[:1]).last.top(1).ids[0]
        expect(visit.at(f"card-{best}")).to_contain_text(f"Sample {best}")
        expect(visit.at("query-0")).to_contain_text("query 0")
