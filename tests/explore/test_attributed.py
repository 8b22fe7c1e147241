"""How much of what training changed belongs to samples: beside each answer, and in the books."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, expect
from tests.explore.conftest import digit_images, shown_digits
from tests.explore.visits import serving, visiting
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.explore import Exhibit, Explorer, write_report


@pytest.fixture(scope="module")
def summarized(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """Digits, of which summaries are kept; and of a bias nothing but its steps."""
    torch.manual_seed(0)
    (x, y), model = digit_images(), nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, images = tmp_path_factory.mktemp("runs") / "summarized", x.flatten(1)
    keep = {"0.bias": "steps", "*": dualform.summaries(4, 8)}
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        for ids in torch.arange(120).repeat(3).split(40):
            recorder.samples(ids)
            F.cross_entropy(model(images[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = dualform.open(path)
    return Exhibit(run, model.eval(), images[120:124], shown_digits(y[120:124]))


def test_an_answer_and_the_books_say_what_belongs_to_no_sample(
    browser: Browser, summarized: Exhibit
) -> None:
    run, model = summarized.run, summarized.model
    explanation, audit = run.explain(model, summarized.inputs(1)), run.audit()
    assert explanation.check is not None
    with serving([Explorer(summarized)]) as address, visiting(browser, address) as visit:
        visit.settle("/query?query=0&ask=network")
        share = float(explanation.check.attributed[0])
        assert 0 < share < 1
        assert abs(visit.value("attributed-share") - share) < 1e-6
        expect(visit.at("attributed")).to_contain_text("belongs to no sample")
        visit.settle("/books")
        assert abs(visit.value("books-attributed") - audit.attributed) < 1e-9
        expect(visit.at("books-nobody")).to_contain_text("belongs to no sample")
        for book in audit.books:
            cell = visit.at(f"book-{book.name}").locator(".share data")
            assert abs(float(cell.get_attribute("value") or "nan") - book.attributed) < 1e-9
        assert audit.books[1].attributed == 0.0  # kept by step
        assert not visit.axe()


def test_nothing_is_said_where_samples_have_all(browser: Browser, digits: Exhibit) -> None:
    with serving([Explorer(digits)]) as address, visiting(browser, address) as visit:
        visit.settle("/query?query=0&ask=network")
        expect(visit.at("check")).to_be_visible()
        expect(visit.at("attributed")).to_have_count(0)
        visit.settle("/books")
        expect(visit.at("books-remainder")).to_be_visible()
        expect(visit.at("books-attributed")).to_have_count(0)


def test_a_report_says_it_too(browser: Browser, summarized: Exhibit, tmp_path: Path) -> None:
    page = write_report(summarized, tmp_path / "report.html", ["0"])
    with visiting(browser, page.as_uri()) as visit:
        visit.settle("/query?query=0")
        expect(visit.at("attributed")).to_contain_text("belongs to no sample")
