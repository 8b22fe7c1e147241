"""A report offers what it carries, and nothing else: no choice takes the page away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect
from tests.explore.visits import BUSY, Visit, eventually, serving, visiting

from dualform.explore import Exhibit, Explorer, write_report
from dualform.read.progress import watched

ROOM = 3
"""For how many answers of the digits there is room for amounts by sample and time."""
CHOICES = (  # of cards, which are alike, the first
    "main :is(button, a[href]:not(.twin, [download]), input[type=radio], option)"
    ":not(:disabled, li:nth-child(n + 3) .frame, .card:not(:first-child) *)"
)


SERVED = [
    "/query?span=0-1&label=3",
    "/query?run=1&layer=0&at=3",
    "/query?run=2&layer=mix&place=4",
    "/query?run=3&ask=network&place=2",
]


@pytest.fixture(scope="module")
def report(digits: Exhibit, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualform.explore.report.CELL_BYTES", ROOM * 120 * 3 * 4)
        patch.setattr("dualform.explore.report.PAGES", 3)
        page = write_report(digits, tmp_path_factory.mktemp("few") / "report.html", ["0", "5"])
    return page.as_uri()


@pytest.fixture
def visit(browser: Browser, report: str) -> Iterator[Visit]:
    with visiting(browser, report, offline=True) as found:
        yield found


ALIKE = """controls => {
  const seen = new Map()
  const kind = (one) => (one.closest('[data-testid]')?.dataset.testid ?? '') + one.localName
  controls.forEach((one, at) => {
    const name = kind(one).replace(/\\d+/g, '')
    seen.set(name, [...(seen.get(name) ?? []), at])
  })
  return [...seen.values()].flatMap((all) => [...new Set([all[0], all[1], all.at(-1)])])
    .filter((at) => at !== undefined)
}"""
"""The first two and the last of the controls that are alike: of labels, outputs, positions."""


def choose(control: Locator) -> None:
    """As a person would: options in their list, radio buttons by their label."""
    kind = control.evaluate("one => one.localName + (one.type ?? '')")
    if kind == "option":
        chosen = control.evaluate("one => one.value")
        control.locator("xpath=..").select_option(chosen)
    elif kind == "inputradio":
        Visit.choose(control)
    else:
        control.dispatch_event("click")


@pytest.mark.parametrize(
    "state",
    [
        "/query",
        "/query?query=5&ask=network",
        "/query?ask=keys",
        "/query?layer=0",
        "/query?span=0-1",
        "/suspects",
        "/compare?b.query=5&b.ask=keys",
    ],
)
def test_nothing_that_can_be_chosen_is_missing(visit: Visit, state: str) -> None:
    """Of the first page, really nothing."""
    assert try_choices(visit, state, every=state == "/query") > 0


@pytest.mark.parametrize("kind", ["speech", "patches", "training samples"])
def test_nor_of_positions_and_training_samples(
    browser: Browser, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    exhibit = request.getfixturevalue("words" if kind == "training samples" else kind)
    exhibit = Exhibit(exhibit.run) if kind == "training samples" else exhibit
    chosen = None if kind == "training samples" else ["0", "1"]
    page = write_report(exhibit, tmp_path / "report.html", chosen)
    with visiting(browser, page.as_uri(), offline=True) as visit:
        assert try_choices(visit, "/query") > 10


@pytest.fixture(scope="module")
def address(digits: Exhibit, patches: Exhibit, words: Exhibit, speech: Exhibit) -> Iterator[str]:
    """A server of four runs: it has everything, so that nothing it offers may be refused."""
    with serving([Explorer(exhibit) for exhibit in (digits, patches, words, speech)]) as found:
        yield found


@pytest.mark.parametrize("state", SERVED)
def test_a_server_answers_all_it_offers(browser: Browser, address: str, state: str) -> None:
    with visiting(browser, address) as visit:
        assert try_choices(visit, state) > 10


@pytest.mark.long
@pytest.mark.parametrize("state", SERVED)
def test_really_all(browser: Browser, address: str, state: str) -> None:
    with visiting(browser, address) as visit:
        assert try_choices(visit, state, every=True) > 20


def try_choices(visit: Visit, state: str, every: bool = False) -> int:
    """Chooses what a state offers, one after the other, of what is alike a few; gives how many."""
    visit.settle(state)
    expect(visit.at("error")).to_have_count(0)
    controls, busy = visit.page.locator(CHOICES), visit.page.locator(BUSY)
    count = controls.count()
    chosen = range(count) if every else controls.evaluate_all(ALIKE)
    for at in chosen:
        expect(busy).to_have_count(0)  # it is drawn again, and a place in it means the same
        expect(controls).to_have_count(count)
        control = controls.nth(at)
        name = control.evaluate("one => one.outerHTML")[:200]
        choose(control)
        expect(busy).to_have_count(0)
        assert visit.at("error").count() == 0, name
        visit.go(state)
    return len(chosen)


def test_outputs_that_are_not_carried_cannot_be_asked(visit: Visit) -> None:
    visit.settle("/query")
    outputs = visit.at("outputs").get_by_role("button")
    able = outputs.evaluate_all("all => all.map(one => !one.disabled)")
    assert able == [True] * 3 + [False] * 7
    expect(visit.at("outputs-missing").locator("code")).to_have_text("dualform view")


def test_a_link_to_what_is_not_carried_leads_on(visit: Visit, digits: Exhibit) -> None:
    last = Explorer(digits).view("answer", {"query": "0"})["outputs"][-1]["output"]
    visit.go(f"/query?query=0&output={last}")
    expect(visit.at("error")).to_contain_text("dualform view on the run answers everything")
    assert "`" not in visit.page.locator("main").inner_text()
    visit.at("wholly").click()
    expect(visit.at("title")).to_have_text("digit 0")


def test_a_position_that_is_not_carried_is_not_answered_by_another(
    browser: Browser, speech: Exhibit, tmp_path: Path
) -> None:
    page = write_report(speech, tmp_path / "report.html", ["0"])
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.go("/query?query=0&place=2")
        expect(visit.at("error")).to_contain_text("This report does not carry the answer")
        visit.go("/query?query=0")
        radios = visit.at("query-places").get_by_role("radio")
        able = radios.evaluate_all("all => all.map(one => !one.disabled)")
        assert able == [False] * 5 + [True]


def test_a_report_lists_every_suspect(visit: Visit, digits: Exhibit) -> None:
    visit.go("/suspects")
    expect(visit.at("suspects")).to_contain_text("120 samples")
    ranking = digits.run.suspicion().top(120)
    visit.at("suspect-list").evaluate("one => one.scrollTo(0, one.scrollHeight)")
    last = visit.at(f"suspect-{ranking.ids[-1]}")
    expect(last).to_be_visible()
    eventually(
        lambda: float(last.locator("data").get_attribute("value") or "nan"),
        float(ranking.rows[-1].value),
    )


def test_what_is_ticked_without_amounts_is_not_said_to_add_nothing(
    visit: Visit, digits: Exhibit
) -> None:
    visit.go("/query?query=5&ask=network&tick=3")
    expect(visit.at("tray").get_by_test_id("error")).to_contain_text("does not carry")


def test_writing_a_report_says_how_far_it_is(digits: Exhibit, tmp_path: Path) -> None:
    news: list[tuple[str, float]] = []
    with watched(lambda doing, share: news.append((doing, share))):
        write_report(digits, tmp_path / "report.html", ["0", "1"])
    shares = [share for _, share in news]
    assert {doing for doing, _ in news} == {"writing the report"}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) > 10
