"""What stands side by side is about the same thing: one position, one set of samples, one scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.explore.conftest import WORDS
from tests.explore.visits import Visit, eventually, serving, visiting

from dualform.errors import ReadingError
from dualform.explore import Exhibit, Explorer, write_report

PLACES = 6


@pytest.fixture(scope="module")
def explorer(speech: Exhibit) -> Explorer:
    return Explorer(speech)


def test_every_question_is_about_the_same_position(explorer: Explorer) -> None:
    """Of a language model the last, unless another is given: of each layer as of the network."""
    for place in (None, 2):
        asked = {"query": "3"} | ({} if place is None else {"place": str(place)})
        answers = [explorer.view("answer", asked | {"layer": la}) for la in explorer.run.layers]
        answers += [explorer.view("answer", asked | {"ask": ask}) for ask in ("network", "removed")]
        wanted = PLACES - 1 if place is None else place
        assert [answer["place"] for answer in answers] == [wanted] * len(answers)
        assert all(answer["shared"] and answer["places"] == PLACES for answer in answers)
        assert {answer["tokens"][0] in WORDS for answer in answers} == {True}


def test_the_last_layer_s_outputs_are_the_model_s(explorer: Explorer) -> None:
    layer = explorer.view("answer", {"query": "3"})
    network = explorer.view("answer", {"query": "3", "ask": "network"})
    assert [o["output"] for o in layer["outputs"]] == [o["output"] for o in network["outputs"]]
    values = [o["value"] for o in network["outputs"]]
    assert [o["value"] for o in layer["outputs"]] == pytest.approx(values, abs=1e-5)
    assert layer["marks"] == pytest.approx(network["marks"], abs=1e-5)


@pytest.mark.parametrize("place", range(PLACES))
def test_layers_shares_are_those_of_the_position_beside_them(
    explorer: Explorer, place: int
) -> None:
    asked = {"query": "1", "place": str(place), "output": "4"}
    network = explorer.view("answer", asked | {"ask": "network"})
    layers = explorer.view("layers", asked)
    assert layers["total"] == network["check"]["total"]
    shares = sum(share["value"] for share in layers["shares"])
    assert shares == pytest.approx(network["check"]["evidence"], abs=1e-6)


def test_subtracting_is_about_the_position_that_is_asked(explorer: Explorer) -> None:
    for ask in ("layer", "network"):
        asked = {"query": "1", "ask": ask, "place": "2", "output": "4"}
        answer = explorer.view("answer", asked)
        own = {line["output"]: line["value"] for line in answer["outputs"]}
        subtracted = explorer.view("subtract", asked | {"id": ["3", "5"], "estimate": "1"})
        before = {line["output"]: line["value"] for line in subtracted["before"]}
        assert 4 in before
        assert before == pytest.approx({output: own[output] for output in before}, abs=1e-5)
        removed = explorer.view("answer", asked | {"ask": "removed"})
        lost = explorer.view("acts", asked | {"ask": "removed", "id": "3"})["value"]
        lost += explorer.view("acts", asked | {"ask": "removed", "id": "5"})["value"]
        there = {line["output"]: line["value"] for line in removed["outputs"]}[4]
        assert subtracted["asked"]["retrained"] == pytest.approx(there - lost, abs=1e-5)


def test_a_sample_s_effects_are_what_their_links_show(explorer: Explorer, patches: Exhibit) -> None:
    for own in (explorer, Explorer(patches)):
        page = own.view("sample", {"id": "4"})
        effects = [*page["helps"][:3], *page["hurts"][:3]]
        assert effects
        for effect in effects:
            asked = {"query": effect["query"]["query"], "output": str(effect["output"])}
            acts = own.view("acts", asked | {"id": "4"})
            assert acts["value"] == pytest.approx(effect["value"], abs=1e-9)


def test_on_the_page_a_position_is_chosen_for_all(browser: Browser, explorer: Explorer) -> None:
    with serving([explorer]) as address, visiting(browser, address) as visit:
        visit.go("/query?query=1&output=4")
        places = visit.at("query-places").get_by_role("radio")
        expect(places.nth(PLACES - 1)).to_be_checked()
        visit.choose(places.nth(1))
        asked = {"query": "1", "output": "4", "place": "1"}
        shares = [share["value"] for share in explorer.view("layers", asked)["shares"]]
        eventually(lambda: visit.values("[data-testid=layers] data"), shares)
        visit.choose(visit.at("ask-network"))
        network = explorer.view("answer", asked | {"ask": "network"})
        eventually(lambda: visit.value("check-total"), network["check"]["total"])
        expect(visit.at("query-places").get_by_role("radio").nth(1)).to_be_checked()
        visit.choose(visit.at("query-places").get_by_role("radio").nth(3))
        third = explorer.view("answer", asked | {"ask": "network", "place": "3"})
        eventually(lambda: visit.value("check-total"), third["check"]["total"])


@pytest.fixture(scope="module")
def homes(digits: Exhibit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    report = write_report(digits, tmp_path_factory.mktemp("alike") / "report.html", ["0"])
    with serving([Explorer(digits)]) as address:
        yield {"server": address, "report": report.as_uri()}


@pytest.fixture(params=["server", "report"])
def visit(
    request: pytest.FixtureRequest, browser: Browser, homes: dict[str, str]
) -> Iterator[Visit]:
    with visiting(browser, homes[request.param], offline=request.param == "report") as found:
        yield found


def test_answers_of_all_labels_add_up_to_the_whole(digits: Exhibit) -> None:
    explorer = Explorer(digits)
    for asked in ({"query": "3"}, {"query": "3", "by": "parity", "span": "1-2"}):
        whole = explorer.view("answer", asked)
        parts = [
            explorer.view("answer", asked | {"label": str(group["label"])})
            for group in whole["groups"]
        ]
        for side in ("for", "against"):
            for name in ("sum", "count"):
                total = sum(part["sides"][side][name] for part in parts)
                assert total == pytest.approx(whole["sides"][side][name])
        timelines = zip(*(part["timeline"] for part in parts), strict=True)
        assert [sum(bins) for bins in timelines] == pytest.approx(whole["timeline"])
        assert all(part["groups"] == whole["groups"] for part in parts)
        assert all(part["check"] is None and "Only samples" in part["note"] for part in parts)
    with pytest.raises(ReadingError, match=r"label='cat'; there are 0, 1, 2, 3, 4, 5, 6, 7, …\."):
        explorer.view("answer", {"query": "3", "label": "cat"})


def test_a_filter_reaches_every_sum_on_the_page(visit: Visit, digits: Exhibit) -> None:
    explorer = Explorer(digits)
    groups = explorer.view("answer", {"query": "0"})["groups"]
    label = max(groups, key=lambda group: group["for"])["label"]
    visit.go(f"/query?query=0&label={label}")
    only = explorer.view("answer", {"query": "0", "label": str(label)})
    eventually(lambda: visit.value("sum-for"), only["sides"]["for"]["sum"])
    headline = only["sides"]["for"]["sum"] + only["sides"]["against"]["sum"]
    if only["sides"]["against"]["count"]:
        assert visit.value("check-sides") == pytest.approx(headline, rel=1e-5)
    assert visit.at("check-total").count() == 0
    expect(visit.at("check")).to_contain_text(f"Only samples whose label is {label}.")
    expect(visit.at("layers")).to_contain_text("of all samples and all of training")
    visit.at("lift-label").click()
    whole = explorer.view("answer", {"query": "0"})
    eventually(lambda: visit.value("check-total"), whole["check"]["total"])


def test_the_focus_comes_back(visit: Visit) -> None:
    """After a sheet to what opened it; after a restriction is lifted, to the page."""
    visit.go("/query?query=0")
    opener = visit.at("evidence").locator(".card .open").nth(1)
    opener.focus()
    visit.page.keyboard.press("Enter")
    expect(visit.at("acts")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.at("acts")).to_have_count(0)
    expect(opener).to_be_focused()
    visit.go("/query?query=0&span=0-1")
    visit.at("lift-span").focus()
    visit.page.keyboard.press("Enter")
    expect(visit.at("filters")).to_have_count(0)
    expect(visit.page.locator("main")).to_be_focused()


def test_the_books_page_has_the_audit_s_verdict(
    browser: Browser, digits: Exhibit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.read.audit.SUSPECT", 1e-12)
    verdict = digits.run.audit().verdict
    assert verdict
    page = write_report(digits, tmp_path / "report.html", ["0"])
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.go("/books")
        expect(visit.at("books-verdict")).to_contain_text(verdict)
