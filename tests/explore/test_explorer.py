"""What a person can do in the explorer: on a real server, and in a report without any network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, expect
from tests.explore.visits import Visit, eventually, serving, visiting

from dualform.explore import Exhibit, Explorer, write_report

CARRIED = ["0", "1", "5"]


@pytest.fixture(scope="module")
def explorer(digits: Exhibit) -> Explorer:
    """Says what must be shown."""
    return Explorer(digits)


@pytest.fixture(scope="module")
def homes(digits: Exhibit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server with the run (twice, to compare), and a report from it."""
    report = write_report(digits, tmp_path_factory.mktemp("report") / "report.html", CARRIED)
    with serving([Explorer(digits), Explorer(digits)]) as address:
        yield {"server": address, "report": report.as_uri()}


@pytest.fixture(params=["server", "report"])
def visit(
    request: pytest.FixtureRequest, browser: Browser, homes: dict[str, str]
) -> Iterator[Visit]:
    offline = request.param == "report"
    with visiting(browser, homes[request.param], offline=offline) as found:
        found.go("/query")
        yield found


def amounts(answer: dict[str, Any], side: str) -> dict[str, float]:
    return {str(line["id"]): line["value"] for line in answer["sides"][side]["samples"]}


def test_a_prediction_is_the_sum_of_its_evidence(visit: Visit, digits: Exhibit) -> None:
    x = digits.subject("0").x
    reading = digits.run.spotlight(digits.model, x).last
    with torch.no_grad():
        outputs = digits.model(x)[0].sort(descending=True)
    eventually(lambda: visit.values("[data-testid=outputs] data"), outputs.values.tolist())
    assert visit.value("check-initial") == pytest.approx(float(reading.initial[0]), abs=1e-6)
    evidence = float(reading.samples().values[:, 0].sum())
    assert visit.value("check-evidence") == pytest.approx(evidence, rel=1e-5)
    assert visit.value("check-total") == pytest.approx(float(reading.total[0]), rel=1e-5)
    parts = [visit.value(f"check-{part}") for part in ("initial", "evidence", "remainder")]
    assert sum(parts) == pytest.approx(visit.value("check-total"), abs=1e-5)
    assert abs(parts[-1]) < 1e-5
    assert visit.value("check-error") < 1e-5
    expect(visit.at("verdict")).to_contain_text(f"Predicted {outputs.indices[0]}")


def test_evidence_is_what_python_finds(visit: Visit, digits: Exhibit) -> None:
    reading = digits.run.spotlight(digits.model, digits.subject("0").x).last
    best, worst = reading.top(12), reading.bottom(12)
    found = {"for": best, "against": worst}
    for side, ranking in found.items():
        expected = {str(row.id): row.value for row in ranking.rows}
        eventually(lambda side=side: visit.evidence(side), expected)
        text = visit.at(f"side-{side}").locator(".card data").first.inner_text()
        assert text[0] == ("+" if side == "for" else "−")
    pictures = visit.page.locator("[data-testid=evidence] img").evaluate_all(
        "all => all.map(one => one.naturalWidth)"
    )
    assert set(pictures) == {8}


def test_another_output_another_query_and_back(visit: Visit, explorer: Explorer) -> None:
    first = explorer.view("answer", {"query": "0"})
    second = first["outputs"][1]["output"]
    other = explorer.view("answer", {"query": "0", "output": str(second)})
    eventually(lambda: visit.evidence("for"), amounts(first, "for"))
    visit.at(f"output-{second}").click()
    eventually(lambda: visit.evidence("for"), amounts(other, "for"))
    assert f"output={second}" in visit.page.url
    visit.at("query-5").click()
    last = explorer.view("answer", {"query": "5"})
    eventually(lambda: visit.evidence("against"), amounts(last, "against"))
    visit.page.go_back()
    eventually(lambda: visit.evidence("for"), amounts(other, "for"))
    visit.page.reload()
    eventually(lambda: visit.evidence("for"), amounts(other, "for"))


@pytest.mark.parametrize("ask", ["layer", "network", "removed", "keys"])
def test_four_questions(visit: Visit, explorer: Explorer, ask: str) -> None:
    expected = explorer.view("answer", {"query": "1", "ask": ask})
    question = {q["ask"]: q for q in explorer.view("run", {})["questions"]}[ask]
    visit.at("query-1").click()
    visit.choose(visit.at(f"ask-{ask}"))
    eventually(lambda: visit.evidence("for"), amounts(expected, "for"))
    expect(visit.at("meaning")).to_have_text(question["meaning"])
    expect(visit.at("check")).to_contain_text(expected["note"])
    if ask == "keys":
        assert visit.at("side-against").count() == 0
    else:
        assert visit.evidence("against") == pytest.approx(amounts(expected, "against"), rel=1e-5)
    if expected["check"]:
        assert visit.value("check-total") == pytest.approx(expected["check"]["total"])
        assert visit.value("check-error") == pytest.approx(expected["error"])


def test_layers_say_what_they_add_and_can_be_entered(visit: Visit, explorer: Explorer) -> None:
    shares = {s["layer"]: s["value"] for s in explorer.view("layers", {"query": "0"})["shares"]}
    eventually(lambda: visit.values("[data-testid=layers] data"), list(shares.values()))
    visit.at("layer-0").click()
    inside = explorer.view("answer", {"query": "0", "layer": "0"})
    eventually(lambda: visit.evidence("for"), amounts(inside, "for"))
    expect(visit.at("check")).to_contain_text(inside["asked"])
    assert "layer=0" in visit.page.url


def test_a_span_of_training_restricts_everything(visit: Visit, explorer: Explorer) -> None:
    visit.at("brush").scroll_into_view_if_needed()
    box = visit.at("brush").bounding_box()
    assert box is not None
    x, y, width = box["x"], box["y"] + box["height"] / 2, box["width"]
    visit.page.mouse.move(x + width * 0.5, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + width * 0.9, y, steps=4)
    visit.page.mouse.up()
    late = explorer.view("answer", {"query": "0", "span": "1-2"})
    eventually(lambda: visit.evidence("for"), amounts(late, "for"))
    assert "span=1-2" in visit.page.url
    sums = [group["sum"] for group in late["groups"]]
    eventually(lambda: visit.values("[data-testid=groups] data"), sums)
    visit.page.get_by_role("slider", name="Beginning of the span").press("ArrowLeft")
    whole = explorer.view("answer", {"query": "0"})
    eventually(lambda: visit.evidence("for"), amounts(whole, "for"))
    visit.page.get_by_role("slider", name="End of the span").press("Home")
    early = explorer.view("answer", {"query": "0", "span": "0-0"})
    eventually(lambda: visit.evidence("against"), amounts(early, "against"))
    visit.at("lift-span").click()
    eventually(lambda: visit.evidence("against"), amounts(whole, "against"))


def test_groups_and_the_evidence_of_one_label(visit: Visit, explorer: Explorer) -> None:
    answer = explorer.view("answer", {"query": "0"})
    sums = [group["sum"] for group in answer["groups"]]
    eventually(lambda: visit.values("[data-testid=groups] data"), sums)
    assert visit.page.locator("[data-testid=areas] svg").count() == len(answer["groups"])
    label = max(answer["groups"], key=lambda group: group["for"])["label"]
    visit.at(f"label-{label}").click()
    only = explorer.view(
        "evidence", {"query": "0", "side": "for", "label": str(label), "limit": "12"}
    )
    expected = {str(line["id"]): line["value"] for line in only["samples"]}
    eventually(lambda: visit.evidence("for"), expected)
    visit.at("lift-label").click()
    eventually(lambda: visit.evidence("for"), amounts(answer, "for"))


def test_groups_of_another_column(visit: Visit, explorer: Explorer) -> None:
    visit.at("group-by").select_option("parity")
    answer = explorer.view("answer", {"query": "0", "by": "parity"})
    sums = [group["sum"] for group in answer["groups"]]
    eventually(lambda: visit.values("[data-testid=groups] data"), sums)
    visit.at("label-odd").click()
    odd = {"query": "0", "side": "for", "by": "parity", "label": "odd", "limit": "12"}
    only = explorer.view("evidence", odd)["samples"]
    eventually(lambda: visit.evidence("for"), {str(line["id"]): line["value"] for line in only})


def test_every_sample_is_listed_but_only_what_is_seen_is_made(
    visit: Visit, explorer: Explorer
) -> None:
    visit.at("all-against").click()
    full = explorer.view("evidence", {"query": "0", "side": "against", "limit": "500"})
    expect(visit.at("all")).to_contain_text(f"{full['total']} samples")
    rows = visit.at("all-list").locator(".card")
    expect(rows.first).to_be_visible()
    assert rows.count() < 30 < full["total"]
    visit.at("all-list").evaluate("list => list.scrollTo(0, list.scrollHeight)")
    last = full["samples"][-1]
    shown = visit.at("all").get_by_test_id(f"card-{last['id']}").locator("data")
    expect(shown).to_be_visible()
    assert float(shown.get_attribute("value") or "nan") == pytest.approx(last["value"], rel=1e-4)
    visit.page.keyboard.press("Escape")
    expect(visit.at("all")).to_have_count(0)


def test_when_a_sample_acts(visit: Visit, explorer: Explorer) -> None:
    answer = explorer.view("answer", {"query": "0"})
    best = str(answer["sides"]["for"]["samples"][0]["id"])
    visit.at(f"card-{best}").get_by_role("button").click()
    acts = explorer.view("acts", {"query": "0", "id": best})
    eventually(lambda: visit.value("acts-value"), acts["value"])
    assert visit.at("acts-timeline").locator("rect").count() == len(acts["timeline"])
    visit.at("to-sample").click()
    expect(visit.at("sample").get_by_role("heading", level=1)).to_have_text(f"Sample {best}")


def test_subtracting_samples(visit: Visit, explorer: Explorer) -> None:
    answer = explorer.view("answer", {"query": "0"})
    ids = [str(line["id"]) for line in answer["sides"]["for"]["samples"][:2]]
    for name in ids:
        visit.at(f"tick-{name}").check()
    asked = {"query": "0", "id": ids, "estimate": "1"}
    expected = explorer.view("subtract", asked)["asked"]
    eventually(lambda: visit.value("before"), expected["before"])
    eventually(lambda: visit.value("after"), expected["after"])
    if visit.at("estimate").count():
        visit.at("estimate").click()
    eventually(lambda: visit.value("retrained"), expected["retrained"])
    expect(visit.at("kind")).to_contain_text("An account of this layer alone")
    expect(visit.at("kind")).to_contain_text("An estimate of what training without these samples")
    visit.at("untick").click()
    expect(visit.at("tray")).to_have_count(0)


def test_suspects_and_a_sample_s_own_page(visit: Visit, explorer: Explorer, tmp_path: Path) -> None:
    visit.at("page-suspects").click()
    ranking = explorer.run.suspicion().top(6)
    rows = "[data-testid^=suspect-]:is(article) data"
    eventually(lambda: visit.values(rows)[:6], [row.value for row in ranking.rows])
    with visit.page.expect_download() as download:
        visit.at("csv").click()
    download.value.save_as(tmp_path / "suspects.csv")
    table = (tmp_path / "suspects.csv").read_text("utf-8").splitlines()
    assert table[0] == "id,label,suspicion"
    assert [line.split(",")[0] for line in table[1:7]] == [str(name) for name in ranking.ids]
    visit.at(f"suspect-{ranking.ids[0]}").get_by_role("link").click()
    page = explorer.view("sample", {"id": str(ranking.ids[0])})
    eventually(lambda: visit.value("rank"), 1.0)
    for side in ("helps", "hurts"):
        shown = visit.values(f"[data-testid={side}] data")
        wanted = [effect["value"] for effect in page[side]][: len(shown)]
        assert shown == pytest.approx(wanted)


def test_two_questions_side_by_side(visit: Visit, explorer: Explorer) -> None:
    visit.at("page-compare").click()
    right = visit.at("pane-other")
    picker = right.get_by_test_id("choose-query")
    if picker.evaluate("one => one.tagName") == "SELECT":
        picker.select_option("5")
    else:
        picker.fill("5")
        picker.press("Enter")
    right.get_by_test_id("choose-layer").select_option("0")
    for pane, asked in (("asked", {"query": "0"}), ("other", {"query": "5", "layer": "0"})):
        expected = explorer.view("answer", asked)
        total = f"[data-testid=pane-{pane}] [data-testid=check-total]"
        eventually(lambda total=total: visit.values(total), [expected["check"]["total"]])
    visit.page.go_back()
    visit.page.go_back()
    expected = explorer.view("answer", {"query": "0"})["check"]["total"]
    eventually(lambda: visit.values("[data-testid=check-total]"), [expected, expected])


def test_the_books(visit: Visit, digits: Exhibit) -> None:
    visit.at("page-books").click()
    audit = digits.run.audit().to_dict()
    eventually(lambda: visit.value("books-remainder"), audit["remainder"])
    assert visit.value("coverage") == audit["coverage"]
    assert visit.value("books-bytes") == audit["bytes"]
    for book in audit["books"]:
        row = visit.at(f"book-{book['name']}")
        expect(row).to_contain_text(book["granularity"])
        numbers = row.locator("data").evaluate_all("all => all.map(one => Number(one.value))")
        assert numbers == pytest.approx([book["rows"], book["remainder"], book["bytes"]])


def test_wrong_ones_and_search(visit: Visit, explorer: Explorer) -> None:
    listed = explorer.view("queries", {"limit": "500"})["queries"]
    if visit.home.startswith("file:"):
        listed = [card for card in listed if card["query"] in CARRIED]
    expect(visit.at("found")).to_contain_text(str(len(listed)))
    wrong = [card["query"] for card in listed if card["right"] is False]
    visit.at("only-wrong").check()
    expect(visit.at("found")).to_have_text(
        f"{len(wrong)} prediction" + ("" if len(wrong) == 1 else "s")
    )
    visit.at("only-wrong").uncheck()
    visit.at("search").fill("digit 5")
    expect(visit.at("query-5")).to_be_visible()
    expect(visit.at("found")).to_have_text("1 prediction")
    visit.at("search").fill("no such thing")
    expect(visit.at("gallery")).to_contain_text("No prediction fits.")


def test_a_report_says_what_it_does_not_carry(browser: Browser, homes: dict[str, str]) -> None:
    with visiting(browser, homes["report"], offline=True) as visit:
        visit.go("/query?query=17")
        expect(visit.at("error")).to_contain_text("dualform view")
        assert visit.at("give").count() == 0
        assert visit.page.locator(".twin").count() == 0
        assert np.all([url.startswith(("file:", "data:")) for url in visit.requests])
